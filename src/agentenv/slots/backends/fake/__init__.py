"""A farm without isolation: see :mod:`agentenv.slots.backends.fake.backend`."""

from agentenv.slots.backends.fake.backend import FakeBackend

__all__ = ["FakeBackend"]

"""Interface of backends: keep the requested number of containers running, and report on them.

The pool requests a number with :meth:`ContainerBackend.scale` and learns from :meth:`ContainerBackend.events`; it
never waits on a particular container. This is how Nomad works (a count, and an event stream), and the local and
fake backends work the same way. Scaling down always takes the highest index.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from agentenv.containers.handle import ContainerHandle

_PERMANENT = frozenset({"sandbox_unavailable", "self_test_failed", "config", "protocol"})
"""Codes of a container's `failed` event that starting again cannot help."""


@dataclass(frozen=True)
class ContainerStarted:
    """A container is ready; its handshake has been checked by the backend."""

    handle: ContainerHandle


@dataclass(frozen=True)
class ContainerDraining:
    """No new leases on this container; it will be gone soon."""

    id: str
    reason: str


@dataclass(frozen=True)
class ContainerGone:
    """The container and all its slots are gone. Reported once per container."""

    id: str
    reason: str


@dataclass(frozen=True)
class StartFailed:
    """A container could not be started. ``permanent``: retrying cannot help (cure in ``reason``). ``foreign``: it
    runs with somebody else's settings, so it is left alone."""

    reason: str
    next_step: str = ""
    permanent: bool = False
    foreign: bool = False

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> StartFailed:
        """From the container's own `failed` event."""
        return cls(
            reason=str(event.get("message") or "the container failed to start"),
            next_step=str(event.get("next_step") or ""),
            permanent=event.get("code") in _PERMANENT,
        )


ContainerEvent = ContainerStarted | ContainerDraining | ContainerGone | StartFailed


class ContainerBackend(Protocol):
    """Starts and stops containers. An async context manager: leaving it stops all it started."""

    name: str

    @property
    def found(self) -> int:
        """Containers that were running already when it was opened: the smallest goal that keeps them all. 0 before."""

    @property
    def generation(self) -> int:
        """While open: larger than that of anybody who controlled these containers before. 0: nobody else can."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def scale(self, count: int) -> None:
        """Make ``count`` containers the goal. Returns at once; the outcome is reported by events."""

    def events(self) -> AsyncIterator[ContainerEvent]:
        """All changes from the start, for one reader. Ends when the backend is closed."""

    async def replace(self, container_id: str, reason: str) -> None:
        """Stop this broken container permanently; the goal stays, so another is started."""

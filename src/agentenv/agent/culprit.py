"""Whether a failure is worth another attempt: could the model have caused it? Pure.

docs/environments.md has the whole table; each of its rows is a case of tests/unit/test_agent_culprit.py.
"""

from __future__ import annotations

from typing import Final

from agentenv.errors import (
    AgentEnvError,
    DoubtfulTurnError,
    InfraError,
    LeaseLostError,
    ProtocolError,
    SlotDestroyedError,
    StaleLeaseError,
)

DOUBTFUL: Final = frozenset({InfraError, LeaseLostError, StaleLeaseError, ProtocolError, DoubtfulTurnError})
"""Failures of ours that what a model wrote or ran may have brought about: an exception nobody expected, a message
that was not understood, a lease that ended although its container lives. Exactly these classes, not their kin."""


def worth_another(error: AgentEnvError, *, acted: bool) -> bool:
    """Whether the rollout is tried again on a new slot. ``acted``: the model had been asked for its first turn;
    before that nothing can be its doing."""
    return isinstance(error, InfraError) and not (acted and type(error) in DOUBTFUL)


def before_the_model(error: SlotDestroyedError) -> LeaseLostError:
    """A slot destroyed while it was prepared: the policy had done nothing yet, so it counts as ours."""
    lost = LeaseLostError(f"the slot was destroyed before the model acted: {error.message}")
    lost.__cause__ = error
    return lost


def of_another_slot(error: SlotDestroyedError) -> InfraError:
    """A slot destroyed by an agent that a hook ran: what the policy gave that agent to read may be why, but the
    rollout's own slot is as it was."""
    return InfraError(f"the slot of an agent that a hook ran was destroyed: {error.message}")


def unexpected(error: BaseException) -> InfraError:
    """An exception outside the author's code that is none of :mod:`agentenv.errors`: ours, never scored."""
    wrapped = InfraError(f"unexpected {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

"""Decides whether a failure is retried, depending on whether the model could have caused it. Pure.

docs/environments.md has the whole table; each row is a case of tests/unit/agent/test_culprit.py.
"""

from __future__ import annotations

from typing import Final

from agentenv.errors import (
    AgentEnvError,
    CheckpointError,
    DoubtfulTurnError,
    InfraError,
    LeaseLostError,
    ProtocolError,
    SlotDestroyedError,
    StaleLeaseError,
)

DOUBTFUL: Final = frozenset(
    {CheckpointError, InfraError, LeaseLostError, StaleLeaseError, ProtocolError, DoubtfulTurnError}
)
"""Infrastructure failures that the model's output or commands may have caused: an unexpected exception, a malformed
message, a lease that ended although its container is alive, files too many to be kept. Exactly these classes, without
subclasses."""


def worth_another(error: AgentEnvError, *, acted: bool) -> bool:
    """Whether the rollout is retried on a new slot. ``acted``: the model has been queried at least once; before
    that it cannot have caused anything."""
    return isinstance(error, InfraError) and not (acted and type(error) in DOUBTFUL)


def before_the_model(error: SlotDestroyedError) -> LeaseLostError:
    """A slot destroyed during preparation: the policy had done nothing yet, so it counts as an infrastructure
    failure."""
    lost = LeaseLostError(f"the slot was destroyed before the model acted: {error.message}")
    lost.__cause__ = error
    return lost


def of_another_slot(error: SlotDestroyedError) -> InfraError:
    """A slot destroyed by an agent that a hook ran: the policy's output may have caused it, but the rollout's own
    slot is intact."""
    return InfraError(f"the slot of a hook's agent was destroyed: {error.message}")


def unexpected(error: BaseException) -> InfraError:
    """An exception outside the author's code that is not in :mod:`agentenv.errors`: an infrastructure failure,
    never scored."""
    wrapped = InfraError(f"unexpected {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

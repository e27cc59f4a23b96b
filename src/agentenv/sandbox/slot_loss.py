"""Causes of losing a slot before its lease has ended, and whose fault each is. Pure.

A policy must not be able to cause an infrastructure failure, which would be a free retry. So a slot lost while its
container is alive is the policy's fault (:class:`agentenv.errors.SlotDestroyedError`), unless a cause outside the
slot is known. ``WAYS`` is the table; docs/environments.md shows it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from enum import StrEnum

from agentenv.errors import AgentEnvError, LeaseLostError, SlotDestroyedError


class LossReason(StrEnum):
    """Cause of the loss."""

    ended = "its first process (the slot's agent) ended or was killed"
    silent = "a killed call did not end: the slot's agent did not answer"
    deaf = "the slot's agent did not read what it was sent"
    broken = "the slot's agent broke its protocol"
    offline = "the process of its network ended; only the slot's own packets reach that process"
    unchanged = "its network could not be changed in time"
    filled = "its own memory limit prevented sealing it"
    unused = "its agent ended before it ran anything"
    memory_above = "the container or its machine ran out of memory while the slot was below its own limit"
    no_descriptors = "the sandbox server had no file descriptor left"
    agent_failed = "the slot's agent gave up over a message of ours"
    not_renewed = "the slot could not be recreated (a seal, its network)"
    refused = "the slot could not be created with the requested root"
    quarantined = "the slot could not be proved clean"
    reset = "the supervisor or the server restarted"
    expired = "the lease had no heartbeat"


WAYS: Mapping[LossReason, type[AgentEnvError]] = {
    LossReason.ended: SlotDestroyedError,
    LossReason.silent: SlotDestroyedError,
    LossReason.deaf: SlotDestroyedError,
    LossReason.broken: SlotDestroyedError,
    LossReason.offline: SlotDestroyedError,
    LossReason.unchanged: SlotDestroyedError,
    LossReason.filled: SlotDestroyedError,
    LossReason.unused: LeaseLostError,
    LossReason.memory_above: LeaseLostError,
    LossReason.no_descriptors: LeaseLostError,
    LossReason.agent_failed: LeaseLostError,
    LossReason.not_renewed: LeaseLostError,
    LossReason.refused: LeaseLostError,
    LossReason.quarantined: LeaseLostError,
    LossReason.reset: LeaseLostError,
    LossReason.expired: LeaseLostError,
}
"""Every cause, and the error of every call of the lease: the policy's fault, or ours."""

_AGENT_GAVE_UP = frozenset({0, 64, 65, 71})
"""The agent's own exit codes (``slotagent/agent/packets.h``); programs in the slot can end it only by a signal."""


def loss_of_end(exit_code: int | None, *, killed_for_memory_above: bool) -> LossReason:
    """Why a slot's first process ended. ``exit_code`` None: a signal, or unknown."""
    if killed_for_memory_above:
        return LossReason.memory_above
    return LossReason.agent_failed if exit_code in _AGENT_GAVE_UP else LossReason.ended


def loss_of_network(status: int, *, killed_for_memory_above: bool) -> LossReason:
    """Why the process behind a slot's network ended, with this wait status. It runs outside the slot, is not
    counted in the slot's cgroup, and cannot be killed from inside: only the kernel does that, when it is short of
    memory."""
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return LossReason.memory_above if killed or killed_for_memory_above else LossReason.offline


def error_of(loss: LossReason, slot: int, reason: str) -> AgentEnvError:
    """The error for every call of the lease."""
    kind = WAYS[loss]
    if kind is SlotDestroyedError:
        return kind(f"slot {slot} was destroyed by what ran in it: {reason}", next_step="the rollout ends here")
    return kind(f"slot {slot} was lost: {reason}", next_step="start the rollout again on a new slot")

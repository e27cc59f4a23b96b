"""Prepares once for all rollouts with the same key: one prepares, the others wait for it and begin as forks.

A waiting rollout holds no slot and no pass. If a preparation fails through infrastructure, the next waiter prepares.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal, Self

from agentenv.agent.failure_log import FailureLog
from agentenv.agent.prepared import Key, PreparedState, PreparedStates
from agentenv.agent.protocols import Session, SessionOpener
from agentenv.errors import CheckpointError, InfraError, TaskError
from agentenv.executor.session import Checkpoint
from agentenv.wire.roots import RootSpec

logger = logging.getLogger(__name__)

_SHORTEST_WAIT_S: Final = 1.0
_DROP_WAIT_S: Final = 5.0
_FULL: Final = "checkpoint_bytes"
"""In the message of a CheckpointError: the limit that is reached."""

End = Literal["kept", "not_kept", "given_up"] | TaskError
"""How a preparation ended: ``not_kept``: it went well, but its files cannot be kept; ``given_up``: it failed for
infrastructure, or was cancelled; a TaskError: the environment's own."""


class Preparations:
    """The preparations of one environment. ``counts`` gets ``prepared_count``, preparations that went well, and
    ``prepared_reused``, rollouts that began from one of them."""

    def __init__(self, failures: FailureLog, counts: Counter[str]) -> None:
        self._states = PreparedStates()
        self._running: dict[Key, Preparation] = {}
        self._failures = failures
        self._counts = counts

    async def begin(self, key: Key, avoided: Collection[PreparedState] = ()) -> PreparedState | Preparation | None:
        """How to begin: from a state; by preparing for all, as ``with`` the result; or (None) by preparing for oneself,
        because nothing can be kept. Waits while another prepares this key.

        Raises TaskError when the environment's own code failed in the preparation that was waited for.
        """
        while True:
            if (state := self._states.choose(key, avoided)) is not None:
                return state
            running = self._running.get(key)
            if running is None:
                begun = self._running[key] = Preparation(self, key)
                return begun
            end = await running.wait()
            if isinstance(end, TaskError):
                raise _again(end)
            if end == "not_kept":
                return None

    def here(self, key: Key, session: Session, root: RootSpec | None) -> PreparedState | None:
        """The state that the slot of this session, whose root this is, can be given in place of a preparation."""
        state = self._states.here(key, session.container_id)
        if state is None or root is None:
            return state
        same = state.checkpoint.root == replace(root, checkpoint=state.checkpoint.root.checkpoint)
        return state if same else None  # with another network, for instance

    @contextmanager
    def standing_on(self, state: PreparedState) -> Iterator[None]:
        """While a rollout uses a slot that was, or is to be, forked from this state."""
        self._states.begun(state)
        try:
            yield
        finally:
            self._states.ended(state)

    def reused(self) -> None:
        """A rollout has begun from a state."""
        self._counts["prepared_reused"] += 1

    def lost(self, state: PreparedState) -> None:
        """No slot can be forked from it any more."""
        self._states.forget(state)

    def ended(self, preparation: Preparation) -> None:
        """For :class:`Preparation`."""
        del self._running[preparation.key]

    async def drop_all(self, sessions: SessionOpener) -> None:
        """Forget all states, in containers that outlive this environment. One that has no slot free for a moment, or is
        gone, is left."""
        kept = self._states.by_container()
        await asyncio.gather(*(self._drop(sessions, container, states) for container, states in kept.items()))

    async def _drop(self, sessions: SessionOpener, container: str, states: Sequence[PreparedState]) -> None:
        name = f"drop-prepared-{secrets.token_hex(4)}"
        try:
            async with sessions.open(name, acquire_timeout_s=_DROP_WAIT_S, container=container) as session:
                for state in states:
                    self._states.forget(state)
                    await session.drop(state.checkpoint)
        except InfraError as error:
            logger.info("prepared states are left in container %s: %s", container, error)

    async def keep(self, key: Key, session: Session, meta: Mapping[str, Any], took_s: float) -> bool:
        """For :meth:`Preparation.keep`."""
        self._counts["prepared_count"] += 1
        try:
            checkpoint = await self._checkpoint(session)
        except CheckpointError as error:
            text = f"prepared slots cannot be checkpointed, so every rollout prepares its own: {error}"
            self._failures.add(text, text)
            return False
        for replaced in self._states.keep(PreparedState(key, checkpoint, took_s, meta)):
            await session.drop(replaced.checkpoint)
        return True

    async def _checkpoint(self, session: Session) -> Checkpoint:
        """Where there is no room, states that no rollout uses are dropped."""
        while True:
            try:
                return await session.checkpoint()
            except CheckpointError as error:
                oldest = self._states.oldest_unused(session.container_id) if _FULL in error.message else None
                if oldest is None:
                    raise
                self._states.forget(oldest)
                await session.drop(oldest.checkpoint)


class Preparation:
    """The right, and the duty, to prepare a key for all who wait for it; used as ``with``."""

    def __init__(self, preparations: Preparations, key: Key) -> None:
        self.key = key
        self._preparations = preparations
        self._end: End = "given_up"
        self._over = asyncio.Event()

    async def wait(self) -> End:
        """Until it is over, by one who does not prepare."""
        await self._over.wait()
        return self._end

    async def keep(self, session: Session, meta: Mapping[str, Any], took_s: float) -> None:
        """The slot is prepared: keep its files for others, if that can be done. Everything running in it ends. Raises
        InfraError."""
        kept = await self._preparations.keep(self.key, session, meta, took_s)
        self._end = "kept" if kept else "not_kept"

    def found(self) -> None:
        """It was not necessary: the slot was given files that were prepared before."""
        self._end = "kept"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TaskError):
            self._end = error
        self._preparations.ended(self)
        self._over.set()


def fork_patience_s(state: PreparedState, patience_s: float | None) -> float:
    """How long a slot is waited for in the container that has the state: no longer than preparing another would take.
    So in whatever way it ends, it takes at most twice the time of the better way."""
    wait_s = max(state.took_s, _SHORTEST_WAIT_S)
    return wait_s if patience_s is None else min(wait_s, patience_s)


def _again(error: TaskError) -> TaskError:
    """The same error for another rollout."""
    again = error.copy()
    again.__cause__ = error.__cause__
    return again

"""Calls on sessions: they run concurrently with a slot's other calls, and with each other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from agentenv.errors import AgentEnvError, InfraError, InvalidArgumentsError, LeaseLostError
from agentenv.sandbox.limit_watch import LimitWatch
from agentenv.sandbox.server.agent_link import TooManyRunsError
from agentenv.sandbox.server.calls import NO_CONTENT, CallInFlight, Content, Fields, Stop, answer, ended, refusal
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.session_host import SlotHost
from agentenv.sessions.slot_sessions import SessionArguments, SlotSessions
from agentenv.wire.base import WireModel

MAX_BESIDE = 256
"""Session calls of one slot that may be in progress at once; more wait for their turn."""

log = logging.getLogger(__name__)


class SessionCalls:
    """One slot's session calls, and its sessions while the slot is usable."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._loop = context.poller.loop
        self._waiting: deque[CallInFlight] = deque()
        self._running: set[CallInFlight] = set()
        self._sessions: SlotSessions | None = None
        self._limits: LimitWatch | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @staticmethod
    def takes(arguments: WireModel) -> bool:
        """Whether a call with these arguments is a session call."""
        return isinstance(arguments, SessionArguments)

    def open(self, io: SlotIo, env: Mapping[str, str]) -> None:
        """The slot is usable (again), with this environment and without sessions."""
        self._limits = io.limits
        self._sessions = SlotSessions(SlotHost(io, env), self._context.output_bytes)

    def close(self) -> None:
        """The slot's agent is released; every session ends with it. Repeatable."""
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.close()

    def submit(self, asked: CallInFlight) -> None:
        """Start the call as soon as the slot is usable."""
        self._waiting.append(asked)
        self.pump()

    def pump(self) -> None:
        """Start waiting calls that can be started."""
        while self._waiting and self._sessions is not None and len(self._running) < MAX_BESIDE:
            if self._waiting[0].memory.full:
                return
            asked = self._waiting.popleft()
            self._running.add(asked)
            asked.started_at = self._loop.time()
            asked.task = self._loop.create_task(self._run(asked, self._sessions))

    def cancel(self, asked: CallInFlight) -> bool:
        """Answer this call now; what it waited for continues. Returns whether it was a session call."""
        if asked in self._waiting:
            self._waiting.remove(asked)
        elif asked not in self._running:
            return False
        asked.stop = Stop.cancelled
        self._answer(asked, ended(asked, self._loop.time(), {}))
        return True

    def stop(self) -> None:
        """Answer the running calls as cancelled, because what they wait for is about to be killed."""
        for asked in tuple(self._running):
            self.cancel(asked)

    def end(self, error: AgentEnvError) -> None:
        """Answer every call with this error: the lease has ended."""
        for asked in (*self._running, *self._waiting):
            self._answer(asked, refusal(asked.call_id, error))
        self._waiting.clear()

    def _answer(self, asked: CallInFlight, result: Fields, content: Content = NO_CONTENT) -> None:
        task = asked.task
        self._running.discard(asked)
        answer(asked, result, self._context.statistics, content)
        if task is not None and not task.done():
            task.cancel()

    async def _run(self, asked: CallInFlight, sessions: SlotSessions) -> None:
        content = NO_CONTENT
        assert isinstance(asked.arguments, SessionArguments)
        try:
            answered = await sessions.call(asked.arguments, asked.started_at + asked.timeout_s)
            content = Content((answered.content.model_dump_json(exclude_defaults=True).encode(),))
            result = ended(asked, self._loop.time(), answered.fields)
            if self._limits is not None and (above := self._limits.take_above()):
                content, result = NO_CONTENT, refusal(asked.call_id, InfraError(above))
        except LeaseLostError:
            return  # the slot answers every call of its lease
        except AgentEnvError as error:
            full = isinstance(error.__cause__, TooManyRunsError)
            result = refusal(asked.call_id, InvalidArgumentsError(str(error.__cause__)) if full else error)
        except Exception as error:
            log.exception("%s failed", asked.tool)
            result = refusal(asked.call_id, InfraError(f"{asked.tool} failed: {error!r}"))
        asked.task = None
        self._answer(asked, result, content)
        self.pump()

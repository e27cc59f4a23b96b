"""The calls of one slot, from arrival to reply: which wait, which run, when they are stopped, what answers them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping

from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.server.calls import (
    NO_CONTENT,
    CallInFlight,
    Content,
    Fields,
    Outlet,
    Stop,
    detached,
    encode_result,
    ended,
    refusal,
)
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.inbox import Inbox, close_all
from agentenv.sandbox.server.past_calls import PastCalls
from agentenv.sandbox.server.poller import Lane
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.replies import ReplyMemory
from agentenv.sandbox.server.runner import Runner
from agentenv.sandbox.server.slot_sessions import SessionArguments, SlotHost
from agentenv.sandbox.server.tools.registry import parse_arguments, with_attached
from agentenv.wire.calls import Call

MAX_QUEUED_CALLS = 2_000
"""Calls that may be queued in one slot; more are refused."""
MAX_BESIDE = 256
"""Session calls of one slot that may be in progress at once; more wait for their turn."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Finished replies per lease that no client has taken, before its slot pauses."""
MAX_SENT_BYTES = 16 * 1024 * 1024
"""Sent replies kept per lease until they are forgotten: more than the buffers of a connection (2 MiB here, a few
more in each kernel), so that data lost in a cut connection can be sent again."""
KILL_GRACE_S = scaled(15.0)
"""Time for the agent to end a killed call (a fork bomb, on a busy machine) before the slot counts as lost."""


class CallQueue:
    """Calls run one at a time, in order of arrival; calls on sessions run concurrently with them and with each other.
    They begin while ``usable``. ``on_lost`` is called when the slot's agent is no longer usable."""

    def __init__(
        self,
        index: int,
        context: ServerContext,
        on_lost: Callable[[Loss, str], None],
        usable: Callable[[], bool],
    ) -> None:
        self.memory: ReplyMemory | None = None
        """The replies of the slot's lease."""
        self.any_ran = False
        """Whether a call of the lease has run here: without one the policy cannot have destroyed anything."""
        self.past = PastCalls()
        self._index = index
        self._context = context
        self._loop = context.poller.loop
        self._lane = Lane(context.poller)
        self._on_lost = on_lost
        self._usable = usable
        self._runner: Runner | None = None
        self._waiting: deque[CallInFlight] = deque()
        self._waiting_beside: deque[CallInFlight] = deque()
        self._current: CallInFlight | None = None
        self._beside: dict[CallInFlight, None] = {}
        """Session calls that run, in order of their start."""

    def __repr__(self) -> str:
        return f"{'running' if self.busy else 'idle'}, queued={self.queued}"

    def __len__(self) -> int:
        """Calls that wait or run."""
        return self.busy + self.queued + len(self._waiting_beside) + len(self._beside)

    @property
    def queued(self) -> int:
        """Calls waiting for the running one."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a call runs, other than those on sessions."""
        return self._current is not None

    @property
    def running(self) -> tuple[CallInFlight, ...]:
        """Calls that run now."""
        current = () if self._current is None else (self._current,)
        return (*current, *self._beside)

    @property
    def io(self) -> SlotIo | None:
        """The slot's agent; None while there is none."""
        return None if self._runner is None else self._runner.io

    @property
    def host(self) -> SlotHost | None:
        """Starts programs beside the calls; None while there is no agent."""
        return None if self._runner is None else self._runner.host

    def take_above(self) -> str:
        """What ran short above the slot since the last look, as far as it is known."""
        return "" if self._runner is None else self._runner.io.limits.take_above()

    # -- the slot's agent ---------------------------------------------------------------------------

    def open(self, packet: SlotReady, agent: socket.socket, era: int, *, sealed: bool) -> None:
        """Calls run by this agent from now on, which is owned. ``era``: see Lease."""
        self._runner = Runner(
            self._context, packet, agent, self._lane, self._ended, self._on_lost, era=era, sealed=sealed
        )

    def prepare(self) -> None:
        """Get ready for the next call, when there is time."""
        if self._runner is not None:
            self._context.poller.defer(self._prepare)

    def _prepare(self) -> None:
        if self._runner is not None and self._current is None:
            self._runner.prepare()

    def close(self) -> None:
        """The slot has no agent (any more). Repeatable."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for asked in self.running:
                _abandon(asked)
            runner.close()

    def change_network_env(self, env: Mapping[str, str]) -> None:
        """What the slot's network adds to the environment of commands is something else now."""
        if self._runner is not None:
            self._runner.change_network_env(env)

    # -- the slot's lease ---------------------------------------------------------------------------

    def begin_lease(self) -> None:
        """Replies are kept from now on."""
        self.memory = ReplyMemory(
            self._context.index,
            max_count=self._context.reply_memory,
            max_unsent_bytes=MAX_UNSENT_BYTES,
            max_sent_bytes=MAX_SENT_BYTES,
            inbox=Inbox(self._context.statistics.hold),
        )

    def end_lease(self, error: AgentEnvError) -> None:
        """Every call is answered with this; nothing is remembered."""
        for asked in (*self.running, *self._waiting, *self._waiting_beside):
            _abandon(asked)
            self._answer(asked, refusal(asked.call_id, error))
        self._waiting.clear()
        self._waiting_beside.clear()
        self.past.clear()
        if self.memory is not None:
            self.memory.clear()
            self.memory = None

    def stop(self) -> None:
        """Cancel what runs, because the slot's processes are about to end; what waits goes on waiting."""
        for asked in self.running:
            self._answer_cancelled(asked)

    # -- calls --------------------------------------------------------------------------------------

    def submit(self, call: Call, memory: ReplyMemory, outlet: Outlet, held_bytes: int) -> None:
        """Queue a new call, whose JSON took ``held_bytes``. Raises SandboxUnavailableError when too many wait, use too
        much memory, or an attachment is missing; ProtocolError, UnknownToolError when its arguments do not fit."""
        attached = memory.inbox.take(call.id, call.attachments) if call.attachments else {}
        try:
            given = with_attached(call.tool, call.arguments, attached) if attached else call.arguments
            arguments = parse_arguments(call.tool, given)
            if len(self._waiting) + len(self._waiting_beside) + len(self._beside) >= MAX_QUEUED_CALLS:
                raise SandboxUnavailableError(f"{MAX_QUEUED_CALLS} calls wait in slot {self._index} already")
            memory.inbox.hold(held_bytes)
        except BaseException:
            close_all(attached)
            raise
        asked = CallInFlight(call, arguments, memory, outlet, self._loop.time(), held_bytes, attached)
        memory.begin(asked)
        self.any_ran = True
        (self._waiting_beside if isinstance(arguments, SessionArguments) else self._waiting).append(asked)
        self.pump()

    def cancel(self, asked: CallInFlight) -> None:
        """Cancel this call now, whether it is queued or running. No effect when it has ended."""
        if asked is self._current:
            self._kill(asked, Stop.cancelled)
        elif asked.message is None:
            for waiting in (self._waiting, self._waiting_beside):
                if asked in waiting:
                    waiting.remove(asked)
            self._answer_cancelled(asked)
            self.pump()

    def pump(self) -> None:
        """Begin what waits, if it can."""
        if self._runner is None or self.memory is None or not self._usable():
            return
        while self._waiting and self._current is None and not self.memory.full:
            asked = self._current = self._waiting.popleft()
            asked.started_at = self._loop.time()
            # First: whatever happens to the rest, the call ends.
            asked.timer = self._loop.call_at(asked.started_at + asked.timeout_s, self._kill, asked, Stop.deadline)
            self._runner.begin(asked)
        while self._waiting_beside and len(self._beside) < MAX_BESIDE and not self.memory.full:
            asked = self._waiting_beside.popleft()
            self._beside[asked] = None
            asked.started_at = self._loop.time()
            self._runner.begin(asked)

    def _kill(self, asked: CallInFlight, why: Stop) -> None:
        """Kill the call that runs; its answer follows with its output so far. Repeatable."""
        if asked.stop:
            return
        asked.stop = why
        if asked.timer is not None:
            asked.timer.cancel()
        asked.timer = self._loop.call_later(KILL_GRACE_S, self._on_lost, Loss.silent, "a killed call did not end")
        if asked.process is not None:
            asked.process.kill()

    def _ended(self, asked: CallInFlight, result: Fields, content: Content = NO_CONTENT) -> None:
        """The runner has run the call, unless it was answered by other means meanwhile."""
        if asked.message is not None:
            return
        in_order = asked is self._current
        self._answer(asked, result, content)
        self.pump()
        if in_order and self._current is None:
            # After the answer is sent: starting the next spare shell delays no call.
            self.prepare()

    def _answer_cancelled(self, asked: CallInFlight) -> None:
        """Answer at once, without waiting for the call's processes."""
        _abandon(asked)
        asked.stop = Stop.cancelled
        self._answer(asked, ended(asked, self._loop.time(), {}))

    def _answer(self, asked: CallInFlight, fields: Fields, content: Content = NO_CONTENT) -> None:
        """The call ended with this result: remember it, count it, and send it to every connection that submitted it."""
        if asked is self._current:
            self._current = None
        self._beside.pop(asked, None)
        if asked.started_at:
            self.past.add(asked, fields, self._loop.time())
        fields, raw = detached(fields, content)
        asked.memory.finish(asked, encode_result(fields, b"" if "content" in raw else b"".join(content.json)), raw)
        asked.memory.inbox.let_go(asked.held_bytes)
        if asked.attached:
            close_all(asked.attached)
        self._context.statistics.answered(fields, asked.size_bytes)
        if asked.timer is not None:
            asked.timer.cancel()
            asked.timer = None
        asked.process = asked.task = None
        for outlet in asked.outlets:
            if not outlet.closed:
                outlet.deliver(asked)


def _abandon(asked: CallInFlight) -> None:
    """Its processes are ignored from now on, and its timer is off."""
    if asked.process is not None:
        asked.process.on_end = None
    if asked.task is not None:
        asked.task.cancel()
    if asked.timer is not None:
        asked.timer.cancel()

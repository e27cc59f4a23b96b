"""The calls of one slot, from arrival to result: which wait, which run, when they are stopped."""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, ConfigError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.server.call_log import CallLog
from agentenv.sandbox.server.calls import (
    NO_CONTENT,
    Content,
    Fields,
    ResultCache,
    ResultSink,
    SlotCall,
    Stop,
    encode_result,
    parse_arguments,
    refusal,
    result_fields,
    split_attachments,
    with_uploads,
)
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.poller import Lane
from agentenv.sandbox.server.runner import Runner
from agentenv.sandbox.server.slot_sessions import SessionArguments
from agentenv.sandbox.server.uploads import UploadBuffer, close_all
from agentenv.sandbox.slot_loss import LossReason
from agentenv.wire.calls import Call

MAX_QUEUED_CALLS = 2_000
"""Calls that may be queued in one slot; more are refused."""
MAX_SESSION_CALLS = 256
"""Session calls of one slot that may be in progress at once; more wait for their turn."""
MAX_WAITING_BYTES = 128 * 1024 * 1024
"""Memory that the waiting and running calls of one lease may hold: their JSON and attachments."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Unsent results per lease at which its slot pauses."""
MAX_SENT_BYTES = 16 * 1024 * 1024
"""Sent results kept per lease until they are forgotten: more than the buffers of a connection (2 MiB here, a few
more in each kernel), so that data lost in a cut connection can be sent again."""
KILL_GRACE_S = scaled(15.0)
"""Time for the agent to end a killed call (a fork bomb, on a busy machine) before the slot counts as lost."""


Agents = Mapping[str, socket.socket]
"""The sockets to a slot's agents: its main root's, of the empty name, and its services'."""


def close_agents(agents: Agents) -> None:
    """Close their sockets."""
    for agent in agents.values():
        agent.close()


class CallQueue:
    """Calls run one at a time, in order of arrival, whichever of the slot's roots they are for; calls on sessions run
    concurrently with them and with each other. They begin while ``usable``. ``on_lost`` is called when one of the
    slot's agents is no longer usable."""

    def __init__(
        self,
        index: int,
        context: ServerContext,
        on_lost: Callable[[LossReason, str], None],
        usable: Callable[[], bool],
    ) -> None:
        self.cache: ResultCache | None = None
        """The calls of the slot's lease and their results."""
        self.any_ran = False
        """Whether a call of the lease has run here. If none has, the policy cannot have destroyed the slot."""
        self.log = CallLog()
        self.held_bytes = 0
        """Memory that the lease's calls and uploads hold, at most MAX_WAITING_BYTES."""
        self._index = index
        self._context = context
        self._loop = context.poller.loop
        self._lane = Lane(context.poller)
        self._on_lost = on_lost
        self._usable = usable
        self._runners: dict[str, Runner] = {}
        """By service, the main root's first; empty while the slot has no agent."""
        self._waiting: deque[SlotCall] = deque()
        self._waiting_sessions: deque[SlotCall] = deque()
        self._current: SlotCall | None = None
        self._sessions: dict[SlotCall, None] = {}
        """Session calls that run, in order of their start."""

    def __repr__(self) -> str:
        return f"{'running' if self.busy else 'idle'}, queued={self.queued}"

    def __len__(self) -> int:
        """Calls that wait or run."""
        return self.busy + self.queued + len(self._waiting_sessions) + len(self._sessions)

    @property
    def queued(self) -> int:
        """Calls waiting for the running one."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a call runs, other than those on sessions."""
        return self._current is not None

    @property
    def running(self) -> tuple[SlotCall, ...]:
        """Calls that run now."""
        current = () if self._current is None else (self._current,)
        return (*current, *self._sessions)

    def runner(self, service: str) -> Runner:
        """Runs the calls for this service (empty: the main root), while there is an agent. Raises ConfigError when
        there is no such service."""
        found = self._runners.get(service)
        if found is None:
            raise ConfigError("service", f"slot {self._index} has no service {service!r}")
        return found

    def take_above(self) -> str:
        """Effect of a limit above the slot, reported once; empty if there was none or nothing is known. All roots of
        the slot have the same counters."""
        return "" if not self._runners else self._runners[""].io.limits.take_above()

    def look_at_limits(self) -> None:
        """Read the counters now, while they are there."""
        if self._runners:
            self._runners[""].io.limits.look()

    # -- the slot's agent ---------------------------------------------------------------------------

    def open(self, packet: SlotReady, agents: Agents, era: int, *, sealed: bool) -> None:
        """Run calls by these agents from now on; owns their sockets. ``era``: see Lease."""
        for name, agent in agents.items():
            of_root = replace(packet, view=packet.services[name]) if name else packet
            self._runners[name] = Runner(
                self._context, of_root, agent, self._lane, self._ended, self._on_lost, era=era, sealed=sealed
            )

    def prepare(self) -> None:
        """Get ready for the next call, once what is ready now has been handled."""
        self._context.poller.defer(self._prepare)

    def _prepare(self) -> None:
        if self._runners and self._current is None:
            self._runners[""].prepare()

    def close(self) -> None:
        """The slot has no agent (any more). Repeatable."""
        runners, self._runners = self._runners, {}
        if runners:
            for call in self.running:
                _abandon(call)
        for runner in runners.values():
            runner.close()

    def change_network_env(self, env: Mapping[str, str]) -> None:
        """Replace the variables that the slot's network adds to the environment of commands."""
        for runner in self._runners.values():
            runner.change_network_env(env)

    # -- the slot's lease ---------------------------------------------------------------------------

    def begin_lease(self) -> None:
        """Start a cache of results."""
        self.cache = ResultCache(
            self._context.index,
            max_count=self._context.reply_memory,
            max_unsent_bytes=MAX_UNSENT_BYTES,
            max_sent_bytes=MAX_SENT_BYTES,
            uploads=UploadBuffer(self._hold, self._release),
        )

    def end_lease(self, error: AgentEnvError) -> None:
        """Every call ends with this error; nothing of them is kept."""
        for call in (*self.running, *self._waiting, *self._waiting_sessions):
            _abandon(call)
            self._finish(call, refusal(call.call_id, error))
        self._waiting.clear()
        self._waiting_sessions.clear()
        self.log.clear()
        if self.cache is not None:
            self.cache.clear()
            self.cache = None

    def stop(self) -> None:
        """Cancel the running calls, because the slot's processes are about to end. Queued calls stay queued."""
        for call in self.running:
            self._end_cancelled(call)

    # -- calls --------------------------------------------------------------------------------------

    def submit(self, call: Call, cache: ResultCache, sink: ResultSink, json_bytes: int) -> None:
        """Queue a new call, whose JSON has ``json_bytes``. Raises SandboxUnavailableError when too many wait, use too
        much memory, or an attachment is missing; ProtocolError, UnknownToolError when its arguments do not fit;
        ConfigError for a service that is not there."""
        if self._runners:  # else the slot is being recreated, with the same services
            self.runner(call.lease.service)
        uploads = cache.uploads.take(call.id, call.attachments) if call.attachments else {}
        try:
            arguments = parse_arguments(
                call.tool, with_uploads(call.tool, call.arguments, uploads) if uploads else call.arguments
            )
            if len(self._waiting) + len(self._waiting_sessions) + len(self._sessions) >= MAX_QUEUED_CALLS:
                raise SandboxUnavailableError(f"too many calls wait in slot {self._index}: {MAX_QUEUED_CALLS}")
            self._hold(json_bytes)
        except BaseException:
            close_all(uploads)
            raise
        queued = SlotCall(call, arguments, cache, sink, self._loop.time(), json_bytes, uploads)
        cache.begin(queued)
        self.any_ran = True
        (self._waiting_sessions if isinstance(arguments, SessionArguments) else self._waiting).append(queued)
        self.pump()

    def sent(self, call: SlotCall) -> None:
        """The call's result was written to a connection: that may make room for another call."""
        call.cache.sent(call)
        self.pump()

    def cancel(self, call: SlotCall) -> None:
        """Cancel this call now, whether it is queued or running. No effect when it has ended."""
        if call is self._current:
            self._kill(call, Stop.cancelled)
        elif call.message is None:
            for waiting in (self._waiting, self._waiting_sessions):
                if call in waiting:
                    waiting.remove(call)
            self._end_cancelled(call)
            self.pump()

    def pump(self) -> None:
        """Begin queued calls, as many as may run now."""
        if not self._runners or self.cache is None or not self._usable():
            return
        while self._waiting and self._current is None and not self.cache.full:
            call = self._current = self._waiting.popleft()
            call.started_at = self._loop.time()
            # Before the call begins: it ends at its deadline whatever happens while it is started.
            if call.timeout_s != math.inf:
                call.timer = self._loop.call_at(call.started_at + call.timeout_s, self._kill, call, Stop.deadline)
            self._runners[call.service].begin(call)
        while self._waiting_sessions and len(self._sessions) < MAX_SESSION_CALLS and not self.cache.full:
            call = self._waiting_sessions.popleft()
            self._sessions[call] = None
            call.started_at = self._loop.time()
            self._runners[call.service].begin(call)

    def _kill(self, call: SlotCall, why: Stop) -> None:
        """Kill the running call; its result follows, with its output so far. Repeatable."""
        if call.stop:
            return
        call.stop = why
        if call.timer is not None:
            call.timer.cancel()
        call.timer = self._loop.call_later(KILL_GRACE_S, self._on_lost, LossReason.silent, "a killed call did not end")
        if call.process is not None:
            call.process.kill()

    def _ended(self, call: SlotCall, result: Fields, content: Content = NO_CONTENT) -> None:
        """The runner has run the call. No effect if it has a result already (it was cancelled)."""
        if call.message is not None:
            return
        in_order = call is self._current
        self._finish(call, result, content)
        self.pump()
        if in_order and self._current is None:
            # After the result is sent: starting the next spare shell delays no call.
            self.prepare()

    def _end_cancelled(self, call: SlotCall) -> None:
        """End the call at once, without waiting for its processes."""
        _abandon(call)
        call.stop = Stop.cancelled
        self._finish(call, result_fields(call, self._loop.time(), {}))

    def _finish(self, call: SlotCall, fields: Fields, content: Content = NO_CONTENT) -> None:
        """The call has ended with this result: cache it, count it, and send it to every connection that submitted the
        call."""
        if call is self._current:
            self._current = None
        else:
            self._sessions.pop(call, None)
        if call.started_at:
            self.log.add(call, fields, self._loop.time())
        fields, raw = split_attachments(fields, content)
        call.cache.finish(call, encode_result(fields, b"" if "content" in raw else b"".join(content.json)), raw)
        self._release(call.held_bytes)
        if call.uploads:
            close_all(call.uploads)
        self._context.statistics.ended(fields, call.size_bytes)
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        call.process = call.task = None
        for sink in call.sinks:
            if not sink.closed:
                sink.deliver(call)

    def _hold(self, size_bytes: int) -> None:
        """Charge memory to the lease. Raises SandboxUnavailableError when its budget is used up."""
        if self.held_bytes + size_bytes > MAX_WAITING_BYTES:
            raise SandboxUnavailableError(
                f"the calls that wait in this slot hold {self.held_bytes} bytes; at most {MAX_WAITING_BYTES} may wait",
                next_step="make fewer large calls at once",
            )
        self.held_bytes += size_bytes
        self._context.statistics.held_bytes += size_bytes

    def _release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._context.statistics.held_bytes -= size_bytes


def _abandon(call: SlotCall) -> None:
    """Ignore the call's processes from now on, and stop its timer."""
    if call.process is not None:
        call.process.on_end = None
    if call.task is not None:
        call.task.cancel()
    if call.timer is not None:
        call.timer.cancel()

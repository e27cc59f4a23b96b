"""The calls of one slot: those that wait, the one that runs, and what answers them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.limit_watch import LimitWatch
from agentenv.sandbox.server.agent_link import AgentLink
from agentenv.sandbox.server.call_runner import CallRunner
from agentenv.sandbox.server.calls import CallInFlight, Outlet, Stop, answer, ended, refusal
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.inbox import Attached, Inbox
from agentenv.sandbox.server.past_calls import PastCalls
from agentenv.sandbox.server.poller import Lane
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.replies import ReplyMemory
from agentenv.sandbox.server.session_calls import SessionCalls, SlotHost
from agentenv.sandbox.slot_env import SEALED_ENV, image_env
from agentenv.wire.base import WireModel
from agentenv.wire.calls import Call

MAX_QUEUED_CALLS = 2_000
"""Calls that may be queued in one slot; more are refused."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Finished replies per lease that no client has taken, before its slot pauses."""
MAX_SENT_BYTES = 16 * 1024 * 1024
"""Sent replies kept per lease until they are forgotten: more than the buffers of a connection (2 MiB here, a few
more in each kernel), so that data lost in a cut connection can be sent again."""


class SlotCalls:
    """Calls run one at a time, in order of arrival; session calls run concurrently. ``on_lost`` is called when the
    slot's agent is no longer usable; calls begin while ``usable``."""

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
        self._queue: deque[CallInFlight] = deque()
        self._runner: CallRunner | None = None
        self._current: CallInFlight | None = None
        self._session_calls = SessionCalls(context, self.past, usable)
        self._network_env: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"{'running' if self.busy else 'idle'}, queued={self.queued}"

    def __len__(self) -> int:
        """Calls that wait or run."""
        return self.busy + self.queued + len(self._session_calls)

    @property
    def queued(self) -> int:
        """Calls waiting for the running one."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self._current is not None

    @property
    def running(self) -> tuple[CallInFlight, ...]:
        """Calls that run now."""
        current = () if self._current is None else (self._current,)
        return (*current, *self._session_calls.running)

    @property
    def io(self) -> SlotIo | None:
        """The slot's agent; None while there is none."""
        return None if self._runner is None else self._runner.io

    @property
    def host(self) -> SlotHost | None:
        """Starts programs beside the calls; None while there is no agent."""
        return self._session_calls.host

    def take_above(self) -> str:
        """What ran short above the slot since the last look, as far as it is known."""
        return "" if self._runner is None else self._runner.take_above()

    # -- the slot's agent ---------------------------------------------------------------------------

    def open(self, packet: SlotReady, agent: socket.socket, era: int, *, sealed: bool) -> None:
        """Calls run by this agent from now on, which is owned. ``era``: see Lease."""
        given, shell, paths = self._context.env, self._context.shell, packet.paths
        if packet.view is not None:
            view = packet.view
            self._network_env, shell = view.network_env, view.shell
            only_bash = "" if view.stands_in else shell
            given = image_env({**view.env, **view.network_env}, self._context.given_env, view.user, only_bash)
            paths = replace(paths, workspace=view.workdir, own_root=True, user=view.user, tmux=view.tmux)
        env = {name: paths.in_slot(value) for name, value in given.items()}
        context = replace(self._context, env={**env, **SEALED_ENV} if sealed else env, shell=shell)
        link = AgentLink(agent, self._lane, era, self._on_lost, max_descriptors=context.descriptors)
        if era > 0:
            link.kill_former_runs()
        paths = replace(paths, home=env.get("HOME", ""))
        io = SlotIo(link, self._lane, LimitWatch(packet.limits), paths)
        self._runner = CallRunner(context, io, self._call_ended, self._on_lost, self.past)
        self._session_calls.open(io, context.env)

    def prepare(self) -> None:
        """Get ready for the next call, when there is time."""
        if self._runner is not None:
            self._context.poller.defer(self._runner.prepare)

    def close(self) -> None:
        """The slot has no agent (any more)."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        self._session_calls.close()

    def change_network_env(self, env: Mapping[str, str]) -> None:
        """What the slot's network adds to the environment of commands is something else now."""
        if self._runner is not None:
            self._session_calls.change_env(self._runner.change_env(self._network_env, env))
        self._network_env = env

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
        self._stop_current(Stop.lost, error)
        self._session_calls.end(error)
        queued, self._queue = self._queue, deque()
        for asked in queued:
            answer(asked, refusal(asked.call_id, error), self._context.statistics)
        self.past.clear()
        if self.memory is not None:
            self.memory.clear()
            self.memory = None

    def stop(self) -> None:
        """Cancel what runs, because the slot's processes are about to end; what waits goes on waiting."""
        self._stop_current(Stop.cancelled)
        self._session_calls.stop()

    # -- calls --------------------------------------------------------------------------------------

    def submit(
        self,
        call: Call,
        arguments: WireModel,
        memory: ReplyMemory,
        outlet: Outlet,
        held_bytes: int,
        attached: Mapping[str, Attached],
    ) -> None:
        """Queue a new call, whose JSON took ``held_bytes``. Raises SandboxUnavailableError when too many wait, or
        use too much memory."""
        if len(self._queue) + len(self._session_calls) >= MAX_QUEUED_CALLS:
            raise SandboxUnavailableError(f"{MAX_QUEUED_CALLS} calls wait in slot {self._index} already")
        memory.inbox.hold(held_bytes)
        asked = CallInFlight(call, arguments, memory, outlet, self._loop.time(), attached)
        self.any_ran = True
        memory.begin(asked)
        asked.held_bytes = held_bytes
        if self._session_calls.takes(arguments):
            self._session_calls.submit(asked)
            return
        self._queue.append(asked)
        self._begin_next()

    def cancel(self, asked: CallInFlight) -> None:
        """Cancel this call now, whether it is queued or running. No effect when it has ended."""
        if asked is self._current and self._runner is not None:
            self._runner.stop(asked, Stop.cancelled)
        elif asked.message is None and not self._session_calls.cancel(asked) and asked in self._queue:
            self._queue.remove(asked)
            asked.stop = Stop.cancelled
            answer(asked, ended(asked, self._loop.time(), {}), self._context.statistics)

    def made_room(self) -> None:
        """A reply was sent or forgotten: a slot that paused for room may continue."""
        self._session_calls.pump()
        if self._queue and self._current is None:
            self._begin_next()

    def pump(self) -> None:
        """Begin what waits, if it can."""
        self._begin_next()
        self._session_calls.pump()

    def _begin_next(self) -> None:
        """Start the next call, if possible."""
        while self._queue and self._current is None and self._runner is not None and self._usable():
            if self.memory is None or self.memory.full:
                return
            asked = self._queue.popleft()
            self._current = asked
            self._runner.begin(asked)

    def _call_ended(self) -> None:
        self._current = None
        self._begin_next()
        if self._current is None and self._runner is not None:
            # After the answer is sent: starting the next spare shell delays no call.
            self._context.poller.defer(self._runner.prepare)

    def _stop_current(self, stop: Stop, error: AgentEnvError | None = None) -> None:
        """Answer the running call at once, without waiting for its process (the slot is about to end)."""
        asked, self._current = self._current, None
        if asked is None or self._runner is None:
            return
        self._runner.abandon(asked)
        asked.stop = stop
        result = ended(asked, self._loop.time(), {}) if error is None else refusal(asked.call_id, error)
        answer(asked, result, self._context.statistics)

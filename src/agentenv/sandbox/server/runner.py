"""Runs one call in its slot: a command, a file operation, or something on a session; and builds its result."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic_core import to_json

from agentenv.errors import AgentEnvError, InfraError, InvalidArgumentsError, LeaseLostError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.limit_watch import LimitWatch
from agentenv.sandbox.server.agent_link import AgentLink, TooManyRunsError
from agentenv.sandbox.server.calls import NO_CONTENT, Content, Fields, SlotCall, refusal, result_fields
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.poller import Lane
from agentenv.sandbox.server.process import Command, Outcome, Process, SlotIo
from agentenv.sandbox.server.slot_sessions import SessionArguments, SlotHost, SlotSessions
from agentenv.sandbox.server.tools.bash import ShellPool, binary_output, result_of
from agentenv.sandbox.server.tools.files import FileOutcome, Finished, run_file_tool
from agentenv.sandbox.server.uploads import Upload
from agentenv.sandbox.slot_env import SEALED_ENV, env_of, image_env
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sessions.start_errors import cannot_start
from agentenv.wire.base import WireModel
from agentenv.wire.tools import BashArguments, FileToolArguments

_AT_ONCE = 500
"""Entries of a list encoded in one iteration of the loop: a millisecond or two."""

log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The call was stopped while its file operation ran."""


class Runner:
    """Runs the calls of one slot, from its hand-over to :meth:`close`. ``ended`` is called with each call's result,
    never from within :meth:`begin`; not for calls that end with the slot's agent. ``on_lost``: see AgentLink."""

    def __init__(
        self,
        context: ServerContext,
        packet: SlotReady,
        agent: socket.socket,
        lane: Lane,
        ended: Callable[[SlotCall, Fields, Content], None],
        on_lost: Callable[[LossReason, str], None],
        *,
        era: int,
        sealed: bool,
    ) -> None:
        base_env, shell, paths = context.env, context.shell, packet.paths
        self._network_env: Mapping[str, str] = {}
        self.view = packet.view
        """Of its image; None: it has none."""
        if packet.view is not None:
            view = packet.view
            self._network_env, shell = view.network_env, view.shell
            only_bash = "" if view.stands_in else shell
            base_env = image_env({**view.env, **view.network_env}, context.given_env, view.user, only_bash)
            paths = replace(paths, workspace=view.workdir, workdir="", own_root=True, user=view.user, tmux=view.tmux)
        env = {name: paths.in_slot(value) for name, value in base_env.items()}
        self._env = {**env, **SEALED_ENV} if sealed else env
        self._context = context
        self._shell = shell
        self._loop = context.poller.loop
        self._ended = ended
        link = AgentLink(agent, lane, era, on_lost, max_descriptors=context.descriptors)
        if era > 0:
            link.kill_former_runs()
        self.io = SlotIo(link, lane, LimitWatch(packet.limits), replace(paths, home=env.get("HOME", "")))
        self.host = SlotHost(self.io, self._env)
        self._sessions = SlotSessions(self.host, context.output_bytes)
        self._shells = self._new_shells()

    def change_network_env(self, env: Mapping[str, str]) -> None:
        """Programs started from now on have these variables of the network instead of the former ones."""
        kept = {name: value for name, value in self._env.items() if name not in self._network_env}
        self._network_env = env
        self._env = self.host.env = {**kept, **env}
        self._shells.dismiss_spare()
        self._shells = self._new_shells()

    def _new_shells(self) -> ShellPool:
        context = self._context
        return ShellPool(self.io, self._env, context.output_bytes, context.spare_shells, self._shell)

    def prepare(self) -> None:
        """Prepare a shell for the next call while there is nothing else to do."""
        if not self.io.link.closed:
            self._shells.start_spare()
            # Read here instead of at the next call's start: it costs as much as a hop between processes.
            self.io.limits.begin()

    def begin(self, call: SlotCall) -> None:
        """Start the call. Any failure becomes its result."""
        try:
            if isinstance(call.arguments, BashArguments):
                stdin = call.uploads.get("stdin") or call.uploads.get("stdin_data")
                call.process, warm = self._shells.run(
                    call.arguments, lambda process: self._bash_ended(call, process), stdin
                )
                self._context.statistics.calls_cold += not warm
            else:
                run = self._session if isinstance(call.arguments, SessionArguments) else self._file
                call.task = self._loop.create_task(self._run(call, run))
        except AgentEnvError as error:
            self._refuse(call, error)
        except Exception as error:
            log.exception("call %s could not be started", call.call_id)
            self._refuse(call, InfraError(f"the call could not be started: {error!r}"))

    def close(self) -> None:
        """Release the agent and everything held for it. Repeatable."""
        self.io.link.close()
        self.io.limits.close()
        self._sessions.close()

    def _refuse(self, call: SlotCall, error: AgentEnvError) -> None:
        refused = refusal(call.call_id, error)
        self._context.poller.defer(lambda: self._ended(call, refused, NO_CONTENT))

    def _check_above(self) -> None:
        """Raise InfraError when a limit above the slot was reached during the call: its effects may be incomplete."""
        if above := self.io.limits.take_above():
            raise InfraError(above)

    def _bash_ended(self, call: SlotCall, process: Process) -> None:
        # A lost agent is reported to the slot, which ends every call of its lease.
        if process.outcome is Outcome.lost:
            return
        assert isinstance(call.arguments, BashArguments)
        now = self._loop.time()
        try:
            fields = result_of(process, call.arguments)
            self._check_above()
        except AgentEnvError as error:
            self._ended(call, refusal(call.call_id, error), NO_CONTENT)
            return
        usage, limits = process.usage, self.io.limits
        fields["cpu_s"] = usage.user_s + usage.system_s
        fields["peak_memory_bytes"] = usage.max_rss_bytes
        if fields["exit_code"] != 0 and limits.killed_by_own_limit():
            fields["oom_killed"] = True
            fields["peak_memory_bytes"] = limits.peak_bytes() or usage.max_rss_bytes
        content = binary_output(process, fields) if call.arguments.binary else NO_CONTENT
        self._ended(call, result_fields(call, now, fields), content)

    async def _run(self, call: SlotCall, run: Callable[[SlotCall], Awaitable[tuple[Fields, Content]]]) -> None:
        content = NO_CONTENT
        try:
            fields, content = await run(call)
            result = result_fields(call, self._loop.time(), fields)
            self._check_above()
        except _StoppedError:
            result = result_fields(call, self._loop.time(), {})
        except LeaseLostError:
            return  # the slot ends every call of its lease
        except AgentEnvError as error:
            full = isinstance(error.__cause__, TooManyRunsError)
            reason = InvalidArgumentsError(str(error.__cause__)) if full else error
            content, result = NO_CONTENT, refusal(call.call_id, reason)
        except Exception as error:
            log.exception("%s failed", call.tool)
            content, result = NO_CONTENT, refusal(call.call_id, InfraError(f"{call.tool} failed: {error!r}"))
        self._ended(call, result, content)

    async def _session(self, call: SlotCall) -> tuple[Fields, Content]:
        assert isinstance(call.arguments, SessionArguments)
        reply = await self._sessions.call(call.arguments, call.started_at + call.timeout_s)
        return reply.fields, Content((reply.content.model_dump_json(exclude_defaults=True).encode(),))

    async def _file(self, call: SlotCall) -> tuple[Fields, Content]:
        assert isinstance(call.arguments, FileToolArguments)
        user = call.arguments.user
        paths = self.io.paths.of_user(user)
        programs = _FilePrograms(self.io, self._env if user is None else env_of(user, self._env), call)
        outcome = await run_file_tool(call.tool, call.arguments, programs, paths=paths, uploads=call.uploads)
        return {"exit_code": outcome.exit_code, "stderr": outcome.stderr}, await _encoded(outcome)


class _FilePrograms:
    """Runs the processes of one file call (:class:`agentenv.sandbox.server.tools.files.SlotRunner`)."""

    def __init__(self, io: SlotIo, env: Mapping[str, str], call: SlotCall) -> None:
        self._io = io
        self._env = env
        self._call = call

    async def run(self, argv: Sequence[str], *, stdin: bytes | Upload | None = None, output_bytes: int) -> Finished:
        """Run to its end. Raises _StoppedError when the call was stopped, LeaseLostError when the slot was lost,
        InvalidArgumentsError when argv is too large."""
        if self._call.stop:
            raise _StoppedError
        over: asyncio.Future[None] = self._io.lane.loop.create_future()
        process = Process(self._io, output_bytes, lambda _: None if over.done() else over.set_result(None))
        try:
            process.start(Command(argv, self._env, self._io.paths.start), stdin=stdin)
        except ValueError as error:
            raise InvalidArgumentsError(str(error)) from error
        self._call.process = process
        await over
        if process.outcome is Outcome.lost:
            raise LeaseLostError("the slot was lost")
        if self._call.stop:
            raise _StoppedError
        if above := process.refused_from_above():
            raise InfraError(above)
        return _finished(process)


def _finished(process: Process) -> Finished:
    if process.outcome is Outcome.failed:
        return Finished(process.error, b"", f"{cannot_start(process.error)}\n".encode(), 0)
    code = os.waitstatus_to_exitcode(process.status)
    assert process.stdout is not None
    assert process.stderr is not None
    pieces, dropped = process.stdout.kept.pieces()
    # The file tools cannot use truncated output: they check the count.
    stdout = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    stderr = b"".join(process.stderr.kept.parts())
    return Finished(code if code >= 0 else 128 - code, stdout, stderr, dropped)


async def _encoded(outcome: FileOutcome) -> Content:
    """The outcome of a file tool, ready to be sent: its reply as JSON, encoded in pieces, so that a listing of 100,000
    entries does not block the loop."""
    if outcome.content is None:
        return NO_CONTENT
    pieces = []
    for piece in _pieces(outcome.content):
        pieces.append(piece)
        if len(piece) > _AT_ONCE:
            await asyncio.sleep(0)
    return Content(tuple(pieces), {f"content.{name}": (raw,) for name, raw in outcome.raw.items()})


def _pieces(content: WireModel) -> Iterator[bytes]:
    """The JSON of ``content``, with its one long list in parts."""
    long = next((name for name, value in content if isinstance(value, tuple) and len(value) > _AT_ONCE), None)
    if long is None:
        yield content.model_dump_json().encode()
        return
    entries = getattr(content, long)
    rest = content.model_dump_json(exclude={long}).encode()
    yield b'{"%b":[' % long.encode()
    for start in range(0, len(entries), _AT_ONCE):
        part = to_json(entries[start : start + _AT_ONCE])
        yield (b"," if start else b"") + part[1:-1]
    yield b"]}" if rest == b"{}" else b"]," + rest[1:]

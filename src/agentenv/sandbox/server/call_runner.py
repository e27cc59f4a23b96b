"""Runs the calls of one slot, one at a time: starts them, enforces deadlines, builds answers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic_core import to_json

from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, InfraError, InvalidArgumentsError, LeaseLostError
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.server.calls import NO_CONTENT, CallInFlight, Content, Fields, Stop, answer, ended, refusal
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.inbox import Attached
from agentenv.sandbox.server.past_calls import PastCalls
from agentenv.sandbox.server.process import Command, Outcome, Process, SlotIo
from agentenv.sandbox.server.tools.bash import Shells, binary_output, output
from agentenv.sandbox.server.tools.files import FileOutcome, run_file_tool
from agentenv.sandbox.server.tools.runner import Finished
from agentenv.sessions.start_errors import cannot_start
from agentenv.wire.base import WireModel
from agentenv.wire.tools import BashArguments

KILL_GRACE_S = scaled(15.0)
"""Time for the agent to end a killed call (a fork bomb, on a busy machine) before the slot counts as lost."""
_AT_ONCE = 500
"""Entries of a list encoded in one iteration of the loop: a millisecond or two."""

log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The call was stopped while its file operation was running."""


class CallRunner:
    """From a slot's hand-over to :meth:`close`. ``call_ended`` is called after each call's answer; ``lost`` when
    the agent does not obey."""

    def __init__(
        self,
        context: ServerContext,
        io: SlotIo,
        call_ended: Callable[[], None],
        lost: Callable[[Loss, str], None],
        past: PastCalls,
    ) -> None:
        self._context = context
        self._io = self.io = io
        self._call_ended = call_ended
        self._lost = lost
        self._past = past
        self._loop = context.poller.loop
        self._shells = Shells(io, context.env, context.output_bytes, context.spare_shells, context.shell)
        self._current: CallInFlight | None = None

    def change_env(self, former: Iterable[str], env: Mapping[str, str]) -> Mapping[str, str]:
        """Commands started from now on have ``env`` in place of the variables ``former``. Returns all they have."""
        kept = {name: value for name, value in self._context.env.items() if name not in former}
        self._context = replace(self._context, env={**kept, **env})
        context = self._context
        self._shells.dismiss_spare()
        self._shells = Shells(self._io, context.env, context.output_bytes, context.spare_shells, context.shell)
        return context.env

    def prepare(self) -> None:
        """Prepare a shell for the next call while there is nothing else to do."""
        if self._current is None and not self._io.link.closed:
            self._shells.start_spare()
            # Read here instead of at the next call's start: it costs as much as a hop between processes.
            self._io.limits.begin()

    def begin(self, asked: CallInFlight) -> None:
        """Start the call. Its answer comes later, never from within this method; any failure becomes that call's
        answer."""
        self._current = asked
        asked.started_at = self._loop.time()
        # First: whatever happens to the rest, the call ends.
        asked.timer = self._loop.call_at(asked.started_at + asked.timeout_s, self.stop, asked, Stop.deadline)
        try:
            if isinstance(asked.arguments, BashArguments):
                stdin = asked.attached.get("stdin") or asked.attached.get("stdin_data")
                asked.process, warm = self._shells.run(asked.arguments, self._bash_ended, stdin)
                self._context.statistics.calls_cold += not warm
            else:
                asked.task = self._loop.create_task(self._run_file(asked))
        except AgentEnvError as error:
            self._refuse(asked, error)
        except Exception as error:
            log.exception("call %s could not be begun", asked.call_id)
            self._refuse(asked, InfraError(f"the call could not be begun: {error!r}"))

    def _refuse(self, asked: CallInFlight, error: AgentEnvError) -> None:
        refused = refusal(asked.call_id, error)
        self._context.poller.defer(lambda: self._end(asked, refused))

    def take_above(self) -> str:
        """See :meth:`agentenv.sandbox.limit_watch.LimitWatch.take_above`."""
        return self._io.limits.take_above()

    def stop(self, asked: CallInFlight, why: Stop) -> None:
        """Kill the running call; its answer follows with its output so far. Repeatable."""
        if asked is not self._current or asked.stop:
            return
        asked.stop = why
        if asked.timer is not None:
            asked.timer.cancel()
        asked.timer = self._loop.call_later(KILL_GRACE_S, self._lost, Loss.silent, "a killed call did not end")
        if asked.process is not None:
            asked.process.kill()

    def abandon(self, asked: CallInFlight) -> None:
        """The call was answered by other means; its process is ignored from now on."""
        if asked is self._current:
            self._current = None
        if asked.process is not None:
            asked.process.on_end = None
        if asked.task is not None:
            asked.task.cancel()

    def close(self) -> None:
        """Release the agent and everything held for it. Repeatable."""
        if self._current is not None:
            self.abandon(self._current)
        self._io.link.close()
        self._io.limits.close()

    def _end(self, asked: CallInFlight, result: Fields, content: Content = NO_CONTENT) -> None:
        if asked is self._current:
            self._current = None
            self._past.add(asked, result, self._loop.time())
            answer(asked, result, self._context.statistics, content)
            self._call_ended()

    # -- bash --------------------------------------------------------------------------------------

    def _bash_ended(self, process: Process) -> None:
        asked = self._current
        # A lost agent is reported to the slot, which answers every call of its lease.
        if asked is None or process.outcome is Outcome.lost:
            return
        assert isinstance(asked.arguments, BashArguments)
        now = self._loop.time()
        try:
            fields = output(process, asked.arguments)
            self._check_above()
        except AgentEnvError as error:
            self._end(asked, refusal(asked.call_id, error))
            return
        usage = process.usage
        fields["cpu_s"] = usage.user_s + usage.system_s
        fields["peak_memory_bytes"] = usage.max_rss_bytes
        if fields["exit_code"] != 0 and self._io.limits.killed_by_own_limit():
            fields["oom_killed"] = True
            fields["peak_memory_bytes"] = self._io.limits.peak_bytes() or usage.max_rss_bytes
        content = binary_output(process, fields) if asked.arguments.binary else NO_CONTENT
        self._end(asked, ended(asked, now, fields), content)

    def _check_above(self) -> None:
        """Raise InfraError when a limit above the slot was reached during the call: its effects may be incomplete."""
        if above := self._io.limits.take_above():
            raise InfraError(above)

    # -- file operations ---------------------------------------------------------------------------

    async def _run_file(self, asked: CallInFlight) -> None:
        content = NO_CONTENT
        try:
            runner = _Runner(self._io, self._context.env, asked)
            outcome = await run_file_tool(
                asked.tool, asked.arguments, runner, paths=self._io.paths, attached=asked.attached
            )
            content = await _encoded(outcome)
            fields: Fields = {"exit_code": outcome.exit_code, "stderr": outcome.stderr}
            result = ended(asked, self._loop.time(), fields)
            self._check_above()
        except _StoppedError:
            result = ended(asked, self._loop.time(), {})
        except LeaseLostError:
            return  # the slot answers every call of its lease
        except AgentEnvError as error:
            content, result = NO_CONTENT, refusal(asked.call_id, error)
        except Exception as error:
            log.exception("file tool %s failed", asked.tool)
            result = refusal(asked.call_id, InfraError(f"{asked.tool} failed: {error!r}"))
        self._end(asked, result, content)


class _Runner:
    """Runs the processes of one file call (:class:`agentenv.sandbox.server.tools.runner.SlotRunner`)."""

    def __init__(self, io: SlotIo, env: dict[str, str], asked: CallInFlight) -> None:
        self._io = io
        self._env = env
        self._asked = asked

    async def run(self, argv: Sequence[str], *, stdin: bytes | Attached | None = None, output_bytes: int) -> Finished:
        """Run to its end. Raises _StoppedError when the call was stopped, LeaseLostError when the slot was lost,
        InvalidArgumentsError when argv is too large."""
        if self._asked.stop:
            raise _StoppedError
        over: asyncio.Future[None] = self._io.lane.loop.create_future()
        process = Process(self._io, output_bytes, lambda _: None if over.done() else over.set_result(None))
        try:
            process.start(Command(argv, self._env, self._io.paths.workspace), stdin=stdin)
        except ValueError as error:
            raise InvalidArgumentsError(str(error)) from error
        self._asked.process = process
        await over
        if process.outcome is Outcome.lost:
            raise LeaseLostError("the slot was lost")
        if self._asked.stop:
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
    # Truncated output is of no use to those who run programs here: they check the count.
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

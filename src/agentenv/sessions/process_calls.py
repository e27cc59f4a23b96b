"""The calls of the ``process`` tool on the background processes of one slot."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from agentenv.deadlines import scaled
from agentenv.errors import InvalidArgumentsError, LeaseLostError, UnknownSessionError
from agentenv.sessions.answers import SessionAnswer
from agentenv.sessions.background import Background, Order
from agentenv.sessions.host import Host
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import ProcessArguments, ProcessReply, ProcessState

MAX_RUNNING = 100
MAX_ENDED = 16
"""Number of ended processes whose output is kept; the oldest are dropped first."""
MAX_LONGEST_WAIT_S = 300.0
_DEFAULT_WAIT_S = 30.0
_KILL_WAIT_S = scaled(15.0)
_SIGNAL_WAIT_S = scaled(2.0)
"""Time for a process to end after a signal it can handle, before the answer says that it is still running."""
_WRITE_WAIT_S = scaled(5.0)
_START_WAIT_S = scaled(5.0)


class ProcessCalls:
    """All background processes of one slot, until :meth:`close`."""

    def __init__(self, host: Host, unread: Unread) -> None:
        self._host = host
        self._unread = unread
        self._processes: dict[str, Background] = {}
        self._started = 0

    async def call(self, arguments: ProcessArguments, deadline_s: float) -> SessionAnswer:
        """Run one call, answered by ``deadline_s`` (the loop's clock). Raises ToolCallError, LeaseLostError."""
        act = {
            "start": self._start, "list": self._list, "poll": self._poll, "log": self._log, "wait": self._wait,
            "kill": self._kill, "write": self._write, "submit": self._write, "close": self._close,
        }[arguments.action]  # fmt: skip
        answer = await act(arguments, deadline_s)
        for process in self._processes.values():
            if process.lost:
                raise LeaseLostError("the slot was lost")
        notices = self.notices()
        return answer if not notices else _noted(answer, notices)

    async def start(self, order: Order) -> Background:
        """Start a process, and wait until it runs or has failed to start. Raises InvalidArgumentsError."""
        if sum(process.running for process in self._processes.values()) >= MAX_RUNNING:
            raise InvalidArgumentsError(
                f"{MAX_RUNNING} background processes are already running", next_step="kill one you do not need"
            )
        self._started += 1
        process = Background(self._host, f"p{self._started}", order, self._unread)
        self._processes[process.name] = process
        self._forget_ended()
        deadline_s = self._host.loop.time() + _START_WAIT_S
        while not process.begun and await process.changes.until(deadline_s):
            pass
        return process

    def order(
        self,
        command: str,
        workdir: str | None,
        env: Mapping[str, str] | None,
        *,
        pty: bool,
        check_interval_s: float | None,
        argv: tuple[str, ...] | None = None,
        user: str | None = None,
    ) -> Order:
        """What to start; by default in the workspace."""
        cwd = self._host.directory(workdir)
        return Order(command, cwd, dict(env or {}), pty, check_interval_s, argv=argv, user=user)

    def notices(self) -> tuple[str, ...]:
        """State of the processes whose ``check_interval`` has passed since the last report."""
        now = self._host.loop.time()
        said = []
        for process in self._processes.values():
            interval_s = process.order.check_interval_s
            due = interval_s is not None and (not process.running or now - process.noticed_s >= interval_s)
            if due and not process.end_told:
                said.append(_standing(process.state()))
                process.noticed_s = now
                process.end_told = not process.running
        return tuple(said)

    def close(self) -> None:
        """Release everything; the slot ends its processes by other means. Repeatable."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    # -- actions -----------------------------------------------------------------------------------

    async def _start(self, arguments: ProcessArguments, _: float) -> SessionAnswer:
        order = self.order(
            arguments.command or "",
            arguments.workdir,
            arguments.env,
            pty=arguments.pty,
            check_interval_s=arguments.check_interval,
            argv=arguments.argv,
            user=arguments.user,
        )
        process = await self.start(order)
        # A process that could not be started has reported why.
        return self._new_output(process, arguments.limit) if process.failed else _answer(process)

    async def _list(self, _: ProcessArguments, __: float) -> SessionAnswer:
        states = tuple(process.state() for process in self._processes.values())
        return SessionAnswer(ProcessReply(processes=states))

    async def _poll(self, arguments: ProcessArguments, _: float) -> SessionAnswer:
        return self._new_output(self._named(arguments), arguments.limit)

    async def _log(self, arguments: ProcessArguments, _: float) -> SessionAnswer:
        process = self._named(arguments)
        output = process.output
        wanted = arguments.offset
        if wanted is None:
            wanted = max(0, output.total_bytes - arguments.limit)
        text, data = "", None
        if arguments.binary:
            data, offset = output.read_bytes(wanted, arguments.limit)
            next_offset = offset + len(data)
            more = next_offset < output.total_bytes
        else:
            text, offset, next_offset, more = output.read(wanted, arguments.limit)
        process.polled_bytes = max(process.polled_bytes, next_offset)
        reply = ProcessReply(
            data=data,
            process=process.state(),
            offset=offset,
            next_offset=next_offset,
            truncated=more,
            note=f"first {offset} bytes discarded" if offset - wanted > 3 else "",
        )
        return _answer(process, reply, text)

    async def _wait(self, arguments: ProcessArguments, deadline_s: float) -> SessionAnswer:
        process = self._named(arguments)
        began_s = self._host.loop.time()
        longest_s = min(MAX_LONGEST_WAIT_S, max(0.0, deadline_s - began_s))
        wanted_s = min(_DEFAULT_WAIT_S, longest_s) if arguments.timeout_s is None else arguments.timeout_s
        until_s = began_s + min(wanted_s, longest_s)
        while process.running and await process.changes.until(until_s):
            pass
        clamped = wanted_s > longest_s and process.running
        note = f"waited {longest_s:.1f} s, the maximum, instead of {wanted_s:g} s" if clamped else ""
        answer = self._new_output(process, arguments.limit, newest=True, note=note)
        changed = {"waited_s": self._host.loop.time() - began_s, "clamped_to_s": longest_s if clamped else None}
        fields = {**answer.fields, "timed_out": True} if process.running else answer.fields
        return SessionAnswer(answer.content.model_copy(update=changed), fields)

    async def _kill(self, arguments: ProcessArguments, _: float) -> SessionAnswer:
        process = self._named(arguments)
        if arguments.signal == "KILL":
            process.kill()
        else:
            process.signal(signal.Signals[f"SIG{arguments.signal}"])
        until_s = self._host.loop.time() + (_KILL_WAIT_S if arguments.signal == "KILL" else _SIGNAL_WAIT_S)
        while process.running and await process.changes.until(until_s):
            pass
        note = f"{arguments.signal} was sent; the process is still running" if process.running else ""
        return self._new_output(process, arguments.limit, newest=True, note=note)

    async def _write(self, arguments: ProcessArguments, deadline_s: float) -> SessionAnswer:
        process = self._named(arguments)
        data = arguments.input_data or (arguments.input or "").encode("utf-8", "surrogatepass")
        if arguments.action == "submit":
            data += b"\r" if process.order.pty else b"\n"
        until_s = min(deadline_s, self._host.loop.time() + _WRITE_WAIT_S)
        written = process.write(data)
        while written < len(data) and process.running and self._host.loop.time() < until_s:
            await asyncio.sleep(0.005)
            written += process.write(data[written:])
        note = (
            "" if written == len(data) else f"wrote {written} of {len(data)} bytes: the process does not read its input"
        )
        return _answer(process, ProcessReply(process=process.state(), written_bytes=written, note=note))

    async def _close(self, arguments: ProcessArguments, _: float) -> SessionAnswer:
        process = self._named(arguments)
        process.end_input()
        return _answer(process)

    # -- inside ------------------------------------------------------------------------------------

    def _named(self, arguments: ProcessArguments) -> Background:
        process = self._processes.get(arguments.process or "")
        if process is None:
            known = ", ".join(self._processes) or "none"
            raise UnknownSessionError(f"no background process {arguments.process!r}", next_step=f"processes: {known}")
        return process

    def _new_output(self, process: Background, limit: int, *, newest: bool = False, note: str = "") -> SessionAnswer:
        """At most ``limit`` bytes of output not shown before: the oldest, or (``newest``) the last ones, because
        errors come at the end. ``note`` collects remarks about the output."""
        output = process.output
        unread = process.polled_bytes
        begin = max(unread, output.total_bytes - limit) if newest else unread
        text, offset, next_offset, more = output.read(begin, limit)
        gone = min(offset, output.dropped_bytes) - unread
        skipped = offset - max(unread, output.dropped_bytes)
        notes = [f"{gone} earlier bytes were discarded"] if gone > 3 else []
        if skipped > 3:
            notes.append(f"{skipped} earlier bytes were skipped: read them with action=log, offset={offset - skipped}")
        process.polled_bytes = next_offset
        reply = ProcessReply(
            process=process.state(),
            offset=offset,
            next_offset=next_offset,
            truncated=more,
            note="; ".join([*notes, note] if note else notes),
        )
        return _answer(process, reply, text)

    def _forget_ended(self) -> None:
        ended = [name for name, process in self._processes.items() if not process.running]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self._processes.pop(name).close()


def _answer(process: Background, reply: ProcessReply | None = None, text: str = "") -> SessionAnswer:
    """``reply``: state of the process, unless something else is to be reported."""
    reply = reply or ProcessReply(process=process.state())
    fields: dict[str, object] = {"stdout": text} if text else {}
    if process.exit_code is not None:
        fields["exit_code"] = process.exit_code
        process.end_told = True
    return SessionAnswer(reply, fields)


def _noted(answer: SessionAnswer, notices: tuple[str, ...]) -> SessionAnswer:
    return SessionAnswer(answer.content.model_copy(update={"notices": notices}), answer.fields)


def _standing(state: ProcessState) -> str:
    shown = state.command if len(state.command) <= 80 else state.command[:80] + "…"
    how = (
        f"has been running for {state.runs_s:.0f} s"
        if state.state == "running"
        else f"ended with exit code {state.exit_code} after {state.runs_s:.0f} s"
    )
    return f"{state.process} ({shown}) {how}; {state.unread_bytes} bytes of output are unread"

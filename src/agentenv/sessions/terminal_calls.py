"""The calls of the ``terminal`` tool, on the sessions of one slot."""

from __future__ import annotations

import posixpath

from agentenv.errors import InvalidArgumentsError, UnknownSessionError
from agentenv.sessions.answers import SessionAnswer, output_fields
from agentenv.sessions.keys import key_bytes
from agentenv.sessions.port import Host
from agentenv.sessions.process_calls import ProcessCalls
from agentenv.sessions.terminal import Phase, Setup, Terminal
from agentenv.wire.sessions import TerminalArguments, TerminalReply

MAX_SESSIONS = 128
_PEEK_S = 10.0
"""How long an empty command waits for something new, when it does not say."""
_KEYS_S = 5.0
_KEYS_SILENT_S = 1.0
"""Keys that lead to no output at all are answered after this."""
_QUIET_S = 0.25
"""Output is taken to be complete for now when nothing more came for so long."""
_KILL_WAIT_S = 15.0
_REPLACED_S = 0.5


class TerminalCalls:
    """All terminal sessions of one slot, until :meth:`close`. Calls never wait for other calls."""

    def __init__(self, host: Host, cap_bytes: int, processes: ProcessCalls) -> None:
        self._host = host
        self._cap_bytes = cap_bytes
        self._processes = processes
        self._terminals: dict[str, Terminal] = {}

    async def call(self, arguments: TerminalArguments, deadline_s: float) -> SessionAnswer:
        """One call, answered by ``deadline_s`` (the loop's clock) whatever runs. Raises ToolCallError,
        LeaseLostError."""
        if arguments.background:
            return await self._background(arguments)
        if arguments.reset:
            await self._end(arguments.session)
            if not arguments.command:
                return self._answer(arguments.session, None)
        if arguments.command:
            return await self._run(arguments, deadline_s)
        terminal = self._known(arguments.session)
        if arguments.keys or arguments.input is not None:
            await self._send(terminal, arguments, deadline_s)
        elif terminal.busy and (arguments.timeout_s is not None or not terminal.waiting_bytes):
            await self._more(terminal, arguments.timeout_s, deadline_s)
        return self._answer(arguments.session, terminal)

    def close(self) -> None:
        """The slot's processes end otherwise. Repeatable."""
        for terminal in self._terminals.values():
            terminal.close()
        self._terminals.clear()

    # -- what calls do -----------------------------------------------------------------------------

    async def _run(self, arguments: TerminalArguments, deadline_s: float) -> SessionAnswer:
        name = arguments.session
        terminal = self._terminals.get(name)
        started = terminal is None or terminal.phase is Phase.exited
        if terminal is None or started:
            terminal = self._start(arguments)
        else:
            _check_same(terminal, arguments)
        terminal.run(arguments.command or "")
        wait_s = deadline_s if arguments.timeout_s is None else self._host.loop.time() + arguments.timeout_s
        await self._until_done(terminal, min(wait_s, deadline_s))
        return self._answer(name, terminal, started=started)

    async def _background(self, arguments: TerminalArguments) -> SessionAnswer:
        process = await self._processes.start(
            self._processes.order(
                arguments.command or "",
                arguments.workdir,
                arguments.env,
                pty=bool(arguments.pty),
                check_interval_s=arguments.check_interval,
            )
        )
        reply = TerminalReply(
            session=arguments.session,
            state="none",
            cwd=posixpath.normpath(process.order.cwd),
            pty=process.order.pty,
            process=process.state(),
            note=f"started as background process {process.name}: see the process tool",
            notices=self._processes.notices(),
        )
        fields = {} if process.exit_code is None else {"exit_code": process.exit_code}
        return SessionAnswer(reply, fields)

    async def _send(self, terminal: Terminal, arguments: TerminalArguments, deadline_s: float) -> None:
        keys = [key_bytes(name) for name in arguments.keys]
        if terminal.phase is Phase.exited:
            raise UnknownSessionError(
                f"the session {arguments.session!r} has ended", next_step="a command starts it afresh"
            )
        if not terminal.busy and not terminal.setup.pty:
            raise InvalidArgumentsError(
                f"nothing runs in session {arguments.session!r} that keys could reach", next_step="run a command first"
            )
        before = terminal.waiting_bytes
        typed = (arguments.input or "").encode("utf-8", "surrogatepass")
        if terminal.setup.pty:
            terminal.send(typed + b"".join(keys))
        else:
            for data in [typed] * bool(typed) + keys:
                terminal.send(data)
        if arguments.timeout_s is not None:
            until_s = self._host.loop.time() + arguments.timeout_s
            await self._until_done(terminal, min(until_s, deadline_s))
        else:
            await self._until_quiet(terminal, before, deadline_s)

    async def _more(self, terminal: Terminal, timeout_s: float | None, deadline_s: float) -> None:
        now = self._host.loop.time()
        if timeout_s is not None:
            await self._until_done(terminal, min(now + timeout_s, deadline_s))
            return
        until_s = min(now + _PEEK_S, deadline_s)
        while terminal.busy and not terminal.waiting_bytes and await terminal.changes.until(until_s):
            pass
        await self._until_quiet(terminal, 0, until_s)

    async def _until_done(self, terminal: Terminal, until_s: float) -> None:
        while terminal.busy and not terminal.detached and await terminal.changes.until(until_s):
            pass
        if terminal.busy and terminal.detached:
            # The shell is gone: it has ended, as is heard in a moment, or something else is in its place.
            until_s = min(until_s, self._host.loop.time() + _REPLACED_S)
            while terminal.busy and await terminal.changes.until(until_s):
                pass
        terminal.check_lost()

    async def _until_quiet(self, terminal: Terminal, before: int, deadline_s: float) -> None:
        """Until the command ends, or what came of the keys seems complete."""
        now = self._host.loop.time()
        until_s = min(now + _KEYS_S, deadline_s)
        silent_s = min(now + _KEYS_SILENT_S, until_s)
        idle = not terminal.busy  # a shell that waits: what it shows of the keys is all there will be
        while terminal.busy or idle:
            came = terminal.waiting_bytes > before
            wait_s = min(until_s, self._host.loop.time() + _QUIET_S) if came else silent_s
            seen = terminal.waiting_bytes
            if not await terminal.changes.until(wait_s) and terminal.waiting_bytes == seen:
                break
        terminal.check_lost()

    # -- sessions ----------------------------------------------------------------------------------

    def _known(self, name: str) -> Terminal:
        terminal = self._terminals.get(name)
        if terminal is None:
            known = ", ".join(self._terminals) or "there are none"
            raise UnknownSessionError(
                f"there is no session {name!r}", next_step=f"a command starts one; sessions: {known}"
            )
        return terminal

    def _start(self, arguments: TerminalArguments) -> Terminal:
        former = self._terminals.pop(arguments.session, None)
        if former is not None:
            former.close()
        if len(self._terminals) >= MAX_SESSIONS:
            raise InvalidArgumentsError(
                f"this slot has {MAX_SESSIONS} sessions already", next_step="use one of them, or reset one to end it"
            )
        setup = Setup(
            cwd=posixpath.join(self._host.workspace, arguments.workdir or "."),
            env=dict(arguments.env or {}),
            cap_bytes=self._cap_bytes,
            pty=bool(arguments.pty),
        )
        terminal = self._terminals[arguments.session] = Terminal(self._host, setup)
        return terminal

    async def _end(self, name: str) -> None:
        """Kill it and all it runs. No error when there is none."""
        terminal = self._terminals.pop(name, None)
        if terminal is None:
            return
        terminal.kill()
        until_s = self._host.loop.time() + _KILL_WAIT_S
        while terminal.phase is not Phase.exited and await terminal.changes.until(until_s):
            pass
        terminal.close()

    def _answer(self, name: str, terminal: Terminal | None, *, started: bool = False) -> SessionAnswer:
        notices = self._processes.notices()
        if terminal is None:
            reply = TerminalReply(session=name, state="none", cwd=self._host.workspace, notices=notices)
            return SessionAnswer(reply)
        terminal.check_lost()
        exited = terminal.phase is Phase.exited
        fields = output_fields(terminal.take())
        if (code := terminal.take_result()) is not None:
            fields["exit_code"] = code
        if terminal.start_error:
            fields["stderr"] = terminal.start_error
        if terminal.busy:
            fields["timed_out"] = True
        reply = TerminalReply(
            session=name,
            state="exited" if exited else "running" if terminal.busy else "idle",
            cwd=terminal.cwd,
            pty=terminal.setup.pty,
            command=terminal.shown_command,
            running_s=self._host.loop.time() - terminal.command_began_s if terminal.busy else None,
            started=started,
            note=_note(terminal),
            notices=notices,
        )
        return SessionAnswer(reply, fields)


def _note(terminal: Terminal) -> str:
    if terminal.start_error:
        return "the session could not be started"
    if terminal.phase is Phase.exited:
        return "the shell has ended; the next command starts a new one"
    if terminal.busy and terminal.detached:
        return "another program has taken the shell's place (exec); reset starts a new shell"
    if terminal.busy:
        return "still running: an empty command gets more output, keys such as C-c can be sent"
    return ""


def _check_same(terminal: Terminal, arguments: TerminalArguments) -> None:
    """What is decided when a session starts cannot be changed later. Raises InvalidArgumentsError."""
    changed = "pty" if arguments.pty not in (None, terminal.setup.pty) else ""
    changed = changed or ("workdir" if arguments.workdir is not None else "env" if arguments.env is not None else "")
    if changed and not terminal.busy:
        raise InvalidArgumentsError(
            f"the session {arguments.session!r} runs already: its {changed} was decided when it started",
            next_step="use cd or export in it, another session, or reset=true",
        )

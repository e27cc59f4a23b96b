"""The calls of the ``terminal`` tool on the sessions of one slot."""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from dataclasses import replace

from agentenv.deadlines import scaled
from agentenv.errors import InvalidArgumentsError, UnknownSessionError
from agentenv.sessions.answers import SessionAnswer, output_fields
from agentenv.sessions.host import Host
from agentenv.sessions.keys import key_bytes
from agentenv.sessions.process_calls import ProcessCalls
from agentenv.sessions.terminal import Setup, Terminal, TerminalPhase
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import TerminalArguments, TerminalReply

MAX_SESSIONS = 128
_PEEK_S = scaled(10.0)
"""How long an empty command waits for new output by default."""
_KEYS_S = scaled(5.0)
_KEYS_SILENT_S = scaled(1.0)
"""Keys that produce no output are answered after this time."""
_QUIET_S = 0.25
"""Output counts as complete for now when nothing came for this long."""
_LOOK_S, _LONGEST_LOOK_S = 0.3, 5.0
"""After this silence it is checked whether the program waits for input; then at growing intervals."""
_TAKE_S, _RETRY_S = scaled(10.0), 0.005
"""A program that reads none of its input for this long does not read it."""
_MOST_TYPED_BYTES = 32 * 1024 * 1024
_SMALL_COMMAND_CHARS = 64 * 1024
_HARMLESS_KEYS = (b"\x03", b"\x1c", b"\x1a")
r"""C-c, C-\ and C-z have no effect at a terminal where nothing runs. Other keys would stay in its input."""
_KILL_WAIT_S = scaled(15.0)
_REPLACED_S = 0.5
_REPORTED_S = scaled(10.0)
"""For the end of a shell to be reported."""


class TerminalCalls:
    """All terminal sessions of one slot, until :meth:`close`. Calls never wait for other calls."""

    def __init__(self, host: Host, cap_bytes: int, processes: ProcessCalls, unread: Unread) -> None:
        self._host = host
        self._cap_bytes = cap_bytes
        self._processes = processes
        self._unread = unread
        self._terminals: dict[str, Terminal] = {}
        self._setups: dict[str, Setup] = {}
        """How each session was started: a shell that ended is replaced by one like it."""

    async def call(self, arguments: TerminalArguments, deadline_s: float) -> SessionAnswer:
        """Run one call, answered by ``deadline_s`` (the loop's clock) whatever is running. Raises ToolCallError,
        LeaseLostError."""
        if arguments.background:
            return await self._background(arguments)
        if arguments.reset:
            ended = await self._end(arguments.session)
            if not arguments.command:
                note = "the session and everything it ran were killed" if ended else "there was no such session"
                return self._answer(arguments.session, note=f"{note}; the next command starts a new shell")
        if arguments.command:
            return await self._run(arguments, deadline_s)
        terminal = self._known(arguments.session)
        during_s = terminal.command_began_s if terminal.busy else None
        if arguments.keys or arguments.input is not None:
            await self._send(terminal, arguments, deadline_s)
        elif terminal.busy and (arguments.timeout_s is not None or not terminal.waiting_bytes):
            await self._more(terminal, arguments.timeout_s, deadline_s)
        await self._last_look(terminal, arguments, deadline_s)
        return self._answer(arguments.session, terminal, during_s)

    def close(self) -> None:
        """Release everything; the slot ends its processes by other means. Repeatable."""
        for terminal in self._terminals.values():
            terminal.close()
        self._terminals.clear()

    # -- what calls do -----------------------------------------------------------------------------

    async def _run(self, arguments: TerminalArguments, deadline_s: float) -> SessionAnswer:
        name, command = arguments.session, arguments.command or ""
        self._check_room(command)
        terminal = self._terminals.get(name)
        started = terminal is None or terminal.phase is TerminalPhase.exited
        note = ""
        if terminal is None or started:
            note = "new shell: variables and settings of the previous shell are lost" if name in self._setups else ""
            terminal = self._start(arguments)
        else:
            _check_same(terminal, arguments)
        wait_s = deadline_s if arguments.timeout_s is None else self._host.loop.time() + arguments.timeout_s
        until_s = min(wait_s, deadline_s)
        if started or arguments.workdir is None or await self._entered(terminal, arguments.workdir, deadline_s):
            terminal.run(command)
            await self._until_done(terminal, until_s)
        else:
            note = "the command was not run: its workdir could not be entered"
        during_s = terminal.command_began_s
        if terminal.start_error:
            self._setups.pop(name, None)  # otherwise every later command would meet the same error
        await self._last_look(terminal, arguments, deadline_s)
        return self._answer(name, terminal, during_s, started=started, note=note)

    async def _entered(self, terminal: Terminal, workdir: str, deadline_s: float) -> bool:
        """Change the directory of a running shell; False if that failed, or was not done by the deadline. Raises
        SessionBusyError."""
        terminal.run(f"\\builtin cd -- {shlex.quote(self._host.directory(workdir))}")
        await self._until_done(terminal, deadline_s)
        return not terminal.busy and terminal.take_result(terminal.command_began_s) == 0

    async def _background(self, arguments: TerminalArguments) -> SessionAnswer:
        name = arguments.session
        terminal, setup = self._terminals.get(name), self._setups.get(name)
        cwd = terminal.cwd if terminal is not None and terminal.phase is not TerminalPhase.exited else None
        process = await self._processes.start(
            self._processes.order(
                arguments.command or "",
                cwd if arguments.workdir is None else arguments.workdir,
                {**(setup.env if setup is not None else {}), **(arguments.env or {})},
                pty=bool(arguments.pty),
                check_interval_s=arguments.check_interval,
                user=arguments.user or (setup.user if setup is not None else None),
            )
        )
        reply = TerminalReply(
            session=name,
            state="none",
            cwd=posixpath.normpath(process.order.cwd),
            pty=process.order.pty,
            process=process.state(),
            note=f"started as background process {process.name} in {posixpath.normpath(process.order.cwd)}",
            notices=self._processes.notices(),
        )
        fields = {} if process.exit_code is None else {"exit_code": process.exit_code}
        return SessionAnswer(reply, fields)

    async def _send(self, terminal: Terminal, arguments: TerminalArguments, deadline_s: float) -> None:
        keys = [key_bytes(name) for name in arguments.keys]
        typed = (arguments.input or "").encode("utf-8", "surrogatepass")
        idle = not terminal.busy
        _check_reachable(terminal, arguments.session, harmless=not typed and all(key in _HARMLESS_KEYS for key in keys))
        before = terminal.waiting_bytes
        until_s = deadline_s
        if arguments.timeout_s is not None:
            until_s = min(self._host.loop.time() + arguments.timeout_s, deadline_s)
        if terminal.setup.pty:
            await self._typed(terminal, typed + b"".join(keys), deadline_s)
        else:
            for data in [typed] * bool(typed) + keys:
                terminal.signal(data)
        if arguments.timeout_s is not None and not idle:
            await self._until_done(terminal, until_s)
        else:
            await self._until_quiet(terminal, before, until_s)

    async def _typed(self, terminal: Terminal, data: bytes, deadline_s: float) -> None:
        """Type as fast as the program reads. Raises InvalidArgumentsError, with the number of bytes taken, when it
        does not read."""
        rest = memoryview(data)
        idle = not terminal.busy
        until_s = min(deadline_s, self._host.loop.time() + _TAKE_S)
        while rest:
            if not idle and not terminal.busy:
                return  # the program has ended, which is the result; the rest must not go to the next one
            if taken := terminal.type(rest):
                rest = rest[taken:]
                until_s = min(deadline_s, self._host.loop.time() + _TAKE_S)
            elif self._host.loop.time() < until_s:
                await asyncio.sleep(_RETRY_S)
            else:
                raise InvalidArgumentsError(
                    f"the program took {len(data) - len(rest)} of {len(data)} bytes and then stopped reading its input",
                    next_step="send the rest later, or interrupt it with C-c",
                )

    async def _more(self, terminal: Terminal, timeout_s: float | None, deadline_s: float) -> None:
        now = self._host.loop.time()
        if timeout_s is not None:
            await self._until_done(terminal, min(now + timeout_s, deadline_s))
            return
        until_s = min(now + _PEEK_S, deadline_s)
        await self._until_done(terminal, until_s, or_output=True)
        if terminal.waiting_bytes:
            await self._until_quiet(terminal, 0, until_s)

    async def _until_done(self, terminal: Terminal, until_s: float, *, or_output: bool = False) -> None:
        """Wait until the command ends, waits for input, can no longer be seen to end, or the time is over."""
        silent_s, seen = _LOOK_S, -1
        while terminal.busy and terminal.answering and not (or_output and terminal.waiting_bytes):
            now = self._host.loop.time()
            if now >= until_s:
                break
            changed = await terminal.changes.until(min(until_s, now + silent_s))
            if changed or terminal.waiting_bytes != seen:
                silent_s, seen = _LOOK_S, terminal.waiting_bytes
            elif self._host.loop.time() < until_s:
                await self._look(terminal, until_s)
                if terminal.asks_input and terminal.waiting_bytes == seen:
                    break
                silent_s = min(2 * silent_s, _LONGEST_LOOK_S)
        if terminal.busy and terminal.detached:
            await self._until_reported(terminal, until_s)
        terminal.check_lost()

    async def _until_reported(self, terminal: Terminal, until_s: float) -> None:
        """The shell is gone: either it has ended, which is reported in a moment, or another program has replaced it."""
        until_s = min(until_s, self._host.loop.time() + _REPORTED_S)
        look_s = min(until_s, self._host.loop.time() + _REPLACED_S)
        while terminal.busy:
            if await terminal.changes.until(look_s):
                continue
            if look_s >= until_s or not await terminal.shell_has_ended():
                break
            look_s = min(until_s, self._host.loop.time() + _REPLACED_S)

    async def _last_look(self, terminal: Terminal, arguments: TerminalArguments, deadline_s: float) -> None:
        """Determine whether the program waits for input even if the call's wait was too short for a check."""
        if terminal.busy and not terminal.asks_input and arguments.timeout_s != 0:
            await self._look(terminal, deadline_s)

    async def _look(self, terminal: Terminal, until_s: float) -> None:
        """Check the command and its shell: whether it waits for input, whether the shell answers."""
        if terminal.busy and terminal.answering and self._host.loop.time() < until_s:
            await terminal.look()

    async def _until_quiet(self, terminal: Terminal, before: int, deadline_s: float) -> None:
        """Wait until the command ends, or the output after the keys seems complete."""
        now = self._host.loop.time()
        until_s = min(now + _KEYS_S, deadline_s)
        silent_s = min(now + _KEYS_SILENT_S, until_s)
        idle = not terminal.busy  # a waiting shell: what it shows of the keys is all there will be
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
            known = ", ".join(self._terminals) or "none"
            raise UnknownSessionError(f"no session {name!r}", next_step=f"run a command to start it; sessions: {known}")
        return terminal

    def _start(self, arguments: TerminalArguments) -> Terminal:
        name = arguments.session
        if (ended := self._terminals.pop(name, None)) is not None:
            ended.close()
        if len(self._terminals) >= MAX_SESSIONS:
            raise InvalidArgumentsError(
                f"{MAX_SESSIONS} sessions already exist", next_step="use one of them, or end one with reset"
            )
        former = self._setups.pop(name, None) or Setup(self._host.workspace, {}, self._cap_bytes)
        workdir, env, pty = arguments.workdir, arguments.env, arguments.pty
        setup = replace(
            former,
            cwd=former.cwd if workdir is None else self._host.directory(workdir),
            env=former.env if env is None else dict(env),
            pty=former.pty if pty is None else pty,
            user=arguments.user or former.user,
        )
        terminal = self._terminals[name] = Terminal(self._host, setup, self._unread)
        self._setups[name] = setup
        if len(self._setups) > MAX_SESSIONS:
            del self._setups[next(iter(self._setups))]
        return terminal

    async def _end(self, name: str) -> bool:
        """Kill a session and everything in it; returns whether there was one."""
        terminal = self._terminals.pop(name, None)
        if terminal is None:
            return False
        terminal.kill()
        until_s = self._host.loop.time() + _KILL_WAIT_S
        while terminal.phase is not TerminalPhase.exited and await terminal.changes.until(until_s):
            pass
        terminal.close()
        return True

    def _check_room(self, command: str) -> None:
        """A large command waits here until its shell has read it. Raises InvalidArgumentsError."""
        if len(command) > _SMALL_COMMAND_CHARS:
            typed_bytes = sum(terminal.typed_bytes for terminal in self._terminals.values())
            if typed_bytes + len(command) > _MOST_TYPED_BYTES:
                raise InvalidArgumentsError(
                    "too many large commands are running in the sessions at once",
                    next_step="put the text in a file, or wait for one of them",
                )

    def _answer(
        self,
        name: str,
        terminal: Terminal | None = None,
        during_s: float | None = None,
        *,
        started: bool = False,
        note: str = "",
    ) -> SessionAnswer:
        """``during_s``: start time of the command that was running when the call was made, or that the call started."""
        notices = self._processes.notices()
        if terminal is None:
            reply = TerminalReply(session=name, state="none", cwd=self._host.workspace, note=note, notices=notices)
            return SessionAnswer(reply)
        terminal.check_lost()
        exited = terminal.phase is TerminalPhase.exited
        fields = output_fields(terminal.take())
        if (code := terminal.take_result(during_s)) is not None:
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
            waiting_for_input=terminal.busy and terminal.asks_input,
            note="; ".join(said for said in (note, _note(terminal)) if said),
            notices=notices,
        )
        return SessionAnswer(reply, fields)


def _note(terminal: Terminal) -> str:
    if terminal.start_error:
        return "the session could not be started"
    if terminal.phase is TerminalPhase.exited:
        return "the shell has exited; the next command starts a new one"
    if terminal.busy and terminal.detached:
        return "exec replaced the shell with another program; reset starts a new shell"
    if terminal.busy and terminal.mute:
        return "the shell no longer responds after this command; reset starts a new shell"
    if terminal.busy and terminal.asks_input:
        return "the program is waiting for input: answer with input and keys, or end it with C-c or C-d"
    if terminal.busy:
        return (
            "still running: send an empty command for more output, C-c to interrupt it, or reset if that does not help"
        )
    return ""


def _check_reachable(terminal: Terminal, name: str, *, harmless: bool) -> None:
    """Check that something reads what is typed. Raises UnknownSessionError, InvalidArgumentsError."""
    if terminal.phase is TerminalPhase.exited:
        raise UnknownSessionError(f"the session {name!r} has ended", next_step="run a command to start it again")
    if terminal.busy or (terminal.setup.pty and harmless):
        return
    if not terminal.setup.pty:
        raise InvalidArgumentsError(
            f"nothing is running in session {name!r} that could receive keys", next_step="run a command first"
        )
    raise InvalidArgumentsError(
        f"nothing is running in session {name!r}: the next program would read this input",
        next_step="run a command first; give shell commands as command, not as input",
    )


def _check_same(terminal: Terminal, arguments: TerminalArguments) -> None:
    """Settings fixed at a session's start cannot be changed later. Raises InvalidArgumentsError."""
    changed = "pty" if arguments.pty not in (None, terminal.setup.pty) else ""
    changed = changed or ("env" if arguments.env is not None else "")
    if changed and not terminal.busy:
        raise InvalidArgumentsError(
            f"session {arguments.session!r} is already running: its {changed} was set when it started",
            next_step="use export in it, another session, or reset=true",
        )

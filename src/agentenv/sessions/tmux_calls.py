"""The calls of the ``tmux`` tool on the tmux sessions of one slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.backoff import Backoff
from agentenv.deadlines import scaled
from agentenv.errors import InvalidArgumentsError, UnknownSessionError
from agentenv.sessions.answers import SessionAnswer
from agentenv.sessions.host import Host
from agentenv.sessions.run_once import output_of
from agentenv.sessions.tmux import Tmux, TmuxSetup
from agentenv.sessions.tmux_control import difference, pressing, trimmed, typing
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import TmuxArguments, TmuxReply, TmuxState

MAX_SESSIONS = 16
_LOOK_S, _LONGEST_LOOK_S = 0.03, 0.25
_SETTLE_S, _LONGEST_SETTLE_S = 0.12, 1.0
"""The result of keys is shown once nothing came for this long."""
_STOP_S = scaled(5.0)
_DUPLICATE = "duplicate session"
_GOING = ("server exited", "lost server", "no server running")
"""A server exits with its last session; a client that connects at that moment gets this error."""
_GOING_S, _GOING_TIMES = 0.05, 200


class TmuxCalls:
    """All tmux sessions of one slot, until :meth:`close`."""

    def __init__(self, host: Host, unread: Unread) -> None:
        self._host = host
        self._unread = unread
        self._sessions: dict[str, Tmux] = {}

    async def call(self, arguments: TmuxArguments, deadline_s: float) -> SessionAnswer:
        """Run one call, answered by ``deadline_s`` (the loop's clock) or soon after when tmux is slow. Raises
        ToolCallError, LeaseLostError."""
        match arguments.action:
            case "start":
                return await self._start(arguments)
            case "list":
                return await self._list()
        tmux = self._sessions.get(arguments.session)
        if tmux is None:
            known = ", ".join(self._sessions) or "none"
            raise UnknownSessionError(
                f"no tmux session {arguments.session!r}", next_step=f"start it; sessions: {known}"
            )
        match arguments.action:
            case "send_keys":
                return await self._send_keys(tmux, arguments, deadline_s)
            case "wait":
                return await self._wait(tmux, arguments, deadline_s)
            case "capture":
                return await self._capture(tmux, arguments)
            case "resize":
                await tmux.resize(arguments.rows, arguments.columns)
                return await self._shown(tmux)
            case _:
                return await self._stop(tmux)

    def close(self) -> None:
        """Release everything; the slot ends its processes by other means. Repeatable."""
        for tmux in self._sessions.values():
            tmux.close()
        self._sessions.clear()

    # -- actions -----------------------------------------------------------------------------------

    async def _start(self, arguments: TmuxArguments) -> SessionAnswer:
        name = arguments.session
        former = self._sessions.get(name)
        if former is not None and former.alive:
            raise InvalidArgumentsError(f"tmux session {name!r} already exists", next_step="use it, or stop it first")
        if len(self._sessions) >= MAX_SESSIONS:
            raise InvalidArgumentsError(f"{MAX_SESSIONS} tmux sessions already exist", next_step="stop one")
        setup = TmuxSetup(
            name=name,
            command=arguments.command or None,
            cwd=self._host.directory(arguments.workdir),
            env=dict(arguments.env or {}),
            rows=arguments.rows,
            columns=arguments.columns,
            record=arguments.record,
        )
        tmux = await self._begun(setup)
        if tmux.start_error:
            del self._sessions[name]
            tmux.close()
            state = TmuxState(session=name, state="exited")
            reply = TmuxReply(session=state, note="the session could not be started")
            return SessionAnswer(reply, {"exit_code": 1, "stderr": f"tmux: {tmux.start_error.strip()}\n"})
        await self._settle(tmux)
        return await self._shown(tmux)

    async def _begun(self, setup: TmuxSetup) -> Tmux:
        """A session that runs, or whose ``start_error`` is something that trying again does not cure."""
        tmux, left = await self._opened(setup), True
        for _ in range(_GOING_TIMES):
            if left and tmux.start_error.startswith(_DUPLICATE):
                # Left by a sandbox server that died, or created by a program in the slot: it has no owner. When it was
                # the last one, tmux's own server exits now.
                argv = (*self._host.tmux, "-S", self._host.tmux_socket, "kill-session", "-t", f"={setup.name}")
                await output_of(self._host, *argv, longest_s=_STOP_S, given=self._host.tmux_env)
                left = False
            elif any(said in tmux.start_error for said in _GOING):
                await asyncio.sleep(_GOING_S)
            else:
                break
            tmux.close()
            tmux = await self._opened(setup)
        return tmux

    async def _opened(self, setup: TmuxSetup) -> Tmux:
        tmux = self._sessions[setup.name] = Tmux(self._host, setup, self._unread)
        await tmux.open()
        return tmux

    async def _send_keys(self, tmux: Tmux, arguments: TmuxArguments, deadline_s: float) -> SessionAnswer:
        presses = [command for key in arguments.keys for command in pressing(tmux.pane, key)]
        text = arguments.text or ""
        began_s = self._host.loop.time()
        for command in (*typing(tmux.pane, text), *presses):
            await tmux.command(command)
        until_s = min(deadline_s, began_s + arguments.max_wait_s)
        if arguments.min_wait_s:
            await asyncio.sleep(max(0.0, min(began_s + arguments.min_wait_s, deadline_s) - self._host.loop.time()))
        idle = None
        if arguments.block:
            await self._settle(tmux)
            idle = await self._looking(tmux.idle, until_s)
        else:
            await self._settle(tmux)
        sent = len(text.encode("utf-8", "surrogatepass"))
        return await self._shown(tmux, idle=idle, sent_bytes=sent, waited_s=self._host.loop.time() - began_s)

    async def _wait(self, tmux: Tmux, arguments: TmuxArguments, deadline_s: float) -> SessionAnswer:
        until = arguments.until or ("text" if arguments.text else "idle")
        text = arguments.text or ""

        async def shown() -> bool:
            return text in "\n".join(await tmux.screen(joined=True))

        async def over() -> bool:
            # in this order: a program's last output is on the screen once it is known to have ended
            return await tmux.ended() or await holds()

        holds = {"text": shown, "idle": tmux.idle, "exit": tmux.ended}[until]
        began_s = self._host.loop.time()
        matched = await self._looking(over, min(deadline_s, began_s + arguments.max_wait_s)) and await holds()
        waited_s = self._host.loop.time() - began_s
        idle = matched if until == "idle" else None
        return await self._shown(tmux, idle=idle, matched=matched, waited_s=waited_s)

    async def _capture(self, tmux: Tmux, arguments: TmuxArguments) -> SessionAnswer:
        if arguments.what == "screen":
            return await self._shown(tmux)
        lines = await tmux.screen(history=True)
        while lines and not lines[-1]:
            lines.pop()
        new = lines
        if arguments.what == "difference":
            # A whole history takes longer than the server's loop may be blocked.
            new = await asyncio.to_thread(difference, tmux.seen, lines)
        tmux.seen = lines
        return await self._shown(tmux, lines=new)

    async def _stop(self, tmux: Tmux) -> SessionAnswer:
        if tmux.alive:
            await tmux.command(f"kill-session -t {tmux.pane}")
        until_s = self._host.loop.time() + _STOP_S
        while tmux.alive and await tmux.changes.until(until_s):
            pass
        recording = tmux.take_recording()
        tmux.close()
        self._sessions.pop(tmux.setup.name, None)
        state = TmuxState(session=tmux.setup.name, state="exited")
        return SessionAnswer(TmuxReply(session=state, recording=recording))

    async def _list(self) -> SessionAnswer:
        states = [await tmux.state() for tmux in tuple(self._sessions.values())]
        return SessionAnswer(TmuxReply(sessions=tuple(states)))

    # -- inside ------------------------------------------------------------------------------------

    async def _looking(self, holds: Callable[[], Awaitable[bool]], until_s: float) -> bool:
        """Check until the condition holds or the time is over."""
        backoff = Backoff(_LOOK_S, _LONGEST_LOOK_S)
        while not await holds():
            if self._host.loop.time() >= until_s:
                return False
            await asyncio.sleep(min(backoff.next_s(), max(0.0, until_s - self._host.loop.time())))
        return True

    async def _settle(self, tmux: Tmux) -> None:
        """Wait until nothing has come for a moment."""
        now = self._host.loop.time()
        latest_s = now + _LONGEST_SETTLE_S
        while (now := self._host.loop.time()) < latest_s:
            if not await tmux.changes.until(min(now + _SETTLE_S, latest_s)):
                return

    async def _shown(
        self, tmux: Tmux, *, lines: list[str] | None = None, idle: bool | None = None, **said: Any
    ) -> SessionAnswer:
        state = await tmux.state(idle=idle)
        text = trimmed(await tmux.screen() if lines is None else lines) if tmux.alive else ""
        fields: dict[str, Any] = {"stdout": text} if text else {}
        if state.exit_code is not None:
            fields["exit_code"] = state.exit_code
        waited_in_vain = said.get("matched") is False or idle is False
        if waited_in_vain and state.state == "running":
            fields["timed_out"] = True
        elif waited_in_vain:
            said["note"] = "the session ended before that"
        return SessionAnswer(TmuxReply(session=state, recording=tmux.take_recording(), **said), fields)

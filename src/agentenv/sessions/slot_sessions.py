"""All that lives between calls in one slot, and the calls on it."""

from __future__ import annotations

from typing import assert_never

from agentenv.sessions.answers import SessionAnswer
from agentenv.sessions.port import Host
from agentenv.sessions.process_calls import ProcessCalls
from agentenv.sessions.terminal_calls import TerminalCalls
from agentenv.sessions.tmux_calls import TmuxCalls
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import ProcessArguments, TerminalArguments, TmuxArguments

SessionArguments = TerminalArguments | ProcessArguments | TmuxArguments


class SlotSessions:
    """From a slot's hand-over to :meth:`close`. Calls run side by side, whatever others wait for."""

    def __init__(self, host: Host, cap_bytes: int) -> None:
        unread = Unread()
        self._processes = ProcessCalls(host, unread)
        self._terminals = TerminalCalls(host, cap_bytes, self._processes, unread)
        self._tmux = TmuxCalls(host, unread)

    async def call(self, arguments: SessionArguments, deadline_s: float) -> SessionAnswer:
        """One call, answered by ``deadline_s`` (the loop's clock). Raises ToolCallError, LeaseLostError."""
        match arguments:
            case TerminalArguments():
                return await self._terminals.call(arguments, deadline_s)
            case ProcessArguments():
                return await self._processes.call(arguments, deadline_s)
            case TmuxArguments():
                return await self._tmux.call(arguments, deadline_s)
            case _:
                assert_never(arguments)

    def close(self) -> None:
        """Let go of everything: the slot ends what runs in it. Repeatable."""
        self._terminals.close()
        self._tmux.close()
        self._processes.close()

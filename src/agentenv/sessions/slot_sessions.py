"""All sessions of one slot, and the calls on them."""

from __future__ import annotations

import asyncio
import logging
from typing import assert_never

from agentenv.deadlines import scaled
from agentenv.errors import UnknownSessionError
from agentenv.sessions.answers import SessionAnswer
from agentenv.sessions.host import Host
from agentenv.sessions.process_calls import ProcessCalls
from agentenv.sessions.terminal_calls import TerminalCalls
from agentenv.sessions.tmux_calls import TmuxCalls
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import ProcessArguments, TerminalArguments, TmuxArguments

SessionArguments = TerminalArguments | ProcessArguments | TmuxArguments

LATE_S = scaled(30.0)
"""A call without an answer this long after its deadline is ended: longer than any wait for programs of the slot,
slow or stopped."""

log = logging.getLogger(__name__)


class SlotSessions:
    """Sessions from a slot's hand-over to :meth:`close`. Calls run concurrently and do not wait for each other."""

    def __init__(self, host: Host, cap_bytes: int) -> None:
        unread = Unread()
        self._processes = ProcessCalls(host, unread)
        self._terminals = TerminalCalls(host, cap_bytes, self._processes, unread)
        self._tmux = TmuxCalls(host, unread)

    async def call(self, arguments: SessionArguments, deadline_s: float) -> SessionAnswer:
        """Run one call, answered by ``deadline_s`` (the loop's clock), or soon after when programs in the slot are
        slow. Raises ToolCallError (also without an answer :data:`LATE_S` after the deadline), LeaseLostError."""
        try:
            async with asyncio.timeout_at(deadline_s + LATE_S):
                return await self._answer(arguments, deadline_s)
        except TimeoutError as error:
            log.warning("a call had no answer %g s after its deadline: %s", LATE_S, type(arguments).__name__)
            raise UnknownSessionError(
                "the session does not respond",
                next_step="end whatever stops or slows down the other processes, then start the session again",
            ) from error

    async def _answer(self, arguments: SessionArguments, deadline_s: float) -> SessionAnswer:
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
        """Release everything: the slot ends what runs in it. Repeatable."""
        self._terminals.close()
        self._tmux.close()
        self._processes.close()

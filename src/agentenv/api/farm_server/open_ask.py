"""What a farm service keeps of an ask. It may have tens of thousands, so their size counts (benchmarks, F9)."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from agentenv.errors import AgentEnvError
from agentenv.wire import farm as wire
from agentenv.wire.leases import TokenTag


class Once:
    """Something that happens once. An :class:`asyncio.Event` takes 760 bytes; this has one while a task waits."""

    __slots__ = ("_event", "_happened")

    def __init__(self) -> None:
        self._happened = False
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        """It has happened. Repeatable."""
        self._happened = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._happened

    async def wait(self) -> None:
        """Until it has."""
        if not self._happened:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()


@dataclass(eq=False, slots=True)
class OpenAsk:
    """One ask, from its arrival until some time after its end. ``ticket`` is set while it waits."""

    ask: wire.Ask
    run: str
    client: str
    tokens: tuple[TokenTag, ...]
    """By which it was asked for, last."""
    since: float
    last_seen: float
    until_unix_s: float = math.inf
    """When the token expires."""
    ticket: int | None = None
    held: dict[int, wire.Grant] = field(default_factory=dict)
    """Grants of its leases that have not ended, by the ledger's number."""
    granted: bool = False
    error: AgentEnvError | None = None
    ended: float | None = None
    decided: Once = field(default_factory=Once)
    last_sent_place: wire.Place | None = None
    """Its place as last sent in the news."""

    @property
    def by(self) -> str:
        """The id of the token; empty: it was asked for without one."""
        return self.tokens[0].id if self.tokens else ""

    def is_disallowed(self, denied: frozenset[str], now_unix_s: float) -> bool:
        """Whether its token was revoked, or has expired."""
        return now_unix_s >= self.until_unix_s or not denied.isdisjoint(token.id for token in self.tokens)

    def refuse(self, error: AgentEnvError, now: float) -> None:
        """It gets nothing."""
        self.ticket, self.error, self.ended, self.last_sent_place = None, error, now, None
        self.decided.set()

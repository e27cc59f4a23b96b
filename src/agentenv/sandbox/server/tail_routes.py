"""``/v1/slots/{slot}/tail``: what the calls in one slot print (:mod:`agentenv.wire.tails`).

Reads the captures of running calls, and the log of those that ended (:class:`CallLog`), a few times a second while a
client is connected. Running calls are not affected.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from aiohttp import web

from agentenv.errors import StaleLeaseError
from agentenv.sandbox.server.bodies import number, streamed, write_lines
from agentenv.sandbox.server.call_log import LoggedCall, Printed, about
from agentenv.sandbox.server.calls import SlotCall
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.watch import Watchers
from agentenv.wire.base import MAX_COUNT
from agentenv.wire.tails import TAIL_BEAT_S, TailBeat, TailCall, TailEnd, TailLine, TailOutput, TailOver
from agentenv.wire.tools import BashArguments

_LOOK_S: Final = 0.2
_MAX_BYTES: Final = 32 * 1024
"""Of each stream of a running call in one look: 160 KiB/s."""
Stream = Literal["stdout", "stderr"]
_STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr")


class _Cursor:
    """How far one stream of one call was sent."""

    def __init__(self) -> None:
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, begin: int, data: bytes) -> tuple[str, int]:
        """The text of ``data``, which begins at that offset, as far as it is new; and how many bytes are missing."""
        skipped = max(0, begin - self.offset)
        data = data[max(0, self.offset - begin) :]
        if skipped:
            self._decoder.reset()
        self.offset = max(self.offset, begin) + len(data)
        return self._decoder.decode(data), skipped


@dataclass
class _SentCall:
    """A call that the reader has been sent."""

    number: int
    cursors: dict[Stream, _Cursor] = field(default_factory=lambda: {stream: _Cursor() for stream in _STREAMS})


class Tail:
    """What one reader has been sent of a slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._sent: dict[str, _SentCall] = {}
        self._numbers = 0
        self._log_position = slot.calls.log.added - sum(1 for _ in slot.calls.log.after(0))

    def lines(self, now: float) -> Iterator[TailLine]:
        """What is new."""
        for entry in self._slot.calls.log.after(self._log_position):
            yield from self._ended(entry, now)
        self._log_position = self._slot.calls.log.added
        running = self._slot.calls.running
        for call in running:
            yield from self._running(call, now)
        for call_id in self._sent.keys() - {call.call_id for call in running}:
            yield TailEnd(call=self._sent.pop(call_id).number, note="its end was not kept")

    def _ended(self, entry: LoggedCall, now: float) -> Iterator[TailLine]:
        sent = self._sent.pop(entry.call_id, None)
        if sent is None:
            sent = self._new()
            began_s = entry.ended_at_s - (entry.duration_s or 0.0)
            yield TailCall(call=sent.number, tool=entry.tool, about=entry.about, ago_s=max(0.0, now - began_s))
        for stream, printed in zip(_STREAMS, (entry.stdout, entry.stderr), strict=True):
            yield from _output(sent, stream, printed)
        yield TailEnd(call=sent.number, exit_code=entry.exit_code, duration_s=entry.duration_s, note=entry.note)

    def _running(self, call: SlotCall, now: float) -> Iterator[TailLine]:
        sent = self._sent.get(call.call_id)
        if sent is None:
            sent = self._sent[call.call_id] = self._new()
            ago_s = max(0.0, now - call.started_at)
            yield TailCall(call=sent.number, tool=call.tool, about=about(call.arguments), ago_s=ago_s)
        process = call.process
        if process is None or not isinstance(call.arguments, BashArguments):
            return
        for stream, reader in zip(_STREAMS, (process.stdout, process.stderr), strict=True):
            if reader is not None:
                total = reader.kept.total_bytes
                begin, data = reader.kept.read(max(sent.cursors[stream].offset, total - _MAX_BYTES), _MAX_BYTES)
                yield from _output(sent, stream, Printed(begin + len(data), data))

    def _new(self) -> _SentCall:
        self._numbers += 1
        return _SentCall(self._numbers)


def _output(sent: _SentCall, stream: Stream, printed: Printed) -> Iterator[TailOutput]:
    text, skipped = sent.cursors[stream].take(printed.total_bytes - len(printed.last), printed.last)
    if text or skipped:
        yield TailOutput(call=sent.number, stream=stream, text=text, skipped_bytes=skipped)


class TailRoute:
    """The route, over one container."""

    def __init__(self, container: Container, watchers: Watchers) -> None:
        self._container = container
        self._watchers = watchers
        self._poller = container.context.poller

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/slots/{slot}/tail", self._get, allow_head=False)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        slot = self._container.slot(number("slot", request.match_info["slot"], MAX_COUNT))
        epoch = number("epoch", request.query.get("epoch", ""), MAX_COUNT)
        if slot.lease is None or slot.epoch != epoch:
            raise StaleLeaseError(f"slot {slot.index} has no lease of epoch {epoch}")
        async with streamed(request, "application/x-ndjson") as response:
            await self._follow(slot, epoch, response)
        return response

    async def _follow(self, slot: Slot, epoch: int, response: web.StreamResponse) -> None:
        """Write lines until the lease ends. Raises TimeoutError when the reader does not read, ConnectionError when
        it has disconnected."""
        loop = self._poller.loop
        tail, beat_at_s = Tail(slot), 0.0
        while slot.lease is not None and slot.epoch == epoch and not self._watchers.ended:
            await self._poller.going.wait()
            lines = list(tail.lines(loop.time()))
            if lines or loop.time() >= beat_at_s:
                await write_lines(response, lines or [TailBeat()])
                beat_at_s = loop.time() + TAIL_BEAT_S
            await asyncio.sleep(_LOOK_S)
        await write_lines(response, [TailOver()])

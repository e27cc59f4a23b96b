"""``/v1/slots/{slot}/tail``: what the calls in one slot print (:mod:`agentenv.wire.tails`).

It looks at the captures of running calls, and at the slot's memory of those that ended (:class:`CallLog`), a few
times a second while somebody reads. Calls know nothing of it.
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
    """How far one stream of one call was told."""

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
class _Told:
    """A call that was told of."""

    number: int
    cursors: dict[Stream, _Cursor] = field(default_factory=lambda: {stream: _Cursor() for stream in _STREAMS})


class Tail:
    """What one reader has been told of a slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._told: dict[str, _Told] = {}
        self._numbers = 0
        self._past = slot.calls.log.added - sum(1 for _ in slot.calls.log.after(0))

    def lines(self, now: float) -> Iterator[TailLine]:
        """What is new."""
        for past in self._slot.calls.log.after(self._past):
            yield from self._ended(past, now)
        self._past = self._slot.calls.log.added
        running = self._slot.calls.running
        for call in running:
            yield from self._running(call, now)
        for call_id in self._told.keys() - {call.call_id for call in running}:
            yield TailEnd(call=self._told.pop(call_id).number, note="its end was not kept")

    def _ended(self, past: LoggedCall, now: float) -> Iterator[TailLine]:
        told = self._told.pop(past.call_id, None)
        if told is None:
            told = self._new()
            began_s = past.ended_at_s - (past.duration_s or 0.0)
            yield TailCall(call=told.number, tool=past.tool, about=past.about, ago_s=max(0.0, now - began_s))
        for stream, printed in zip(_STREAMS, (past.stdout, past.stderr), strict=True):
            yield from _output(told, stream, printed)
        yield TailEnd(call=told.number, exit_code=past.exit_code, duration_s=past.duration_s, note=past.note)

    def _running(self, call: SlotCall, now: float) -> Iterator[TailLine]:
        told = self._told.get(call.call_id)
        if told is None:
            told = self._told[call.call_id] = self._new()
            ago_s = max(0.0, now - call.started_at)
            yield TailCall(call=told.number, tool=call.tool, about=about(call.arguments), ago_s=ago_s)
        process = call.process
        if process is None or not isinstance(call.arguments, BashArguments):
            return
        for stream, reader in zip(_STREAMS, (process.stdout, process.stderr), strict=True):
            if reader is not None:
                total = reader.kept.total_bytes
                begin, data = reader.kept.read(max(told.cursors[stream].offset, total - _MAX_BYTES), _MAX_BYTES)
                yield from _output(told, stream, Printed(begin + len(data), data))

    def _new(self) -> _Told:
        self._numbers += 1
        return _Told(self._numbers)


def _output(told: _Told, stream: Stream, printed: Printed) -> Iterator[TailOutput]:
    text, skipped = told.cursors[stream].take(printed.total_bytes - len(printed.last), printed.last)
    if text or skipped:
        yield TailOutput(call=told.number, stream=stream, text=text, skipped_bytes=skipped)


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
        it has gone."""
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

"""Calls of a slot and their result cache, for tests without a slot."""

from __future__ import annotations

from agentenv.sandbox.server.calls import ResultCache, SlotCall
from agentenv.sandbox.server.uploads import UploadBuffer
from agentenv.wire.base import WireModel
from agentenv.wire.calls import Call
from agentenv.wire.leases import LeaseKey
from agentenv.wire.sessions import TerminalArguments


class NoSink:
    closed = False

    def deliver(self, call: SlotCall) -> None:
        pass

    def refuse(self, call_id: str, message: bytes) -> None:
        pass


def result_cache(
    index: dict[str, SlotCall], max_count: int = 10, max_unsent_bytes: int = 100, max_sent_bytes: int = 100
) -> ResultCache:
    buffer = UploadBuffer(lambda _: None, lambda _: None)
    return ResultCache(
        index, max_count=max_count, max_unsent_bytes=max_unsent_bytes, max_sent_bytes=max_sent_bytes, uploads=buffer
    )


def slot_call(call_id: str, cache: ResultCache, arguments: WireModel | None = None) -> SlotCall:
    key = LeaseKey(slot=0, epoch=0, secret="s" * 16)
    call = Call(id=call_id, lease=key, tool="terminal", arguments={}, timeout_s=5.0, boot="b" * 16)
    return SlotCall(call, arguments or TerminalArguments(command=f"echo {call_id}"), cache, NoSink(), 0.0)

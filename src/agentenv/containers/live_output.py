"""The output of a running command, handed on as it comes (:class:`agentenv.wire.calls.LiveOutput`).

A view beside the call, never a part of it: the result is complete without it. What the view has not shown when the
result arrives is taken from the result, so that each byte the result has is shown once and in order.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from typing import Final, Literal

from pydantic import ValidationError

from agentenv.containers.attachments import decoded_base64
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import headers_for, open_session
from agentenv.containers.stream import TRANSIENT
from agentenv.sessions.head_tail import seam
from agentenv.wire.calls import LIVE_WAIT_S, CallResult, LiveOutput
from agentenv.wire.transfers import LEASE_HEADER

OnOutput = Callable[[Literal["stdout", "stderr"], str], None]
"""Called with the name of the stream and the next piece of its text, never an empty one."""

_PAUSE_S: Final = 0.2
_LATE_S: Final = 5.0


class Shown:
    """What was shown of one stream. Pure, but for the callback."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0
        self._gap = False
        self.bytes = 0
        """Offset in the stream up to which it was shown."""

    def add(self, data: bytes, begin: int) -> None:
        """Show ``data``, which is at offset ``begin`` of the stream."""
        if begin > self.bytes:
            self._gap = True
            self._put(self._decoder.decode(b"", final=True) + seam(begin - self.bytes))
        self.bytes = begin + len(data)
        self._put(self._decoder.decode(data))

    def finish(self, text: str, dropped_bytes: int) -> None:
        """Show the rest of the stream, of which the result has ``text``, without ``dropped_bytes`` in its middle."""
        head, mark, tail = text.partition(seam(dropped_bytes)) if dropped_bytes else (text, "", "")
        head_bytes, tail_bytes = len(head.encode()), tail.encode()
        if not mark or (not self._gap and self.bytes <= head_bytes):
            self._put(text[self._characters :])
            return
        left = max(0, head_bytes + dropped_bytes + len(tail_bytes) - self.bytes)
        if left > len(tail_bytes):
            self._put(seam(left - len(tail_bytes)))
        self._put(tail_bytes[max(0, len(tail_bytes) - left) :].decode("utf-8", "replace"))

    def _put(self, text: str) -> None:
        self._characters += len(text)
        if text:
            self._show(text)


class LiveView:
    """The view of one call, whose ``on_output`` it calls."""

    def __init__(self, handle: ContainerHandle, lease: bytes, call_id: str, on_output: OnOutput) -> None:
        self._handle = handle
        self._lease = lease
        self._url = f"{handle.base_url}/v1/calls/{call_id}/output"
        self._stdout = Shown(lambda text: on_output("stdout", text))
        self._stderr = Shown(lambda text: on_output("stderr", text))

    async def follow(self) -> None:
        """Show output as it comes, until cancelled or the call has ended. Raises what the callback raises."""
        async with open_session() as http:
            while True:
                output = None
                try:
                    async with asyncio.timeout(LIVE_WAIT_S + _LATE_S):
                        async with http.get(
                            self._url,
                            headers=headers_for(self._handle, **{LEASE_HEADER: self._lease.decode()}),
                            params={"stdout": self._stdout.bytes, "stderr": self._stderr.bytes},
                        ) as response:
                            if response.status == 200:
                                output = LiveOutput.model_validate_json(await response.read())
                except (*TRANSIENT, ValidationError):
                    pass  # the call itself tells of a container that is gone; this tries again
                if output is None:  # also: the call has not arrived there yet, or is forgotten there
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self._stdout.add(output.stdout, output.stdout_from)
                self._stderr.add(output.stderr, output.stderr_from)
                if output.ended:
                    return

    async def finish(self, result: CallResult) -> None:
        """Show what the result has and was not shown yet."""
        self._stdout.finish(await stdout_of(result), result.stdout_dropped_bytes)
        self._stderr.finish(result.stderr, result.stderr_dropped_bytes)


async def stdout_of(result: CallResult) -> str:
    """What a result has of stdout, as text. That of a call with ``binary`` has bytes: all, or the first and the last
    half of them, as :class:`agentenv.sessions.head_tail.HeadTail` keeps them."""
    data = result.content.get("data") if isinstance(result.content, dict) else None
    if not isinstance(data, str):
        return result.stdout
    kept = await decoded_base64(data)
    if not result.stdout_dropped_bytes:
        return kept.decode("utf-8", "replace")
    half = len(kept) // 2
    head, tail = (part.decode("utf-8", "replace") for part in (kept[:half], kept[half:]))
    return head + seam(result.stdout_dropped_bytes) + tail

"""One connection of a slot to the proxy: checks its request, and forwards what the policy allows."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError, ProtocolError
from agentenv.sandbox.proxy import heads
from agentenv.sandbox.proxy.chunks import Chunks
from agentenv.sandbox.proxy.heads import Body, Framing, Request
from agentenv.sandbox.proxy.names import Names
from agentenv.sandbox.proxy.packets import Counts
from agentenv.sandbox.proxy.streams import CHUNK_BYTES, Stream
from agentenv.wire.addresses import Address, Network
from agentenv.wire.network import NetworkPolicy, judge_address, judge_host

_MOST_RESPONSES: Final = 32
"""To one request, interim ones (1xx) among them."""
_ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(frozen=True)
class Deadlines:
    """``head_s``: until a request is complete. ``connect_s``: for each address of its host. ``idle_s``: how long a
    connection may be silent in both directions."""

    head_s: float = 30.0
    connect_s: float = 15.0
    idle_s: float = 600.0


@dataclass
class Gate:
    """What decides about the connections of one slot, and counts them. ``policy`` may be replaced at any time."""

    policy: NetworkPolicy
    names: Names
    closed: Callable[[], list[Network]]
    counts: Counts
    deadlines: Deadlines = Deadlines()


class _UpstreamError(Exception):
    """The host could not be reached, or does not speak HTTP; the message is for the model."""


class Connection:
    """One request: the one that is judged is the only one that is sent. ``moved_s``: when a byte last passed."""

    def __init__(self, client: Stream, gate: Gate) -> None:
        self._client = client
        self._gate = gate
        self._request: Request | None = None
        self._address: Address | None = None
        self._answered = False
        self.moved_s = asyncio.get_running_loop().time()

    def allowed(self) -> bool:
        """Whether the slot's policy, as it is now, allows what this connection requested, as far as that is known."""
        if self._request is None:
            return True
        try:
            judge_host(self._gate.policy, self._request.host, self._request.port)
            if self._address is not None:
                judge_address(self._gate.policy, self._address, self._request.port, self._gate.closed())
        except (PolicyRefusalError, OSError):
            return False
        return True

    async def serve(self) -> None:
        """Answer the request, whatever it is. Raises nothing but CancelledError; the client is closed at the end."""
        try:
            await self._serve()
        except InvalidArgumentsError as error:
            self._gate.counts.malformed += 1
            await self._refuse(400, str(error))
        except PolicyRefusalError as error:
            self._gate.counts.refused += 1
            await self._refuse(403, error.message)
        except _UpstreamError as error:
            self._gate.counts.failed += not self._answered
            await self._refuse(502, str(error))
        except OSError:
            pass  # either side has closed: the other sees the connection end
        finally:
            self._client.close()

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(self._gate.deadlines.head_s):
                head = await self._client.receive_head()
        except TimeoutError:
            await self._refuse(408, "The request's header did not arrive in time.")
            return
        if not head:
            return
        self._request = heads.parse_request(head)
        upstream = await self._connect(self._request)
        try:
            self.moved_s = asyncio.get_running_loop().time()
            if self._request.tunnel:
                await self._tunnel(upstream)
            else:
                await self._exchange(self._request, upstream)
        finally:
            upstream.close()
        await self._finish()

    async def _connect(self, request: Request) -> Stream:
        """Connect to the first address that is allowed and answers."""
        judge_host(self._gate.policy, request.host, request.port)
        refusal: PolicyRefusalError | None = None
        failure: _UpstreamError | None = None
        for address in await self._addresses(request):
            try:
                judge_address(self._gate.policy, address, request.port, self._gate.closed())
            except PolicyRefusalError as error:
                refusal = error
                continue
            self._address = address
            try:
                async with asyncio.timeout(self._gate.deadlines.connect_s):
                    return await Stream.connect(address, request.port)
            except OSError as error:  # TimeoutError is one
                reason = os.strerror(error.errno) if error.errno else "it did not answer in time"
                failure = _UpstreamError(f"No connection to {request.host} port {request.port}: {reason}.")
        if failure is None and refusal is not None:
            raise PolicyRefusalError(f"{request.host} is refused: {refusal.message}")
        raise failure or _UpstreamError(f"{request.host} has no address.")

    async def _addresses(self, request: Request) -> list[Address]:
        if not isinstance(request.host, str):
            return [request.host]
        try:
            return await self._gate.names.addresses(request.host)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _UpstreamError(f"The host {request.host} could not be resolved: {reason}.") from error

    async def _tunnel(self, upstream: Stream) -> None:
        self._answered = True
        await self._client.send(_ESTABLISHED)
        back, forth = self._pass_back(upstream, Framing.UNTIL_CLOSED), self._pass_on(upstream, Framing.UNTIL_CLOSED)
        await _side_by_side(back, forth, both=True)

    async def _exchange(self, request: Request, upstream: Stream) -> None:
        """Send the request and its body, and nothing that follows it; return the response."""
        await self._to_upstream(upstream, request.head)
        await _side_by_side(self._return_response(request, upstream), self._send_body(request, upstream), both=False)

    async def _return_response(self, request: Request, upstream: Stream) -> None:
        for _ in range(_MOST_RESPONSES):
            try:
                response = heads.parse_response(await upstream.receive_head(), request.method)
            except (OSError, InvalidArgumentsError, ProtocolError) as error:
                reason = "it closed the connection" if isinstance(error, OSError) else error.message
                raise _UpstreamError(f"No response from {request.host}: {reason}.") from error
            self._answered = True
            await self._client.send(response.head)
            if response.status >= 200:
                await self._pass_back(upstream, response.body)
                return
        raise _UpstreamError(f"No response from {request.host}: it sent {_MOST_RESPONSES} interim responses.")

    async def _send_body(self, request: Request, upstream: Stream) -> None:
        with contextlib.suppress(_UpstreamError):  # it may have answered before it had all
            await self._pass_on(upstream, request.body)

    async def _pass_on(self, upstream: Stream, body: Body) -> None:
        await _pass(self._client, partial(self._to_upstream, upstream), body)
        if body is Framing.UNTIL_CLOSED:
            upstream.end()

    async def _pass_back(self, upstream: Stream, body: Body) -> None:
        await _pass(upstream, self._to_client, body)
        self._client.end()

    async def _to_upstream(self, upstream: Stream, data: bytes) -> None:
        self.moved_s = asyncio.get_running_loop().time()
        try:
            await upstream.send(data)
        except OSError as error:
            raise _UpstreamError("The host closed the connection.") from error
        self._gate.counts.sent_bytes += len(data)

    async def _to_client(self, data: bytes) -> None:
        self.moved_s = asyncio.get_running_loop().time()
        self._gate.counts.received_bytes += len(data)
        await self._client.send(data)

    async def _refuse(self, status: int, message: str) -> None:
        if self._answered:
            return  # the client sees its response end early
        try:
            await self._client.send(heads.answer(status, message))
        except OSError:
            return
        await self._finish()

    async def _finish(self) -> None:
        self._request = None  # nothing is open that a change of the policy could forbid
        await self._client.linger()


async def _pass(source: Stream, send: Callable[[bytes], Awaitable[None]], body: Body) -> None:
    """Pass on a body and nothing after it. Raises InvalidArgumentsError when it ends early or is malformed."""
    if body is Framing.CHUNKED:
        await _pass_chunks(source, send)
    elif body is Framing.UNTIL_CLOSED:
        while received := await source.receive():
            await send(received)
    else:
        await _pass_exactly(source, send, body)


async def _pass_exactly(source: Stream, send: Callable[[bytes], Awaitable[None]], size: int) -> None:
    while size > 0:
        received = await source.receive(min(size, CHUNK_BYTES))
        if not received:
            raise InvalidArgumentsError("The body is shorter than its header says.")
        size -= len(received)
        await send(received)


async def _pass_chunks(source: Stream, send: Callable[[bytes], Awaitable[None]]) -> None:
    """Chunks are rewritten, as large as they arrive; extensions of chunks and trailer fields are dropped."""
    chunks = Chunks()
    while data := await source.receive_decoded(chunks):
        await send(b"%x\r\n%b\r\n" % (len(data), data))
    await send(b"0\r\n\r\n")


async def _side_by_side(leading: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None], *, both: bool) -> None:
    """Run both until ``leading`` has ended (``both``: until both have), or one has failed: its exception is raised.
    Neither runs on afterwards."""
    first, second = asyncio.create_task(leading), asyncio.create_task(other)
    pending = {first, second}
    try:
        while first in pending or (both and pending):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

"""The fake's wire side: every fake container behind one in-process HTTP server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from aiohttp import ClientConnectionResetError, WSMsgType, web
from pydantic import ValidationError

from agentenv._version import __version__
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import (
    AgentEnvError,
    InvalidArgumentsError,
    PolicyRefusalError,
    SlotDestroyedError,
    StaleLeaseError,
)
from agentenv.slots.backends import fake_transfer
from agentenv.slots.backends.fake_slot import FakeSlot, refusal
from agentenv.wire.base import MAX_MESSAGE_BYTES, WireModel
from agentenv.wire.calls import (
    Accepted,
    Attachment,
    Batch,
    Call,
    CallResult,
    Cancel,
    Failure,
    Forget,
    Result,
    client_message,
)
from agentenv.wire.leases import (
    EndRequest,
    LeaseKey,
    LeaseLoss,
    LeaseRequest,
    ReleaseReply,
    RenewReply,
    RenewRequest,
    SealRequest,
)
from agentenv.wire.server import ErrorReply, Health, ServerInfo, SlotsReply
from agentenv.wire.states import SlotState

Model = TypeVar("Model", bound=WireModel)
Send = Callable[[WireModel], Awaitable[None]]

_SWEEP_S = 0.1
WEAKER = ("the fake backend isolates nothing: commands run as the caller, in a temporary directory",)


class FakeContainer:
    """One fake container: its slots, and the switches that break it."""

    def __init__(self, handle: ContainerHandle, directory: Path, env: Mapping[str, str], output_bytes: int) -> None:
        self.handle = handle
        self.boot = secrets.token_hex(8)
        self.slots = [FakeSlot(index, directory / str(index), env, output_bytes) for index in range(handle.slots)]
        self.streams: set[asyncio.Transport] = set()
        self.stalled_until = 0.0
        self.heard_at = asyncio.get_running_loop().time()
        self.quarantine_next = False
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ended(self) -> str:
        """Wait for its death; why."""
        return await asyncio.shield(self.end)

    async def stop(self, reason: str) -> None:
        """End it: connections cut, slots destroyed."""
        if not self.end.done():
            self.end.set_result(reason)
        self.cut()
        for slot in self.slots:
            slot.destroy()

    def cut(self) -> None:
        """Close every stream, as a broken network would."""
        for transport in list(self.streams):
            transport.abort()

    @contextlib.contextmanager
    def cuttable(self, request: web.Request) -> Iterator[None]:
        """A transfer, which :meth:`cut` cuts as well."""
        assert isinstance(request.transport, asyncio.Transport)
        self.streams.add(request.transport)
        try:
            yield
        finally:
            self.streams.discard(request.transport)

    def restart_server(self) -> None:
        """The server crashed and is back: another boot, leases kept, replies and running calls lost."""
        self.boot = secrets.token_hex(8)
        self.cut()
        for slot in self.slots:
            slot.forget_replies()

    async def gate(self) -> None:
        """Wait while stalled."""
        loop = asyncio.get_running_loop()
        while (left_s := self.stalled_until - loop.time()) > 0:  # noqa: ASYNC110 - the end may be moved meanwhile
            await asyncio.sleep(left_s)

    async def reset(self, slot: FakeSlot) -> None:
        """Reset a slot; quarantined when the switch says so."""
        quarantine, self.quarantine_next = self.quarantine_next, False
        await slot.reset(quarantine)

    def slot(self, index: int) -> FakeSlot:
        """Raises InvalidArgumentsError when there is no such slot."""
        if index >= len(self.slots):
            raise InvalidArgumentsError(f"slot {index}: {self.handle.id} has slots 0 to {len(self.slots) - 1}")
        return self.slots[index]

    def submit(self, call: Call) -> asyncio.Task[CallResult] | CallResult:
        """One call of a batch."""
        try:
            return self.slot(call.lease.slot).submit(call, self.boot)
        except AgentEnvError as error:
            return refusal(call.id, error)


class FakeServer:
    """``containers`` by id answer below ``/c/<id>``; an id that is not there is a cut connection."""

    def __init__(self) -> None:
        self.containers: dict[str, FakeContainer] = {}
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=MAX_MESSAGE_BYTES, middlewares=[self._errors])
        prefix = "/c/{container}"
        app.add_routes(
            [
                web.get(prefix + "/health", self._health),
                web.get(prefix + "/v1/info", self._info),
                web.get(prefix + "/v1/slots", self._slots),
                web.post(prefix + "/v1/leases", self._lease),
                web.post(prefix + "/v1/leases/renew", self._renew),
                web.post(prefix + "/v1/leases/release", self._release),
                web.post(prefix + "/v1/leases/end", self._end),
                web.post(prefix + "/v1/leases/seal", self._seal),
                web.post(prefix + "/v1/batch", self._batch),
                web.get(prefix + "/v1/stream", self._stream),
                web.put(prefix + "/v1/attachments/{call}/{field}", self._put_attachment),
                web.get(prefix + "/v1/attachments/{call}/{field}", self._get_attachment),
                web.put(prefix + "/v1/slots/{slot}/transfer", self._put_transfer),
                web.get(prefix + "/v1/slots/{slot}/transfer", self._get_transfer),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._sweeper = asyncio.create_task(self._sweep(), name="fake lease expiry")

    async def aclose(self) -> None:
        """Stop listening."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _sweep(self) -> None:
        """Reset the slots whose lease was not renewed in time."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for container in list(self.containers.values()):
                for slot in container.slots:
                    if slot.lease is not None and slot.lease.expires_at <= loop.time():
                        await container.reset(slot)

    # -- requests -----------------------------------------------------------------------------

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        container = self.containers.get(request.match_info.get("container", ""))
        if container is None:
            return _hang_up(request)
        await container.gate()
        if self.containers.get(container.handle.id) is not container:
            return _hang_up(request)
        if not request.path.endswith("/health") and not _authorised(request, container):
            return _error(401, "refused", "the bearer token is missing or wrong")
        try:
            return await handler(request)
        except ValidationError as error:
            return _error(400, "protocol", f"{error.error_count()} validation errors: {error.errors()[0]['msg']}")
        except AgentEnvError as error:
            gone = isinstance(error, (StaleLeaseError, SlotDestroyedError))
            return _error(409 if gone else 400, error.code, str(error))

    def _at(self, request: web.Request) -> FakeContainer:
        return self.containers[request.match_info["container"]]

    async def _health(self, _: web.Request) -> web.Response:
        return _reply(Health(status="ok", version=__version__))

    async def _info(self, request: web.Request) -> web.Response:
        container = self._at(request)
        info = ServerInfo(
            container=container.handle.id,
            boot=container.boot,
            version=__version__,
            slots=len(container.slots),
            isolation="none",
            weaker=WEAKER,
        )
        return _reply(info)

    async def _slots(self, request: web.Request) -> web.Response:
        container = self._at(request)
        now = asyncio.get_running_loop().time()
        reports = tuple(slot.report(now) for slot in container.slots)
        return _reply(SlotsReply(boot=container.boot, slots=reports, heard_s=now - container.heard_at))

    async def _lease(self, request: web.Request) -> web.Response:
        wanted = await _body(request, LeaseRequest)
        slot = self._at(request).slot(wanted.slot)
        return _reply(slot.grant(wanted, asyncio.get_running_loop().time()))

    async def _renew(self, request: web.Request) -> web.Response:
        container, wanted = self._at(request), await _body(request, RenewRequest)
        now = container.heard_at = asyncio.get_running_loop().time()
        renewed = {key.slot for key in wanted.keys if container.slot(key.slot).renew(key, wanted.ttl_s, now)}
        stale = tuple(key.slot for key in wanted.keys if key.slot not in renewed)
        lost = tuple(
            LeaseLoss(slot=key.slot, error=why.code, message=str(why))
            for key in wanted.keys
            if (why := container.slot(key.slot).why_lost(key)) is not None
        )
        return _reply(RenewReply(renewed=tuple(sorted(renewed)), stale=stale, lost=lost))

    async def _release(self, request: web.Request) -> web.Response:
        container, key = self._at(request), await _body(request, LeaseKey)
        slot = container.slot(key.slot)
        if slot.held_by(key) is not None:
            await container.reset(slot)
        elif slot.lease is not None and slot.epoch == key.epoch:
            raise StaleLeaseError(f"slot {key.slot} is leased under another key")
        return _reply(ReleaseReply(slot=key.slot, state=slot.state))

    async def _end(self, request: web.Request) -> web.Response:
        container, wanted = self._at(request), await _body(request, EndRequest)
        slot = container.slot(wanted.slot)
        if slot.epoch == wanted.epoch:
            await container.reset(slot)
        return _reply(ReleaseReply(slot=slot.index, state=slot.state))

    async def _seal(self, request: web.Request) -> web.Response:
        wanted = await _body(request, SealRequest)
        key = wanted.key
        slot = self._at(request).slot(key.slot)
        if slot.held_by(key) is None:
            raise slot.why_lost(key) or StaleLeaseError(f"slot {key.slot} is not under this lease any more")
        await slot.seal(wanted.request_id)
        return _reply(ReleaseReply(slot=key.slot, state=SlotState.leased))

    # -- calls --------------------------------------------------------------------------------

    async def _put_attachment(self, request: web.Request) -> web.StreamResponse:
        key, name = fake_transfer.lease_key(request), request.match_info
        with self._at(request).cuttable(request):
            content = b"".join([piece async for piece in request.content.iter_any()])
        at = int(request.query.get("from", "0"))
        size_bytes = self._at(request).slot(key.slot).receive(key, name["call"], name["field"], content, at)
        return _reply(Attachment(field=name["field"], size_bytes=size_bytes))

    async def _get_attachment(self, request: web.Request) -> web.StreamResponse:
        key, name = fake_transfer.lease_key(request), request.match_info
        content = self._at(request).slot(key.slot).fetched(key, name["call"], name["field"])
        with self._at(request).cuttable(request):
            response = web.Response(body=content[int(request.query.get("from", "0")) :])
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _put_transfer(self, request: web.Request) -> web.StreamResponse:
        slot = self._at(request).slot(fake_transfer.lease_key(request).slot)
        with self._at(request).cuttable(request):
            return await fake_transfer.put(request, slot)

    async def _get_transfer(self, request: web.Request) -> web.StreamResponse:
        slot = self._at(request).slot(fake_transfer.lease_key(request).slot)
        with self._at(request).cuttable(request):
            return await fake_transfer.get(request, slot)

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        container, batch = self._at(request), await _body(request, Batch)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)

        async def send(message: WireModel) -> None:
            await container.gate()
            await response.write(message.model_dump_json().encode() + b"\n")

        async with _streaming(container, request, send) as run:
            await run(batch)
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        container = self._at(request)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES)
        await socket.prepare(request)

        async def send(message: WireModel) -> None:
            await container.gate()
            await socket.send_str(message.model_dump_json())

        async with _streaming(container, request, send) as run:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await container.gate()
                    await self._receive(container, message.data, run, send)
        return socket

    async def _receive(
        self, container: FakeContainer, text: str, run: Callable[[Batch], Awaitable[None]], send: Send
    ) -> None:
        try:
            message = client_message.validate_json(text)
        except ValidationError as error:
            await send(Failure(error="protocol", message=str(error.errors()[0]["msg"])))
            return
        match message:
            case Batch():
                await run(message)
            case Cancel(calls=calls):
                for call in calls:
                    container.slot(call.lease.slot).cancel(call)
            case Forget(calls=calls):
                for call in calls:
                    container.slot(call.lease.slot).forget(call)


@contextlib.asynccontextmanager
async def _streaming(
    container: FakeContainer, request: web.Request, send: Send
) -> AsyncIterator[Callable[[Batch], Awaitable[None]]]:
    """Gives ``run(batch)``, which accepts it and sends each result as it is ready.

    Left in good order it waits for the results under way when the request was a single batch; a stream
    that ends takes its senders along, never its calls.
    """
    transport, senders = request.transport, set[asyncio.Task[None]]()
    if isinstance(transport, asyncio.Transport):
        container.streams.add(transport)

    async def deliver(answer: asyncio.Task[CallResult] | CallResult, call_id: str) -> None:
        with contextlib.suppress(ClientConnectionResetError):
            await send(Result(result=await _answered(answer, call_id)))

    async def run(batch: Batch) -> None:
        answers = [(container.submit(call), call.id) for call in batch.calls]
        await send(Accepted(batch=batch.batch))
        for answer, call_id in answers:
            sender = asyncio.create_task(deliver(answer, call_id))
            senders.add(sender)
            sender.add_done_callback(senders.discard)

    try:
        with contextlib.suppress(ClientConnectionResetError):
            yield run
            if request.method == "POST":
                await asyncio.gather(*senders)
    finally:
        for sender in set(senders):
            sender.cancel()
        if isinstance(transport, asyncio.Transport):
            container.streams.discard(transport)


async def _answered(answer: asyncio.Task[CallResult] | CallResult, call_id: str) -> CallResult:
    if isinstance(answer, CallResult):
        return answer
    await asyncio.wait({answer})
    if answer.cancelled():  # ended before it began
        return refusal(call_id, StaleLeaseError("the lease ended before the call ran"))
    return answer.result()


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _authorised(request: web.Request, container: FakeContainer) -> bool:
    given = request.headers.get("Authorization", "").encode()
    return hmac.compare_digest(given, f"Bearer {container.handle.token}".encode())


def _reply(model: WireModel) -> web.Response:
    return web.Response(text=model.model_dump_json(), content_type="application/json")


def _error(status: int, code: str, message: str) -> web.Response:
    reply = ErrorReply(error=code, message=message)
    return web.Response(status=status, text=reply.model_dump_json(), content_type="application/json")


async def _body(request: web.Request, model: type[Model]) -> Model:
    try:
        return model.model_validate_json(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise PolicyRefusalError(f"the body is above {MAX_MESSAGE_BYTES} bytes") from error

"""HTTP interface of the sandbox server: routes, token, error bodies. No decisions about slots."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from aiohttp import WSMsgType, web
from pydantic import TypeAdapter, ValidationError

from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, InfraError, ProtocolError, SandboxUnavailableError
from agentenv.sandbox.loop_watch import LoopWatch, Stalls
from agentenv.sandbox.server import access, metrics
from agentenv.sandbox.server.attachment_routes import AttachmentRoutes
from agentenv.sandbox.server.bodies import lease_key, message_body, number
from agentenv.sandbox.server.calls import SlotCall
from agentenv.sandbox.server.connect_route import ConnectRoute
from agentenv.sandbox.server.connections import BatchSink, StreamSink
from agentenv.sandbox.server.container import Container, Requester, requester_of
from agentenv.sandbox.server.image_route import ImageRoute
from agentenv.sandbox.server.layer_routes import LayerRoutes
from agentenv.sandbox.server.poller import Poller
from agentenv.sandbox.server.program_route import ProgramRoute
from agentenv.sandbox.server.slot_metrics_route import SlotMetricsRoute
from agentenv.sandbox.server.tail_routes import TailRoute
from agentenv.sandbox.server.transfer_routes import TransferRoutes
from agentenv.sandbox.server.watch import Watchers, WatchRoute
from agentenv.wire.base import MAX_COUNT, MAX_MESSAGE_BYTES, WireModel
from agentenv.wire.calls import LIVE_WAIT_S, Accepted, Batch, Cancel, Failure, LiveOutput, client_message
from agentenv.wire.leases import (
    ActionRequest,
    EndRequest,
    LeaseKey,
    LeaseRequest,
    RenewRequest,
)
from agentenv.wire.server import ErrorReply, Health, ServerInfo
from agentenv.wire.watch import GENERATION_HEADER, GUEST_HEADER

_HEARTBEAT_S = scaled(30.0)
_MAX_SHOWN = 500
_SLOW_MESSAGE_BYTES = 64 * 1024
"""A larger message takes the loop for a millisecond or more, up to :data:`MAX_MESSAGE_BYTES` for some ten: a
client that sends one after the other has no more than half of the loop."""
_MAX_OUTPUT_BYTES = 128 * 1024
"""Of each stream of a running command in one reply."""
_OUTPUT_LOOK_S = 0.05
Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STREAMS: web.AppKey[set[web.WebSocketResponse]] = web.AppKey("streams")

_batch: TypeAdapter[Batch] = TypeAdapter(Batch)
_key: TypeAdapter[LeaseKey] = TypeAdapter(LeaseKey)
_act: TypeAdapter[ActionRequest] = TypeAdapter(ActionRequest)
_end: TypeAdapter[EndRequest] = TypeAdapter(EndRequest)
_lease: TypeAdapter[LeaseRequest] = TypeAdapter(LeaseRequest)
_renew: TypeAdapter[RenewRequest] = TypeAdapter(RenewRequest)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SandboxApp:
    """The application's state."""

    container: Container
    poller: Poller
    info: ServerInfo
    token: str
    watch: LoopWatch
    watchers: Watchers

    def application(self) -> web.Application:
        """The application with its routes; :data:`access.ROUTES` has who may use each."""
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_MESSAGE_BYTES)
        application[STREAMS] = set()
        router = application.router
        router.add_get("/health", self._health)
        router.add_get("/metrics", self._metrics)
        router.add_get("/v1/info", self._get_info)
        router.add_get("/v1/slots", self._slots)
        router.add_get("/v1/paused", self._paused)
        router.add_delete("/v1/paused/{checkpoint}", self._drop_paused)
        router.add_get("/v1/statistics", self._statistics)
        router.add_get("/v1/stalls", self._stalls)
        router.add_get("/v1/stream", self._stream)
        router.add_post("/v1/batch", self._post_batch)
        router.add_get("/v1/calls/{call}/output", self._get_output, allow_head=False)
        router.add_post("/v1/leases", self._post_lease)
        router.add_post("/v1/leases/renew", self._post_renew)
        router.add_post("/v1/leases/release", self._post_release)
        router.add_post("/v1/leases/end", self._post_end)
        router.add_post("/v1/leases/act", self._post_act)
        ConnectRoute(self.container).add_to(router)
        AttachmentRoutes(self.container).add_to(router)
        ImageRoute(self.container).add_to(router)
        LayerRoutes(self.container.exports).add_to(router)
        ProgramRoute(self.container).add_to(router)
        SlotMetricsRoute(self.container).add_to(router)
        TailRoute(self.container, self.watchers).add_to(router)
        TransferRoutes(self.container).add_to(router)
        WatchRoute(self.container, self.watchers).add_to(router)
        application.on_shutdown.append(self._end_watches)
        return application

    async def _end_watches(self, _: web.Application) -> None:
        self.watchers.end()

    # -- small routes ------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        status = "draining" if self.container.draining else "ok"
        silent_s = self.container.supervisor_silent_s
        return _reply(Health(status=status, version=self.info.version, supervisor_silent_s=silent_s))

    async def _get_info(self, _: web.Request) -> web.Response:
        return _reply(self.info)

    async def _slots(self, _: web.Request) -> web.Response:
        return _reply(self.container.inventory())

    async def _paused(self, _: web.Request) -> web.Response:
        return _reply(self.container.paused())

    async def _drop_paused(self, request: web.Request) -> web.Response:
        self.container.drop_paused(request.match_info["checkpoint"])
        return _reply(self.container.paused())

    async def _statistics(self, _: web.Request) -> web.Response:
        return web.json_response(self.container.statistics())

    async def _stalls(self, _: web.Request) -> web.Response:
        return web.json_response({process: asdict(stalls) for process, stalls in self._stalls_of_both().items()})

    def _stalls_of_both(self) -> dict[str, Stalls]:
        return {"server": self.watch.stalls(), "supervisor": self.container.supervisor_stalls}

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = metrics.exposition(
            self.container.statistics(),
            self.container.states(),
            version=self.info.version,
            isolation=self.info.isolation,
            stalls=self._stalls_of_both(),
            call_times=self.container.counted.call_times(),
        )
        return web.Response(body="".join(lines).encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _post_lease(self, request: web.Request) -> web.Response:
        return _reply(await self.container.lease(await _read(request, _lease)))

    async def _post_renew(self, request: web.Request) -> web.Response:
        return _reply(requester_of(request, self.container).renew(await _read(request, _renew)))

    async def _post_release(self, request: web.Request) -> web.Response:
        return _reply(await requester_of(request, self.container).release(await _read(request, _key)))

    async def _post_end(self, request: web.Request) -> web.Response:
        return _reply(await self.container.end(await _read(request, _end)))

    async def _post_act(self, request: web.Request) -> web.Response:
        return _reply(await requester_of(request, self.container).act(await _read(request, _act)))

    # -- calls -------------------------------------------------------------------------------------

    async def _post_batch(self, request: web.Request) -> web.StreamResponse:
        batch = await _read(request, _batch)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(Accepted(batch=batch.batch).model_dump_json().encode() + b"\n")
        sink = BatchSink({call.id for call in batch.calls}, self.container.sent)
        try:
            requester_of(request, self.container).submit(batch.calls, sink, request.content_length or 0)
            await sink.write_all(response)
        finally:
            sink.closed = True
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=_HEARTBEAT_S, compress=False)
        await socket.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        sink = StreamSink(request.transport, self.poller, self.container.sent)
        requester, loop = requester_of(request, self.container), self.poller.loop
        request.app[STREAMS].add(socket)
        self.container.counted.streams += 1
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    sink.send(_failure(ProtocolError("only text messages are understood"), None))
                    continue
                began_s = loop.time()
                try:
                    self._process_message(message.data, sink, requester)
                except Exception as error:  # as an HTTP response it would end the stream, and every call on it
                    log.exception("a message could not be processed")
                    sink.send(_failure(InfraError(f"the message could not be processed: {error!r}"), message.data))
                if len(message.data) > _SLOW_MESSAGE_BYTES:
                    # The next one may be here already: first let the loop handle what has waited.
                    await asyncio.sleep(loop.time() - began_s)
                if sink.clogged:
                    await sink.room()
        finally:
            sink.close()
            self.container.counted.streams -= 1
            request.app[STREAMS].discard(socket)
        return socket

    async def _get_output(self, request: web.Request) -> web.StreamResponse:
        """What a running command has printed so far.

        Reads the capture that the result is made of, from the offsets that the client has reached. So this holds no
        memory, and a slow reader does not slow the command: it misses what the capture drops, and gets the number of
        missing bytes.
        """
        requester = requester_of(request, self.container)
        key, call_id = lease_key(request), request.match_info["call"]
        stdout, stderr = (number(name, request.query.get(name, "0"), MAX_COUNT) for name in ("stdout", "stderr"))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LIVE_WAIT_S
        while True:
            output = _output_of(requester.in_flight(key, call_id), stdout, stderr)
            if output.stdout or output.stderr or output.ended or loop.time() >= until_s:
                return web.json_response(text=output.model_dump_json())
            await asyncio.sleep(_OUTPUT_LOOK_S)

    def _process_message(self, text: str, sink: StreamSink, requester: Requester) -> None:
        statistics = self.container.counted
        try:
            message = client_message.validate_json(text)
        except ValidationError as error:
            statistics.messages_refused += 1
            sink.send(_failure(ProtocolError(_problem(error)), text))
            return
        if isinstance(message, Batch):
            statistics.batches += 1
            # Sent with the first result: that saves one write here and one wake-up at the client.
            sink.send_along(b'{"type":"accepted","batch":%d}' % message.batch)
            requester.submit(message.calls, sink, len(text))
        elif isinstance(message, Cancel):
            requester.cancel(message.calls, sink)
        else:
            requester.forget(message.calls)

    # -- every route -------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            route = access.route_of(request)
            bearer = access.bearer_of(request.headers.get("Authorization", ""), self.token)
            if refused := access.refusal(route, bearer):
                return _error(*refused)
            if bearer is None:  # open to everybody: no use of the container
                return await handler(request)
            request[access.BEARER] = bearer
            if bearer.run is None and route in access.FENCED:
                self._fence(request)
            with self.container.idle_timer.request():
                return await handler(request)
        except web.HTTPException as error:
            code = "refused" if error.status == 413 else "protocol"
            return _error(error.status, ErrorReply(error=code, message=error.text or error.reason))
        except ProtocolError as error:
            return _error(400, ErrorReply.of(error))
        except SandboxUnavailableError as error:
            return _error(503, ErrorReply.of(error))
        except AgentEnvError as error:
            return _error(409, ErrorReply.of(error))

    def _fence(self, request: web.Request) -> None:
        generation = access.generation_of(request.headers.get(GENERATION_HEADER))
        guest = GUEST_HEADER in request.headers
        self.container.obey(access.fence(self.container.generation, generation, guest=guest))


async def _read(request: web.Request, model: TypeAdapter[Body]) -> Body:
    try:
        return model.validate_json(await message_body(request))
    except ValidationError as error:
        raise ProtocolError(_problem(error)) from error


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"[:_MAX_SHOWN] if where else first["msg"][:_MAX_SHOWN]


def _failure(error: AgentEnvError, text: str | None) -> bytes:
    """A Failure that names the batch if the message can be read that far."""
    batch = None
    try:
        raw = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        raw = None
    if isinstance(raw, dict) and type(raw.get("batch")) is int:
        batch = raw["batch"]
    return Failure(error=error.code, message=error.message, batch=batch).model_dump_json().encode()


def _output_of(call: SlotCall, stdout: int, stderr: int) -> LiveOutput:
    process = call.process
    if call.message is not None or process is None or process.stdout is None or process.stderr is None:
        return LiveOutput(stdout_from=stdout, stderr_from=stderr, ended=call.message is not None)
    stdout, out = process.stdout.kept.read(stdout, _MAX_OUTPUT_BYTES)
    stderr, err = process.stderr.kept.read(stderr, _MAX_OUTPUT_BYTES)
    return LiveOutput(stdout=out, stdout_from=stdout, stderr=err, stderr_from=stderr)


def _reply(model: WireModel) -> web.Response:
    return web.Response(body=model.model_dump_json().encode(), content_type="application/json")


def _error(status: int, body: ErrorReply) -> web.Response:
    return web.Response(status=status, body=body.model_dump_json().encode(), content_type="application/json")

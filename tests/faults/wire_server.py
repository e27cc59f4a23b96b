"""A small server that speaks the wire, for tests of the client: calls are run by a Python function.

It keeps the contract a container keeps (ids run once, replies are remembered, a call of another boot is
lost, the calls of one slot run in order) and counts what reached it.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import WSMsgType, web
from pydantic_core import to_json

from agentenv.containers.handle import ContainerHandle
from agentenv.wire.base import LARGE_BYTES, MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from agentenv.wire.calls import Accepted, Attachment, Batch, Call, CallResult, Cancel, Forget, Result, client_message
from agentenv.wire.server import ServerInfo

Run = Callable[[Call], Awaitable[CallResult]]


async def echo(call: Call) -> CallResult:
    return CallResult(id=call.id, exit_code=0, stdout=str(call.arguments.get("command", "")))


class WireServer:
    def __init__(self, run: Run = echo, *, port: int = 0) -> None:
        self.run = run
        self.port = port
        self.token = secrets.token_hex(8)
        self.boot = secrets.token_hex(8)
        self.protocol = PROTOCOL_VERSION
        self.acknowledge = True
        self.runs: list[str] = []
        """The id of every call that was really run, in order of start."""
        self.batches: list[list[str]] = []
        self.cancelled: list[str] = []
        self.forgotten: list[str] = []
        self.streams = 0
        self.on_batch: Callable[[web.WebSocketResponse, Batch], Awaitable[bool]] | None = None
        """Called for each batch before it is taken; False: it was dealt with."""
        self.known: dict[str, asyncio.Task[CallResult]] = {}
        self.attached: dict[tuple[str, str], bytes] = {}
        """Large arguments, by call and field, that arrived whole."""
        self.arriving = 0
        """Large arguments that are on their way."""
        self.cut_uploads = False
        """Every large argument's connection is cut."""
        self.lose_answers = 0
        """So many of the next answers are not sent."""
        self.left: dict[tuple[str, str], bytes] = {}
        """What results left to be fetched."""
        self._slots: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: set[web.WebSocketResponse] = set()
        self._senders: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/v1/info", self._info), web.get("/v1/stream", self._stream)])
        app.add_routes([web.put("/v1/attachments/{call}/{field}", self._put)])
        app.add_routes([web.get("/v1/attachments/{call}/{field}", self._get)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.forget_everything()
        for task in tuple(self._senders):
            task.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        assert self._runner is not None
        await self.drop_streams()
        await self._runner.cleanup()

    def handle(self, port: int | None = None) -> ContainerHandle:
        return ContainerHandle("c0", 0, f"http://127.0.0.1:{port or self.port}", self.token, slots=100)

    async def drop_streams(self) -> None:
        """Cut every stream, as a dying process would."""
        for socket in tuple(self._open):
            transport = socket._req.transport if socket._req else None
            if transport is not None:
                transport.abort()

    async def forget_everything(self) -> None:
        """What a restart does: running calls end, replies are forgotten, the boot is new."""
        running = list(self.known.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.known.clear()
        self.boot = secrets.token_hex(8)

    def _refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") == f"Bearer {self.token}":
            return None
        return web.json_response({"error": "protocol", "message": "wrong token"}, status=401)

    async def _info(self, request: web.Request) -> web.StreamResponse:
        info = ServerInfo(
            container="c0", boot=self.boot, version="test", protocol=self.protocol, slots=100, isolation="none"
        )
        return self._refused(request) or web.json_response(text=info.model_dump_json())

    async def _put(self, request: web.Request) -> web.StreamResponse:
        if self.cut_uploads:
            assert request.transport is not None
            request.transport.abort()
        call_id, field = request.match_info["call"], request.match_info["field"]
        self.arriving += 1
        try:
            content = b"".join([piece async for piece in request.content.iter_any()])
        finally:
            self.arriving -= 1
        at = int(request.query.get("from", "0"))
        self.attached[call_id, field] = self.attached.get((call_id, field), b"")[:at] + content
        reply = Attachment(field=field, size_bytes=len(self.attached[call_id, field]))
        return self._refused(request) or web.json_response(text=reply.model_dump_json())

    async def _get(self, request: web.Request) -> web.StreamResponse:
        content = self.left[request.match_info["call"], request.match_info["field"]]
        return self._refused(request) or web.Response(body=content[int(request.query.get("from", "0")) :])

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if refused := self._refused(request):
            return refused
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        self.streams += 1
        self._open.add(socket)
        try:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                await self._take(socket, client_message.validate_json(message.data))
        finally:
            self._open.discard(socket)
        return socket

    async def _take(self, socket: web.WebSocketResponse, message: Batch | Cancel | Forget) -> None:
        if isinstance(message, Forget):
            self.forgotten.extend(call.id for call in message.calls)
        elif isinstance(message, Cancel):
            self.cancelled.extend(call.id for call in message.calls)
            for call_id in [call.id for call in message.calls]:
                if call_id in self.known:
                    self.known[call_id].cancel()
        elif self.on_batch is None or await self.on_batch(socket, message):
            self.batches.append([call.id for call in message.calls])
            for call in message.calls:
                self._answer(socket, call)
            if self.acknowledge:
                await socket.send_str(Accepted(batch=message.batch).model_dump_json())

    def _answer(self, socket: web.WebSocketResponse, call: Call) -> None:
        task = self.known.get(call.id)
        if task is None:
            task = self.known[call.id] = asyncio.create_task(self._outcome(call))
        sender = asyncio.create_task(self._send(socket, call, task))
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _outcome(self, call: Call) -> CallResult:
        if call.boot != self.boot:
            return CallResult(id=call.id, fault="infra", error="call_lost", message="the server was restarted")
        async with self._slots[call.lease.slot]:
            self.runs.append(call.id)
            large = {part.field: self.attached.pop((call.id, part.field)).decode() for part in call.attachments}
            result, left = without_large(
                await self.run(call.model_copy(update={"arguments": {**call.arguments, **large}}))
            )
            self.left |= {(call.id, field): content for field, content in left.items()}
            return result

    async def _send(self, socket: web.WebSocketResponse, call: Call, task: asyncio.Task[CallResult]) -> None:
        await asyncio.wait({task})
        if self.lose_answers:
            self.lose_answers -= 1
            return
        result = CallResult(id=call.id, cancelled=True) if task.cancelled() else task.result()
        try:
            await socket.send_str(Result(result=result).model_dump_json())
        except (OSError, RuntimeError):
            return  # cut; the client asks again


def without_large(result: CallResult) -> tuple[CallResult, dict[str, bytes]]:
    """The result as it is sent, and what of it is to be fetched, by its field."""
    left = {name: text.encode() for name in ("stdout", "stderr") if len(text := getattr(result, name)) > LARGE_BYTES}
    content = result.content
    if isinstance(content, dict):
        for name in ("text", "data"):
            if isinstance(value := content.get(name), str) and len(value) > LARGE_BYTES:
                left[f"content.{name}"] = value.encode() if name == "text" else base64.b64decode(value)
                content = {**content, name: None}
    if len(encoded := to_json(content)) > LARGE_BYTES:
        left["content"], content = encoded, None
    parts = tuple(Attachment(field=name, size_bytes=len(value)) for name, value in left.items())
    empty = {name: "" for name in left if "." not in name}
    return result.model_copy(update={**empty, "content": content, "attachments": parts}), left

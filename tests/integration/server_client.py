"""A plain client of the wire, for tests: it keeps every message in the order it came."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentenv.wire.base import LARGE_BYTES
from agentenv.wire.calls import Accepted, CallResult, Failure, Result, server_message
from agentenv.wire.leases import LeaseGrant, LeaseKey, SlotReport, Tags
from agentenv.wire.server import ErrorReply, ServerInfo, SlotsReply
from agentenv.wire.transfers import LEASE_HEADER
from tests.waiting import DEADLINE_S


def sealing(key: LeaseKey) -> dict[str, Any]:
    """The body of ``POST /v1/leases/act`` that seals its slot."""
    return {"key": key.model_dump(), "action": {"do": "seal"}}


def _lease_header(call: dict[str, Any]) -> dict[str, str]:
    return {LEASE_HEADER: json.dumps(call["lease"])}


class Client:
    """One HTTP session and one stream with a server."""

    def __init__(self, url: str, token: str) -> None:
        self.http = aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"})
        self.boot = ""
        self.messages: list[Accepted | Result | Failure] = []
        self.results: dict[str, CallResult] = {}
        self.stream: aiohttp.ClientWebSocketResponse | None = None
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        self.boot = (await self.info()).boot
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()

    async def connect(self) -> None:
        """Open the stream (again)."""
        self.stream = await self.http.ws_connect("/v1/stream", max_msg_size=0)

    async def cut(self) -> None:
        """Close the stream as a failing network would: without a word."""
        assert self.stream is not None
        transport = self.stream.get_extra_info("socket")
        assert transport is not None
        self.stream._response.connection.transport.abort()  # type: ignore[union-attr]
        self.stream = None

    async def info(self) -> ServerInfo:
        async with self.http.get("/v1/info") as reply:
            return ServerInfo.model_validate_json(await reply.read())

    async def slot(self, slot: int) -> SlotReport:
        async with self.http.get("/v1/slots") as reply:
            return SlotsReply.model_validate_json(await reply.read()).slots[slot]

    async def statistics(self) -> dict[str, int]:
        async with self.http.get("/v1/statistics") as reply:
            found: dict[str, int] = await reply.json()
            return found

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status, and the body as JSON; an error's body is checked to be an ErrorReply."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=io.BytesIO(payload), headers=headers) as reply:
            raw = await reply.read()
            if reply.status >= 400:
                ErrorReply.model_validate_json(raw)
            return reply.status, json.loads(raw)

    async def lease(
        self, slot: int = 0, *, ttl_s: float = 300, request_id: str | None = None, tags: Tags | None = None
    ) -> LeaseKey:
        body = {"slot": slot, "trajectory": "t", "ttl_s": ttl_s, "request_id": request_id or secrets.token_hex(16)}
        body |= {"tags": tags.model_dump()} if tags else {}
        status, grant = await self.post("/v1/leases", body)
        assert status == 200, grant
        return LeaseGrant.model_validate(grant).key

    async def renew(self, key: LeaseKey, ttl_s: float) -> list[int]:
        """Slots whose leases were renewed: the key's or none."""
        status, reply = await self.post("/v1/leases/renew", {"ttl_s": ttl_s, "keys": [key.model_dump()]})
        assert status == 200, reply
        renewed: list[int] = reply["renewed"]
        return renewed

    async def release(self, key: LeaseKey) -> str:
        status, reply = await self.post("/v1/leases/release", key.model_dump())
        assert status == 200, reply
        state: str = reply["state"]
        return state

    @asynccontextmanager
    async def leased(self, slot: int = 0) -> AsyncIterator[LeaseKey]:
        """A slot for the time of a test."""
        key = await self.lease(slot)
        try:
            yield key
        finally:
            await self.release(key)

    def call(
        self, key: LeaseKey, tool: str = "bash", *, timeout_s: float = DEADLINE_S, **fields: Any
    ) -> dict[str, Any]:
        """A call's JSON with a new id; ``id`` and ``boot`` may be given, the rest are arguments."""
        call_id = fields.pop("id", None) or f"{self._prefix}-{next(self._numbers)}"
        boot = fields.pop("boot", self.boot)
        arguments = {name: value for name, value in fields.items() if value is not None}
        return {
            "id": call_id,
            "lease": key.model_dump(),
            "tool": tool,
            "arguments": arguments,
            "timeout_s": timeout_s,
            "boot": boot,
        }

    async def send(self, message: dict[str, Any] | str) -> None:
        assert self.stream is not None
        await self.stream.send_str(message if isinstance(message, str) else json.dumps(message))

    async def ask(self, *calls: dict[str, Any], batch: int = 0) -> None:
        await self.send({"type": "batch", "batch": batch, "calls": calls})

    def named(self, kind: str, *calls: dict[str, Any]) -> dict[str, Any]:
        """A message about calls: cancel or forget."""
        return {"type": kind, "calls": [{"id": call["id"], "lease": call["lease"]} for call in calls]}

    async def put(self, call: dict[str, Any], field: str, content: bytes, at: int = 0) -> tuple[int, Any]:
        """Send an argument as an attachment, and name it in the call when it was taken."""
        url = f"/v1/attachments/{call['id']}/{field}?from={at}"
        async with self.http.put(url, data=io.BytesIO(content), headers=_lease_header(call)) as reply:
            told = await reply.json()
        if reply.status == 200:
            call.setdefault("attachments", []).append(told)
        return reply.status, told

    async def get(self, call: dict[str, Any], field: str, skip: int = 0) -> tuple[int, bytes]:
        """Fetch what a result left out."""
        url = f"/v1/attachments/{call['id']}/{field}?from={skip}"
        async with self.http.get(url, headers=_lease_header(call)) as reply:
            return reply.status, await reply.read()

    async def whole(self, call: dict[str, Any], result: CallResult) -> CallResult:
        """The result with what was attached to it, which is forgotten then."""
        fields: dict[str, Any] = {}
        content = dict(result.content) if isinstance(result.content, dict) else {}
        for part in result.attachments:
            status, raw = await self.get(call, part.field)
            assert (status, len(raw)) == (200, part.size_bytes)
            if part.field in ("stdout", "stderr"):
                fields[part.field] = raw.decode()
            elif part.field == "content":
                fields["content"] = json.loads(raw)
            else:
                name = part.field.removeprefix("content.")
                content[name] = raw.decode() if name == "text" else base64.b64encode(raw).decode()
                fields["content"] = content
        await self.send(self.named("forget", call))
        return result.model_copy(update=fields)

    async def next_message(self, timeout_s: float = DEADLINE_S) -> Accepted | Result | Failure:
        assert self.stream is not None
        async with asyncio.timeout(timeout_s):
            frame = await self.stream.receive()
        assert frame.type is aiohttp.WSMsgType.TEXT, frame
        message = server_message.validate_json(frame.data)
        self.messages.append(message)
        if isinstance(message, Result):
            self.results[message.result.id] = message.result
        return message

    async def result(self, call: dict[str, Any], timeout_s: float = DEADLINE_S) -> CallResult:
        """The answer to a call that was asked; others that come meanwhile are kept."""
        async with asyncio.timeout(timeout_s):
            while call["id"] not in self.results:
                await self.next_message(timeout_s)
        result = self.results.pop(call["id"])
        return await self.whole(call, result) if result.attachments else result

    async def run(
        self,
        key: LeaseKey,
        command: str | None = None,
        *,
        tool: str = "bash",
        timeout_s: float = DEADLINE_S,
        **arguments: Any,
    ) -> CallResult:
        """One call, there and back."""
        call = self.call(key, tool, timeout_s=timeout_s, command=command, **arguments)
        for name, value in (*call["arguments"].items(),):
            if isinstance(value, str) and len(content := value.encode()) > LARGE_BYTES:
                del call["arguments"][name]
                assert (await self.put(call, name, content))[0] == 200
        await self.ask(call)
        return await self.result(call, timeout_s + DEADLINE_S)

    async def running(self, slot: int, count: int) -> None:
        """Until so many calls run or wait in the slot."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.slot(slot)).running_calls != count:
                await asyncio.sleep(0.005)

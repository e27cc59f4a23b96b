"""A collector of spans: OTLP over HTTP, in the test's own process."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """A span as it arrived."""

    raw: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def attributes(self) -> dict[str, Any]:
        return values(self.raw.attributes)

    @property
    def id(self) -> bytes:
        return self.raw.span_id

    @property
    def parent(self) -> bytes:
        return self.raw.parent_span_id

    @property
    def times(self) -> tuple[int, int]:
        return self.raw.start_time_unix_nano, self.raw.end_time_unix_nano

    @property
    def failed(self) -> bool:
        return self.raw.status.code == trace_pb2.Status.STATUS_CODE_ERROR


@dataclass
class Collector:
    """What has arrived at ``url``."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    requests: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        found = [span for span in self.spans if span.parent == parent.id and span.raw.trace_id == parent.raw.trace_id]
        return sorted(found, key=lambda span: span.times)

    async def receive(self, request: web.Request) -> web.Response:
        self.requests += 1
        self.headers = dict(request.headers)
        if self.status != 200:
            return web.Response(status=self.status)
        body = await request.read()  # aiohttp has unpacked it, unless it came in gzip's own form
        message = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        for resources in message.resource_spans:
            resource = values(resources.resource.attributes)
            self.spans += [Span(span, resource) for scope in resources.scope_spans for span in scope.spans]
        return web.Response(body=b"", content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that listens on a free port of this machine."""
    collector = Collector()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", collector.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        collector.url = f"http://{host}:{port}"
        yield collector
    finally:
        await runner.cleanup()


def values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in attributes}


def _value(pair: KeyValue) -> Any:
    return _plain(pair.value)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(entry) for entry in value.array_value.values]
    return getattr(value, kind) if kind else None

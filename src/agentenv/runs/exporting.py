"""OpenTelemetry's SDK, as :mod:`agentenv.runs.tracing` uses it. Imported only where traces are wanted.

The SDK's own batching processor drops what exceeds its queue. Here whole groups are queued, and a request is made of
the spans at hand; so it is known what was not accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from itertools import islice
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentenv._version import __version__
from agentenv.config import debug
from agentenv.runs.spans import SpanRecord, span_id, trace_id

SPANS_PER_REQUEST: Final = 512
"""As OTEL_BSP_MAX_EXPORT_BATCH_SIZE is by default."""


class Exporting:
    """Makes spans of records, with the ids that their keys give them, and sends them."""

    def __init__(self, exporters: Sequence[str], *, named: bool) -> None:
        """``exporters``: names of entry points. ``named``: whether the variables name the service. Raises: LookupError
        and ImportError for an exporter that is not installed; what an exporter raises for variables it refuses."""
        resource = Resource.create()
        if not named:
            resource = resource.merge(Resource({SERVICE_NAME: "agentenv"}))
        self._ids, self._ended = _NamedIds(), _Ended()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(self._ended)
        self._tracer = self._provider.get_tracer("agentenv", __version__)
        self._exporters = [_exporter(name) for name in exporters]
        self._failures = _Failures()
        self._loggers = {logging.getLogger(type(each).__module__) for each in self._exporters}
        for each in self._loggers:
            each.addFilter(self._failures)

    @property
    def where(self) -> str:
        """The exporters' addresses, or what they are."""
        return ", ".join(str(getattr(each, "_endpoint", type(each).__name__)) for each in self._exporters)

    @property
    def failure(self) -> str:
        """Why the newest request has failed, perhaps one that is tried again; empty if it has not."""
        return self._failures.newest

    def is_sampled(self, name: str) -> bool:
        """Whether the trace of this name is one of those to send (``OTEL_TRACES_SAMPLER``)."""
        decision = self._provider.sampler.should_sample(None, trace_id(name), "").decision
        return decision is Decision.RECORD_AND_SAMPLE

    def spans(self, name: str, records: Iterable[SpanRecord], linked: str = "") -> list[ReadableSpan]:
        """The spans of the trace of this name, in the order they are given, parents first; empty if it is not sampled.
        The first is linked to the trace ``linked``."""
        self._ids.trace = trace_id(name)
        contexts: dict[str, Any] = {"": None}
        for record in records:
            self._ids.span = span_id(record.key)
            span = self._tracer.start_span(
                record.name,
                contexts[record.parent],
                SpanKind.CLIENT if record.client else SpanKind.INTERNAL,
                record.attributes,
                [_link(linked)] if linked and not record.parent else None,
                _nanoseconds(record.began_unix_s),
            )
            if not span.is_recording():
                break
            contexts[record.key] = trace.set_span_in_context(span)
            for event, unix_s, attributes in record.events:
                span.add_event(event, attributes, _nanoseconds(unix_s))
            if record.error is not None:
                span.set_status(Status(StatusCode.ERROR, record.error))
            span.end(_nanoseconds(record.ended_unix_s))
        return self._ended.taken()

    def send(self, spans: Sequence[ReadableSpan]) -> str:
        """Send them with every exporter. Returns why one did not accept all; empty if all did."""
        self._failures.newest = ""
        left, why = iter(spans), ""
        while chunk := tuple(islice(left, SPANS_PER_REQUEST)):
            for exporter in self._exporters:
                if exporter.export(chunk) is SpanExportResult.SUCCESS:
                    continue
                why = self._failures.newest = self._failures.newest or "no reason given"
            if why:
                break
        else:
            self._failures.newest = ""
        return why

    def give_up(self) -> None:
        """End a request that is tried again, and accept no more."""
        for exporter in self._exporters:
            exporter.shutdown()

    def close(self) -> None:
        """Leave the exporters' loggers as they were."""
        for each in self._loggers:
            each.removeFilter(self._failures)


def _exporter(name: str) -> SpanExporter:
    for point in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = point.load()()
        return exporter
    raise LookupError(f"no package with the exporter {name!r} is installed")


def _link(run: str) -> Link:
    return Link(SpanContext(trace_id(run), span_id(run), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)))


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)


class _NamedIds(IdGenerator):
    """The ids of the span that is made next."""

    trace = 0
    span = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _Ended(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def taken(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class _Failures(logging.Filter):
    """Keeps what exporters log of their failures, which is shown once, from being shown each time."""

    newest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.newest = record.getMessage()
        return debug()

"""OpenTelemetry's SDK, as :mod:`agentenv.runs.tracing` uses it. Imported only where traces are wanted.

The SDK's own batching processor drops what exceeds its queue. Here whole groups are queued, and a request is made of
the spans at hand; so it is known what was not accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Final

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentenv._version import __version__
from agentenv.config import debug
from agentenv.runs.spans import Attributes, SpanRecord, span_id, trace_id

SPANS_PER_REQUEST: Final = 512
"""As OTEL_BSP_MAX_EXPORT_BATCH_SIZE is by default."""
CHARACTERS_PER_REQUEST: Final = 4 * 1024 * 1024
"""Of texts, which are large where the content of messages is sent: collectors accept requests of 20 MiB by default."""
_SCOPE: Final = InstrumentationScope("agentenv", __version__)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)


class Exporting:
    """Makes spans of records, with the ids that their keys give them, and sends them."""

    def __init__(self, exporters: Sequence[str], *, named: bool) -> None:
        """``exporters``: names of entry points. ``named``: whether the variables name the service. Raises: LookupError
        and ImportError for an exporter that is not installed; what an exporter raises for variables it refuses."""
        resource = Resource.create()
        if not named:
            resource = resource.merge(Resource({SERVICE_NAME: "agentenv"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # reads the variables of sampling
        self._longest_text = SpanLimits().max_span_attribute_length
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
        return self._provider.sampler.should_sample(None, trace_id(name), "").decision is Decision.RECORD_AND_SAMPLE

    def spans(self, name: str, records: Iterable[SpanRecord], linked: str = "") -> list[ReadableSpan]:
        """The spans of the trace of this name; empty if it is not sampled. Its first is linked to the trace
        ``linked``."""
        if not self.is_sampled(name):
            return []
        trace = trace_id(name)
        return [self._span(trace, record, linked) for record in records]

    def _span(self, trace: int, record: SpanRecord, linked: str) -> ReadableSpan:
        """Made as it is, not started and ended: that would take ten times as long."""
        return ReadableSpan(
            name=record.name,
            context=_context(trace, record.key),
            parent=_context(trace, record.parent) if record.parent else None,
            resource=self._provider.resource,
            attributes=self._limited(record.attributes),
            events=[
                Event(event, self._limited(attributes), _nanoseconds(unix_s))
                for event, unix_s, attributes in record.events
            ],
            links=[Link(_context(trace_id(linked), linked, is_remote=True))] if linked and not record.parent else (),
            kind=SpanKind.CLIENT if record.client else SpanKind.INTERNAL,
            status=_UNSET if record.error is None else Status(StatusCode.ERROR, record.error),
            start_time=_nanoseconds(record.began_unix_s),
            end_time=_nanoseconds(record.ended_unix_s),
            instrumentation_scope=_SCOPE,
        )

    def _limited(self, attributes: Attributes) -> Attributes:
        """With texts cut at ``OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT``."""
        if (limit := self._longest_text) is None:
            return attributes
        return {key: value[:limit] if isinstance(value, str) else value for key, value in attributes.items()}

    def send(self, spans: Sequence[ReadableSpan]) -> str:
        """Send them with every exporter. Returns why one did not accept all; empty if all did."""
        self._failures.newest = ""
        for request in _requests(spans):
            results = [exporter.export(request) for exporter in self._exporters]
            if set(results) != {SpanExportResult.SUCCESS}:
                self._failures.newest = self._failures.newest or "no reason was given"
                return self._failures.newest
            self._failures.newest = ""
        return ""

    def give_up(self) -> None:
        """End a request that is tried again, and accept no more."""
        for exporter in self._exporters:
            exporter.shutdown()

    def close(self) -> None:
        """Leave the exporters' loggers as they were."""
        for each in self._loggers:
            each.removeFilter(self._failures)


def _requests(spans: Sequence[ReadableSpan]) -> Iterator[Sequence[ReadableSpan]]:
    """The spans in parts, each of a size that collectors accept."""
    begin, characters = 0, 0
    for at, span in enumerate(spans):
        size = sum(len(value) for value in (span.attributes or {}).values() if isinstance(value, str))
        if at > begin and (at - begin >= SPANS_PER_REQUEST or characters + size > CHARACTERS_PER_REQUEST):
            yield spans[begin:at]
            begin, characters = at, 0
        characters += size
    if begin < len(spans):
        yield spans[begin:]


def _exporter(name: str) -> SpanExporter:
    for point in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = point.load()()
        return exporter
    raise LookupError(f"no package with the exporter {name!r} is installed")


def _context(trace: int, key: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace, span_id(key), is_remote, _SAMPLED)


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)


class _Failures(logging.Filter):
    """Keeps what exporters log of their failures, which is shown once, from being shown each time."""

    newest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.newest = record.getMessage()
        return debug()

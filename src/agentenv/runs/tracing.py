"""Sends the spans of a run to a collector (docs/tracing.md). OpenTelemetry's environment variables configure it;
without them nothing of it is imported.

A group's spans are made when it has ended, in a thread of its own, from the records of its rollouts. Their ids are made
from names, so that a request to the model's server can bear the id of its span before there is one.
"""

from __future__ import annotations

import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final

from agentenv.agent.results import Results, one_line
from agentenv.agent.transcript import RunRecord, Transcript
from agentenv.config import TraceVariables
from agentenv.runs.spans import GroupSpans, Served, SpanRecord, span_id, trace_id, turn_key
from agentenv.wire.leases import RunKind

if TYPE_CHECKING:
    from agentenv.runs.exporting import Exporting

logger = logging.getLogger(__name__)

WAITING_ROLLOUTS: Final = 2_000
"""Ended rollouts that may wait for the collector; the spans of those that come on top of them are dropped."""
ROLLOUTS_AT_ONCE: Final = 64
"""Whose spans are made before they are sent, unless no more are waiting."""
CLOSE_S: Final = 10.0
"""How long the end of a run waits for a collector that accepts spans."""
FAILED_CLOSE_S: Final = 1.0
"""The same for one that does not."""
INSTALL: Final = "pip install 'agentenv[otel]'"

_Group = tuple[str, str, RunKind, float, list[Transcript]]
Headers = Callable[[str, int], dict[str, str]]
"""Of the request for a turn (0 first) of an attempt, which is named as its slot is."""


class Tracing:
    """The spans of one run. Does nothing before :meth:`open`, or if the variables name no exporter. Never raises for
    the collector's sake, and never waits for it before the end: what it does not accept is counted, and logged once."""

    def __init__(self, run: RunRecord, served: Served) -> None:
        self._run = run
        self._served = served
        self._sender: _Sender | None = None
        self._began_unix_s = 0.0

    @contextmanager
    def within(self, shown: AbstractContextManager[None], verb: str, results: Callable[[], Results]) -> Iterator[None]:
        """``shown``, within which spans are sent: of the groups that end there, and at last that of the run."""
        with shown:
            self.open()
            try:
                yield
            finally:
                self.close(verb, results(), sys.exception())

    def open(self) -> None:
        """Begin the run's span. Imports OpenTelemetry, if the variables name an exporter."""
        self._began_unix_s = time.time()
        self._sender = self._started()

    def close(self, verb: str, results: Results, error: BaseException | None) -> None:
        """End the run's span, which ``error`` has ended, and send what is left; blocks :data:`CLOSE_S` at most.
        Repeatable."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(self._run_span(verb, results, error))

    def _started(self) -> _Sender | None:
        variables = TraceVariables.from_environment()
        if not variables.exporters:
            return None
        try:
            from agentenv.runs.exporting import Exporting

            exporting = Exporting(variables.exporters, named=variables.named)
        except (ImportError, LookupError) as error:
            logger.warning("no traces, though OTEL_ variables ask for them: %s (%s)", error, INSTALL)
            return None
        except Exception as error:  # of an exporter that refuses its variables
            logger.warning("no traces, though OTEL_ variables ask for them: %s: %s", type(error).__name__, error)
            return None
        content = variables.content in ("true", "span_only", "span_and_event")
        if variables.content == "event_only":
            logger.warning("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT: no events are sent; use SPAN_ONLY")
        return _Sender(exporting, GroupSpans(self._run, self._served, content=content))

    def turn_headers(self, group: str) -> Headers | None:
        """``traceparent`` for the requests of a group's turns; None without traces, and for models of an environment's
        own, which may not know such an argument."""
        if self._sender is None or not self._served.provider:
            return None
        trace, flags = trace_id(group), int(self._sender.exporting.is_sampled(group))

        def headers(attempt: str, index: int) -> dict[str, str]:
            return {"traceparent": f"00-{trace:032x}-{span_id(turn_key(attempt, index)):016x}-{flags:02x}"}

        return headers

    def add(self, group: str, item: str, kind: RunKind, began_unix_s: float, members: Sequence[Transcript]) -> None:
        """A group has ended. Never waits."""
        if self._sender is not None:
            self._sender.add((group, item, kind, began_unix_s, [_without_tokens(each) for each in members]))

    def _run_span(self, verb: str, results: Results, error: BaseException | None) -> SpanRecord:
        run = self._run
        span = SpanRecord(
            name=f"run {run.environment}",
            key=run.id,
            parent="",
            began_unix_s=self._began_unix_s,
            ended_unix_s=time.time(),
            attributes={
                **self._served.attributes(run.model),
                "agentenv.run.id": run.id,
                "agentenv.environment": run.environment,
                **({"agentenv.verb": verb} if verb else {}),
                "agentenv.settings": run.settings,
                "agentenv.version": run.agentenv,
                "agentenv.run.groups": results.groups,
                "agentenv.run.rollouts": results.rollouts,
                "agentenv.run.scored": results.scored,
                **{f"agentenv.run.fault.{fault}": number for fault, number in results.faults.items()},
            },
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        if results.mean is not None:
            span.attributes["agentenv.score.mean"] = results.mean
        if error is not None:
            span.attributes["error.type"] = type(error).__name__
        return span


def _without_tokens(member: Transcript) -> Transcript:
    return member.model_copy(update={"token_sequences": []})


class _Sender:
    """The thread that makes spans and sends them."""

    def __init__(self, exporting: Exporting, spans: GroupSpans) -> None:
        self.exporting = exporting
        self._spans = spans
        self._groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._added = 0
        self._taken = 0
        self._sent = 0
        self._warned = False
        self._given_up = False
        self._last: SpanRecord | None = None
        self._thread = threading.Thread(target=self._work, name="agentenv-traces", daemon=True)
        self._thread.start()

    def add(self, group: _Group) -> None:
        members = group[-1]
        waiting = self._added - self._taken
        self._added += len(members)
        if waiting > WAITING_ROLLOUTS:
            self._taken += len(members)
            self._warn("it is slower than the run")
        else:
            self._groups.put(group)

    def close(self, run: SpanRecord) -> None:
        """Send what is left, and the run's span, for :data:`CLOSE_S` at most."""
        self._last = run
        self._groups.put(None)
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.02)
            if time.monotonic() - began > (FAILED_CLOSE_S if (failure := self.exporting.failure) else CLOSE_S):
                self._warn(failure or f"the rest took more than {CLOSE_S:g} s")
                self._given_up = True
                break
        self.exporting.give_up()
        self._thread.join(FAILED_CLOSE_S)
        self.exporting.close()
        if self._sent < self._added:
            logger.info("the spans of %d of %d rollouts were not sent", self._added - self._sent, self._added)

    def _work(self) -> None:
        while not self._given_up:
            groups, ended = self._next()
            if self._accepted(groups):
                self._sent += sum(len(group[-1]) for group in groups)
            if ended:
                break
        if self._last is not None and not self._given_up:
            self._accepted([], self._last)

    def _next(self) -> tuple[list[_Group], bool]:
        """The groups that wait, some rollouts of them at most, and whether they are the last."""
        groups: list[_Group] = []
        rollouts = 0
        while (group := self._groups.get()) is not None:
            groups.append(group)
            rollouts += len(group[-1])
            if self._groups.empty() or rollouts >= ROLLOUTS_AT_ONCE:
                break
        self._taken += rollouts
        return groups, group is None

    def _accepted(self, groups: list[_Group], run: SpanRecord | None = None) -> bool:
        try:
            name = self._spans.run.id
            spans = [] if run is None else self.exporting.spans(name, [run])
            for group in groups:
                spans += self.exporting.spans(group[0], self._spans.of(*group), linked=name)
            why = self.exporting.send(spans)
        except Exception as error:  # a value that OpenTelemetry cannot express
            why = f"{type(error).__name__}: {error}"
        if why:
            self._warn(why)
        return not why

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("spans are not accepted by %s: %s; the run goes on", self.exporting.where, cause_of(why))


def cause_of(why: str) -> str:
    """What an exporter's message comes down to: the system's own words, where it has any."""
    system = re.search(r"\[Errno -?\d+\] ([^\"'()]+)", why)
    return system[1].strip() if system else one_line(why)

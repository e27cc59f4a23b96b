"""Counters of the server as plain integers: each call costs only increments.

``GET /metrics`` returns them in Prometheus' text format. Written by hand: it is a page of code, and the server
needs no additional package.
"""

from __future__ import annotations

import dataclasses
import os
import resource
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentenv.sandbox.loop_watch import Stalls
from agentenv.wire.watch import CALL_BOUNDS_S, CallTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Statistics:
    """Counters since the server process started; from ``held_bytes`` on, gauges."""

    calls: int = 0
    calls_cold: int = 0
    """Bash calls that found no spare shell ready."""
    calls_timed_out: int = 0
    calls_cancelled: int = 0
    calls_oom_killed: int = 0
    calls_faulted: int = 0
    """Results with a fault other than ``none``."""
    calls_asked_again: int = 0
    batches: int = 0
    messages_refused: int = 0
    results_bytes: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    slots_lost: int = 0
    held_bytes: int = 0
    """Memory held by waiting and running calls: their JSON and attachments."""
    streams: int = 0
    slots_free: int = 0
    slots_leased: int = 0
    calls_running: int = 0
    calls_queued: int = 0

    run_counts: list[int] = field(default_factory=lambda: [0] * (len(CALL_BOUNDS_S) + 1))
    """Calls by how long they ran, see :class:`agentenv.wire.watch.CallTimes`."""
    run_total_s: float = 0.0

    def ran(self, duration_s: float) -> None:
        """A call, or a streamed program, ran for so long."""
        self.run_counts[bisect_left(CALL_BOUNDS_S, duration_s)] += 1
        self.run_total_s += duration_s

    def ended(self, result: Mapping[str, Any], size_bytes: int) -> None:
        """A call has ended with these fields of a CallResult."""
        self.calls += 1
        self.results_bytes += size_bytes
        if (duration_s := result.get("duration_s")) is not None:
            self.ran(duration_s)
        self.calls_faulted += "fault" in result
        self.calls_timed_out += "timed_out" in result
        self.calls_cancelled += "cancelled" in result
        self.calls_oom_killed += "oom_killed" in result

    def call_times(self) -> CallTimes:
        """How long calls ran."""
        return CallTimes(counts=tuple(self.run_counts), total_s=self.run_total_s)

    def as_dict(self) -> dict[str, int]:
        """For ``GET /v1/statistics``."""
        values = ((one.name, getattr(self, one.name)) for one in dataclasses.fields(self))
        return {name: value for name, value in values if isinstance(value, int)}


@dataclass(frozen=True)
class ServerMetric:
    """One metric of the server; ``field`` names its value in :class:`Statistics`, if it is there."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    field: str = ""
    labels: tuple[str, ...] = ()


INFO = ServerMetric(
    "agentenv_sandbox_info", "gauge", "Always 1; the labels tell what is running.", "", ("version", "isolation")
)
SLOTS = ServerMetric("agentenv_sandbox_slots", "gauge", "Slots by state.", "", ("state",))
COUNTED = (
    ServerMetric("agentenv_sandbox_calls_total", "counter", "Finished tool calls.", "calls"),
    ServerMetric(
        "agentenv_sandbox_calls_cold_total", "counter", "Bash calls that found no spare shell ready.", "calls_cold"
    ),
    ServerMetric("agentenv_sandbox_calls_timed_out_total", "counter", "Calls that timed out.", "calls_timed_out"),
    ServerMetric(
        "agentenv_sandbox_calls_cancelled_total", "counter", "Calls cancelled by their caller.", "calls_cancelled"
    ),
    ServerMetric(
        "agentenv_sandbox_calls_oom_killed_total",
        "counter",
        "Calls with a process killed by the slot's memory limit.",
        "calls_oom_killed",
    ),
    ServerMetric(
        "agentenv_sandbox_calls_faulted_total", "counter", "Results with a fault other than none.", "calls_faulted"
    ),
    ServerMetric(
        "agentenv_sandbox_calls_asked_again_total", "counter", "Calls resubmitted by their client.", "calls_asked_again"
    ),
    ServerMetric("agentenv_sandbox_batches_total", "counter", "Batches received.", "batches"),
    ServerMetric(
        "agentenv_sandbox_messages_refused_total", "counter", "Messages rejected as malformed.", "messages_refused"
    ),
    ServerMetric("agentenv_sandbox_results_bytes_total", "counter", "Bytes of results sent (JSON).", "results_bytes"),
    ServerMetric("agentenv_sandbox_leases_granted_total", "counter", "Leases granted.", "leases_granted"),
    ServerMetric(
        "agentenv_sandbox_leases_expired_total", "counter", "Leases expired for lack of a heartbeat.", "leases_expired"
    ),
    ServerMetric("agentenv_sandbox_slots_lost_total", "counter", "Slots whose agent died unexpectedly.", "slots_lost"),
    ServerMetric(
        "agentenv_sandbox_held_bytes",
        "gauge",
        "Memory held by queued and running calls: JSON and attachments.",
        "held_bytes",
    ),
    ServerMetric("agentenv_sandbox_streams", "gauge", "Open call streams.", "streams"),
    ServerMetric("agentenv_sandbox_calls_running", "gauge", "Running calls.", "calls_running"),
    ServerMetric(
        "agentenv_sandbox_calls_queued", "gauge", "Calls queued behind earlier calls of their slot.", "calls_queued"
    ),
)
CALL_TIMES = ServerMetric("agentenv_sandbox_call_seconds", "histogram", "Time calls ran in their slots.")
PROCESS = (
    ServerMetric("agentenv_sandbox_server_resident_bytes", "gauge", "Resident memory of the server process."),
    ServerMetric("agentenv_sandbox_server_cpu_seconds_total", "counter", "CPU time of the server process."),
    ServerMetric("agentenv_sandbox_server_open_files", "gauge", "Open file descriptors of the server process."),
)
LOOP = (
    ServerMetric(
        "agentenv_sandbox_loop_stalls_total", "counter", "Event loop iterations longer than 50 ms.", labels=("process",)
    ),
    ServerMetric(
        "agentenv_sandbox_loop_longest_stall_seconds", "gauge", "Longest event loop iteration.", labels=("process",)
    ),
    ServerMetric(
        "agentenv_sandbox_loop_recent_stall_seconds",
        "gauge",
        "Longest event loop iteration in the last one to two minutes.",
        labels=("process",),
    ),
)
METRICS = (INFO, SLOTS, *COUNTED, CALL_TIMES, *PROCESS, *LOOP)


def exposition(
    statistics: Mapping[str, int],
    states: Mapping[str, int],
    *,
    version: str,
    isolation: str,
    stalls: Mapping[str, Stalls],
    call_times: CallTimes,
) -> Iterator[str]:
    """The lines of Prometheus' text format, version 0.0.4. ``states``: number of slots per state; ``stalls``: by
    process."""
    yield from _lines(INFO, {f'version="{_escaped(version)}",isolation="{_escaped(isolation)}"': 1})
    yield from _lines(SLOTS, {f'state="{_escaped(state)}"': count for state, count in states.items()})
    for metric in COUNTED:
        yield from _lines(metric, {"": statistics[metric.field]})
    yield from _histogram(CALL_TIMES, call_times)
    for metric, value in zip(PROCESS, own_process(), strict=True):
        yield from _lines(metric, {"": value})
    for metric, name in zip(LOOP, ("count", "longest_s", "recent_s"), strict=True):
        yield from _lines(
            metric, {f'process="{process}"': getattr(counted, name) for process, counted in stalls.items()}
        )


def own_process() -> tuple[float, float, float]:
    """Resident bytes, CPU seconds and open descriptors of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - one of them is this look
    except OSError:  # a container without /proc
        pages = descriptors = 0
    used = resource.getrusage(resource.RUSAGE_SELF)
    return pages * resource.getpagesize(), used.ru_utime + used.ru_stime, descriptors


def _lines(metric: ServerMetric, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    for labels, value in values.items():
        yield f"{metric.name}{{{labels}}} {value!r}\n" if labels else f"{metric.name} {value!r}\n"


def _histogram(metric: ServerMetric, times: CallTimes) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    so_far = 0
    for bound, count in zip((*(f"{bound:g}" for bound in CALL_BOUNDS_S), "+Inf"), times.counts, strict=True):
        so_far += count
        yield f'{metric.name}_bucket{{le="{bound}"}} {so_far}\n'
    yield f"{metric.name}_sum {times.total_s!r}\n{metric.name}_count {so_far}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

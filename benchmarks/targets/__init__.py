"""One function per target of docs/performance.md: measure in this run, compare with this run's baselines."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from benchmarks.measure import Outcome
from benchmarks.sessions import t5_sessions
from benchmarks.targets.cluster import n1_first_result, n2_one_to_ten
from benchmarks.targets.crowd import t3_slow_neighbours, t4_oversubscribed
from benchmarks.targets.decisions import s1_scaling
from benchmarks.targets.effort import Effort
from benchmarks.targets.idle import t7_idle, t8_start
from benchmarks.targets.images import (
    f12_plain,
    i1_lease,
    i4_neighbours,
    i5_fork,
    i6_depth,
    i7_hundred,
    i8_disk,
    i9_apt,
)
from benchmarks.targets.killed import f5_killed, f6_away, f14_successor
from benchmarks.targets.leases import f1_lease, f2_burst, f7_handed_on
from benchmarks.targets.neighbours import t9_bad_neighbour
from benchmarks.targets.once import f13_once
from benchmarks.targets.output import t6_output
from benchmarks.targets.programs import a_exact, a_programs
from benchmarks.targets.pulls import i10_pull
from benchmarks.targets.relay import f8_relay
from benchmarks.targets.runs import f3_real, f11_neighbour_run
from benchmarks.targets.serving import a_serving
from benchmarks.targets.sharing import f3_shares, f4_arrival, f10_pick
from benchmarks.targets.short import t1_short_calls, t2_alone
from benchmarks.targets.size import f9_size

TARGETS: Mapping[str, Callable[[Effort], Coroutine[Any, Any, list[Outcome]]]] = {
    "T1": t1_short_calls,
    "T2": t2_alone,
    "T3": t3_slow_neighbours,
    "T4": t4_oversubscribed,
    "T5": t5_sessions,
    "T6": t6_output,
    "T7": t7_idle,
    "T8": t8_start,
    "T9": t9_bad_neighbour,
    "S1": s1_scaling,
    "F1": f1_lease,
    "F2": f2_burst,
    "F3": f3_shares,
    "F3.real": f3_real,
    "F4": f4_arrival,
    "F5": f5_killed,
    "F6": f6_away,
    "F7": f7_handed_on,
    "F8": f8_relay,
    "F9": f9_size,
    "F10": f10_pick,
    "F11": f11_neighbour_run,
    "F12": f12_plain,
    "F13": f13_once,
    "F14": f14_successor,
    "I1": i1_lease,
    "I4": i4_neighbours,
    "I5": i5_fork,
    "I6": i6_depth,
    "I7": i7_hundred,
    "I8": i8_disk,
    "I9": i9_apt,
    "I10": i10_pull,
    "A": a_serving,
    "A4": a_programs,
    "A6": a_exact,
    "N1": n1_first_result,
    "N2": n2_one_to_ten,
}

"""What a decision of the scale policy and each move of the ledger costs at 1,000 containers of 10 slots."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from agentenv.config import PoolSettings
from agentenv.slots.commands import Grant
from agentenv.slots.ledger import Ledger
from agentenv.slots.scaler import Scaler
from agentenv.wire.leases import SlotRequest
from agentenv.wire.states import SlotState
from benchmarks.farmsim.backend import NowhereBackend
from benchmarks.measure import percentile

CONTAINERS, SLOTS = 1_000, 10


def farm(leased: int, waiting: int = 0) -> tuple[Ledger, list[Grant]]:
    """A farm with so many slots leased and so many waiters; the leases, in order."""
    ledger = Ledger()
    for index in range(CONTAINERS):
        ledger.started(f"c{index}", index)
        ledger.inventory(f"c{index}", [SlotState.free] * SLOTS, 0.0)
    grants = []
    for number in range(leased):
        grant = ledger.enqueue(SlotRequest((f"t{number}",)), 0.0, 1e6)[1][0]
        assert isinstance(grant, Grant)
        ledger.confirm(grant.lease, 0.0)
        grants.append(grant)
    for number in range(waiting):
        ledger.enqueue(SlotRequest((f"w{number}",)), 0.0, 1e6 + number)
    return ledger, grants


def scaler(maximum: int = 2 * CONTAINERS, minimum: int = 0) -> Scaler:
    """A scaler whose goal is the containers there are."""
    settings = PoolSettings(min_containers=minimum, max_containers=maximum, target_idle_slots=100)
    made = Scaler(NowhereBackend(), settings, 0.0)
    made.goal, made.slots_per_container = CONTAINERS, SLOTS
    return made


def decisions(times: int, share: float = 0.99) -> dict[str, float]:
    """A percentile of a decision's own CPU time (ms): full farms, and one that is all to be taken away."""
    full, _ = farm(CONTAINERS * SLOTS)
    crowded, _ = farm(CONTAINERS * SLOTS, waiting=10_000)
    half, _ = farm(CONTAINERS * SLOTS // 2)
    empty, _ = farm(0)
    cases = {"full": full, "10,000 waiting": crowded, "half used": half, "all 1,000 to go": empty}
    return {
        name: 1e3 * percentile([_took_s(scaler().decide, ledger, 1_000.0) for _ in range(times)], share)
        for name, ledger in cases.items()
    }


def moves(times: int, waiting: int = 0, share: float = 0.99) -> dict[str, float]:
    """A percentile of each operation's own CPU time (ms) in a nearly full farm, with so many waiting."""
    ledger, grants = farm(CONTAINERS * SLOTS - (0 if waiting else 5), waiting)
    took: dict[str, list[float]] = {}

    def timed(name: str, do: Callable[..., Any], *what: Any) -> Any:
        began = time.thread_time()  # our own CPU: others on the machine do not count
        result = do(*what)
        took.setdefault(name, []).append(time.thread_time() - began)
        return result

    for number in range(times):
        old = grants[number * 7919 % len(grants)]
        timed("release", ledger.release, old.lease, 1.0)
        freed = timed("freed", ledger.freed, old.container, old.slot, 1.0)
        asked = timed("ask", ledger.enqueue, SlotRequest((f"n{number}",)), 1.0, 2e6)[1]
        (grant,) = [one for one in [*freed, *asked] if isinstance(one, Grant)]
        timed("confirm", ledger.confirm, grant.lease, 1.0)
        timed("tick", ledger.tick, 1.0)
        timed("next_deadline", ledger.next_deadline)
        timed("load", ledger.load, 1.0)
        grants[number * 7919 % len(grants)] = grant
    return {name: 1e3 * percentile(seconds, share) for name, seconds in took.items()}


def _took_s(do: Callable[..., Any], *what: Any) -> float:
    gc.disable()  # a collection looks at all of the process, whoever happens to set it off
    began = time.thread_time()
    do(*what)
    took = time.thread_time() - began
    gc.enable()
    return took

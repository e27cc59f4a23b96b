"""S1: what deciding costs."""

from __future__ import annotations

from benchmarks.ledger_costs import decisions, moves
from benchmarks.measure import Outcome, at_most
from benchmarks.targets.effort import Effort


async def s1_scaling(effort: Effort) -> list[Outcome]:
    """One decision of the scale policy, and the slowest move of the ledger, at 10,000 slots."""
    decided, moved = [], []
    for _ in range(effort.rounds):
        decided.append(decisions(20))
        crowded = {f"{name}, 10,000 waiting": ms for name, ms in moves(500, 10_000).items()}
        moved.append({**moves(500), **crowded})
    decision = at_most("S1", "a scaling decision over 1,000 containers, p99", "ms", 1.0)
    move = at_most("S1.ledger", "the slowest move of the ledger at 10,000 slots, p99", "ms", 1.0)
    return [
        decision.outcome([max(found.values()) for found in decided], p99_ms=decided[-1]),
        move.outcome([max(found.values()) for found in moved], p99_ms=moved[-1]),
    ]

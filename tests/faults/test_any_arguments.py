"""Nothing that a model writes into a call is an infrastructure failure, hangs, or hurts a neighbour."""

from __future__ import annotations

from benchmarks.fuzz import fuzz


async def test_hostile_arguments_harm_nobody() -> None:
    tally = await fuzz(seconds=15, seed=1)
    assert tally.wrongs == []
    assert tally.counted["neighbour's calls"] > 0
    assert tally.counted["calls, fault none"] > 0

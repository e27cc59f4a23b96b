"""A1 to A3: ports of a slot that are answered in the trainer's process."""

from __future__ import annotations

from agentenv.containers.handle import ContainerHandle
from benchmarks.measure import Outcome, at_least, at_most
from benchmarks.relay import executor_of, relayed_container
from benchmarks.serving import Answered, answered_bare, answered_in_slot
from benchmarks.targets.effort import BARE, Effort, Rounds

_DIRECT, _RELAYED = "local", "relayed"


async def a_serving(effort: Effort) -> list[Outcome]:
    """Opening a port, requests, and 64 MB each way: directly, through a relay, and without a slot, in turn; always the
    local backend."""
    rounds = Rounds(Effort(rounds=effort.rounds, calls=effort.calls, backends=(_DIRECT, _RELAYED)))
    async with relayed_container(1) as ways:
        for _ in range(effort.rounds):
            _add(rounds, BARE, await answered_bare(3 * effort.calls))
            for name, way in ((_DIRECT, ways.direct), (_RELAYED, ways.relayed)):
                _add(rounds, name, await _answered(way, 3 * effort.calls))
    direct = (
        (at_most("A1", "opening a port that is answered here", "ms", 50), "open_ms"),
        (at_most("A2", "request on a kept connection, p50", "ms", 0.5), "kept_ms"),
        (at_most("A2.new", "request on a new connection, p50", "ms", 1.0), "new_ms"),
        (at_least("A3.to", "64 MB from a slot to what answers", "MB/s", 150), "to_mb_s"),
        (at_least("A3.from", "64 MB from what answers to a slot", "MB/s", 50), "from_mb_s"),
    )
    relay = at_most("A2.relay", "request on a kept connection through a relay, p50", "ms", 1.0)
    found = [
        goal.outcome(
            rounds.of(what, _DIRECT),
            None if what == "open_ms" else rounds.beside(what, goal.unit, _DIRECT, ""),
            relayed=rounds.of(what, _RELAYED),
        )
        for goal, what in direct
    ]
    return [*found, relay.outcome(rounds.of("kept_ms", _RELAYED))]


async def _answered(handle: ContainerHandle, calls: int) -> Answered:
    async with executor_of(handle) as executor, executor.open("serving") as session:
        return await answered_in_slot(session, calls)


def _add(rounds: Rounds, whose: str, answered: Answered) -> None:
    for what in ("open_ms", "kept_ms", "new_ms", "to_mb_s", "from_mb_s"):
        rounds.add(what, whose, getattr(answered, what))

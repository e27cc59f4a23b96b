"""A farm that looks as if it had thousands of slots: service and page are real, most containers are only recorded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from agentenv.api.farm_server.farm import Farm
from agentenv.slots.records import Holder
from agentenv.wire.leases import RunKind, Tags
from agentenv.wire.states import SlotState

KINDS: Sequence[RunKind] = ("train", "train", "train", "eval", "interactive")


def crowd(farm: Farm, containers: int, slots: int, runs: Sequence[str]) -> list[str]:
    """Enter so many containers into the farm's ledger, held by these runs but for two slots each; returns their ids.
    None of their slots is free, so nobody is given one."""
    names, ids = itertools.cycle(runs), []
    states = [SlotState.leased] * (slots - 2) + [SlotState.resetting, SlotState.quarantined]
    for index in range(100, 100 + containers):
        ids.append(f"crowd-{index}")
        holders = {slot: _holder(next(names), index, slot) for slot in range(slots - 2)}
        farm.manager.ledger.started(ids[-1], index)
        farm.manager.ledger.inventory(ids[-1], states, farm.clock(), holders)
    return ids


def _holder(run: str, index: int, slot: int) -> Holder:
    tags = Tags(run=run, kind=KINDS[(index + slot) % len(KINDS)], environment="repair", group=f"g{index}")
    return Holder(f"{run}-g{index}-{slot}", tags, epoch=3, held_s=60.0 * slot)

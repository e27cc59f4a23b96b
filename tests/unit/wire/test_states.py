"""Slots, containers and leases move along their tables, and no other way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agentenv.wire.states import (
    CONTAINER_MOVES,
    LEASE_MOVES,
    POOL_SLOT_MOVES,
    SLOT_PHASE_MOVES,
    IllegalMoveError,
    SlotPhase,
    SlotState,
    move,
)

TABLES = [POOL_SLOT_MOVES, SLOT_PHASE_MOVES, CONTAINER_MOVES, LEASE_MOVES]


@pytest.mark.parametrize("table", TABLES)
def test_every_move_of_a_table_is_legal_and_no_other(table: Mapping[Any, frozenset[Any]]) -> None:
    for state in table:
        for to in table:
            if to in table[state]:
                assert move(table, state, to) is to
            else:
                with pytest.raises(IllegalMoveError, match=f"from {state.value} to {to.value}"):
                    move(table, state, to)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_every_state(table: Mapping[Any, frozenset[Any]]) -> None:
    states: Any = type(next(iter(table)))
    assert set(table) == set(states)


def test_what_could_not_be_proved_clean_is_never_free_again() -> None:
    assert SlotState.free not in POOL_SLOT_MOVES[SlotState.quarantined]
    assert not SLOT_PHASE_MOVES[SlotPhase.quarantined]

"""Which uids a container's slots get when it cannot claim a block among its neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.supervisor.isolation import FIRST_SLOT_UID, FULL, UIDS_PER_CONTAINER, Identity, fitting_block
from agentenv.wire.spec import SandboxSpec

EVERY_ID = "         0          0 4294967295\n"
REMAPPED = "         0     231072      65536\n"


@given(st.integers(0, 2_000_000))
def test_named_block_is_used_where_all_ids_exist(block: int) -> None:
    assert fitting_block(block, EVERY_ID) == block


@given(st.integers(0, 2_000_000), st.integers(0, 100_000), st.integers(22_000, 200_000))
def test_block_always_fits_the_namespace(block: int, first: int, count: int) -> None:
    found = fitting_block(block, f"{first} 5000000 {count}\n")

    uids = [Identity(FULL, 0, 0, found).slot_uid(slot) for slot in (0, UIDS_PER_CONTAINER - 1)]
    assert first <= uids[0]
    assert uids[1] < first + count


def test_neighbours_get_different_blocks_as_far_as_there_are_any() -> None:
    found = {fitting_block(port, REMAPPED) for port in range(20_000, 20_045)}

    assert len(found) == (65_536 - FIRST_SLOT_UID) // UIDS_PER_CONTAINER


def test_namespace_without_a_block_is_refused() -> None:
    with pytest.raises(SandboxUnavailableError, match="has no 1000 uids"):
        fitting_block(3, "0 1000 1\n")


def test_largest_block_stays_below_what_tools_take_for_negative() -> None:
    assert Identity(FULL, 0, 0, 2_000_000).slot_uid(999) < 2**31
    with pytest.raises(ConfigError, match="uid_block"):
        SandboxSpec(container="c", token_file="t", data_dir="d", uid_block=2_000_001)

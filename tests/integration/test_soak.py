"""A short soak over local containers: nothing is left behind by a lease, and the limits can tell."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Iterator

import pytest

from benchmarks.farm import Farm, open_farm
from benchmarks.soak import LIMITS, Footprint, at_rest, cycles, drift, footprint


@pytest.fixture
def leaks() -> Iterator[list[socket.socket]]:
    kept: list[socket.socket] = []
    yield kept
    for one in kept:
        one.close()


async def test_leases_leave_nothing_behind_and_what_they_leave_is_seen(leaks: list[socket.socket]) -> None:
    async with open_farm("local", 4) as farm:
        await cycles(farm.executor, 12, 4)
        before = await at_rest(farm)
        assert before.container_mounts > 0
        assert before.container_processes >= 2
        await cycles(farm.executor, 48, 4)
        assert drift(before, await at_rest(farm, before)) == {}

        await _a_process_that_stays(farm, before)
        leaks += [socket.socket() for _ in range(LIMITS.our_descriptors + 1)]
        assert "our_descriptors" in drift(before, footprint(farm))


async def _a_process_that_stays(farm: Farm, before: Footprint) -> None:
    """A slot that is not given back is found as such, and so is what runs in it."""
    async with farm.executor.open("stays") as session:
        await session.call("bash", {"command": "(sleep 300 &)"})
        found = drift(before, footprint(farm))
        assert "slots_not_free" in found
        assert "slot_processes" in found
    assert drift(before, await at_rest(farm, before)) == {}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Footprint)])
def test_growth_beyond_its_limit_is_drift(field: str) -> None:
    before = dataclasses.replace(LIMITS)
    most = dataclasses.replace(before, **{field: 2 * getattr(LIMITS, field)})
    more = dataclasses.replace(before, **{field: 2 * getattr(LIMITS, field) + 1})
    assert drift(before, most) == {}
    assert drift(before, more) == {field: (getattr(before, field), getattr(more, field))}


async def test_cycles_end_when_one_fails() -> None:
    """A slot that was not clean fails the soak, not only its own cycle."""

    class Dirty:
        def open(self, name: str) -> Dirty:
            return self

        async def __aenter__(self) -> Dirty:
            return self

        async def __aexit__(self, *_: object) -> None:
            await asyncio.sleep(0)

        async def call(self, tool: str, arguments: dict[str, str]) -> object:
            return dataclasses.make_dataclass("Result", ["exit_code"])(9)

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await cycles(Dirty(), 5, 2)  # type: ignore[arg-type]

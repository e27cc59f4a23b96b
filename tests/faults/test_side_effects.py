"""Every call runs at most once and is answered once, whatever happens to the farm meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.errors import CallLostError
from benchmarks.chaos import Account, Tally, chaos


@pytest.mark.parametrize(
    ("asked", "log", "wrong"),
    [
        ({"a": True, "b": False}, "a\n", []),
        ({"a": True, "b": False}, "b\na\n", []),
        ({"a": False}, "a\na\n", ["a was written 2 times"]),
        ({"a": True}, "", ["a was confirmed and is missing"]),
        ({}, "b\n", ["b is another session's"]),
    ],
)
def test_the_accounts_tell_what_cannot_be(asked: dict[str, bool], log: str, wrong: list[str]) -> None:
    assert Account(asked).wrongs(log) == wrong


async def test_hangs_and_untyped_errors_are_wrong_and_typed_ones_are_counted() -> None:
    tally = Tally()

    async def fails(error: Exception) -> None:
        raise error

    await tally.ended("typed", fails(CallLostError("lost")), 5)
    assert (tally.counted["CallLostError"], tally.wrongs) == (1, [])
    await tally.ended("untyped", fails(ValueError("oops")), 5)
    await tally.ended("a call", asyncio.sleep(60), 0.01)
    assert tally.wrongs == ["untyped: ValueError: oops", "a call has not ended after 0.01 s"]


async def test_nothing_runs_twice_and_nothing_hangs_while_everything_breaks() -> None:
    tally = await chaos(seconds=20, seed=1)
    assert tally.wrongs == []
    assert tally.counted["sessions verified"] > 0
    assert tally.counted["cuts"] + tally.counted["stalls"] + tally.counted["SIGKILL server"] > 0

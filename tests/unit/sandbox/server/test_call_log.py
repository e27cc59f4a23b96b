"""The calls that a slot logs for its tail: a bounded number, with a bounded end of what they printed."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.sandbox.server.call_log import MAX_CALLS, CallLog, about
from agentenv.sandbox.server.calls import SlotCall
from agentenv.wire.base import WireModel
from agentenv.wire.sessions import ProcessArguments, TerminalArguments
from agentenv.wire.tails import TAIL_BYTES
from agentenv.wire.tools import BashArguments, ReadFileArguments, WriteFileArguments
from tests.unit.sandbox.server.slot_calls import result_cache, slot_call


def ended(number: int) -> SlotCall:
    return slot_call(f"call-{number}", result_cache({}))


def test_calls_after_a_number() -> None:
    log = CallLog()
    for number in range(3):
        log.add(ended(number), {"exit_code": number, "stdout": f"{number}\n"}, float(number))
    assert [one.call_id for one in log.after(1)] == ["call-1", "call-2"]
    assert [one.exit_code for one in log.after(0)] == [0, 1, 2]
    assert list(log.after(log.added)) == []
    log.clear()
    assert list(log.after(0)) == []
    log.add(ended(3), {}, 3.0)
    assert [one.call_id for one in log.after(3)] == ["call-3"]
    assert [one.call_id for one in log.after(0)] == ["call-3"]


def test_the_oldest_are_dropped_by_number_and_by_size() -> None:
    log = CallLog()
    for number in range(MAX_CALLS + 5):
        log.add(ended(number), {"stdout": "x"}, 0.0)
    assert [one.call_id for one in log.after(0)] == [f"call-{number}" for number in range(5, MAX_CALLS + 5)]
    for number in range(100):
        log.add(ended(number), {"stdout": "x" * 10**6, "stderr": "y" * 10**6}, 0.0)
    kept = list(log.after(0))
    assert 1 < len(kept) < MAX_CALLS
    assert sum(one.size_bytes for one in kept) <= TAIL_BYTES
    assert kept[-1].call_id == "call-99"
    assert kept[-1].stdout.total_bytes == 10**6


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"exit_code": 0}, ""),
        ({"exit_code": 137, "timed_out": True}, "timed out"),
        ({"exit_code": 137, "oom_killed": True}, "out of memory"),
        ({"error": "cancelled", "cancelled": True}, "cancelled"),
        ({"fault": "infra", "error": "lease_lost"}, "lease_lost"),
    ],
)
def test_it_says_how_a_call_ended(fields: dict[str, Any], note: str) -> None:
    log = CallLog()
    log.add(ended(0), fields, 0.0)
    assert next(log.after(0)).note == note


def test_an_attachment_is_kept_by_its_end() -> None:
    log = CallLog()
    log.add(ended(0), {"stdout": (memoryview(b"head" * 10**5), memoryview(b"tail" * 10**5))}, 0.0)
    printed = next(log.after(0)).stdout
    assert printed.total_bytes == 8 * 10**5
    assert set(printed.last.split(b"tail")) == {b""}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (BashArguments(command="\n  make test\nmake install"), "make test"),
        (BashArguments(command="x" * 500), "x" * 200 + "…"),
        (ReadFileArguments(path="a/b"), "a/b"),
        (WriteFileArguments(path="a/b", text="secret"), "a/b"),
        (ProcessArguments(action="list"), "list"),
        (TerminalArguments(command="", keys=("C-c",)), ""),
    ],
)
def test_a_call_is_named_by_what_says_most(arguments: WireModel, said: str) -> None:
    assert about(arguments) == said

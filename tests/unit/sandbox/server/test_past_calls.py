"""The calls that a slot remembers for its tail: a bounded number, with a bounded end of what they printed."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.sandbox.server.calls import CallInFlight
from agentenv.sandbox.server.past_calls import MAX_CALLS, PastCalls, about
from agentenv.sandbox.server.replies import ReplyMemory
from agentenv.wire.base import WireModel
from agentenv.wire.calls import Call
from agentenv.wire.leases import LeaseKey
from agentenv.wire.sessions import ProcessArguments, TerminalArguments
from agentenv.wire.tails import TAIL_BYTES
from agentenv.wire.tools import BashArguments, ReadFileArguments, WriteFileArguments


class Outlet:
    closed = False

    def deliver(self, asked: CallInFlight) -> None:
        pass

    def refuse(self, call_id: str, message: bytes) -> None:
        pass


def asked(number: int, arguments: WireModel | None = None) -> CallInFlight:
    key = LeaseKey(slot=0, epoch=0, secret="s" * 16)
    call = Call(id=f"call-{number}", lease=key, tool="terminal", arguments={}, timeout_s=5.0, boot="b" * 16)
    memory = ReplyMemory({}, max_count=9, max_unsent_bytes=2**20, max_sent_bytes=2**20)
    return CallInFlight(call, arguments or TerminalArguments(command=f"echo {number}"), memory, Outlet(), 0.0)


def test_calls_are_told_after_the_last_that_was_told() -> None:
    past = PastCalls()
    for number in range(3):
        past.add(asked(number), {"exit_code": number, "stdout": f"{number}\n"}, float(number))
    assert [one.call_id for one in past.after(1)] == ["call-1", "call-2"]
    assert [one.exit_code for one in past.after(0)] == [0, 1, 2]
    assert list(past.after(past.added)) == []
    past.clear()
    assert list(past.after(0)) == []
    past.add(asked(3), {}, 3.0)
    assert [one.call_id for one in past.after(3)] == ["call-3"]
    assert [one.call_id for one in past.after(0)] == ["call-3"]


def test_the_oldest_are_dropped_by_number_and_by_size() -> None:
    past = PastCalls()
    for number in range(MAX_CALLS + 5):
        past.add(asked(number), {"stdout": "x"}, 0.0)
    assert [one.call_id for one in past.after(0)] == [f"call-{number}" for number in range(5, MAX_CALLS + 5)]
    for number in range(100):
        past.add(asked(number), {"stdout": "x" * 10**6, "stderr": "y" * 10**6}, 0.0)
    kept = list(past.after(0))
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
    past = PastCalls()
    past.add(asked(0), fields, 0.0)
    assert next(past.after(0)).note == note


def test_an_attachment_is_kept_by_its_end() -> None:
    past = PastCalls()
    past.add(asked(0), {"stdout": (memoryview(b"head" * 10**5), memoryview(b"tail" * 10**5))}, 0.0)
    printed = next(past.after(0)).stdout
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

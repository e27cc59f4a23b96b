"""The calls of one slot: their order, what stops them, and that each has one answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from agentenv.errors import LeaseLostError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.server import call_queue, process
from agentenv.sandbox.server.call_queue import CallQueue
from agentenv.sandbox.server.calls import SlotCall
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.poller import Poller
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slotagent.protocol import Kind, Message, receive
from agentenv.wire.calls import Call, CallResult, Result, server_message
from agentenv.wire.leases import LeaseKey
from tests.unit.sandbox.server.slot_calls import NoSink
from tests.waiting import until


class Box:
    """The queue of a leased slot, whose agent is the test."""

    def __init__(self) -> None:
        self.poller = Poller(asyncio.get_running_loop())
        self.context = ServerContext(self.poller, cast("SupervisorLink", None), {}, 4096, 9, spare_shells=False)
        self.lost: list[tuple[LossReason, str]] = []
        self.usable = True
        self.queue = CallQueue(0, self.context, lambda *loss: self.lost.append(loss), lambda: self.usable)
        self.queue.begin_lease()
        self.sink = NoSink()
        self.open()

    def open(self) -> None:
        ours, self.agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.queue.open(SlotReady(0, 0, None, kept=False, limits=LimitFiles()), {"": ours}, 0, sealed=False)
        self.queue.pump()

    def submit(self, call_id: str, tool: str = "bash", **arguments: Any) -> SlotCall:
        key = LeaseKey(slot=0, epoch=0, secret="s" * 16)
        call = Call(id=call_id * 8, lease=key, tool=tool, arguments=arguments, timeout_s=5.0, boot="b" * 16)
        assert self.queue.cache is not None
        self.queue.submit(call, self.queue.cache, self.sink, 100)
        return self.context.index[call.id]

    def spawned(self) -> list[Message]:
        """The runs that the agent was call for since the last look."""
        return [message for message in self._received() if message.kind is Kind.SPAWN]

    def _received(self) -> Iterator[Message]:
        self.agent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while (message := receive(self.agent)) is not None:
                yield message

    def close(self) -> None:
        self.queue.close()
        self.agent.close()
        self.poller.close()


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    box = Box()
    yield box
    box.close()


def _result(call: SlotCall) -> CallResult:
    assert call.message is not None
    answered = server_message.validate_json(call.message)
    assert isinstance(answered, Result)
    return answered.result


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_a_call_that_cannot_be_begun_is_answered_and_nobody_else_is(
    monkeypatch: pytest.MonkeyPatch, number: int, box: Box
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, "nothing left")

    monkeypatch.setattr(process, "memory_file", fail)
    call = box.submit("c", command="cat", stdin="x")
    assert call.message is None, "answered from within submit()"
    await until(lambda: call.message is not None)
    result = _result(call)
    assert (result.fault, result.error) == ("infra", "infra")
    assert "nothing left" in result.message
    assert (call.timer, box.lost, len(box.queue)) == (None, [], 0)


async def test_calls_run_one_after_the_other_and_those_on_sessions_beside(box: Box) -> None:
    first, second, beside = (
        box.submit("a", command="1"),
        box.submit("b", command="2"),
        box.submit("c", "process", action="list"),
    )
    assert (box.queue.running, box.queue.queued) == ((first, beside), 1)
    assert len(box.spawned()) == 1
    await until(lambda: beside.message is not None)
    assert _result(beside).error is None
    assert (second.message, box.queue.running) == (None, (first,))


async def test_nothing_begins_in_a_slot_that_is_recreated_and_everything_does_afterwards(box: Box) -> None:
    running = box.submit("a", command="1")
    box.usable = False
    box.queue.stop()
    box.queue.close()
    assert _result(running).cancelled
    assert [one.call_id for one in box.queue.log.after(0)] == [running.call_id]
    waiting = [box.submit("b", command="2"), box.submit("c", "process", action="list")]
    box.agent.close()
    box.open()
    assert [one.started_at for one in waiting] == [0.0, 0.0]
    box.usable = True
    box.queue.pump()
    assert box.queue.running == tuple(waiting)
    await until(lambda: waiting[1].message is not None)


async def test_a_killed_call_that_does_not_end_costs_the_slot(monkeypatch: pytest.MonkeyPatch, box: Box) -> None:
    monkeypatch.setattr(call_queue, "KILL_GRACE_S", 0.01)
    call = box.submit("a", command="1")
    box.queue.cancel(call)
    await until(lambda: bool(box.lost))
    assert box.lost == [(LossReason.silent, "a killed call did not end")]
    assert call.message is None, "who lost the slot answers its calls"
    box.queue.end_lease(LeaseLostError("it was lost"))
    assert _result(call).error == LeaseLostError.code


async def test_what_waits_can_be_cancelled_and_what_is_answered_is_left_alone(box: Box) -> None:
    first, second = box.submit("a", command="1"), box.submit("b", command="2")
    box.queue.cancel(second)
    assert _result(second).cancelled
    message = second.message
    box.queue.cancel(second)
    assert second.message is message
    assert box.queue.running == (first,)
    assert list(box.queue.log.after(0)) == [], "it has not run"


async def test_a_result_that_comes_after_the_answer_is_nobodys(monkeypatch: pytest.MonkeyPatch, box: Box) -> None:
    monkeypatch.setattr(process, "memory_file", MagicMock(side_effect=OSError(errno.EMFILE, "nothing left")))
    call = box.submit("c", command="cat", stdin="x")
    box.queue.end_lease(LeaseLostError("it was lost"))
    answered: list[bool] = []
    box.poller.defer(lambda: answered.append(True))  # after the result
    await until(lambda: answered)
    assert _result(call).error == LeaseLostError.code
    assert (box.context.statistics.calls, list(box.queue.log.after(0))) == (1, [])


async def test_every_call_of_a_lease_that_ends_is_answered(box: Box) -> None:
    call = [
        box.submit("a", command="1"),
        box.submit("b", command="2"),
        box.submit("c", "process", action="start", command="sleep 9"),
    ]
    box.usable = False
    call.append(box.submit("d", "process", action="list"))
    assert (len(box.queue), len(box.queue.running)) == (4, 2)
    box.queue.end_lease(LeaseLostError("it was lost"))
    assert {_result(one).error for one in call} == {LeaseLostError.code}
    assert (len(box.queue), box.context.index, box.queue.cache) == (0, {}, None)
    assert box.context.statistics.held_bytes == 0
    assert list(box.queue.log.after(0)) == []


async def test_the_calls_of_a_lease_hold_a_bounded_memory_and_release_it(
    monkeypatch: pytest.MonkeyPatch, box: Box
) -> None:
    monkeypatch.setattr(call_queue, "MAX_WAITING_BYTES", 250)
    running, waiting = box.submit("a", command="1"), box.submit("b", command="2")
    with pytest.raises(SandboxUnavailableError, match="hold 200 bytes; at most 250"):
        box.submit("c", command="3")
    assert box.queue.cache is not None
    assert box.queue.cache.uploads.receive("d", "text", 0) is not None
    with pytest.raises(SandboxUnavailableError, match="hold 200 bytes"):
        box.queue.cache.uploads.hold(51)
    box.queue.cache.uploads.hold(50)
    box.queue.cache.uploads.release(50)
    box.queue.cancel(waiting)
    assert (box.queue.held_bytes, box.context.statistics.held_bytes) == (100, 100)
    box.queue.end_lease(LeaseLostError("it was lost"))
    assert (box.queue.held_bytes, box.context.statistics.held_bytes) == (0, 0)
    assert running.message is not None

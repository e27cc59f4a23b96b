"""What the plain HTTP shape decides without a farm: parts of texts, and when a lease is renewed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.api.farm_server.plain_artifacts import decoded
from agentenv.api.farm_server.plain_trajectory import Trajectory
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.errors import ConnectionLostError, InfraError, ProtocolError, SlotDestroyedError, StaleLeaseError
from agentenv.wire import plain
from agentenv.wire.leases import SlotRequest, Tags
from tests.clock import ManualClock


@pytest.mark.parametrize(
    ("data", "whole", "text", "used"),
    [
        (b"", True, "", 0),
        ("é".encode(), True, "é", 2),
        ("aé".encode()[:2], False, "a", 1),
        ("a🐙".encode()[:4], False, "a", 1),
        ("aé".encode()[:2], True, "a\ufffd", 2),
        (b"\xff\xffa", False, "\ufffd\ufffda", 3),
        ("🐙".encode()[:3], False, "\ufffd", 3),  # a part that is too small for one character
    ],
)
def test_a_character_that_is_cut_is_left_for_the_next_part(data: bytes, whole: bool, text: str, used: int) -> None:
    assert decoded(data, whole=whole) == (text, data[:used])


class _Lease:
    """A lease that somebody else keeps."""

    lost: StaleLeaseError | None = None


class _Session:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def call(self, *_: Any, **__: Any) -> Any:
        raise self.error


def _run(clock: ManualClock) -> Any:
    leases = SimpleNamespace(settings=PlainSettings(idle_s=20), clock=clock, closed=False, lost=lambda *_: None)
    return SimpleNamespace(name="r", leases=leases, images=None)


def holding(clock: ManualClock) -> Any:
    """A trajectory whose lease was taken up just now."""
    trajectory: Any = Trajectory(_run(clock), "t")
    trajectory.lease = _Lease()
    assert trajectory.due() is None, "it ends soon if no call waits for it any more"
    with trajectory.used():
        assert trajectory.due(), "what was granted lasts for some seconds only"
    trajectory.renewed(clock())
    return trajectory


def renewed(trajectory: Any, clock: ManualClock) -> bool:
    """Whether it is, at the next opportunity."""
    if trajectory.due() is None:
        return False
    trajectory.renewed(clock())
    return True


def test_a_lease_is_renewed_while_a_call_runs_and_once_after_it() -> None:
    clock = ManualClock()
    trajectory = holding(clock)
    with trajectory.used():
        clock.advance(4)
        assert not renewed(trajectory, clock), "not at every opportunity"
        clock.advance(96)
        assert renewed(trajectory, clock)
        clock.advance(5)
        assert renewed(trajectory, clock)
        clock.advance(1)
    clock.advance(4)
    assert renewed(trajectory, clock), "so it lasts idle_s from its last use at least"
    clock.advance(100)
    assert not renewed(trajectory, clock), "it is idle"


def test_a_renewal_that_fails_is_tried_again() -> None:
    clock = ManualClock()
    trajectory = holding(clock)
    clock.advance(6)
    with trajectory.used():
        assert trajectory.due() is trajectory.due() is trajectory.lease
        assert renewed(trajectory, clock)
        assert trajectory.due() is None


def test_what_has_expired_while_it_was_idle_is_told_as_that() -> None:
    clock = ManualClock()
    trajectory = holding(clock)
    trajectory.lease.lost = StaleLeaseError("its epoch ended")
    assert str(trajectory.lost) == "its epoch ended"
    clock.advance(21)
    assert "made no call for 20 s" in str(trajectory.lost)
    assert not trajectory.over()
    clock.advance(3600)
    assert trajectory.over()


async def test_what_the_policy_did_is_a_result_and_what_the_container_did_is_not_the_senders_fault() -> None:
    request = plain.ExecuteRequest(trajectory_id="t", tool=plain.PlainTool(name="bash"))
    trajectory = holding(ManualClock())
    result = await trajectory.call(_Session(SlotDestroyedError("it killed its agent")), request)
    assert (result.success, result.fault, result.error) == (False, "policy", "slot_destroyed")
    with pytest.raises(InfraError, match="garbled") as caught:
        await trajectory.call(_Session(ProtocolError("garbled")), request)
    assert type(caught.value) is InfraError


async def test_a_lease_that_is_found_again_and_cannot_be_renewed_is_looked_for_by_the_next_call() -> None:
    run = _run(ManualClock())
    trajectory: Any = Trajectory(run, "t")
    found = SimpleNamespace(name="c/0/1", key=SimpleNamespace(slot=0), lost=None)
    answers: list[Any] = [ConnectionLostError("no answer"), (0,)]

    async def granted(*_: Any) -> Any:
        return found

    async def renew(_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Session:
        lease = found

        async def __aenter__(self) -> Session:
            await trajectory.acquire(SlotRequest(("t",)))
            return self

    run.executor = SimpleNamespace(open=lambda *_, **__: Session())
    run.leases.of_name = lambda *_: SimpleNamespace(name=found.name, tags=Tags(item="0" * 16))
    run.leases.granted, run.leases.renew = granted, renew
    request = plain.ExecuteRequest(trajectory_id="t", tool=plain.PlainTool(name="bash"))
    right: Any = object()
    with pytest.raises(ConnectionLostError, match="no answer"):
        await trajectory.entered(right, request)
    assert isinstance(await trajectory.entered(right, request), Session)
    assert answers == []

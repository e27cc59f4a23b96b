"""What the plain HTTP shape decides without a farm: parts of texts, and when a lease is renewed."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.api.farm_server.plain_artifacts import decoded
from agentenv.api.farm_server.plain_trajectory import Trajectory
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.errors import ConnectionLostError, InfraError, ProtocolError, SlotDestroyedError, StaleLeaseError
from agentenv.wire import plain
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
    """A lease of the container's."""

    name = "c/0/1"

    def __init__(self) -> None:
        self.lost: StaleLeaseError | None = None
        self.away = False
        self.renewed: list[float] = []

    async def renew(self, ttl_s: float) -> None:
        if self.away:
            raise ConnectionLostError("away")
        self.renewed.append(ttl_s)


class _Session:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def call(self, *_: Any, **__: Any) -> Any:
        raise self.error


async def holding(clock: ManualClock) -> Any:
    """A trajectory whose lease was taken up just now."""
    trajectory: Any = Trajectory(None, "r", "t", PlainSettings(idle_s=20), clock)  # type: ignore[arg-type]
    trajectory.lease = _Lease()
    await trajectory.renew(trajectory.lease)
    trajectory.lease.renewed.clear()
    return trajectory


async def renewals(trajectory: Any) -> int:
    """Number of renewals after a second."""
    if (lease := trajectory.due()) is not None:
        await trajectory.renew(lease)
    return len(trajectory.lease.renewed)


async def test_a_lease_is_renewed_while_a_call_runs_and_once_after_it() -> None:
    clock = ManualClock()
    trajectory = await holding(clock)
    with trajectory.used():
        clock.advance(4)
        assert await renewals(trajectory) == 0, "not at every opportunity"
        clock.advance(96)
        assert await renewals(trajectory) == 1
        clock.advance(5)
        assert await renewals(trajectory) == 2
        clock.advance(1)
    clock.advance(4)
    assert await renewals(trajectory) == 3, "so it lasts idle_s from its last use at least"
    clock.advance(100)
    assert await renewals(trajectory) == 3, "it is idle"
    assert trajectory.lease.renewed == [20, 20, 20]


async def test_a_renewal_that_fails_is_tried_again() -> None:
    clock = ManualClock()
    trajectory = await holding(clock)
    trajectory.lease.away = True
    clock.advance(6)
    with trajectory.used():
        assert await renewals(trajectory) == 0
        trajectory.lease.away = False
        clock.advance(1)
        assert await renewals(trajectory) == 1


async def test_what_has_expired_while_it_was_idle_is_told_as_that() -> None:
    clock = ManualClock()
    trajectory = await holding(clock)
    trajectory.lease.lost = StaleLeaseError("its epoch ended")
    assert str(trajectory.lost) == "its epoch ended"
    clock.advance(21)
    assert "made no call for 20 s" in str(trajectory.lost)
    assert not trajectory.over()
    clock.advance(3600)
    assert trajectory.over()


async def test_what_the_policy_did_is_a_result_and_what_the_container_did_is_not_the_senders_fault() -> None:
    request = plain.ExecuteRequest(trajectory_id="t", tool=plain.PlainTool(name="bash"))
    trajectory = await holding(ManualClock())
    result = await trajectory.call(_Session(SlotDestroyedError("it killed its agent")), request)
    assert (result.success, result.fault, result.error) == (False, "policy", "slot_destroyed")
    with pytest.raises(InfraError, match="garbled") as caught:
        await trajectory.call(_Session(ProtocolError("garbled")), request)
    assert type(caught.value) is InfraError

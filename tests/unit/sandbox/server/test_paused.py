"""What a container keeps of leases that were paused."""

from __future__ import annotations

import pytest

from agentenv.errors import CheckpointError
from agentenv.sandbox.server.leases import Lease
from agentenv.sandbox.server.paused import PAUSED_KEPT_S, PausedSlots
from agentenv.wire.leases import LeaseRequest, Tags
from agentenv.wire.roots import RootSpec

CHECKPOINT = "0c" * 16


def request(by: str, *, run: str = "exp7", trajectory: str = "build", checkpoint: str = CHECKPOINT) -> LeaseRequest:
    root = RootSpec("", checkpoint) if checkpoint else None
    return LeaseRequest(slot=0, trajectory=trajectory, ttl_s=10, request_id=by * 16, tags=Tags(run=run), root=root)


@pytest.fixture
def paused() -> PausedSlots:
    kept = PausedSlots()
    kept.add(Lease.grant(request("a", checkpoint=""), 1, 0.0), CHECKPOINT, "pause-1", 5.0)
    return kept


def test_it_is_resumed_by_one_request_of_its_run_and_trajectory(paused: PausedSlots) -> None:
    assert paused.begin_resume(request("b", run="others")) == ""
    assert paused.begin_resume(request("b", trajectory="copy")) == ""
    assert paused.begin_resume(request("b", checkpoint="")) == ""
    assert paused.begin_resume(request("b")) == paused.begin_resume(request("b")) == CHECKPOINT
    with pytest.raises(CheckpointError, match="'build' is being resumed"):
        paused.begin_resume(request("c"))
    paused.end_resume(CHECKPOINT, resumed=False)
    assert paused.begin_resume(request("c")) == CHECKPOINT
    paused.end_resume(CHECKPOINT, resumed=True)
    (report,) = paused.report(7.0)
    assert (report.resumed, report.paused_s, report.root.checkpoint) == (True, 2.0, CHECKPOINT)
    paused.lease_ended("b" * 16)
    assert paused.report(7.0)
    paused.lease_ended("c" * 16)
    assert paused.report(7.0) == ()


def test_a_repeated_request_finds_what_it_has_paused(paused: PausedSlots) -> None:
    other = Lease.grant(request("b", checkpoint=""), 2, 0.0)
    lease = Lease.grant(request("d", checkpoint=""), 3, 0.0)
    paused.add(lease, "0d" * 16, "pause-2", 6.0)
    assert paused.made_by("pause-2", lease.key) == "0d" * 16
    assert paused.made_by("pause-2", other.key) == paused.made_by("pause-1", lease.key) == ""
    paused.add(other, "0e" * 16, "", 6.0)  # by its clock
    assert paused.made_by("", other.key) == ""


def test_it_is_kept_for_a_day(paused: PausedSlots) -> None:
    assert paused.stale(5.0 + PAUSED_KEPT_S) == []
    assert paused.stale(6.0 + PAUSED_KEPT_S) == [CHECKPOINT]
    assert not paused.dropped(CHECKPOINT)

"""What the Nomad backend reports and does, fact by fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.config import ContainerSettings
from agentenv.slots.backends.acceptance import unacceptable
from agentenv.slots.backends.base import ContainerDraining, ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.backends.nomad.facts import Evaluation, Job, Node, Snapshot, TaskEvent
from agentenv.slots.backends.nomad.view import (
    KICKS,
    STARTS_AT_ONCE,
    AwaitEmpty,
    Command,
    Diagnose,
    FleetView,
    ForgetAllocation,
    Handshake,
    ReportEvent,
    Reschedule,
    StopAllocation,
)
from agentenv.wire.server import ServerInfo
from tests.unit.slots.backends.nomad.nomad_samples import STARTED, allocation, handle


def _view() -> FleetView:
    return FleetView(start_timeout_s=60)


def _serving(*ids: str) -> FleetView:
    view = _view()
    for id_ in ids or ("a",):
        view.update(allocation(id_), 0)
        view.handshake_done(id_, handle(id_), 0)
    return view


def _events(commands: list[Command]) -> list[object]:
    return [command.event for command in commands if isinstance(command, ReportEvent)]


def _kinds(commands: list[Command]) -> list[type]:
    return [type(command.event) if isinstance(command, ReportEvent) else type(command) for command in commands]


def test_a_container_is_started_when_it_runs_and_has_shaken_hands() -> None:
    view = _view()
    assert view.update(allocation(at=5, client="pending", task_state="pending", address=None), 0) == []
    running = allocation(at=6)
    assert view.update(running, 1) == [Handshake("a", running)]
    assert view.update(allocation(at=7), 1) == [], "one handshake is enough"
    assert view.handshake_done("a", handle("a"), 2) == [ReportEvent(ContainerStarted(handle("a")))]
    assert view.handshake_done("a", handle("a"), 2) == []
    assert (view.serving, view.alive) == (1, 1)
    assert repr(view) == "<FleetView 1 serving, 1 alive, index 0>"


def test_an_address_once_known_is_kept_though_lists_leave_it_out() -> None:
    view = _view()
    view.update(allocation(at=5, client="pending", task_state="pending"), 0)
    (shake,) = view.update(Snapshot(9, (allocation(at=6, address=None),)), 0)
    assert isinstance(shake, Handshake)
    assert shake.allocation.address == "127.0.0.1:20000"


def test_its_end_is_told_once_with_the_reason() -> None:
    view = _serving()
    killed = TaskEvent("Terminated", 'Exit Code: 137, Exit Message: "Docker container exited"', 137)
    end = allocation(at=20, client="failed", task_state="dead", failed=True, events=(STARTED, killed))
    commands = view.update(end, 100)
    reason = f"Nomad reports failed: {killed.message}"
    assert commands == [ForgetAllocation("a"), ReportEvent(ContainerGone("a", reason)), Reschedule()]
    assert view.update(end, 101) == []
    assert view.update(Snapshot(30, (end,)), 102) == []
    assert view.update(Snapshot(40, ()), 103) == []
    assert view.stages() == {}


def test_old_facts_change_nothing() -> None:
    view = _serving()
    view.update(allocation(at=20, client="complete", task_state="dead", desired="stop"), 1)
    assert view.update(allocation(at=15), 2) == []
    view.update(Snapshot(50, ()), 3)
    assert view.update(allocation(at=15), 4) == [], "older than the list that no longer had it"


def test_what_a_list_no_longer_has_is_gone_unless_it_is_newer() -> None:
    view = _serving("a", "b")
    view.update(allocation("b", at=60), 0)
    assert _events(view.update(Snapshot(50, ()), 1)) == [ContainerGone("a", "Nomad no longer lists its allocation")]
    assert view.stages() == {"b": "serving"}


def test_a_cluster_that_began_anew_has_nothing_of_before() -> None:
    view = _serving()
    view.update(Snapshot(500, (allocation(at=400),)), 0)
    assert _kinds(view.update(Snapshot(7, ()), 1)) == [ForgetAllocation, ContainerGone]
    assert _kinds(view.update(allocation("b", at=8), 2)) == [Handshake]


def test_a_task_restarted_in_place_is_another_container() -> None:
    view = _serving()
    again = view.update(allocation(at=20, task_state="pending", restarts=1), 10)
    assert _kinds(again) == [ForgetAllocation, ContainerGone]
    (shake,) = view.update(allocation(at=21, restarts=1), 11)
    assert isinstance(shake, Handshake)
    assert shake.container == "a.1"
    assert view.handshake_done("a", handle("a"), 12) == [], "the first container's handshake is too late"
    assert _events(view.handshake_done("a.1", handle("a.1"), 12)) == [ContainerStarted(handle("a.1"))]
    assert view.update(allocation(at=15), 13) == [], "late news of the first"
    assert view.allocation_of("a.1") == "a"
    assert view.allocation_of("a") is None


def test_a_stopped_allocation_drains_until_it_is_empty() -> None:
    view = _serving()
    commands = view.update(allocation(at=20, desired="stop"), 1)
    assert commands == [ReportEvent(ContainerDraining("a", "Nomad stops its allocation")), AwaitEmpty("a", None)]
    assert view.update(allocation(at=21, desired="stop"), 2) == []
    assert view.emptied("a", 3, silent=False) == [StopAllocation("a", "it is drained")]
    end = allocation(at=22, desired="stop", client="complete", task_state="dead")
    assert _kinds(view.update(end, 4)) == [ForgetAllocation, ContainerGone]


def test_a_draining_node_takes_no_new_leases_and_gives_its_deadline() -> None:
    view = _serving("a", "b")
    commands = view.update(Node("n1", 30, "east", draining=True, drain_s=90), 1)
    assert commands[:2] == [ReportEvent(ContainerDraining("a", "node east is being drained")), AwaitEmpty("a", 90)]
    assert _kinds(commands[2:]) == [ContainerDraining, AwaitEmpty]
    assert view.update(Node("n1", 31, "east", draining=True), 2) == []
    assert view.update(allocation("c", at=32), 3) == [], "a container that starts there is of no use"
    assert _kinds(view.update(Node("n1", 33, "east"), 4)) == [Handshake], "until the drain is called off"


def test_a_handshake_of_a_container_that_is_to_go_is_given_up() -> None:
    view = _view()
    view.update(allocation(), 0)
    assert view.update(allocation(at=20, desired="stop"), 1) == [ForgetAllocation("a")]
    assert view.handshake_done("a", handle("a"), 2) == []


@pytest.mark.parametrize("desired", ["stop", "run"])
def test_a_lost_node_is_not_the_end_of_a_container_that_answers(desired: str) -> None:
    view = _serving()
    commands = view.update(allocation(at=20, client="lost", desired=desired), 1)
    assert _events(commands) == [ContainerDraining("a", "Nomad has lost its node")]
    assert view.alive == 0
    assert _kinds(view.emptied("a", 30, silent=True)) == [StopAllocation, ForgetAllocation, ContainerGone]
    assert view.emptied("a", 31, silent=True) == []


def test_a_node_out_of_touch_changes_nothing() -> None:
    view = _serving()
    assert view.update(allocation(at=20, client="unknown"), 1) == []
    assert view.update(allocation(at=21), 2) == []
    assert view.stages() == {"a": "serving"}


def test_a_refused_container_is_reported_and_stopped_after_a_pause() -> None:
    view = _view()
    pauses = []
    for at, id_ in enumerate("abcdefgh", start=10):
        view.update(allocation(id_, at=at), 0)
        refused = StartFailed("7 slots, 2 were asked for")
        report, stop = view.handshake_done(id_, refused, 1)
        assert report == ReportEvent(refused)
        assert isinstance(stop, StopAllocation)
        pauses.append(stop.after_s)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    view.update(allocation("z", at=99), 0)
    _, stop = view.handshake_done("z", StartFailed("weaker than promised", permanent=True), 1)
    assert isinstance(stop, StopAllocation)
    assert stop.after_s == 30


def test_a_container_of_somebody_elses_settings_is_reported_and_left_alone() -> None:
    view = _view()
    view.update(allocation("a"), 0)
    refused = unacceptable(
        ServerInfo(container="a", boot="b", version="0", slots=16, isolation="full", proofs=()),
        ContainerSettings(slots_per_container=10),
    )
    assert refused is not None
    assert view.handshake_done("a", refused, 1) == [ReportEvent(refused)]
    assert "has 16 slots, 10 were requested" in refused.reason


def test_a_start_that_fails_is_diagnosed_once() -> None:
    view = _view()
    broken = allocation(at=5, client="pending", task_state="pending", events=(TaskEvent("Driver Failure", "no image"),))
    assert view.update(broken, 0) == [Diagnose(broken)]
    assert view.update(replace(broken, modify_index=6), 1) == [], "it is still being tried"
    ended = allocation(at=7, client="failed", task_state="dead", failed=True, events=broken.events)
    assert view.update(ended, 1) == [ForgetAllocation("a"), Reschedule()]


def test_crash_loops_are_left_to_nomads_delays() -> None:
    view = _view()
    kicked = []
    for number in range(KICKS + 3):
        failed = allocation(f"a{number}", at=10 + number, client="failed", task_state="dead", failed=True)
        commands = view.update(failed, number)
        assert Diagnose(failed) in commands
        kicked.append(Reschedule() in commands)
    assert kicked == [True] * KICKS + [False] * 3


def test_a_death_after_a_good_life_is_no_crash_loop() -> None:
    view = _view()
    for number in range(KICKS + 3):
        view.update(allocation(f"x{number}", at=10 + number, client="failed", task_state="dead"), number)
    view.update(allocation("a", at=50), 100)
    view.handshake_done("a", handle("a"), 100)
    assert Reschedule() in view.update(allocation("a", at=60, client="failed", task_state="dead"), 200)


def test_history_is_no_news() -> None:
    view = _view()
    old = allocation("old", at=5, client="failed", task_state="dead", failed=True)
    assert view.update(Snapshot(9, (old,)), 0) == []
    assert view.update(allocation("old", at=12, client="failed", task_state="dead"), 1) == []


def test_containers_that_run_are_adopted() -> None:
    view = _view()
    commands = view.update(Snapshot(9, (allocation("a", at=4), allocation("b", at=5))), 0)
    assert _kinds(commands) == [Handshake, Handshake]


def test_a_slow_start_is_told_once_per_timeout() -> None:
    view = _view()
    pulling = (TaskEvent("Driver", "Downloading image"),)
    view.update(allocation(client="pending", task_state="pending", events=pulling), 0)
    assert view.tick(59) == []
    (report,) = view.tick(61)
    assert "Driver: Downloading image" in str(report)
    assert view.tick(100) == []
    assert len(view.tick(122)) == 1


def test_why_nothing_is_placed_is_told_when_it_changes_and_after_each_start() -> None:
    view = _view()
    failures = {"sandbox": {"NodesEvaluated": 3, "DimensionExhausted": {"memory": 3}}}
    (report,) = view.update(Evaluation("e1", 5, "blocked", failures), 0)
    assert isinstance(report, ReportEvent)
    assert isinstance(report.event, StartFailed)
    assert "memory exhausted on 3 nodes" in report.event.reason
    assert not report.event.permanent
    assert view.update(Evaluation("e2", 6, "complete", failures), 1) == []
    assert view.update(Evaluation("e3", 7, "pending"), 1) == []
    view.update(allocation("a"), 2)
    assert _kinds(view.handshake_done("a", handle("a"), 3)) == [ContainerStarted, StartFailed]
    view.update(Evaluation("e1", 9, "complete"), 4)
    assert view.unplaced is None
    view.update(Evaluation("e0", 3, "blocked", failures), 5)
    assert view.unplaced is None, "an older evaluation has no say"


def test_up_as_containers_come_to_serve_and_down_at_once() -> None:
    view = _view()
    assert view.desired_count(1000, None) == STARTS_AT_ONCE
    assert view.desired_count(1000, STARTS_AT_ONCE) == STARTS_AT_ONCE
    for number in range(10):
        view.update(allocation(f"a{number}"), 0)
        view.handshake_done(f"a{number}", handle(f"a{number}"), 0)
    assert view.desired_count(1000, STARTS_AT_ONCE) == STARTS_AT_ONCE + 10
    assert view.desired_count(1000, 500) == 500, "deaths take nothing back"
    assert view.desired_count(3, 500) == 3
    assert view.desired_count(0, None) == 0


def test_the_newest_word_on_the_job_counts() -> None:
    view = _view()
    view.update(Job(5, 3), 0)
    view.update(Job(4, 9), 0)
    assert view.job == Job(5, 3)
    view.update(Snapshot(9, ()), 0)
    assert view.job is None

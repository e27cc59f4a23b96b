"""A container's cgroups in version 2 from claim to removal, over the kernel's own cgroups and over a stand-in: what is
delegated is there for the slots, and what made room for it is moved back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import cgroups, limits, sweep
from agentenv.wire.spec import MIB, SlotLimits
from tests.cgroup_trees import CgroupTree, Real, StandIn, real_mount
from tests.waiting import DEADLINE_S

LIMITS = SlotLimits(processes=50, memory_bytes=4096 * MIB, cpu_weight=200)
MOUNT = real_mount()


@pytest.fixture(params=["stand-in", *(["real"] if MOUNT else [])])
def tree(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CgroupTree]:
    with contextlib.ExitStack() as stack:
        found: CgroupTree
        if request.param == "real":
            assert MOUNT is not None
            found = stack.enter_context(Real(MOUNT))
        else:
            found = StandIn(tmp_path / "cgroup", monkeypatch)
        for name in ("_V2_WANTED", "_V2_NEEDED"):
            monkeypatch.setattr(cgroups, name, found.controllers)
        for name in ("_REMOVE_DEADLINE_S", "_BUSY_DEADLINE_S"):
            monkeypatch.setattr(cgroups, name, DEADLINE_S)
        monkeypatch.setattr(cgroups, "own_directory_v2", lambda *_: (found.top, found.own))
        yield found


def claimed(name: str, recorded: list[tuple[Path, ...]] | None = None) -> limits.CgroupLayout:
    layout, reason = cgroups.claim(name, (recorded if recorded is not None else []).append)
    assert layout is not None, reason
    return layout


def assert_limits_work(layout: limits.CgroupLayout, name: str, controllers: frozenset[str]) -> None:
    """The files that limit a slot are there, and have its limits."""
    plan = limits.slot_plan(layout, name, "slot-0", LIMITS)
    cgroups.make(limits.server_plan(layout, name))
    cgroups.make(plan)
    (directory,) = plan.directories
    assert (directory / "cgroup.controllers").read_text().split() == sorted(controllers)
    required = [setting for setting in plan.settings if setting.required]
    assert [setting.file.read_text().strip() for setting in required] == [setting.value for setting in required]


def assert_as_before(tree: CgroupTree, *pids: int) -> None:
    assert {tree.cgroup_of(pid) for pid in pids} == {tree.own}
    assert not (tree.own / "agentenv").exists()
    assert (tree.own / "cgroup.subtree_control").read_text().split() == []


def test_a_claimed_container_can_limit_its_slots(tree: CgroupTree) -> None:
    pid = tree.start()
    recorded: list[tuple[Path, ...]] = []
    layout = claimed("c", recorded)
    assert layout.controllers == tree.controllers
    assert recorded == [layout.base("c")]
    assert_limits_work(layout, "c", tree.controllers)
    assert tree.cgroup_of(pid) == tree.own / "agentenv/outside"


def test_the_last_container_moves_the_processes_back(tree: CgroupTree) -> None:
    pids = [tree.start() for _ in range(3)]
    one, two = claimed("one"), claimed("two")
    for name, layout in (("one", one), ("two", two)):
        assert_limits_work(layout, name, tree.controllers)
    assert cgroups.remove_tree(tree.own / "agentenv/one")
    assert {tree.cgroup_of(pid) for pid in pids} == {tree.own / "agentenv/outside"}
    assert_limits_work(two, "two", tree.controllers)
    assert cgroups.remove_tree(tree.own / "agentenv/two")
    assert_as_before(tree, *pids)
    assert_limits_work(claimed("three"), "three", tree.controllers)


def test_processes_that_start_and_end_meanwhile_hold_up_nothing(tree: CgroupTree) -> None:
    pids = [tree.start(restless=True), tree.start(), tree.start(restless=True), tree.start()]
    for _ in range(3):
        assert_limits_work(claimed("c"), "c", tree.controllers)
        assert cgroups.remove_tree(tree.own / "agentenv/c")
        assert_as_before(tree, *pids)


def test_a_sweep_moves_back_what_another_pid_namespace_could_not(tree: CgroupTree, tmp_path: Path) -> None:
    """There the pids of others read as 0: what is started in a container moves nothing."""
    pids = [tree.start() for _ in range(2)]
    (base,) = claimed("c").base("c")
    os.close(sweep.take_lock(tmp_path / "state/c"))
    sweep.record_cgroups(tmp_path / "state/c", (base,))
    tree.remove_elsewhere(base)
    assert not base.exists()
    assert {tree.cgroup_of(pid) for pid in pids} == {tree.own / "agentenv/outside"}
    (found,) = sweep.sweep(tmp_path / "state")
    assert (found.removed, found.left) == ((str(tmp_path / "state/c"),), ())
    assert_as_before(tree, *pids)


def test_a_sweep_ends_what_a_killed_container_left(tree: CgroupTree, tmp_path: Path) -> None:
    bystander = tree.start()
    layout = claimed("c")
    assert_limits_work(layout, "c", tree.controllers)
    (base,) = layout.base("c")
    tree.start(base / "slot-0")
    os.close(sweep.take_lock(tmp_path / "state/c"))
    sweep.record_cgroups(tmp_path / "state/c", (base,))
    (found,) = sweep.sweep(tmp_path / "state")
    assert (found.removed, found.left) == ((str(base), str(tmp_path / "state/c")), ())
    assert_as_before(tree, bystander)


def test_a_name_under_which_something_runs_is_refused(tree: CgroupTree) -> None:
    layout = claimed("c")
    assert_limits_work(layout, "c", tree.controllers)
    pid = tree.start(tree.own / "agentenv/c/slot-0")
    recorded: list[tuple[Path, ...]] = []
    with pytest.raises(FileExistsError, match="in use"):
        claimed("c", recorded)
    assert recorded == []  # or a sweep would end it
    assert tree.cgroup_of(pid) == tree.own / "agentenv/c/slot-0"


def test_what_a_dead_container_of_the_name_left_is_taken_over(tree: CgroupTree) -> None:
    pid = tree.start()
    for _ in range(2):
        assert_limits_work(claimed("c"), "c", tree.controllers)
    assert cgroups.remove_tree(tree.own / "agentenv/c")
    assert_as_before(tree, pid)


def test_what_is_above_our_own_cgroup_is_used_but_not_reconfigured(
    tree: CgroupTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user's may not be written, while one above it hands down what slots need."""
    pid = tree.start()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tree.own and access(path, mode))
    layout = claimed("c")
    assert set(layout.parents.values()) == {tree.top}
    assert_limits_work(layout, "c", tree.controllers)
    assert cgroups.remove_tree(tree.top / "agentenv/c")
    assert not (tree.top / "agentenv").exists()
    assert (tree.top / "cgroup.subtree_control").read_text().split() == sorted(tree.controllers)
    assert tree.cgroup_of(pid) == tree.own


def test_a_cgroup_that_cannot_be_emptied_is_left_as_it_was(tree: CgroupTree, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tree.start()
    monkeypatch.setattr(cgroups, "_BUSY_DEADLINE_S", 0.1)
    monkeypatch.setattr(cgroups, "_move", lambda *_: None)
    layout = claimed("c")
    assert set(layout.parents.values()) == {tree.top}
    assert_limits_work(layout, "c", tree.controllers)
    assert_as_before(tree, pid)


def test_containers_that_begin_while_others_end(tree: CgroupTree) -> None:
    """The last one gives back what the next one delegates: what is claimed has its controllers all the same."""
    pids = [tree.start() for _ in range(2)]

    def lives(name: str) -> None:
        for number in range(8):
            container = f"{name}-{number}"
            assert_limits_work(claimed(container), container, tree.controllers)
            assert cgroups.remove_tree(tree.own / "agentenv" / container)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lives, ["a", "b", "c"]))
    assert_as_before(tree, *pids)

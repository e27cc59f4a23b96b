"""Which cgroup files get which values: pure planning, and making it so on a fake tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import cgroups, limits
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB, SlotLimits

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
38 31 0:35 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_SELF = "9:name=systemd:/\n8:pids:/job\n4:memory:/docker/abc\n2:cpu,cpuacct:/\n0::/\n"
LIMITS = SlotLimits(
    processes=50,
    memory_bytes=96 * MIB,
    workspace_bytes=8 * MIB,
    tmp_bytes=8 * MIB,
    shm_bytes=8 * MIB,
    cpu_weight=200,
)


def layout_two(root: str = "/cg") -> limits.CgroupLayout:
    return limits.CgroupLayout(2, dict.fromkeys(("cpu", "memory", "pids"), Path(root)))


def test_v1_layout_follows_the_own_cgroup_below_each_mount() -> None:
    layout = limits.layout_v1(V1_MOUNTS, V1_SELF)
    assert layout is not None
    assert dict(layout.parents) == {
        "memory": Path("/sys/fs/cgroup/memory"),
        "pids": Path("/sys/fs/cgroup/pids/job"),
        "cpu": Path("/sys/fs/cgroup/cpu,cpuacct"),
    }


def test_a_mount_from_outside_the_cgroup_namespace_is_not_ours() -> None:
    mounts = "38 31 0:35 /../.. /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert limits.layout_v1(mounts, "4:memory:/\n") is None


def test_a_container_started_inside_another_s_cgroup_sits_beside_it() -> None:
    mounts = "30 1 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    found = limits.own_directory_v2(mounts, "0::/job/agentenv/outside\n")
    assert found == (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/job"))


def test_v1_slot_plan() -> None:
    layout = limits.layout_v1(V1_MOUNTS, V1_SELF)
    assert layout is not None
    plan = limits.slot_plan(layout, "c", "slot-3", LIMITS)
    values = {str(setting.file): setting.value for setting in plan.settings}
    memory = "/sys/fs/cgroup/memory/agentenv/c/slot-3"
    assert values == {
        "/sys/fs/cgroup/pids/job/agentenv/c/slot-3/pids.max": "52",
        f"{memory}/memory.limit_in_bytes": str(96 * MIB),
        f"{memory}/memory.memsw.limit_in_bytes": str(97 * MIB),
        f"{memory}/memory.kmem.tcp.limit_in_bytes": str(96 * MIB),
        "/sys/fs/cgroup/cpu,cpuacct/agentenv/c/slot-3/cpu.shares": "2048",
    }
    assert plan.kill_file is None
    assert {file.name for file in plan.join_files} == {"tasks"}


def test_the_most_cpu_time_of_a_slot() -> None:
    two = limits.slot_plan(layout_two(), "c", "slot-3", LIMITS, cpu_millis=1500)
    assert [(each.file.name, each.value, each.required) for each in two.settings][-1] == (
        "cpu.max",
        "150000 100000",
        True,
    )
    assert limits.slot_plan(layout_two(), "c", "slot-3", LIMITS).settings == two.settings[:-1]
    one = limits.CgroupLayout(1, {"cpu": Path("/cg/cpu")})
    quota = [(each.file, each.value) for each in limits.slot_plan(one, "c", "slot-3", LIMITS, cpu_millis=500).settings][
        -2:
    ]
    at = Path("/cg/cpu/agentenv/c/slot-3")
    assert quota == [(at / "cpu.cfs_period_us", "100000"), (at / "cpu.cfs_quota_us", "50000")]
    without = limits.CgroupLayout(1, {"pids": Path("/cg/pids")})
    assert limits.slot_plan(without, "c", "slot-3", LIMITS, cpu_millis=500) == limits.slot_plan(
        without, "c", "slot-3", LIMITS
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, ""),
        ({"cpu_millis": 2000, "memory_bytes": 512 * MIB}, ""),
        ({"cpu_millis": 2001}, "root.cpu_millis: 2.001 cores are more than this machine has (2)"),
        ({"memory_bytes": 512 * MIB + 1}, "root.memory_bytes: 536870913 bytes are more than this machine has"),
    ],
)
def test_more_than_the_machine_has_is_refused(asked: dict[str, int], said: str) -> None:
    refusal = limits.Machine(2, 512 * MIB).refusal(RootSpec(f"sha256:{'a' * 64}", **asked))  # type: ignore[arg-type]
    assert (str(refusal) if refusal else "").startswith(said)
    assert (refusal is None) == (not said)


def test_v2_slot_plan() -> None:
    plan = limits.slot_plan(layout_two(), "c", "slot-3", LIMITS)
    at = Path("/cg/agentenv/c/slot-3")
    assert plan.directories == (at,)
    assert {setting.file.name: setting.value for setting in plan.settings} == {
        "pids.max": "52",
        "memory.max": str(96 * MIB),
        "memory.swap.max": "0",
        "memory.oom.group": "0",
        "cpu.weight": "200",
    }
    assert (plan.kill_file, plan.memory_limit) == (at / "cgroup.kill", at / "memory.max")
    assert plan.join_files == (at / "cgroup.procs",)


def test_the_server_has_more_weight_than_a_slot_and_no_limits() -> None:
    plan = limits.server_plan(layout_two(), "c")
    assert [(setting.file.name, setting.value) for setting in plan.settings] == [("cpu.weight", "1000")]


def test_delegation_empties_the_cgroup_before_it_hands_controllers_down() -> None:
    steps = limits.delegation(Path("/cg/scope"), "c", frozenset({"memory", "pids"}), is_real_root=False)
    assert steps.leave == Path("/cg/scope")
    assert steps.leaf == Path("/cg/scope/agentenv/outside")
    assert [str(file.parent) for file in steps.subtree_control] == [
        "/cg/scope",
        "/cg/scope/agentenv",
        "/cg/scope/agentenv/c",
    ]
    assert steps.enable == "+memory +pids"
    assert limits.delegation(Path("/cg"), "c", frozenset(), is_real_root=True).leave is None


def test_a_required_file_that_is_missing_is_an_error_and_an_optional_one_is_not(tmp_path: Path) -> None:
    layout = limits.CgroupLayout(2, {"memory": tmp_path, "pids": tmp_path})
    plan = limits.slot_plan(layout, "c", "slot-0", LIMITS)
    plan.directories[0].parent.mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        cgroups.make(plan)

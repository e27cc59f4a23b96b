from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import attest
from agentenv.sandbox.supervisor.attest import Expected, Mount, Seen, judge, parse_mounts

GOLDEN = """\
148 165 0:47 / /proc ro,nosuid,nodev,noexec,relatime - proc none rw
149 165 0:48 / /sys ro,nosuid,nodev,noexec,relatime - sysfs none rw
150 165 0:49 / /dev rw,nosuid,noexec,relatime - tmpfs none rw,size=64k,nr_inodes=64,mode=755,uid=1879048192
151 150 0:50 / /dev/shm rw,nosuid,nodev,relatime - tmpfs none rw,size=16384k,uid=1879048192,gid=1879048192
152 150 0:62 / /dev/pts rw,nosuid,noexec,relatime - devpts none rw,gid=1879048197,mode=620,ptmxmode=666,max=64
155 150 0:44 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue none rw
156 165 0:40 /root/run/agentenv /run/agentenv ro,nosuid,nodev,relatime - tmpfs tmpfs rw,size=131072k,mode=755
157 150 0:6 /null /dev/null rw,relatime - devtmpfs devtmpfs rw,size=12334460k
158 150 0:6 /zero /dev/zero rw,relatime - devtmpfs devtmpfs rw,size=12334460k
159 150 0:6 /full /dev/full rw,relatime - devtmpfs devtmpfs rw,size=12334460k
160 150 0:6 /random /dev/random rw,relatime - devtmpfs devtmpfs rw,size=12334460k
161 150 0:6 /urandom /dev/urandom rw,relatime - devtmpfs devtmpfs rw,size=12334460k
162 150 0:6 /tty /dev/tty rw,relatime - devtmpfs devtmpfs rw,size=12334460k
165 114 0:67 / / rw,relatime - overlay overlay rw,lowerdir=l0:image,upperdir=upper,workdir=work,userxattr
166 148 0:47 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc none rw
170 148 0:6 /null /proc/keys rw,relatime - devtmpfs devtmpfs rw,size=12334460k
174 149 0:71 / /sys/firmware ro,nosuid,nodev,noexec,relatime - tmpfs none ro,size=0k
"""
"""The mountinfo of a slot above one checkpoint, shortened to three of the covers."""
FIRST = 0x7000_0000
WANT = Expected(
    first_id=FIRST,
    maps=f"0 {FIRST} 65536\n",
    capabilities=0x800425FB,
    oom_score_adj=500,
    lowers=("l0", "image"),
    shm_bytes=16 << 20,
    terminals=64,
    outside={"net": "net:[1]", "pid": "pid:[2]"},
    covers=frozenset({"/proc/sys", "/proc/keys", "/sys/firmware"}),
)
STATUS = {
    "Uid": f"{FIRST}\t{FIRST}\t{FIRST}\t{FIRST}",
    "Gid": f"{FIRST}\t{FIRST}\t{FIRST}\t{FIRST}",
    "CapInh": "0" * 16,
    "CapPrm": "00000000800425fb",
    "CapEff": "00000000800425fb",
    "CapBnd": "00000000800425fb",
    "CapAmb": "0" * 16,
    "NoNewPrivs": "0",
    "Seccomp": "2",
}
GOOD = Seen(
    uid_map=f"         0 {FIRST}      65536\n",
    gid_map=f"         0 {FIRST}      65536\n",
    status=STATUS,
    pids=("40", "1"),
    namespaces={"net": "net:[3]", "pid": "pid:[4]"},
    mounts=tuple(parse_mounts(GOLDEN)),
    oom_score_adj=500,
    in_cgroup=True,
)


def test_the_slot_as_the_launcher_makes_it_is_as_promised() -> None:
    assert judge(GOOD, WANT) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"uid_map": "0 0 4294967295\n"}, "uid_map is 0 0 4294967295"),
        ({"gid_map": ""}, "gid_map is empty"),
        ({"pids": ("40",)}, "its pids are '40': it is not the first process of its own pid namespace"),
        ({"pids": ("40", "2")}, "its pids are '40 2': it is not the first process of its own pid namespace"),
        ({"namespaces": {"net": "net:[1]"}}, "its net namespace is the container's"),
        ({"oom_score_adj": 0}, "its oom_score_adj is 0, not 500"),
        ({"in_cgroup": False}, "it is not in the slot's cgroup"),
    ],
)
def test_anything_else_is_told(change: dict[str, object], said: str) -> None:
    assert judge(dataclasses.replace(GOOD, **change), WANT) == [said]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STATUS)
def test_every_line_of_the_status_counts(name: str) -> None:
    for status in ({**STATUS, name: "3"}, {key: value for key, value in STATUS.items() if key != name}):
        (said,) = judge(dataclasses.replace(GOOD, status=status), WANT)
        assert said.startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("/proc ro,", "/proc rw,", "/proc is not ro"),
        ("/sys ro,nosuid,", "/sys ro,", "/sys is not nosuid"),
        ("- sysfs none", "- tmpfs none", "/sys is a tmpfs"),
        ("/null /dev/null", "/sda /dev/null", "/dev/null shows /sda"),
        ("/null /proc/keys", "/keys /proc/keys", "/proc/keys shows /keys"),
        ("max=64", "max=1048576", "/dev/pts is not max=64"),
        ("size=16384k", "size=99999999k", "/dev/shm is not size=16384k"),
        ("/run/agentenv ro", "/run/agentenv rw", "/run/agentenv is not ro"),
        ("lowerdir=l0:image", "lowerdir=/srv/l0:image", "/ is not lowerdir=l0:image"),
        (",userxattr", "", "/ is not userxattr"),
        ("/ / rw,relatime - overlay", "/ / rw,relatime - ext4", "/ is a ext4"),
        ("/dev/mqueue rw", "/mnt rw", "mqueue is mounted at /mnt"),
    ],
)
def test_a_mount_that_is_another_one_is_told(old: str, new: str, said: str) -> None:
    assert old in GOLDEN
    seen = dataclasses.replace(GOOD, mounts=tuple(parse_mounts(GOLDEN.replace(old, new))))
    assert judge(seen, WANT)[0] == said


@pytest.mark.parametrize("line", GOLDEN.splitlines())
def test_a_missing_mount_is_told_and_one_more(line: str) -> None:
    point = line.split()[4]
    without = tuple(mount for mount in GOOD.mounts if mount.point != point)
    assert judge(dataclasses.replace(GOOD, mounts=without), WANT) == [f"nothing is mounted at {point}"]
    twice = (*GOOD.mounts, next(mount for mount in GOOD.mounts if mount.point == point))
    assert judge(dataclasses.replace(GOOD, mounts=twice), WANT) == [f"{point} is mounted twice"]
    host = Mount("/host", "ext4", "/", frozenset({"rw"}), frozenset())
    assert judge(dataclasses.replace(GOOD, mounts=(*GOOD.mounts, host)), WANT) == ["ext4 is mounted at /host"]


def test_with_nested_namespaces_only_proc_differs() -> None:
    mounts = tuple(parse_mounts(GOLDEN.replace("/proc ro,", "/proc rw,")))
    assert judge(dataclasses.replace(GOOD, mounts=mounts), dataclasses.replace(WANT, nested=True)) == []


def test_where_namespaces_may_not_be_read_pids_and_maps_speak() -> None:
    assert judge(dataclasses.replace(GOOD, namespaces={}), WANT) == []
    assert judge(dataclasses.replace(GOOD, namespaces={}, pids=("1",)), WANT) != []


def test_this_process_is_read_and_is_no_slot(tmp_path: Path) -> None:
    group = tmp_path / "cgroup.procs"
    group.write_text(f"1\n{os.getpid()}\n")
    seen = attest.read(os.getpid(), [group])
    assert seen.in_cgroup
    assert not attest.read(os.getpid(), [group, Path("/dev/null")]).in_cgroup
    assert set(seen.namespaces) == set(attest.NAMESPACES)
    said = judge(seen, dataclasses.replace(WANT, outside=attest.namespaces_of("self")))
    assert {f"its {kind} namespace is the container's" for kind in attest.NAMESPACES} <= {*said}


def test_covers_are_those_that_this_machine_has() -> None:
    found = attest.expected_covers()
    assert "/proc/sys" in found
    assert all(Path(path).exists() for path in found)


def test_binds_are_where_they_were_asked_for_and_read_only() -> None:
    want = dataclasses.replace(WANT, binds=("/opt/given",))
    kept = frozenset({"ro", "nosuid", "nodev"})
    bind = Mount("/opt/given", "ext4", "/data", kept, frozenset())
    below = dataclasses.replace(bind, point="/opt/given/below")
    assert judge(dataclasses.replace(GOOD, mounts=(*GOOD.mounts, bind, below)), want) == []
    assert judge(GOOD, want) == ["nothing is mounted at /opt/given"]
    for loose in (dataclasses.replace(bind, flags=kept - {"ro"}), dataclasses.replace(bind, point="/opt/other")):
        assert judge(dataclasses.replace(GOOD, mounts=(*GOOD.mounts, loose)), want) != []
    writable_below = dataclasses.replace(below, flags=kept - {"ro"})
    found = judge(dataclasses.replace(GOOD, mounts=(*GOOD.mounts, bind, writable_below)), want)
    assert found == ["/opt/given/below is not ro"]

"""What a root inside can and cannot do: image slots of a container of local processes, where no other filter stands
around them, of one that has few ids, and of one that Docker has made of the job file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from agentenv.containers.control import ContainerControl
from agentenv.errors import ConfigError
from agentenv.executor.session import ToolSession
from agentenv.sandbox.supervisor.user_namespace import FIRST_ID, FIRST_LEAN_ID, IDS
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.leases import CheckpointSlot
from tests.few_ids import FIRST as FIRST_OF_FEW
from tests.image_sources import member
from tests.security.conftest import sh
from tests.security.image_slots import Images, ImageSlots, container, make_images, usual_files
from tests.small_root import files, programs

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give image slots their ids"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return make_images(tmp_path_factory.mktemp("images"))


@pytest_asyncio.fixture(params=["local", "nomad", "lean"], scope="module", loop_scope="module")
async def container_of_images(request: pytest.FixtureRequest, images: Images) -> AsyncIterator[ImageSlots]:
    async with container(images, request) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def slots(container_of_images: ImageSlots) -> AsyncIterator[ImageSlots]:
    yield container_of_images
    await container_of_images.release_all()


# ---- the attack kit

EXPECTED: Final[Mapping[str, str]] = {
    "read the agent's memory": "EACCES",
    "read the agent's environment": "EACCES",
    "read the agent's maps": "EACCES",
    "list the agent's descriptors": "EACCES",
    "open the agent's program": "EACCES",
    "read the agent's program": "EACCES",
    "raise the agent's oom score": "EROFS",
    "lower my oom score": "EROFS",
    "trace the agent": "EPERM",
    "read the agent's memory by a call": "EPERM",
    "steal the agent's descriptor": "EPERM",
    "limit the agent": "EPERM",
    "slow the agent": "EPERM",
    "write /run/agentenv": "EROFS",
    "replace the agent": "EROFS",
    "unmount /run/agentenv": "EPERM",
    "mount a tmpfs": "EPERM",
    "bind /": "EPERM",
    "make /proc writable": "EPERM",
    "pivot the root": "EPERM",
    "open a file system": "ENOSYS",
    "copy a mount": "ENOSYS",
    "change a mount": "ENOSYS",
    "clone with a user namespace": "EPERM",
    "clone3": "ENOSYS",
    "make a disk": "EPERM",
    "make /dev/mem": "EPERM",
    "make a whiteout": "EPERM",
    "make a device in /dev": "EPERM",
    "a packet socket": "EAFNOSUPPORT",
    "a vsock socket": "EAFNOSUPPORT",
    "a filter of a socket": "EPERM",
    "a program of a socket": "EPERM",
    "a program of a port": "EPERM",
    "a larger buffer than the machine allows": "EPERM",
    "a filter of system calls": "EINVAL",
    "pages of the image in memory": "ENOSYS",
    "pages of a file in memory": "ENOSYS",
    "submit aio": "ENOSYS",
    "watch a file system": "ENOSYS",
    "a handle of a file": "ENOSYS",
    "secret memory": "ENOSYS",
    "a shadow stack": "ENOSYS",
    "pages in another order": "ENOSYS",
    "pages in a pipe": "ENOSYS",
    "write out a disk of the machine": "done",  # that is, nothing was
    "add a key": "ENOSYS",
    "read a keyring": "ENOSYS",
    "request a key": "ENOSYS",
    "bpf": "EPERM",
    "perf": "EPERM",
    "io_uring": "ENOSYS",
    "userfaultfd": "EPERM",
    "take all aio contexts": "ENOSYS",
    "compare processes": "EPERM",
    "load a module": "EPERM",
    "swap": "EPERM",
    "reboot": "EPERM",
    "account": "EPERM",
    "set the time": "EPERM",
    "read the kernel's log": "EPERM",
    "read quotas": "EPERM",
    "open by handle": "EPERM",
    "set core_pattern": "EROFS",
    "have the kernel watch the machine's memory": "EROFS",
    "set the machine's memory types": "EROFS",
    "set sysrq": "ENOENT",
    "write /sys": "EROFS",
    "write a block device's setting": "EROFS",
    "forge an opaque directory": "done",  # as an attribute of the slot's own, which overlay does not read: see below
    "forge a redirect": "done",
    "forge overlay's own": "EPERM",
    "set a trusted attribute": "EPERM",
    "another personality": "EPERM",
    "a call of i386": "ENOSYS",
    "be a uid outside": "EINVAL",
    "be uid -2": "EINVAL",
    "leave by chroot": "EPERM",
    "set a capability": "EPERM",
    **{f"unshare {kind}": "EPERM" for kind in ("mnt", "uts", "ipc", "user", "pid", "net", "cgroup")},
    **{f"enter the agent's {kind}": "EACCES" for kind in ("mnt", "uts", "ipc", "user", "pid", "net", "cgroup")},
}
OTHERWISE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "set sysrq",
            "set the machine's memory types",
            "have the kernel watch the machine's memory",
            "write /sys",
            "write a block device's setting",
        ),
        "ENOENT",
    ),  # not every kernel has them
    "a call of i386": f"ended with {int(signal.SIGSYS)}",  # by the container's filter
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outcomes(container_of_images: ImageSlots) -> dict[str, str]:
    """What became of every attempt, in one slot."""
    one = await container_of_images.open()
    told: dict[str, str] = json.loads(await sh(one, "python3 /attacks.py", timeout_s=120))
    assert await sh(one, "echo alive") == "alive\n"
    await container_of_images.release_all()
    return told


async def test_the_kit_is_known(outcomes: dict[str, str]) -> None:
    assert outcomes.keys() == EXPECTED.keys()


@pytest.mark.parametrize("attempt", EXPECTED)
async def test_an_attempt_of_root_inside(outcomes: dict[str, str], attempt: str) -> None:
    assert outcomes[attempt] in (EXPECTED[attempt], OTHERWISE.get(attempt))


# ---- the agent, the machine, the neighbours


async def test_nobody_inside_can_end_stop_or_hide_from_the_agent(slots: ImageSlots) -> None:
    one = await slots.open()
    await sh(one, "kill -9 1; kill -STOP 1; kill -SEGV 1; kill -9 -1", timeout_s=20)
    assert await sh(one, "echo alive") == "alive\n"


async def test_mounts_name_no_path_of_the_machine(slots: ImageSlots) -> None:
    one = await slots.open()
    told = await sh(one, "cat /proc/self/mountinfo /proc/self/mounts")
    lowers = "i0:i1" if slots.kind == "lean" else "image"  # an image of two layers
    assert f"lowerdir={lowers},upperdir=upper,workdir=work" in told
    state = [str(slots.images.directory), "/tmp/", "private", "store", "local-0"]
    assert [name for name in state if name in told] == []


async def test_no_process_of_a_slot_keeps_the_machines_mounts(slots: ImageSlots) -> None:
    """A working directory in the old root would keep a copy of all mounts of the container, for each slot."""
    await sh(await slots.open(), "true")
    (agent,) = slots.agents()
    namespace, root = Path(f"/proc/{agent}/ns/mnt").readlink(), Path(f"/proc/{agent}/root").stat()
    places = {}
    for pid in slots.processes():
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/ns/mnt").readlink() == namespace:
                places[pid] = Path(f"/proc/{pid}/cwd").stat()
    assert agent in places
    assert [pid for pid, place in places.items() if place.st_dev != root.st_dev] == []


async def test_a_slot_has_ids_of_its_own_which_nobody_else_has(slots: ImageSlots) -> None:
    for _ in range(2):
        await slots.open()
    maps = [Path(f"/proc/{pid}/uid_map").read_text().split() for pid in slots.agents()]
    if slots.kind == "lean":  # which all image slots have
        first = FIRST_OF_FEW + FIRST_LEAN_ID
        assert maps == [["0", str(first), "2000", "65534", str(first + 2000), "1"]] * 2
        return
    firsts = [int(first) for _, first, _ in maps]
    assert len(set(firsts)) == 2
    assert all(first >= FIRST_ID and (first - FIRST_ID) % IDS == 0 for first in firsts)
    assert [(inside, count) for inside, _, count in maps] == [("0", str(IDS))] * 2


async def test_slots_see_nothing_of_each_other(slots: ImageSlots) -> None:
    one, two = await slots.open(), await slots.open()
    await sh(one, "echo secret > /etc/secret; echo secret > /tmp/s; echo s > /dev/shm/s; (setsid sleep 4321 &)")
    seen = "ls /etc/secret /tmp/s /dev/shm/s; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep '43[2]1'; true"
    assert await sh(two, seen) == ""
    assert await sh(two, "ls /proc/sys/net/ipv4 > /dev/null; cat /proc/net/dev | tail -n +3 | wc -l") == "1\n"


async def test_setuid_and_file_capabilities_work_inside_and_nowhere_else(slots: ImageSlots) -> None:
    one = await slots.open()
    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups"
    own_uid = "'import os; print(os.geteuid())'"
    assert await sh(one, f"{as_user} python3 -c {own_uid}; {as_user} setuid -c {own_uid}") == "1000\n0\n"
    await sh(one, "cp /usr/bin/setuid /tmp/mine; chown 0:0 /tmp/mine; chmod 6755 /tmp/mine")
    (agent,) = slots.agents()
    for name in ("usr/bin/setuid", "tmp/mine"):
        program = os.open(f"/proc/{agent}/root/{name}", os.O_PATH)
        try:
            command = [f"/proc/self/fd/{program}", "-I", "-S", "-c", "import os; print(os.geteuid(), os.getegid())"]
            ran = subprocess.run(
                command, pass_fds=[program], user=1000, group=1000, capture_output=True, text=True, check=True, env={}
            )
        finally:
            os.close(program)
        assert ran.stdout == "1000 1000\n", name


async def test_forged_attributes_of_overlay_hide_nothing_and_show_nothing(slots: ImageSlots) -> None:
    """Also not once the layer that they were written to lies below another one."""
    one = await slots.open()
    forge = (
        "import os; [os.setxattr('/usr', f'user.overlay.{n}', v) for n, v in (('opaque', b'y'), ('redirect', b'/etc'))]"
    )
    await sh(one, f'python3 -c "{forge}"; touch /usr/own')
    assert await sh(one, "ls /usr | tr '\\n' ' '") == "bin lib lib64 own "
    name = await _checkpoint(one)
    two = await slots.open(checkpoint=name)
    for session in (one, two):
        assert await sh(session, "ls /usr | tr '\\n' ' '") == "bin lib lib64 own "


async def _checkpoint(session: ToolSession) -> str:
    async with ContainerControl(session.lease.container, guest=True) as control:
        return (await control.act(session.lease.key, CheckpointSlot())).checkpoint


# ---- resources

HOGS: Final = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; while :; do :; done",
    "kill storm": "for i in $(seq 200); do kill -9 -1; done",
    "memory hog": "tail /dev/zero",
    "memory hog that hides": "python3 -c 'import os; [os.fork() for _ in range(3)]; b = bytearray(9 ** 9); os.wait()'",
    "disk filler": "cat /dev/zero > /full",
    "inode filler": 'python3 -c \'for i in range(10000): open(f"/f{i}", "w").close()\'',
    "shared memory filler": "cat /dev/zero > /dev/shm/full",
    "device node filler": "for i in $(seq 100); do : > /dev/f$i || break; done",
    "output flood": "cat /dev/zero",
    "descriptor hog": 'for i in $(seq 10 5000); do eval "exec $i</dev/null" || break; done',
}


@pytest.mark.parametrize("hog", HOGS)
async def test_no_hog_fails_a_neighbour_or_makes_its_own_slot_an_infrastructure_fault(
    slots: ImageSlots, hog: str
) -> None:
    bad, good = await slots.open(), await slots.open()
    call = asyncio.create_task(bad.call("bash", {"command": HOGS[hog]}, timeout_s=3.0))
    for number in range(10):
        assert await sh(good, f"echo {number} > file; cat file") == f"{number}\n"
    result = await call
    assert result.fault in ("none", "model"), result
    assert await sh(bad, "rm -rf /full /f[0-9]* /dev/shm/* /dev/f[0-9]*; echo usable", timeout_s=60) == "usable\n"


async def test_a_memory_hog_is_told_so(slots: ImageSlots) -> None:
    one = await slots.open()
    result = await one.call("bash", {"command": "tail /dev/zero"}, timeout_s=60)
    assert (result.oom_killed, result.exit_code, result.fault) == (True, 137, "none")


async def test_a_full_disk_is_told_to_the_command_only(slots: ImageSlots) -> None:
    one = await slots.open()
    result = await one.call("bash", {"command": "cat /dev/zero > /full"}, timeout_s=60)
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert int(await sh(one, "stat -c %s /full")) <= 64 << 20


async def test_nothing_outlives_a_release(slots: ImageSlots) -> None:
    for _ in range(3):
        one = await slots.open()
        left = "ls -A /root /etc/left /tmp /dev/shm 2>/dev/null | grep left; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        assert "left" not in await sh(one, left)
        await sh(one, "echo x > /etc/left; rm -rf /usr/bin/env; echo x > /dev/shm/left; (setsid sleep 4321 left &)")
        await slots.release_all()
        plain = await slots.open_plain()
        assert await sh(plain, "id -u; ls /etc/left /attacks.py 2>/dev/null; ls -A") != "0\n"
        await slots.release_all()


# ---- limits of a lease


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"memory_bytes": 10**12}, "root.memory_bytes: 1000000000000 is more than a slot here has"),
        ({"processes": 10_000}, "root.processes: 10000 is more than a slot here has"),
        ({"writable_bytes": 310 << 20}, "root.writable_bytes: .* do not fit"),
    ],
)
async def test_what_the_container_cannot_hold_is_refused_before_anything_is_done(
    slots: ImageSlots, asked: dict[str, Any], said: str
) -> None:
    plain = await slots.open_plain()
    before = await slots.epochs(plain)
    with pytest.raises(ConfigError, match=said):
        await slots.open(**asked)
    assert await slots.epochs(plain) == before


FORK_ALL: Final = """
import os, time
count = 0
while True:
    try:
        os.fork() or time.sleep(20)
    except OSError:
        break
    count += 1
print(count, flush=True)
"""


def _cpu_most(pid: int) -> str:
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    old = [path for _, controllers, path in lines if "cpu" in controllers.split(",")]
    if old:
        return Path(f"/sys/fs/cgroup/cpu{old[0]}/cpu.cfs_quota_us").read_text().strip()
    return Path(f"/sys/fs/cgroup{lines[0][2]}/cpu.max").read_text().split()[0]


async def test_a_lease_has_the_memory_processes_and_cpu_that_it_asks_for(slots: ImageSlots) -> None:
    one = await slots.open(memory_bytes=200 << 20, processes=20, cpu_millis=500)
    (agent,) = slots.agents()
    assert _cpu_most(agent) == "50000"
    hog = await one.call("bash", {"command": "tail /dev/zero"}, timeout_s=60)
    assert hog.oom_killed
    assert (hog.peak_memory_bytes or 0) <= 201 << 20
    told = await sh(one, f"python3 -c '{FORK_ALL}'; kill -9 -1", timeout_s=60)
    assert 10 <= int(told.split()[0]) <= 20


async def test_one_that_asks_for_more_memory_than_others_is_bounded_alone(slots: ImageSlots) -> None:
    usual, plain, large = await slots.open(), await slots.open_plain(), await slots.open(memory_bytes=480 << 20)
    for beside in (usual, plain):
        assert await sh(beside, "(setsid sleep 4321 &) ; echo started") == "started\n"
    for one, limit_bytes in ((large, 480 << 20), (usual, 320 << 20)):
        hog = await one.call("bash", {"command": "tail /dev/zero"}, timeout_s=120)
        assert hog.oom_killed
        assert 0.8 * limit_bytes < (hog.peak_memory_bytes or 0) <= limit_bytes + (1 << 20)
        for beside in (usual, plain):
            assert await sh(beside, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 4321'") == "1\n"
    await slots.release_all()  # all three are leased
    with pytest.raises(ConfigError, match=r"root\.memory_bytes: .* \(limits\.max_memory_bytes\)"):
        await slots.open(memory_bytes=513 << 20)


async def test_what_a_slot_writes_may_be_kept_on_the_disk(slots: ImageSlots) -> None:
    if slots.kind == "nomad":  # where containers are given loop devices by name only
        with pytest.raises(ConfigError, match=r"root\.writable: no loop devices .*loop_devices"):
            await slots.open(writable="disk")
        return
    if slots.kind == "lean":
        with pytest.raises(ConfigError, match=r"root\.writable: only the machine's root may mount a file system"):
            await slots.open(writable="disk")
        return
    one = await slots.open(writable="disk", writable_bytes=400 << 20, memory_bytes=200 << 20)
    write = "dd if=/dev/zero of=/large bs=1M count=300 2>/dev/null; stat -c '%s %u' /large"
    assert await sh(one, write, timeout_s=60) == f"{300 << 20} 0\n", "more than it has memory"
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    await sh(one, f'cd /work; python3 -c "{deep}"; chmod 000 /work', timeout_s=60)
    assert await sh(one, "rm /usr/bin/wc; ls /usr/bin/wc 2>&1 | grep -c 'cannot access'") == "1\n"
    await slots.release_all()
    two = await slots.open(writable="disk")
    assert await sh(two, "ls /large /usr/bin/wc 2>/dev/null") == "/usr/bin/wc\n"


# ---- odd images


def _with(*members: tuple[tarfile.TarInfo, bytes]) -> tuple[tuple[tarfile.TarInfo, bytes], ...]:
    """The usual files, but for what these replace."""
    replaced = {made.name for made, _ in members}
    kept = (each for each in usual_files() if each[0].name.split("/")[0] not in replaced)
    return (*kept, *members)


def _link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


ODD: Final[Mapping[str, tuple[tuple[tarfile.TarInfo, bytes], ...]]] = {
    "files": tuple(member(name, b"a file") for name in ("proc", "sys", "dev", "run", "tmp", "etc")),
    "links to nowhere": tuple(_link(name, "/nowhere") for name in ("proc", "sys", "dev", "run", "tmp", "etc")),
    "links to each other": (_link("proc", "sys"), _link("sys", "dev"), _link("dev", "proc")),
    "links out": tuple(_link(name, "../../../../../../tmp") for name in ("proc", "sys", "dev", "run", "etc")),
    "links to directories": (_link("tmp", "work"), _link("run", "work"), _link("etc", "work")),
    "links as our directory": (member("run", type=tarfile.DIRTYPE, mode=0o755), _link("run/agentenv", "/usr")),
    "links as our files": (_link("etc/hosts", "/usr/bin/bash"), _link("etc/resolv.conf", "/proc/1/mem")),
    "closed directories": tuple(member(name, type=tarfile.DIRTYPE, mode=0) for name in ("run", "etc", "tmp", "proc")),
    "no passwd, a fifo": (member("etc/passwd", type=tarfile.FIFOTYPE),),
    "a device as passwd": (member("etc/passwd", type=tarfile.CHRTYPE, devmajor=1, devminor=5),),
    "a hostile passwd": (member("etc/passwd", b"root:x:4294967295:-1:" + b"A" * 100_000 + b"\n\0\xff:::\n:"),),
    "a hostile preload": (member("etc/ld.so.preload", b"/nowhere.so\n"), member("etc/profile", b"exit 1\n")),
}


@pytest.mark.parametrize("odd", ODD)
async def test_an_odd_image_is_a_slot_like_others(slots: ImageSlots, odd: str) -> None:
    one = await slots.open(slots.images.over_programs(*_with(*ODD[odd])))
    seen = await sh(one, "[ -r /proc/self/status ] && [ -d /sys/class ] && [ -c /dev/null ] && echo fine")
    assert seen == "fine\n"
    assert (await sh(one, "cat /etc/hosts | head -1")).startswith("127.0.0.1")
    assert (await one.call("write_file", {"path": "/tmp/file", "text": "text"})).exit_code == 0
    content = (await one.call("read_file", {"path": "/tmp/file"})).content
    assert isinstance(content, dict)
    assert content["text"] == "text"
    await slots.release_all()
    plain = await slots.open_plain()
    assert await sh(plain, "echo the container is as it was") == "the container is as it was\n"


_BASH_BYTES: Final = 16 * 2**20
BASHES: Final[Mapping[str, tuple[bytes, str]]] = {
    "near versions": (b"@(#)Bash version ", "/usr/bin"),
    "near machines": (b"-linux-aaaaaaaaaaaaa", "/usr/bin"),
    "versions of blanks": (b"@(#)Bash version " + b" " * 63, "/usr/bin"),
    "many directories": (b"x", ":".join(["/usr/bin", *(f"/d{number}" for number in range(4_000))])),
    "directories outside": (b"x", "/usr/bin:/../../../../../../usr/bin:/../../../../proc/1/root/usr/bin"),
}


@pytest.mark.parametrize("name", BASHES)
async def test_an_images_bash_holds_no_loop(slots: ImageSlots, name: str) -> None:
    piece, path = BASHES[name]
    hostile = member("usr/bin/bash", piece * (_BASH_BYTES // len(piece)), mode=0o755)
    image = slots.images.make(
        slots.images.programs, files(*usual_files(), hostile), config={"Env": [f"PATH={path}"], "User": "0"}
    )
    plain = await slots.open_plain()
    before = await slots.stalls(plain, "supervisor")
    await slots.open(image)
    after = await slots.stalls(plain, "supervisor")
    held = after["stack"] if after["longest_s"] > before["longest_s"] else ""
    assert "static_bash" not in held, (after["longest_s"], held)
    await slots.release_all()


async def test_without_bash_the_containers_own_runs_calls_sessions_and_scripts(slots: ImageSlots) -> None:
    names = ("cat", "env", "ls", "sleep")
    bare = slots.images.make(programs(*names, python=False), files(member("work", type=tarfile.DIRTYPE, mode=0o777)))
    one = await slots.open(bare)
    assert await sh(one, "echo $((1 + 1)); ls /usr/bin | cat | head -1 2>/dev/null; type bash") == (
        "2\nbash is /run/agentenv/bash\n"
    )
    assert await sh(one, "echo $LINENO; BASH_ENV= bash -c 'echo $0'") == "1\nbash\n"
    terminal = await one.call("terminal", {"command": "cd /usr && x=5"}, timeout_s=30)
    assert terminal.fault == "none", terminal
    terminal = await one.call("terminal", {"command": "pwd; echo $x"}, timeout_s=30)
    assert terminal.stdout == "/usr\n5\n", terminal
    await one.call("process", {"action": "start", "command": "echo from a process > /work/told"}, timeout_s=30)
    assert await sh(one, "until [ -s /work/told ]; do sleep 0.05; done; cat /work/told") == "from a process\n"


async def test_without_tmux_the_containers_own_draws_the_screen(slots: ImageSlots) -> None:
    """It needs neither libraries nor a locale of the image, and what it needs itself its programs do not get."""
    bare = slots.images.make(programs("sleep", python=False), files(member("work", type=tarfile.DIRTYPE, mode=0o777)))
    one = await slots.open(bare)
    asked = {"action": "start", "command": "echo ünder ${TMUX%%,*} ${LOCPATH-nothing}; sleep 600"}
    assert (await one.call("tmux", asked, timeout_s=60)).fault == "none"
    waited = await one.call("tmux", {"action": "wait", "until": "text", "text": "nothing"}, timeout_s=60)
    assert waited.stdout == "ünder /tmp/tmux.agentenv nothing\n"
    ended = await one.call("tmux", {"action": "stop"}, timeout_s=60)
    assert ended.fault == "none", ended


PING: Final = """
import os, socket, struct
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
head = lambda check: struct.pack("!BBHHH", 8, 0, check, 77, 1)
wire = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
wire.settimeout(20)
wire.sendto(head(checksum(head(0))), ("127.0.0.1", 0))
while (answer := wire.recv(100)[20:])[0] != 0: pass
print("uid", os.geteuid(), "was answered", struct.unpack("!HH", answer[4:8]))
"""


async def test_ping_as_debian_ships_it_works_for_users(slots: ImageSlots) -> None:
    """A program with cap_net_raw as a file capability, which the kernel does not execute where it cannot be had."""
    one = await slots.open()
    await one.call("write_file", {"path": "/work/ping.py", "text": PING})
    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups"
    assert await sh(one, f"{as_user} raw /work/ping.py") == "uid 1000 was answered (77, 1)\n"
    assert await sh(one, f"{as_user} python3 /work/ping.py 2>&1 | tail -1") == (
        "PermissionError: [Errno 1] Operation not permitted\n"
    )


async def test_a_lease_that_asks_for_packets_gets_those_of_its_own_interfaces(slots: ImageSlots) -> None:
    one = await slots.open(capabilities=("net_raw",))
    assert json.loads(await sh(one, "python3 /attacks.py 'a packet socket'")) == {"a packet socket": "done"}
    assert await sh(one, "ls /sys/class/net") == "lo\n"


IF_NESTED: Final = {
    "a filter of system calls": "EFAULT",
    "unshare user": "done",
    "clone with a user namespace": "done",
    "raise the agent's oom score": "EACCES",
    "mount a tmpfs": "EPERM",
    "bind /": "EPERM",
}


async def test_a_lease_may_ask_for_nested_namespaces_as_browsers_make_them(slots: ImageSlots) -> None:
    """Root of such a namespace mounts and makes further ones; of the slot and the agent it gets no more than before."""
    one = await slots.open(nested_namespaces=True)
    await sh(one, "mkdir -p /mnt; chmod 755 /mnt")
    script = "id -u; python3 /attacks.py 'mount a tmpfs'"
    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups"
    assert await sh(one, f'{as_user} unshare -Urmpf bash -c "{script}"') == '0\n{"mount a tmpfs": "done"}'
    told = json.loads(await sh(one, "python3 /attacks.py", timeout_s=120))
    may_be_lowered = "lower my oom score"  # where the container cannot set the least: docs/isolation.md
    assert told.pop(may_be_lowered) in ("done", "EACCES")
    wanted = {**EXPECTED, **IF_NESTED, may_be_lowered: "EROFS"}
    told[may_be_lowered] = "EROFS"
    assert {name: said for name, said in told.items() if said not in (wanted[name], OTHERWISE.get(name))} == {}
    assert told.keys() == wanted.keys()


async def test_what_root_may_do(slots: ImageSlots) -> None:
    """What images are for: users, owners, privileged programs, the system's files."""
    one = await slots.open()
    script = """
    set -e
    mkdir /srv && echo data > /srv/f && chown 1000:1000 /srv/f && chmod 600 /srv/f
    rm /usr/bin/env && mv /usr/bin/wc /usr/bin/env
    setpriv --reuid 1000 --regid 1000 --clear-groups cat /srv/f
    setpriv --reuid 1001 --regid 1001 --clear-groups cat /srv/f 2>/dev/null || echo refused
    python3 -c 'import os; os.chroot("/usr"); print(os.listdir("/"))'
    python3 -c 'import socket; socket.socket().bind(("127.0.0.1", 80)); print("port 80")'
    """
    told: Any = (await sh(one, script)).splitlines()
    assert told[:2] == ["data", "refused"]
    assert "bin" in told[2]
    assert told[3:] == ["port 80"]


FILES_OF_USERS: Final = """
import json, os, sys
for way in sys.argv[1:]:
    os.chdir(f"/srv/{way}")
    modes = {"own": (0, 0o644), "users": (1000, 0o600), "ids": (1000, 0o6755), "linked": (1000, 0o640)}
    for name, (owner, mode) in modes.items():
        with open(name, "w") as file:
            file.write("old\\nsecond\\n")
        os.chown(name, owner, owner)
        os.chmod(name, mode)
    os.link("linked", "link")
    os.setxattr("users", "user.key", b"value")
    os.setxattr("own", "security.capability", b"\\1\\0\\0\\2\\0\\x20" + bytes(14))
"""
FACTS: Final = """
import json, os, sys
facts = {}
for way in sys.argv[1:]:
    os.chdir(f"/srv/{way}")
    for name in sorted(os.listdir()):
        found = os.stat(name)
        with open(name) as file:
            kept = [oct(found.st_mode), found.st_uid, found.st_gid, found.st_nlink, os.listxattr(name), file.read()]
        facts.setdefault(way, {})[name] = kept
print(json.dumps(facts))
"""


def files_of_an_image(directory: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Files that a slot copies before it writes to them: one, and one with two names."""
    content, owner = b"old\nsecond\n", {"uid": 1000, "gid": 1000, "mode": 0o640}
    return [
        member(directory, type=tarfile.DIRTYPE, mode=0o755),
        member(f"{directory}/below", content, **owner),
        member(f"{directory}/linked-below", content, **owner),
        member(f"{directory}/link-below", type=tarfile.LNKTYPE, linkname=f"{directory}/linked-below"),
    ]


async def test_what_root_writes_by_calls_keeps_what_it_keeps_under_a_shell(slots: ImageSlots, tmp_path: Path) -> None:
    """Owners, bits, attributes, links: of files that others own, too."""
    ways = ("shell", "write", "patch", "upload")
    below = [entry for way in ways for entry in files_of_an_image(f"srv/{way}")]
    one = await slots.open(slots.images.over_programs(*usual_files(), *below))
    tools = ToolContext(one)
    await tools.write_file("/work/files.py", FILES_OF_USERS)
    await tools.write_file("/work/facts.py", FACTS)
    assert await sh(one, f"python3 /work/files.py {' '.join(ways)} 2>&1") == ""
    (tmp_path / "new").write_text("new\nsecond\n")
    for name in ("own", "users", "ids", "linked", "below", "linked-below"):
        await sh(one, f"printf 'new\\nsecond\\n' > /srv/shell/{name}")
        await tools.write_file(f"/srv/write/{name}", "new\nsecond\n")
        await tools.patch(f"--- {name}\n+++ {name}\n@@ -1,2 +1,2 @@\n-old\n+new\n second\n", path="/srv/patch")
        mode = int(await sh(one, f"stat -c %a /srv/shell/{name}"), 8) & 0o777
        (tmp_path / "new").chmod(mode)
        await tools.upload(tmp_path / "new", f"/srv/upload/{name}")
    found = json.loads(await sh(one, f"python3 /work/facts.py {' '.join(ways)}"))
    assert found["shell"]["users"][1:] == [1000, 1000, 1, ["user.key"], "new\nsecond\n"]
    assert found["write"] == found["patch"] == found["shell"]
    found["shell"]["ids"][0] = oct(0o100755)  # an upload has the bits that its file has here, and these are 0777
    assert found["upload"] == found["shell"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"capabilities": ("net_admin",)}, r"root\.capabilities: .*net_admin \(allowed_capabilities\)"),
        ({"capabilities": ("net_raw",)}, r"root\.capabilities: .*net_raw \(allowed_capabilities\)"),
        ({"nested_namespaces": True}, r"root\.nested_namespaces: .*allow_nested_namespaces"),
    ],
)
async def test_what_reaches_more_of_the_kernel_is_allowed_by_name(
    cautious: ImageSlots, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        await cautious.open(**asked)
    assert await sh(await cautious.open(capabilities=("sys_ptrace",)), "echo works") == "works\n"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def a_cautious_container(images: Images) -> AsyncIterator[ImageSlots]:
    async with container(images, allowing=False) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def cautious(a_cautious_container: ImageSlots) -> AsyncIterator[ImageSlots]:
    yield a_cautious_container
    await a_cautious_container.release_all()

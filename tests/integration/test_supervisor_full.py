"""A container as root: slots, resets, seals, losses, the server's crashes, what the server is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.limit_watch import LimitFiles, LimitWatch
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.supervisor import limits
from agentenv.wire.spec import Bind, SlotLimits
from tests.integration.supervisor_harness import Container, assert_nothing_left, cgroups_of, living, processes_with
from tests.waiting import START_S, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="full isolation is root's; user mode has its own tests")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")  # below a directory only root can enter, as pytest makes it


@pytest.fixture
def container(place: Path) -> Iterator[Container]:
    with Container(place) as made:
        made.ready()
        yield made


def test_ready_says_what_it_is_and_everything_is_proved(container: Container) -> None:
    ready = next(line for line in container.events.seen if line["event"] == "ready")
    assert ready["isolation"] == "full"
    assert ready["weaker"] == []
    assert Path(f"/proc/{ready['pid']}").exists()
    assert container.server_lines is not None
    hello = container.server_lines.seen[0]["packet"]
    assert hello["op"] == "hello"
    assert hello["token"] == "a-token-for-tests-only"
    assert len(hello["proofs"]) >= 16
    assert [proof for proof in hello["proofs"] if not proof["holds"]] == []


def test_the_server_is_nobody(container: Container) -> None:
    container.order(status=True)
    assert container.server_lines is not None
    told = container.server_lines.until(lambda line: "environ" in line)
    status = dict(line.split(":\t", 1) for line in told["status"].splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["10000"] * 4
    assert status["Gid"].split() == ["10000"] * 4
    assert status["Groups"].strip() == ""
    assert all(int(status[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert status["NoNewPrivs"] == "1"
    assert int(status["SigIgn"], 16) & 1 << signal.SIGTERM - 1 == 0
    assert told["cwd"] == "/"
    assert "SECRET_OF_HOST" not in told["environ"]


def test_a_slot_is_its_uid_and_sees_little(container: Container) -> None:
    seen = container.bash(1, "id -u; whoami; hostname; ls /; cat /proc/1/environ; ls /proc/1/fd; touch /usr/x")
    words = seen.split()
    assert int(words[0]) % 1000 == 1
    assert int(words[0]) >= 20_000
    assert words[1:3] == ["agent", "slot"]
    assert "root" in words
    assert "work" not in words
    assert "Read-only file system" in seen


def test_a_reset_leaves_nothing(container: Container) -> None:
    marker = f"98765.{os.getpid()}"
    container.bash(0, f"echo secret > kept; echo x > /tmp/t; setsid sleep {marker} > /dev/null 2>&1 & sleep 0.05")
    wait_for(lambda: bool(processes_with(marker)), explain="the daemon runs")
    before = container.slots(0)[0]
    container.send(op="reset", slot=0)
    after = container.packet("slot_ready", slot=0, epoch=before["epoch"] + 1)
    assert (after["kept"], after["lease"]) == (False, None)
    assert processes_with(marker) == []
    assert container.bash(0, "ls -A /workspace /tmp; ls /proc | grep -c '^[0-9]'").split()[:2] == [
        "/tmp:",
        "/workspace:",
    ]


def test_memory_files_are_readable_and_fresh_after_a_reset(container: Container) -> None:
    memory = LimitFiles(**container.slots(1)[1]["limits"])
    container.bash(1, "head -c 50000000 /dev/zero > file")
    used = _peak_bytes(memory)
    assert used > 50_000_000
    container.send(op="reset", slot=1)
    container.packet("slot_ready", slot=1, epoch=1)
    assert _peak_bytes(memory) < 20_000_000


def _peak_bytes(files: LimitFiles) -> int:
    watch = LimitWatch(files)
    peak = watch.peak_bytes()
    watch.close()
    assert peak is not None
    return peak


def test_a_seal_keeps_the_workspace_and_nothing_else(container: Container) -> None:
    marker = f"98764.{os.getpid()}"
    container.bash(0, f"echo work > kept; echo x > /tmp/t; setsid sleep {marker} > /dev/null 2>&1 & sleep 0.05")
    wait_for(lambda: bool(processes_with(marker)), explain="the daemon runs")
    before = container.slots(0)[0]["epoch"]
    container.send(op="seal", slot=0)
    after = container.packet("slot_ready", slot=0, kept=True)
    assert after["epoch"] == before
    assert processes_with(marker) == []
    assert container.bash(0, "cat kept; ls -A /tmp") == "work\n"


def test_a_reset_asked_for_during_a_seal_follows_it(container: Container) -> None:
    container.bash(0, "echo work > kept")
    before = container.slots(0)[0]["epoch"]
    container.send(op="seal", slot=0)
    container.send(op="reset", slot=0)
    container.packet("slot_ready", slot=0, epoch=before + 1, kept=False)
    assert container.bash(0, "ls -A") == ""


def test_requests_about_an_ended_epoch_are_dropped(container: Container) -> None:
    container.send(op="reset", slot=1, epoch=0)
    container.packet("slot_ready", slot=1, epoch=1)
    container.bash(1, "echo mine > kept")
    container.send(op="reset", slot=1, epoch=0)
    container.send(op="seal", slot=0, epoch=1)
    container.packet("slot_ready", slot=0, kept=True)
    assert container.bash(1, "cat kept") == "mine\n"


def test_a_slot_that_dies_comes_back(container: Container) -> None:
    agents = {pid for pid in living(container) if _command(pid).startswith("/run/agentenv/slotagent")}
    assert len(agents) == 2
    os.kill(max(agents), signal.SIGKILL)
    lost = container.packet("slot_lost")
    assert lost["loss"] == LossReason.ended
    container.packet("slot_ready", slot=lost["slot"], kept=False)
    assert container.bash(lost["slot"], "echo back") == "back\n"


def test_what_a_dead_server_had_said_of_its_leases_is_heard(place: Path) -> None:
    with Container(place, slots=6) as made:
        made.ready()
        supervisor = int(Path(f"/proc/{made.process.pid}/task/{made.process.pid}/children").read_text())
        os.kill(supervisor, signal.SIGSTOP)  # it is behind: nothing is read while the server lives
        leases = [{"secret": f"s{slot}"} for slot in range(6)]
        for slot, lease in enumerate(leases):
            made.send(op="remember", slot=slot, epoch=made.slots(slot)[slot]["epoch"], lease=lease)
        server = made.server_pid()
        made.order(exit=1)
        wait_for(lambda: _ended(server), explain="the server has ended")
        os.kill(supervisor, signal.SIGCONT)
        made.accept()
        assert [made.slots(*range(6))[slot]["lease"] for slot in range(6)] == leases


def test_a_slot_that_a_dead_server_had_is_reset_unless_a_lease_is_remembered(container: Container) -> None:
    epochs = {slot: packet["epoch"] for slot, packet in container.slots(0, 1).items()}
    container.send(op="remember", slot=0, lease={"secret": "s"})
    container.bash(0, "echo mine > kept")
    container.bash(1, "echo theirs > left")  # whose, it had no time to say
    container.order(exit=1)
    container.accept()
    after = container.slots(0, 1)
    assert (after[0]["epoch"], after[0]["kept"], after[0]["lease"]) == (epochs[0], True, {"secret": "s"})
    assert (after[1]["epoch"], after[1]["lease"]) == (epochs[1] + 1, None)
    assert container.bash(1, "ls") == ""


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def test_a_server_s_crash_keeps_slots_and_leases(container: Container) -> None:
    lease = {"secret": "s", "trajectory": "t"}
    container.bash(0, "echo work > kept")
    container.send(op="remember", slot=0, lease=lease)
    container.order(exit=3)
    container.accept()
    container.event("server_restarted")
    assert container.packet("slot_ready", slot=0)["lease"] == lease
    assert container.slots(0)[0]["kept"] is True
    assert container.bash(0, "cat kept") == "work\n"


def test_a_server_s_crash_keeps_the_highest_generation_it_has_told(container: Container) -> None:
    for generation in (3, 7, 5):
        container.send(op="fence", generation=generation)
    container.order(exit=3)
    container.accept()
    assert container.packet("hello")["generation"] == 7


def test_a_slot_whose_lease_ended_is_reset_before_a_new_server_gets_it(container: Container) -> None:
    container.send(op="remember", slot=1, lease={"secret": "s"})
    container.bash(1, "echo work > kept")
    container.send(op="remember", slot=1, lease=None)
    container.order(exit=0)
    container.accept()
    container.packet("slot_ready", slot=1, epoch=1, kept=False)
    assert container.bash(1, "ls -A") == ""


@pytest.mark.parametrize("bad", [{"op": "mount"}, {"op": "reset", "slot": 7}, ["x"]])
def test_a_server_that_breaks_the_contract_is_started_anew(container: Container, bad: object) -> None:
    container.order(send=bad)
    container.accept()
    container.event("server_restarted")
    container.slots(0, 1)
    assert container.bash(0, "echo fine") == "fine\n"


def test_a_crash_loop_ends_the_container(place: Path) -> None:
    with Container(place) as container:
        container.ready()
        ends, crashes = time.monotonic() + START_S, 1
        container.order(exit=1)
        while container.goes_on() and time.monotonic() < ends:  # until five have fallen into ten seconds
            container.accept()
            container.order(exit=1)  # without waiting for the slots
            crashes += 1
        assert crashes >= 5
        failed = container.event("failed")
        assert failed["code"] == "sandbox_unavailable"
        assert "5 times" in failed["message"]
        assert container.process.wait(START_S) == 2
        assert_nothing_left(container)


def test_what_cannot_be_proved_clean_is_never_used_again(container: Container) -> None:
    pid = next(line for line in container.events.seen if line["event"] == "ready")["pid"]
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    workspace = next(line.split()[4] for line in mounts if line.split()[4].endswith("/ws/1"))
    hold = ["nsenter", "--mount", "--target", str(pid), "sh", "-c", f"cd {workspace} && echo in && exec sleep 1000"]
    with subprocess.Popen(hold, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"in\n"
            container.send(op="reset", slot=1)
            failed = container.packet("slot_failed", slot=1)
            assert "its cleanup could not be verified" in failed["reason"]
            container.send(op="reset", slot=1)
            container.send(op="seal", slot=0)
            container.packet("slot_ready", slot=0, kept=True)
        finally:
            holder.kill()
    assert container.server_lines is not None
    ready = [line["packet"] for line in container.server_lines.seen if line.get("packet", {}).get("op") == "slot_ready"]
    assert not [packet for packet in ready if packet["slot"] == 1 and packet["epoch"] > 0]


def test_binds_are_shown_read_only_even_from_a_private_home(place: Path) -> None:
    home = place / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "file").write_text("content")
    home.chmod(0o700)
    with Container(place, slots=1, binds=(Bind(str(home / "data"), "/opt/data"),)) as container:
        container.ready()
        seen = container.bash(0, "cat /opt/data/file; echo x > /opt/data/file; ls /opt")
        assert seen.startswith("content")
        assert "Read-only" in seen


def test_containers_side_by_side_share_no_uid(container: Container, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Container(tmp_path_factory.mktemp("second")) as second:
        second.ready()
        assert container.bash(0, "id -u") != second.bash(0, "id -u")


def test_the_state_may_live_below_a_private_home(place: Path) -> None:
    home = place / "private"
    home.mkdir(mode=0o700)
    with Container(place, slots=1, data_dir=str(home / "state")) as container:
        container.ready()
        assert container.bash(0, "echo fine") == "fine\n"
        assert container.stop() == 0
        assert_nothing_left(container)
        assert cgroups_of(container.spec.container) == []


RECIPE = ("setpriv", "--bounding-set", "-all,+sys_admin,+setuid,+setgid,+setpcap,+kill", "--inh-caps", "-all")
"""What a Nomad job grants: five capabilities, neither dac_override nor sys_ptrace."""


@pytest.fixture
def own_cgroup() -> Iterator[tuple[str, ...]]:
    """Starts a container in cgroups made for it, as a container runtime does; the command prefix."""
    own = Path("/proc/self/cgroup").read_text()
    layout = limits.layout_v1(Path("/proc/self/mountinfo").read_text(), own)
    parents = list(layout.parents.values()) if layout else [Path("/sys/fs/cgroup")]
    made = [parent / f"runtime{os.getpid()}" for parent in parents]
    for directory in made:
        directory.mkdir()
    join = " ".join(f"echo 0 > {directory}/cgroup.procs;" for directory in made)
    try:
        yield ("sh", "-c", f'{join} exec "$@"', "-")
    finally:
        for directory in made:
            directory.rmdir()


@pytest.mark.parametrize("allow_network", [False, True])
def test_the_capabilities_of_the_container_recipe_suffice(
    tmp_path: Path, own_cgroup: tuple[str, ...], *, allow_network: bool
) -> None:
    with Container(tmp_path, prefix=(*own_cgroup, *RECIPE), allow_network=allow_network) as container:
        assert container.ready()["weaker"] == []
        container.bash(0, "echo x > file")
        container.send(op="seal", slot=0)
        container.packet("slot_ready", slot=0, kept=True)
        container.send(op="reset", slot=0)
        container.packet("slot_ready", slot=0, kept=False, epoch=2)
        assert container.stop() == 0
        assert_nothing_left(container)


def test_root_without_cgroups_serves_and_says_what_is_weaker(tmp_path: Path) -> None:
    hide = ("unshare", "-m", "--propagation", "private", "sh", "-c", 'umount -R /sys/fs/cgroup; exec "$@"', "-")
    with Container(tmp_path, prefix=(*hide, *RECIPE), limits=SlotLimits(processes=30)) as container:
        ready = container.ready()
        assert ready["isolation"] == "full"
        assert [sentence.split(" ")[0] for sentence in ready["weaker"]] == ["Processes", "Memory", "An", "CPU"]
        assert container.bash(0, "ulimit -Hu; ulimit -Hd").split() == ["32", str(SlotLimits().memory_bytes // 1024)]
        assert container.slots(0)[0]["limits"]["memory"] is None
        container.send(op="reset", slot=0)
        container.packet("slot_ready", slot=0, kept=False, epoch=2)


def test_full_isolation_by_name_needs_cgroups(tmp_path: Path) -> None:
    hide = ("unshare", "-m", "--propagation", "private", "sh", "-c", 'umount -R /sys/fs/cgroup; exec "$@"', "-")
    with Container(tmp_path, prefix=hide, isolation="full") as container:
        event = container.event("failed")
        assert "cgroup" in event["message"]
        assert "isolation=auto" in event["next_step"]


def test_no_descriptor_of_the_caller_s_reaches_a_slot(place: Path) -> None:
    leak = ("sh", "-c", 'exec 7< /etc/shadow 8< /etc/passwd && exec "$@"', "-")
    with Container(place, slots=1, prefix=leak) as container:
        ready = container.ready()
        (agent,) = (pid for pid in living(container) if _command(pid).startswith("/run/agentenv/slotagent"))
        for pid in (agent, *(int(text) for text in _children(ready["pid"]))):
            targets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
            assert not targets & {"/etc/shadow", "/etc/passwd"}
            assert not [target for target in targets if "lock" in target or "state" in target]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_too_few_descriptors_for_the_slots_are_said_at_start(place: Path) -> None:
    with Container(place, prefix=("prlimit", "--nofile=150:150"), slots=4) as made:
        failed = made.event("failed")
        assert failed["code"] == "config"
        assert "4 slots need a limit of at least 256 open files" in failed["message"]
        assert "ulimit -Hn" in failed["next_step"]

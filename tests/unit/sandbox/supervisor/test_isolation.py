"""What a slot sees, as data: modes, bwrap's arguments, /etc, reachability, what is weaker."""

from __future__ import annotations

import dataclasses
import stat
from ipaddress import IPv4Network
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest

from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    ProtocolError,
    SandboxUnavailableError,
    SelfTestError,
    StartTimeoutError,
)
from agentenv.sandbox.closed_networks import machine_addresses
from agentenv.sandbox.supervisor import isolation, mounts, network, selftest
from agentenv.sandbox.supervisor.isolation import FULL, USER, Identity
from agentenv.sandbox.supervisor.selftest import Ran
from agentenv.slots.backends.base import StartFailed
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec, unfit
from agentenv.wire.spec import Bind, Capability, SandboxSpec, SlotLimits

ROOT = Identity(FULL, 0, 0, uid_block=2)
ORDINARY = Identity(USER, 1000, 1000)


def test_modes() -> None:
    assert [isolation.choose_mode("auto", uid) for uid in (0, 1000)] == [FULL, USER]
    assert isolation.choose_mode("full", 0) == FULL
    with pytest.raises(SandboxUnavailableError, match="needs root"):
        isolation.choose_mode("full", 1000)
    with pytest.raises(SandboxUnavailableError, match="never run as uid 0"):
        isolation.choose_mode("user", 0)


def test_uids() -> None:
    assert Identity(FULL, 0, 0).slot_uid(7) == 20_007
    assert [ROOT.slot_uid(k) for k in (0, 1)] == [22_000, 22_001]
    assert (ROOT.server_uid, ROOT.proxy_uid) == (10_000, 10_001)
    assert ORDINARY.proxy_uid == 1000
    assert {ORDINARY.slot_uid(k) for k in range(5)} == {1000}


def argv(*, given: bool = False) -> list[str]:
    covered = ["/proc/keys", "/proc/partitions"]
    places = (Path("/p/root"), Path("/p/ws/0"), Path("/p/pts/0"))
    return isolation.bwrap_argv("bwrap", *places, SlotLimits(), 4, covered, namespace_given=given)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "option",
    ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent",
     "--new-session", "--clearenv"],
)  # fmt: skip
def test_bwrap_is_asked_for_every_promise(option: str, given: bool) -> None:
    assert option in argv(given=given)


def test_bwrap_makes_user_namespaces_or_joins_those_that_were_made() -> None:
    assert {"--unshare-user", "--disable-userns"} <= set(argv())
    assert {"--userns", "--assert-userns-disabled"} <= set(argv(given=True))
    assert not {"--unshare-user", "--disable-userns"} & set(argv(given=True)), "bwrap takes either"


def test_the_device_directory_is_closed_after_its_sized_parts_are_in_it() -> None:
    given = argv()
    closed = given.index("/dev", given.index("--dev") + 2)
    assert given[closed - 1] == "--remount-ro"
    assert given.index("--dev") < given.index("/dev/shm") < closed < given.index("/tmp")
    assert given[given.index("/dev/shm") - 4] == str(SlotLimits().shm_bytes)
    assert given[given.index("--cap-drop") + 1] == "ALL"
    terminals = given.index("/dev/pts")
    assert given[terminals - 2 : terminals] == ["--dev-bind", "/p/pts/0"]
    assert given.index("--dev") < terminals < closed, "over the one of bwrap's, which has no limit"


def test_nothing_is_written_through_proc_and_no_key_of_the_machine_is_listed() -> None:
    given = argv()
    mounted, closed = given.index("/proc"), given.index("/proc", given.index("/proc") + 1)
    assert given[closed - 1] == "--remount-ro"
    assert mounted < given.index("/proc/keys") < given.index("/proc/partitions") < closed
    without = isolation.bwrap_argv(
        "bwrap", Path("/p"), Path("/w"), Path("/t"), SlotLimits(), 4, [], namespace_given=True
    )
    assert "/proc/keys" not in without, "a kernel without keys has no such file to cover"


def test_every_slot_uid_is_named_agent() -> None:
    passwd = isolation.etc_files(ROOT, 3, allow_network=False)["passwd"]
    assert [line.split(":")[2] for line in passwd.splitlines() if line.startswith("agent:")] == [
        "22000",
        "22001",
        "22002",
    ]
    assert isolation.etc_files(ORDINARY, 3, allow_network=False)["passwd"].count("agent:x") == 1


def test_a_resolver_only_where_there_is_a_network() -> None:
    assert "resolv.conf" not in isolation.etc_files(ROOT, 1, allow_network=False)
    assert isolation.etc_files(ROOT, 1, allow_network=True)["resolv.conf"] == "nameserver 10.0.2.3\n"


@pytest.mark.parametrize(
    "target", ["/", "/usr", "/etc", "/proc/x", "/dev", "/workspace/data", "/tmp/x", "rel", "/a/../usr"]
)
def test_binds_must_not_cover_the_slot_s_own(target: str) -> None:
    with pytest.raises(ConfigError, match=r"binds\[0\]"):
        isolation.check_binds([Bind("/opt/x", target)])


def test_good_binds_pass() -> None:
    isolation.check_binds([Bind("/data/models", "/opt/models"), Bind("/usr/share/x", "/usr/local/x")])


def test_what_is_weaker() -> None:
    assert isolation.weaker(ROOT, ("memory", "pids", "cpu"), "") == []
    everything = isolation.weaker(ORDINARY, (), "no delegation", "no ids")
    assert "(1000) (no ids): only namespaces" in everything[0]
    assert len(everything) == 5
    assert all(sentence.endswith(".") for sentence in everything)
    assert any("no delegation" in sentence for sentence in everything)
    assert len(isolation.weaker(ROOT, ("memory", "pids"), "")) == 1


def test_bwrap_s_words_become_a_cure() -> None:
    error = isolation.explain_bwrap("bwrap: setting up uid map: Permission denied")
    assert "AppArmor" in error.next_step
    assert "doctor" in isolation.explain_bwrap("bwrap: something new").next_step


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("Permission denied", "AppArmor"),
        ("Operation not permitted", "AppArmor"),
        ("Resource temporarily unavailable", "max_net_namespaces"),
        ("No space left on device", "max_user_namespaces"),
    ],
)
def test_the_errno_decides_what_refused_a_namespace(why: str, cure: str) -> None:
    error = isolation.explain_bwrap(f"bwrap: Creating new namespace failed: {why}")
    assert cure in error.next_step
    assert ("AppArmor" in error.next_step) is (cure == "AppArmor")


IN_DOCKER = """\
1 0 0:41 / / ro,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A,upperdir=/x/diff,workdir=/x/work
2 1 254:0 /usr/bin/tini-static /usr/sbin/docker-init ro,relatime - ext4 /dev/vda rw
3 1 254:0 /data /binds/0 ro,relatime shared:7 - ext4 /dev/vda rw
4 1 0:50 / /proc rw - proc proc rw
"""


def test_what_lies_on_the_engines_overlay_is_seen() -> None:
    assert mounts.layered(IN_DOCKER, "/usr"), "a file mounted below it is the engine's own"
    assert not mounts.layered(IN_DOCKER, "/binds/0")
    assert not mounts.layered(IN_DOCKER.replace("/usr/sbin/docker-init", "/usr/share"), "/usr"), "it would be missing"
    assert not mounts.layered(IN_DOCKER + "5 1 8:1 / / rw - ext4 /dev/sda rw\n", "/usr"), "the last one covers"
    assert not mounts.layered("1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / /usrx rw - overlay overlay rw\n", "/usr")


def test_paths_of_the_engine_are_named_without_refusing_to_serve() -> None:
    proofs = selftest.judge(GOOD | {"layers./usr": "1"}, WANT)
    assert [proof.detail for proof in proofs if not proof.holds] == ["the engine's directories are named at /usr"]
    assert selftest.failure(proofs) is None


MODES = {"/": 0o755, "/root": 0o700, "/root/.pyenv": 0o755, "/opt": 0o755, "/opt/py": 0o750}


def mode_of(path: Path) -> int:
    return stat.S_IFDIR | MODES.get(str(path), 0o755)


def test_the_topmost_blocker_is_found() -> None:
    assert mounts.first_blocker(Path("/root/.pyenv/versions/3"), mode_of) == Path("/root")
    assert mounts.first_blocker(Path("/opt/py/lib"), mode_of) == Path("/opt/py")
    assert mounts.first_blocker(Path("/usr/lib"), mode_of) is None


def test_the_private_place_covers_nothing_that_is_needed() -> None:
    def exists(path: Path) -> bool:
        return str(path) in ("/mnt", "/srv")

    assert mounts.private_place(Path("/root/s"), [Path("/usr")], exists) == Path("/mnt")
    assert mounts.private_place(Path("/root/s"), [Path("/mnt/data")], exists) == Path("/srv")
    assert mounts.private_place(Path("/srv"), [Path("/mnt/a"), Path("/srv/b")], exists) == Path("/srv")
    with pytest.raises(FileNotFoundError):
        mounts.private_place(Path("/root/s"), [Path("/mnt/a"), Path("/srv/b")], exists)


FIB = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
        |-- 127.0.0.1
           /32 host LOCAL
     |-- 192.0.2.2
        /32 host LOCAL
     |-- 192.0.2.255
        /32 link BROADCAST
"""


def test_the_machine_s_addresses_are_found() -> None:
    assert machine_addresses(FIB) == [IPv4Network("192.0.2.2/32")]


def test_a_route_message_is_well_formed() -> None:
    message = network.route_message(IPv4Network("169.254.0.0/16"), 5)
    assert len(message) == int.from_bytes(message[:4], "little") == 36
    assert message[16 + 1] == 16  # prefix length
    assert message[-4:] == bytes([169, 254, 0, 0])
    removed = network.route_message(IPv4Network("169.254.0.0/16"), 5, remove=True)
    assert (message[4], removed[4]) == (24, 25)  # linux/rtnetlink.h
    assert message[16:] == removed[16:]


def test_denied_networks_are_routes_where_the_stack_would_carry_them() -> None:
    policy = NetworkPolicy("public", denied=("10.0.0.0/8", "10.0.2.0/24", "10.0.2.2", "2001:db8::/32", "192.0.2.1"))
    assert network.denied_routes(policy) == {IPv4Network("10.0.0.0/8"), IPv4Network("192.0.2.1/32")}


WANT = selftest.Expected(
    uid=20_000,
    host_namespaces=dict.fromkeys(selftest.NAMESPACES, "[1]"),
    workspace_bytes=1 << 20,
    workspace_inodes=100,
    tmp_bytes=1 << 20,
    environment=frozenset({"PATH"}),
    allow_network=False,
)
GOOD = {
    "status.Uid": "20000", "status.CapPrm": "0000", "status.CapEff": "0000", "status.CapBnd": "0000",
    "status.NoNewPrivs": "1", "mount./": "ro,nosuid", "mount./workspace": "rw", "mount./dev/null": "rw",
    "net.lo": "1", "processes": "2", "init": "slotagent", "workspace": "probe",
    "workspace_bytes": str(1 << 20), "workspace_inodes": "100", "tmp_bytes": str(1 << 20), "unshare": "1",
    "terminals": str(isolation.MAX_TERMINALS),
    "env.PATH": "1", **{f"ns.{kind}": "[2]" for kind in selftest.NAMESPACES},
}  # fmt: skip


def test_a_good_report_proves_everything() -> None:
    proofs = selftest.judge(GOOD, WANT)
    assert all(proof.holds for proof in proofs), proofs
    assert selftest.failure(proofs) is None


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"status.Uid": "0"}, "own uid"),
        ({"status.CapBnd": "01ff"}, "no capabilities"),
        ({"status.NoNewPrivs": "0"}, "no new privileges"),
        ({"ns.net": "[1]"}, "own namespaces"),
        ({"mount./usr": "rw"}, "system read-only"),
        ({"usr_written": "1"}, "system read-only"),
        ({"workspace": ""}, "workspace writable"),
        ({"workspace_bytes": str(1 << 30)}, "workspace size limit"),
        ({"terminals": "- devpts devpts rw,mode=620,ptmxmode=666"}, "terminals limit"),
        ({"net.eth0": "1"}, "no network"),
        ({"unshare": "0"}, "no user namespaces"),
        ({"unshare": "127"}, "no user namespaces"),
        ({"env.SECRET": "1"}, "clean environment"),
        ({"processes": "90"}, "own /proc"),
        ({"init": "systemd"}, "own /proc"),
    ],
)
def test_each_broken_promise_is_named(change: dict[str, str], broken: str) -> None:
    proofs = selftest.judge(GOOD | change, WANT)
    assert [proof.name for proof in proofs if not proof.holds] == [broken]
    error = selftest.failure(proofs)
    assert error is not None
    assert broken in error.message
    assert error.next_step


@pytest.mark.parametrize("line", sorted(key for key in GOOD if not key.startswith(("mount.", "ns.cgroup"))))
def test_a_missing_line_never_proves_anything(line: str) -> None:
    report = {key: value for key, value in GOOD.items() if key != line}
    assert selftest.failure(selftest.judge(report, WANT)) is not None


@pytest.mark.parametrize(
    ("raised", "said", "permanent"),
    [
        (TimeoutError(), StartTimeoutError, False),
        (ProtocolError("the slot's agent ended"), SelfTestError, True),
        (PermissionError(13, "pids.max"), SelfTestError, True),
    ],
)
async def test_lateness_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, said: type[AgentEnvError], permanent: bool
) -> None:
    """On an overloaded machine the next start may do: backends try again, waiters wait on."""

    async def prove(*_: object) -> list[selftest.Verdict]:
        raise raised

    monkeypatch.setattr(selftest, "_prove", prove)
    with pytest.raises(said, match="did not finish") as caught:
        await selftest.prove(None, Mock(), {}, ("127.0.0.1", 1))  # type: ignore[arg-type]
    assert type(caught.value) is said
    assert StartFailed.from_event({"code": caught.value.code}).permanent is permanent


@pytest.mark.parametrize(("mode", "open_to_all"), [(0o666, True), (0o600, False), (0o660, False), (0o644, False)])
def test_a_tun_device_that_a_slot_s_uid_cannot_open_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, *, open_to_all: bool
) -> None:
    tun = tmp_path / "tun"
    tun.touch()
    tun.chmod(mode)
    monkeypatch.setattr(network, "TUN", tun)
    monkeypatch.setattr("agentenv.sandbox.supervisor.network.shutil.which", lambda _: "/usr/bin/slirp4netns")
    if open_to_all:
        assert network.find_tool() == "/usr/bin/slirp4netns"
        return
    with pytest.raises(SandboxUnavailableError, match="every user may open") as refused:
        network.find_tool()
    assert f"chmod 0666 {tun}" in refused.value.next_step


@pytest.mark.parametrize(("status", "holds", "says"), [(200, True, ""), (201, False, "openat2"), (0, False, "with 0")])
def test_a_kernel_without_openat2_is_not_served_on(status: int, holds: bool, says: str) -> None:
    proof = selftest.files_proof(Ran(status))
    assert proof.required
    assert proof.holds is holds
    assert says in proof.detail


def test_what_has_to_be_allowed_is_refused_by_its_name() -> None:
    cautious = SandboxSpec(container="c", token_file="/t", data_dir="/d", store_dir="/s")
    refused = isolation.refused_roots(cautious, ("cpu", "memory", "pids"), "", "", "")
    assert set(refused) == {"capabilities=net_raw", "capabilities=net_admin", "nested_namespaces"}
    assert "allowed_capabilities" in refused["capabilities=net_admin"]
    assert "allow_nested_namespaces" in refused["nested_namespaces"]


def test_what_of_a_root_a_container_refuses() -> None:
    plain = SandboxSpec(container="c", token_file="/t", data_dir="/d")
    allowing = dataclasses.replace(plain, allowed_capabilities=get_args(Capability), allow_nested_namespaces=True)
    with_store = dataclasses.replace(allowing, store_dir="/s")
    every = ("cpu", "memory", "pids")

    assert isolation.refused_roots(with_store, every, "", "", "") == {}
    assert isolation.refused_roots(with_store, every, "", "", "no disk") == {"writable=disk": "no disk"}
    assert "--writable disk" in isolation.refused_roots(with_store, every, "", "Disk only.", "")["writable=memory"]
    neither = isolation.refused_roots(with_store, every, "", "Disk only.", "No disk.")
    assert neither["image"] == "there is no place for what slots write: Disk only. No disk."
    assert "plain slots only" in isolation.refused_roots(plain, every, "", "", "")["image"]
    assert isolation.refused_roots(with_store, every, "an old kernel", "", "") == {"image": "an old kernel"}
    refused = isolation.refused_roots(with_store, (), "", "", "")
    assert "a slot's memory and pids cannot be limited here" in refused["image"]
    assert "CPU time cannot be limited here" in refused["cpu_millis"]


def test_an_ordinary_user_without_cgroups_has_image_slots_without_limits() -> None:
    with_store = SandboxSpec(
        container="c", token_file="/t", data_dir="/d", store_dir="/s", allow_nested_namespaces=True
    )
    allowing = dataclasses.replace(with_store, allowed_capabilities=get_args(Capability))
    every = ("cpu", "memory", "pids")
    assert isolation.refused_roots(allowing, every, "", "", "", root=False) == {}
    refused = isolation.refused_roots(allowing, ("cpu",), "", "", "", root=False)
    assert refused.keys() == {"memory_bytes", "processes"}
    assert "systemd-run --user" in refused["memory_bytes"]
    limits = SlotLimits()
    assert unfit(RootSpec(f"sha256:{'0' * 64}"), limits, refused) is None
    asking = unfit(RootSpec(f"sha256:{'0' * 64}", memory_bytes=limits.memory_bytes), limits, refused)
    assert asking is not None
    assert asking.field == "root.memory_bytes"
    assert isolation.weaker_images(every, root=False) == isolation.weaker_images((), root=True) == []
    (sentence,) = isolation.weaker_images(("cpu",), root=False)
    assert "memory and pids" in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("switch", "cure"),
    [("0\n", "sysctl -w kernel.unprivileged_userns_clone=1"), ("1\n", "AppArmor"), (None, "AppArmor")],
)
def test_namespaces_that_may_not_be_made_name_the_switch_only_where_it_is_off(
    switch: str | None, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "unprivileged_userns_clone"
    if switch is not None:
        file.write_text(switch)
    monkeypatch.setattr(isolation, "_CLONE", file)
    for words in (
        "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged ones",
        "slotlaunch: make a user namespace: Operation not permitted",
    ):
        assert cure in isolation.bwrap_cure(words)

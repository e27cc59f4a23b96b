"""The doctor's rules (pure), and the readings they judge."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentenv.cli import doctor as doctor_verb
from agentenv.cli.app import app
from agentenv.doctor.facts import Cgroups, Facts, current_stale_containers, gather, stale_containers
from agentenv.doctor.rules import RULES, Finding, Level, image_slots, judge, workspaces, worst
from agentenv.errors import SandboxUnavailableError
from agentenv.subordinate_ids import Refusal
from agentenv.wire.server import Proof

GIB = 1024**3
GOOD = Facts(
    kernel="6.1.0-13-amd64",
    python=(3, 11),
    root=True,
    sys_admin=True,
    userns_max=1000,
    bwrap_version=(0, 8, 0),
    bwrap_refusal="",
    compiler="/usr/bin/cc",
    static_libc=True,
    cgroups=Cgroups("v2", frozenset({"memory", "pids", "cpu", "io"})),
    network_stacks=("slirp4netns",),
    tun_open=True,
    slot_programs=frozenset({"python3", "git", "pip"}),
    tmux=True,
    bash_static=True,
    skopeo=True,
    shm_bytes=GIB,
    open_files_hard=65536,
    terminals=3072,
    state_dir="/run/agentenv",
    state_dir_writable=True,
    state_free_bytes=GIB,
    memory_available_bytes=4 * GIB,
)
NO_IDS = Refusal("user a has no ids", ("usermod a", "apt-get install uidmap"))


def found(facts: Facts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level is not Level.ok]


def test_a_good_machine_has_no_findings() -> None:
    assert found(GOOD) == []
    assert len(judge(GOOD)) == len(RULES)


@pytest.mark.parametrize(
    ("change", "name", "level", "says"),
    [
        ({"system": "Darwin"}, "kernel", Level.broken, "need Linux"),
        ({"kernel": "5.4.0-150-generic"}, "kernel", Level.broken, "5.6"),
        ({"python": (3, 10)}, "python", Level.broken, "3.11"),
        ({"root": False, "sys_admin": False, "subordinate": NO_IDS}, "isolation", Level.broken, "has no ids"),
        (
            {"one_id_accepted": True, "root": False, "sys_admin": False, "subordinate": NO_IDS},
            "isolation",
            Level.weaker,
            "has no ids",
        ),
        ({"sys_admin": False}, "isolation", Level.broken, "CAP_SYS_ADMIN"),
        ({"bwrap_version": None, "bwrap_refusal": None}, "bubblewrap", Level.broken, "not installed"),
        ({"bwrap_version": None, "bwrap_refusal": "no libcap"}, "bubblewrap", Level.broken, "not run: no libcap"),
        ({"bwrap_version": (0, 4, 1)}, "bubblewrap", Level.broken, "0.8"),
        ({"bwrap_refusal": "No permissions"}, "bubblewrap", Level.broken, "No permissions"),
        ({"compiler": None}, "slot agent", Level.broken, "no C compiler"),
        ({"static_libc": False}, "slot agent", Level.broken, "static"),
        ({"ripgrep": SandboxUnavailableError("no ripgrep", next_step="pip")}, "ripgrep", Level.broken, "no ripgrep"),
        ({"cgroups": Cgroups("v1", frozenset({"cpu"}))}, "cgroups", Level.weaker, "memory, pids"),
        ({"cgroups": Cgroups()}, "cgroups", Level.weaker, "rlimits"),
        ({"cgroups": Cgroups("v2"), "scope": frozenset({"memory", "pids"})}, "cgroups", Level.weaker, "writable cpu;"),
        ({"network_stacks": ()}, "network in a slot", Level.weaker, "is not possible"),
        ({"tun_open": False}, "network in a slot", Level.weaker, "not every user may open /dev/net/tun"),
        ({"tmux": False}, "tmux", Level.weaker, "not installed"),
        ({"slot_programs": frozenset({"python3"})}, "programs in slots", Level.weaker, "git, pip"),
        ({"bash_static": False}, "fast shell", Level.weaker, "0.4 ms"),
        ({"skopeo": False}, "images of registries", Level.weaker, "skopeo is not installed"),
        ({"no_new_privileges": True}, "privileges of images", Level.weaker, "without no-new-privileges"),
        ({"disk_refusal": "/c lies on tmpfs"}, "storage on disk", Level.weaker, "/c lies on tmpfs"),
        ({"open_files_hard": 1024}, "ulimits", Level.weaker, "1024"),
        ({"terminals": 512}, "terminals", Level.weaker, "enough for 8 slots"),
        ({"memory_available_bytes": 1}, "memory", Level.weaker, "available"),
        ({"state_dir_writable": False}, "state directory", Level.broken, "cannot be written"),
        ({"state_free_bytes": 0}, "state directory", Level.broken, "0 MiB free"),
        ({"stale_containers": ("c-1", "c-2")}, "dead containers", Level.weaker, "c-1, c-2"),
    ],
)
def test_each_lack_is_one_finding_with_a_cure(change: dict[str, Any], name: str, level: Level, says: str) -> None:
    (finding,) = found(dataclasses.replace(GOOD, **change))
    assert (finding.name, finding.level) == (name, level)
    assert says in finding.detail
    assert finding.cure


def test_an_ordinary_user_with_ids_has_a_uid_per_slot() -> None:
    assert found(dataclasses.replace(GOOD, root=False, sys_admin=False)) == []
    (finding,) = found(dataclasses.replace(GOOD, root=False, sys_admin=False, subordinate=NO_IDS))
    assert finding.commands == NO_IDS.cures


CLOSED = [{"userns_max": 0}, {"userns_clone": False}, {"userns_apparmor": True}]


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("refusal", ["bwrap: Creating new namespace failed: Permission denied", None])
def test_closed_user_namespaces_break_slots(closed: dict[str, Any], root: bool, refusal: str | None) -> None:
    """Root makes them with the right to, which only their number limits."""
    facts = dataclasses.replace(GOOD, root=root, sys_admin=root, bwrap_refusal=refusal, **closed)
    findings = [each for each in found(facts) if each.name == "user namespaces"]
    assert len(findings) == (0 if root and "userns_max" not in closed else 1)
    for finding in findings:
        assert finding.level is Level.broken
        assert finding.commands[0].startswith("printf " if "userns_apparmor" in closed else "sysctl -w ")


@pytest.mark.parametrize("closed", CLOSED)
def test_what_was_tried_decides(closed: dict[str, Any]) -> None:
    """A profile may allow bwrap what is closed for others."""
    assert found(dataclasses.replace(GOOD, **closed)) == []


def test_a_security_module_is_named() -> None:
    facts = dataclasses.replace(GOOD, bwrap_refusal="bwrap: Creating new namespace failed: Permission denied")
    (finding,) = found(facts)
    assert finding.name == "bubblewrap"
    assert "AppArmor" in finding.cure
    assert "SELinux" in finding.cure


def test_compiled_programs_need_no_compiler() -> None:
    assert found(dataclasses.replace(GOOD, compiler=None, static_libc=False, programs_built=True)) == []


def test_the_worst_finding_decides() -> None:
    assert worst([]) is Level.ok
    assert worst(judge(dataclasses.replace(GOOD, tmux=False))) is Level.weaker
    assert worst(judge(dataclasses.replace(GOOD, tmux=False, bwrap_version=None))) is Level.broken


def test_this_machine_can_be_read() -> None:
    facts = gather()
    assert facts.system == "Linux"
    assert facts.memory_available_bytes
    assert facts.terminals
    assert judge(facts)


def test_a_container_is_stale_when_nobody_holds_its_lock(tmp_path: Path) -> None:
    for name in ("containers/living", "containers/dead", "launch-dead"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "lock").touch()
    (tmp_path / "containers" / "not-a-container").mkdir()
    with (tmp_path / "containers" / "living" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert current_stale_containers(tmp_path) == ("dead", "launch-dead")
    assert current_stale_containers(tmp_path) == ("dead", "launch-dead", "living")


def test_gc_removes_the_dead_and_leaves_the_living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path))
    for name in ("living", "dead"):
        (tmp_path / "containers" / name).mkdir(parents=True)
        (tmp_path / "containers" / name / "lock").touch()
    with (tmp_path / "containers" / "living" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = CliRunner().invoke(app, ["gc", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["removed"] == ["dead"]
    assert [path.name for path in (tmp_path / "containers").iterdir()] == ["living"]


def test_no_state_directory_means_nothing_stale(tmp_path: Path) -> None:
    assert stale_containers(tmp_path / "never-made", "") == ()


@pytest.mark.parametrize(
    ("image_format", "said", "level"),
    [("erofs", (), Level.ok), ("tree", ("Images are unpacked.",), Level.weaker), ("", ("no store",), Level.weaker)],
)
def test_what_slots_with_images_get(image_format: str, said: tuple[str, ...], level: Level) -> None:
    finding = image_slots(image_format, said)
    assert finding.level is level
    assert all(sentence in finding.detail for sentence in said)
    assert (image_format or "refused") in finding.detail


# -- the verb -------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def be(facts: Facts, real_slot: Finding, proofs: tuple[Proof, ...] = ()) -> None:
        monkeypatch.setattr("agentenv.doctor.facts.gather", lambda: facts)
        monkeypatch.setattr(doctor_verb, "try_container", lambda _facts: ([real_slot], proofs))

    return be


RUNS = Finding("a real slot", Level.ok, "runs")


def test_exit_code_is_the_worst_level(machine: Any) -> None:
    for facts, code in (
        (GOOD, 0),
        (dataclasses.replace(GOOD, tmux=False), 1),
        (dataclasses.replace(GOOD, bwrap_version=None), 2),
    ):
        machine(facts, RUNS)
        assert CliRunner().invoke(app, ["doctor"]).exit_code == code


def test_a_container_that_does_not_start_is_broken(machine: Any) -> None:
    machine(GOOD, Finding("a real slot", Level.broken, "no [permission]", "ask for it"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "no [permission]" in result.stdout
    assert "ask for it" in result.stdout


def test_cure_prints_commands_and_nothing_else(machine: Any) -> None:
    machine(dataclasses.replace(GOOD, bwrap_version=None, tmux=False), RUNS)
    lines = CliRunner().invoke(app, ["doctor", "--cure"]).stdout.splitlines()
    assert lines == ["apt-get update", "apt-get install -y bubblewrap", "apt-get install -y tmux"]


def test_json_holds_findings_proofs_and_facts(machine: Any) -> None:
    machine(dataclasses.replace(GOOD, tmux=False), RUNS, (Proof(name="no network", holds=True, required=True),))
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert told["verdict"] == "weaker"
    assert [f["name"] for f in told["findings"] if f["level"] != "ok"] == ["tmux"]
    assert told["proofs"][0]["name"] == "no network"
    assert told["facts"]["cgroups"] == {"version": "v2", "writable": ["cpu", "io", "memory", "pids"]}
    assert told["facts"]["slot_programs"] == ["git", "pip", "python3"]


def test_a_scope_of_systemd_is_as_good_as_cgroups_of_ones_own() -> None:
    facts = dataclasses.replace(GOOD, cgroups=Cgroups("v2"), scope=frozenset({"memory", "pids", "cpu"}))
    finding = next(one for one in judge(facts) if one.name == "cgroups")
    assert finding.level is Level.ok
    assert "a scope that systemd makes" in finding.detail


def test_failed_proofs_are_shown_with_their_cure(machine: Any) -> None:
    machine(GOOD, RUNS, (Proof(name="own uid", holds=False, required=False, detail="one uid", cure="be root"),))
    stdout = CliRunner().invoke(app, ["doctor"]).stdout
    assert "own uid" in stdout
    assert "be root" in stdout


def test_workspaces_are_kept_or_copied_and_both_is_said() -> None:
    assert workspaces("").detail == "workspaces are checkpointed in place, in milliseconds"
    copied = workspaces("Linux is older than 6.3")
    assert copied.detail.endswith("each way: Linux is older than 6.3")


def test_no_unit_delegates_what_the_kernel_of_cgroup_v1_lacks() -> None:
    facts = dataclasses.replace(GOOD, root=True, cgroups=Cgroups("v1", frozenset({"pids", "cpu"})))
    finding = next(one for one in judge(facts) if one.name == "cgroups")
    assert "no writable memory;" in finding.detail
    assert "cgroup v2" in finding.cure
    assert "Delegate" not in finding.cure

"""What goes into the image, and the number that says whether it is of this source."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import agentenv
from agentenv import shipped
from agentenv.image.context import OUR_PARTS, BuildFile, content_hash, package_entries, wheel_entries, write_context
from agentenv.sandbox.slotagent import build
from agentenv.sandbox.slotagent.build import Binaries


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package like ours, with everything that must stay out."""
    root = tmp_path / "agentenv"
    for name in (
        "__init__.py", "errors.py", "py.typed", "config.py", "cli/app.py", "wire/spec.py",
        "sandbox/supervisor/launch.py", "sandbox/supervisor/__pycache__/launch.cpython-311.pyc",
        "sandbox/slotagent/agent/main.c", "sandbox/slotagent/bin/slotagent-old",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.fixture
def programs(tmp_path: Path) -> Binaries:
    found = [tmp_path / "built" / name for name in (*(f"{name}-0123" for name in build._PROGRAMS), "rg")]
    found[0].parent.mkdir()
    for path in found:
        path.write_bytes(b"\x7fELF" + path.name.encode())
    return Binaries(*found)


def test_context_has_the_container_s_side_and_the_current_programs_only(package: Path, programs: Binaries) -> None:
    names = {entry.name: entry.mode for entry in package_entries(package, programs)}

    assert names == {
        "site/agentenv/__init__.py": 0o644,
        "site/agentenv/errors.py": 0o644,
        "site/agentenv/py.typed": 0o644,
        "site/agentenv/wire/spec.py": 0o644,
        "site/agentenv/sandbox/supervisor/launch.py": 0o644,
        "site/agentenv/sandbox/slotagent/agent/main.c": 0o644,
        **{f"site/agentenv/sandbox/slotagent/bin/{name}-0123": 0o755 for name in build._PROGRAMS},
        "site/agentenv/sandbox/slotagent/bin/rg": 0o755,
    }


def test_no_module_of_the_image_imports_what_stays_out() -> None:
    """An import of anything else would end the server's start."""
    root = Path(agentenv.__file__).parent
    inside = {part.partition("/")[0].removesuffix(".py") for part in OUR_PARTS}
    for part in OUR_PARTS[1:]:
        assert (root / part).exists(), part
        for path in (root / part).rglob("*.py"):
            for name in re.findall(r"^ *from agentenv\.(\w+)", path.read_text(), re.MULTILINE):
                assert name in inside, f"{path} imports agentenv.{name}"
            for name in re.findall(r"^ *from agentenv import (.+)", path.read_text(), re.MULTILINE):
                assert set(name.replace(" ", "").split(",")) <= inside, f"{path} imports {name}"


@pytest.mark.parametrize("module", ["agentenv.store.unpacked", "agentenv.sandbox.supervisor.launch"])
def test_what_is_in_the_image_starts(module: str, tmp_path: Path, programs: Binaries) -> None:
    source = Path(agentenv.__file__).parent
    for entry in package_entries(source, programs):
        if entry.source.is_relative_to(source):
            copied = tmp_path / entry.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(entry.source.read_bytes())
    # -S: without the installed package, and its path.
    started = [sys.executable, "-S", "-B", "-c", f"import {module} as found; print(found.__file__)"]
    done = subprocess.run(started, cwd=tmp_path / "site", capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_wheels_leave_their_scripts_behind(tmp_path: Path) -> None:
    for name in ("bin/aiohttp", "aiohttp/bin/data", "aiohttp/__init__.py", "aiohttp/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert [entry.name for entry in wheel_entries(tmp_path)] == ["site/aiohttp/__init__.py", "site/aiohttp/bin/data"]


def entries(directory: Path, **files: str) -> list[BuildFile]:
    found = []
    for name, text in files.items():
        (directory / name).write_text(text)
        found.append(BuildFile(name, directory / name))
    return found


def test_hash_follows_names_bytes_modes_recipe_and_pins_and_nothing_else(tmp_path: Path) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    one.mkdir()
    two.mkdir()
    base = content_hash(entries(one, a="1", b="2"), b"FROM x", "aiohttp==1")

    assert content_hash(reversed(entries(two, a="1", b="2")), b"FROM x", "aiohttp==1") == base
    others = {
        content_hash(entries(one, a="1", b="3"), b"FROM x", "aiohttp==1"),
        content_hash(entries(two, a="1", c="2"), b"FROM x", "aiohttp==1"),
        content_hash(entries(two, a="12", b=""), b"FROM x", "aiohttp==1"),
        content_hash(entries(two, a="1", b="2"), b"FROM y", "aiohttp==1"),
        content_hash(entries(two, a="1", b="2"), b"FROM x", "aiohttp==2"),
        content_hash([BuildFile("a", two / "a", 0o755), BuildFile("b", two / "b")], b"FROM x", "aiohttp==1"),
    }
    assert len(others | {base}) == 7


def test_context_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    written = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        found = entries(directory, b="2", a="1")
        file = io.BytesIO()
        write_context(file, found if number else reversed(found), b"FROM x")
        written.append(file.getvalue())

    assert written[0] == written[1]
    with tarfile.open(fileobj=io.BytesIO(written[0])) as archive:
        assert archive.getnames() == ["Dockerfile", "a", "b"]
        assert {(member.uid, member.gid, member.mtime) for member in archive} == {(0, 0, 0)}


# -- what ships ------------------------------------------------------------------------------------


def test_what_ships_is_found_and_what_does_not_is_said() -> None:
    assert shipped.path("nomad/sandbox.nomad.hcl").read_text().count('job "sandbox"') == 1
    with pytest.raises(FileNotFoundError, match="ships no nomad/other"):
        shipped.path("nomad/other.hcl")


def test_job_carries_the_seccomp_profile_word_for_word() -> None:
    job = shipped.path("nomad/sandbox.nomad.hcl").read_text()
    text = job.split("<<-SECCOMP\n", 1)[1].split("SECCOMP\n", 1)[0]

    assert json.loads(text) == json.loads(shipped.path("docker/seccomp.json").read_text())


def profile() -> dict[str, list[dict[str, object]]]:
    """What the profile says of each system call."""
    rules: dict[str, list[dict[str, object]]] = {}
    for rule in json.loads(shipped.path("docker/seccomp.json").read_text())["syscalls"]:
        for name in rule["names"]:
            rules.setdefault(name, []).append(rule)
    return rules


def test_profile_allows_only_by_name_and_only_this_machine_s_own_calls() -> None:
    whole = json.loads(shipped.path("docker/seccomp.json").read_text())

    assert whole["defaultAction"] == "SCMP_ACT_ERRNO"
    assert all(not machine["subArchitectures"] for machine in whole["archMap"])
    assert not any("caps" in rule.get("includes", {}) | rule.get("excludes", {}) for rule in whole["syscalls"])


IMAGE_SLOTS = "chroot fsconfig fsmount fsopen mount_setattr move_mount open_tree"


def test_profile_has_what_slots_are_made_with_and_blocks_what_they_are_not() -> None:
    rules = profile()

    for name in ("clone", "unshare", "mount", "umount2", "pivot_root", "setns", "sethostname", *IMAGE_SLOTS.split()):
        assert [rule["action"] for rule in rules[name]] == ["SCMP_ACT_ALLOW"], name
    blocked = (
        "bpf perf_event_open keyctl add_key request_key open_by_handle_at "
        "fspick syslog io_uring_setup io_uring_enter io_uring_register userfaultfd kexec_load "
        "init_module finit_module delete_module reboot swapon swapoff acct settimeofday clock_settime quotactl "
        "pidfd_getfd kcmp lookup_dcookie fanotify_init ioperm iopl vhangup setdomainname move_pages vserver"
    )
    assert [name for name in blocked.split() if name in rules] == []
    [clone3] = rules["clone3"]
    assert (clone3["action"], clone3["errnoRet"]) == ("SCMP_ACT_ERRNO", 38)
    assert all(rule.get("args") for name in ("socket", "personality") for rule in rules[name])


def test_the_job_file_keeps_the_contract() -> None:
    text = shipped.path("nomad/sandbox.nomad.hcl").read_text()

    for part in (
        'group "sandbox"',
        'task "sandbox"',
        'port "http"',
        "update { max_parallel = 0 }",
        'path     = "/health"',
        "attempts = 0",
        "unlimited      = true",
        'shutdown_delay = "${var.drain_s}s"',
        'perms       = "600"',
    ):
        assert part in text, part
    assert text.count("change_mode") == len(re.findall(r"^ +(template|dynamic .template.) {", text, re.MULTILINE)) == 3
    assert "token" not in text.split('dynamic "config"', 1)[1].split("template {", 1)[0]


def test_apptainer_is_started_with_the_very_command_that_is_documented() -> None:
    """Where it cannot be run, its exact command line is what can be kept true."""
    text = shipped.path("nomad/sandbox.nomad.hcl").read_text().partition("command = var.apptainer")[2]
    args = re.search(r"^ +args = \[$(.*?)^ +\]$", text, re.DOTALL | re.MULTILINE)
    page = (Path(__file__).resolve().parents[3] / "docs/nomad.md").read_text()
    shown = re.search(r"^ {4}(apptainer exec (?:.*\\\n)+.*)$", page, re.MULTILINE)
    assert args is not None
    assert shown is not None
    words = re.findall(r'"([^"]*)"|(var\.\w+)', args[1])
    given = ["agentenv-sandbox.sif" if variable == "var.image" else word for word, variable in words]
    asked = [re.sub(r"\$\{(\w+)\}", r"$\1", word) for word in given]
    assert shlex.split(shown[1].replace("\\\n", " ")) == ["apptainer", *asked]

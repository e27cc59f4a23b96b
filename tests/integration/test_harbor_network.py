"""Phases of network: a Debian archive on an Internet of the test's own, which only builds and verifiers reach."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from tests.debian_images import base_in_cache
from tests.integration.results import rows
from tests.integration.slot_networks import REPOSITORY, WEB, connect, inside, network_namespace, process
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")

SOURCES = f"deb [trusted=yes] http://{WEB}/ ./"
DOCKERFILE = f"""\
FROM debian:bookworm-slim
RUN rm -rf /etc/apt/sources.list.d/* && echo '{SOURCES}' > /etc/apt/sources.list
RUN apt-get update -q && apt-get install -y -q built-with && rm -rf /var/lib/apt/lists/*
"""
SOLVE = f"""\
built-with | grep -qx 'this is built-with' || exit 1
exec 3<> /dev/tcp/{WEB}/80 || touch /srv/closed
"""
VERIFY = """\
[ "$(id -un)" = root ] && [ -e /srv/closed ] || exit 1
apt-get update -q && apt-get install -y -q judged-with && judged-with && echo 1 > /logs/verifier/reward.txt
"""
RUN_TESTS = """\
# As tests with pytest and uv do: installed as root, kept below the home directory, results in pytest's words.
[ "$(id -un)" = root ] && apt-get update -q && apt-get install -y -q judged-with && mkdir -p "$HOME/.local" || exit 1
judged-with > "$HOME/.local/judged"
echo "=== short test summary info ==="
cmp /srv/done "$TEST_DIR/expected" && grep -q judged-with "$HOME/.local/judged" && word=PASSED || word=FAILED
echo "$word ../tests/test_outputs.py::test_done"
"""
TOML = """\
[agent]
network_mode = "no-network"
[verifier]
{verifier}
[environment]
memory_mb = 1024
network_mode = "no-network"
"""


def package(directory: Path, name: str) -> str:
    """A package whose program says its name, and its entry in the archive's list."""
    root = directory / name
    (root / "DEBIAN").mkdir(parents=True)
    control = f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: n <n@localhost>\nDescription: a test\n"
    (root / "DEBIAN/control").write_text(control)
    program = root / "usr/bin" / name
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho this is {name}\n")
    program.chmod(0o755)
    file = directory / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, file], check=True, capture_output=True)
    data = file.read_bytes()
    return f"{control}Filename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A flat archive of two packages."""
    made = tmp_path / "archive"
    made.mkdir()
    (made / "Packages").write_text("\n".join(package(made, name) for name in ("built-with", "judged-with")))
    return made


@pytest.fixture
def machine(archive: Path) -> Iterator[subprocess.Popen[str]]:
    """A network namespace from which the archive is reached at WEB, and nothing else."""
    with network_namespace() as here, network_namespace() as internet:
        connect(here, internet)
        server = [sys.executable, "-m", "http.server", "80", "--bind", WEB, "--directory", str(archive)]
        with process(inside(internet, *server), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as served:
            asking = inside(here, "bash", "-c", f"exec 3<> /dev/tcp/{WEB}/80")
            wait_for(lambda: subprocess.run(asking, capture_output=True).returncode == 0, explain=lambda: f"{served}")
            yield here


@pytest.mark.parametrize(
    "verifier", ['network_mode = "public"', f'network_mode = "allowlist"\nallowed_hosts = ["{WEB}"]']
)
def test_a_verifier_installs_what_it_needs_as_root_where_the_agent_had_no_network(
    tmp_path: Path, machine: subprocess.Popen[str], verifier: str
) -> None:
    files = {
        "task.toml": TOML.format(verifier=verifier),
        "instruction.md": "See what is reached.\n",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": SOLVE,
        "tests/test.sh": VERIFY,
    }
    assert checked(tmp_path, machine, files) == ["ok task 1 0 S", "1 of 1 ok"]


def test_tests_of_terminal_bench_1_install_what_they_need(tmp_path: Path, machine: subprocess.Popen[str]) -> None:
    files = {
        "task.yaml": "instruction: Make /srv/done.\nmax_test_timeout_sec: 300\n",
        "Dockerfile": DOCKERFILE,
        "solution.sh": "built-with > /srv/done\n",
        "run-tests.sh": RUN_TESTS,
        "tests/expected": "this is built-with\n",
    }
    assert checked(tmp_path, machine, files) == ["ok task 1 0 S", "1 of 1 ok"]


def checked(tmp_path: Path, machine: subprocess.Popen[str], files: Mapping[str, str]) -> list[str]:
    """The rows of the check of a task with these files."""
    cache = base_in_cache(tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(cache))
        make_base(Store.open(store_directory()))
    for name, text in files.items():
        file = tmp_path / "task" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}",
        "AGENTENV_CACHE_DIR": str(cache),
        "AGENTENV_STATE_DIR": str(tmp_path / "state"),
    }
    command = inside(
        machine,
        sys.executable,
        "-c",
        "from agentenv.cli import main; main()",
        "tasks",
        "check",
        str(tmp_path / "task"),
        "--network",
    )
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    table = rows(done.stdout)
    assert done.returncode == 0, (table, done.stderr)
    return table

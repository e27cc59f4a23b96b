"""What `make setup` is made of: pins that the oldest Python takes, and packages that are waited for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scripts import pins
from scripts.pins import Installed

ROOT = Path(__file__).parents[2]
PROJECT = {
    "name": "agentenv",
    "requires-python": ">=3.11.2",
    "dependencies": ["aiohttp>=3.14.5"],
    "optional-dependencies": {"farm": ["beautifulsoup4>=4.15.0"], "all": ["agentenv[farm]"]},
}
INSTALLED = {
    "aiohttp": Installed("aiohttp", "3.14.5", ">=3.10"),
    "beautifulsoup4": Installed("beautifulsoup4", "4.15.0"),
    "soupsieve": Installed("soupsieve", "2.10", ">=3.10"),
}
PINS = {"aiohttp": "3.14.5", "beautifulsoup4": "4.15.0", "soupsieve": "2.10"}


def test_pins_as_they_should_be() -> None:
    assert pins.mistakes(PROJECT, PINS, INSTALLED) == []
    assert pins.pins_in(pins.frozen(INSTALLED)) == PINS


def test_a_pin_that_the_oldest_python_refuses_is_named() -> None:
    newer = {**INSTALLED, "soupsieve": Installed("soupsieve", "4.1.2", ">=3.11.5")}
    assert pins.mistakes(PROJECT, {**PINS, "soupsieve": "4.1.2"}, newer) == [
        "soupsieve==4.1.2 needs Python >=3.11.5, and pyproject.toml promises 3.11.2"
    ]


def test_what_is_pinned_installed_and_asked_for_is_the_same() -> None:
    assert pins.mistakes(PROJECT, {**PINS, "soupsieve": "2.9"}, INSTALLED) == [
        "soupsieve 2.10 is installed, constraints.txt says 2.9"
    ]
    assert pins.mistakes(PROJECT, {**PINS, "psutil": "7.0"}, INSTALLED) == [
        "constraints.txt pins psutil, which nothing needs"
    ]
    assert pins.mistakes({**PROJECT, "dependencies": ["aiohttp>=3.11"]}, PINS, INSTALLED) == [
        "pyproject.toml asks for aiohttp>=3.11, tested is 3.14.5"
    ]


def test_freezing_raises_the_lower_bounds() -> None:
    text = (
        'requires = ["setuptools>=77"]\ndependencies = ["aiohttp>=3.11", # why\n  "soupsieve>=1"]\nenv = ["other==1"]'
    )
    assert pins.with_bounds(text, INSTALLED) == text.replace(">=3.11", ">=3.14.5").replace(">=1", ">=2.10")


def apt(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    """apt-install with an apt-get that is this script."""
    (directory / "apt-get").write_text(f"#!/bin/bash\n{script}\n")
    (directory / "apt-get").chmod(0o755)
    env = {"PATH": f"{directory}:{os.environ['PATH']}", "APT_PAUSE_S": "0", "APT_WAIT_S": "30"}
    argv = [str(ROOT / "scripts/apt-install"), "some-package"]
    return subprocess.run(argv, env=env, cwd=directory, capture_output=True, text=True, check=False)


def test_another_apt_at_work_is_waited_for(tmp_path: Path) -> None:
    busy = 'echo "$*" >> asked; (($(wc -l < asked) % 3)) || exit 0; echo "E: Could not get lock /x/lock." >&2; exit 100'
    done = apt(tmp_path, busy)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().splitlines() == [
        *["-qq update"] * 3,
        *["-qq install -y --no-install-recommends some-package"] * 3,
    ]
    assert done.stdout.count("waiting for it to end") == 2


def test_an_install_that_failed_says_why(tmp_path: Path) -> None:
    done = apt(tmp_path, 'echo "E: Unable to locate package some-package"; exit 100')
    assert done.returncode == 1
    assert "E: Unable to locate package some-package" in done.stderr


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path) -> None:
    """pip's reason is shown: it was hidden, and "conflicting dependencies" names none."""
    stamps = tmp_path / ".venv/.stamps"
    stamps.mkdir(parents=True)
    (tmp_path / ".venv/bin").mkdir()
    (tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 'Requires-Python >=3.11.5'; exit 1\n")
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (stamps / "venv").touch()
    argv = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), f"VENV={tmp_path}/.venv"]
    done = subprocess.run(
        [*argv, "-o", f"{stamps}/venv", f"{stamps}/python"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Requires-Python >=3.11.5" in done.stderr
    assert "pip-install.log" in done.stderr


def test_no_engine_is_installed_where_there_is_no_nomad(tmp_path: Path) -> None:
    """It took 45 s of apt before the refusal."""
    for name, script in {
        ".venv/bin/agentenv": 'echo "agentenv $*" >>asked; [ "$2" != nomad ] || exit 125',
        "scripts/system-packages": 'echo "packages $*" >>asked',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    argv = ["make", "-f", str(ROOT / "Makefile"), "-o", "as-root", "-o", "slotagent", "nomad-dev"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert (tmp_path / "asked").read_text() == "agentenv dev nomad\n"


def test_make_over_ssh_prints_nothing_else() -> None:
    """Debian's bash takes a shell that sshd has started for one that reads its start files, in which `set -u` fails."""
    over_ssh = {"PATH": os.environ["PATH"], "SSH_CLIENT": "192.0.2.1 50000 22", "SHLVL": "0"}
    done = subprocess.run(["make", "help"], cwd=ROOT, env=over_ssh, capture_output=True, text=True, check=True)
    assert "nomad-dev" in done.stdout
    assert done.stderr == ""

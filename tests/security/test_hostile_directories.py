"""Every reader of a task's directory, or of a build context, against every kind of file that is none: nothing outside
is read, nothing is waited for, nothing is read without end, and no error shows what lies elsewhere.

A new reader is a row of READERS, a new kind of file one of ATTEMPTS.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from agentenv.builder.build import load
from agentenv.builder.context import BuildContext
from agentenv.builder.instructions import Place
from agentenv.builder.steps import CopyStep
from agentenv.errors import ConfigError
from agentenv.tasks.harbor.directories import read_task
from agentenv.tasks.harbor.players import oracle, typed

SECRET: Final = "root:*:20228:0:99999:7:::"
TOML: Final = '[environment]\ndocker_image = "registry.example/tasks/one:1"\n'
KEYS: Final = "- command: ls\n"
pytestmark = pytest.mark.timeout(120)


def _socket(place: Path, _: Path) -> None:
    before = Path.cwd()
    os.chdir(place.parent)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(place.name)
    os.chdir(before)


def _chained(place: Path, secret: Path) -> None:
    place.with_name("between").symlink_to(secret)
    place.symlink_to("between")


def _sparse(place: Path, _: Path) -> None:
    with place.open("wb") as file:
        file.truncate(2**40)


ATTEMPTS: Final[Mapping[str, Callable[[Path, Path], object]]] = {
    "link": lambda place, secret: place.symlink_to(secret),
    "link by ..": lambda place, secret: place.symlink_to(os.path.relpath(secret, place.parent)),
    "link to a link": _chained,
    "link to itself": lambda place, _: place.symlink_to(place.name),
    "link to a device": lambda place, _: place.symlink_to("/dev/zero"),
    "pipe": lambda place, _: os.mkfifo(place),
    "socket": _socket,
    "holes": _sparse,
}


@dataclass(frozen=True)
class Reader:
    """``place``: the file that it reads, in a task's directory. ``loads``: its content, too."""

    place: str
    read: Callable[[Path], object]
    loads: bool = True


def _rules(directory: Path) -> None:
    with BuildContext(directory / "environment"):
        pass


def _copied(directory: Path) -> None:
    step = CopyStep(Place("Dockerfile", 2, "COPY"), ("file",), "/")
    with BuildContext(directory / "environment") as context:
        context.digest(context.sources(step))


def _read(directory: Path) -> object:
    return read_task(directory, {})


def _bench(directory: Path) -> object:
    (directory / "task.toml").unlink()
    return read_task(directory, {})


def _bench_typed(directory: Path) -> object:
    (directory / "task.toml").unlink()
    return typed(read_task(directory, {}))


READERS: Final[Mapping[str, Reader]] = {
    "Dockerfile of a build": Reader("environment/Dockerfile", lambda directory: load(directory / "environment")),
    "-f FILE": Reader("other.Dockerfile", lambda directory: load(directory, directory / "other.Dockerfile")),
    "rules": Reader("environment/.dockerignore", _rules),
    "COPY": Reader("environment/file", _copied),
    "settings": Reader("task.toml", _read),
    "instruction": Reader("instruction.md", _read),
    "tests": Reader("tests/test.sh", _read, loads=False),
    "Dockerfile of tests": Reader("tests/Dockerfile", _read, loads=False),
    "compose of Harbor": Reader("environment/docker-compose.yaml", _read, loads=False),
    "solution": Reader("solution/solve.sh", lambda directory: oracle(read_task(directory, {})), loads=False),
    "settings of Terminal-Bench": Reader("task.yaml", _bench),
    "compose": Reader("docker-compose.yaml", _bench),
    "tests of Terminal-Bench": Reader("run-tests.sh", _bench, loads=False),
    "keys": Reader("solution.yaml", _bench_typed),
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A directory that all readers take."""
    directory = tmp_path / "one"
    (tmp_path / "secret").write_text(SECRET)
    files = {
        "task.toml": TOML + '[verifier]\nenvironment_mode = "separate"\n',
        "task.yaml": "instruction: Do it.\n",
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM debian\n",
        "environment/file": "x",
        "tests/test.sh": "true\n",
        "solution/solve.sh": "true\n",
        "run-tests.sh": "true\n",
        "solution.yaml": KEYS,
        "Dockerfile": "FROM debian\n",
        "other.Dockerfile": "FROM debian\n",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize("name", READERS)
def test_every_reader_takes_the_directory_as_it_is(name: str, task: Path) -> None:
    READERS[name].read(task)


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        (name, attempt)
        for name, reader in READERS.items()
        for attempt in ATTEMPTS
        if reader.loads or attempt != "holes"  # what is only uploaded fills the slot at worst
    ],
)
def test_what_is_no_file_of_the_task_is_refused(name: str, attempt: str, task: Path) -> None:
    place = task / READERS[name].place
    place.unlink(missing_ok=True)
    ATTEMPTS[attempt](place, task.parent / "secret")
    with pytest.raises((ConfigError, OSError)) as raised:
        READERS[name].read(task)
    said = str(raised.value)
    assert SECRET[:8].casefold() not in said.casefold()
    assert attempt not in ("pipe", "socket") or "not a regular file" in said or "neither a file" in said, said


@pytest.mark.parametrize("name", ["environment", "tests", "solution"])
def test_a_directory_of_a_task_is_its_own(name: str, task: Path) -> None:
    (task / name).rename(task.parent / "elsewhere")
    (task / name).symlink_to("../elsewhere")
    with pytest.raises(ConfigError, match="leads out"):
        oracle(read_task(task, {}))


@pytest.mark.parametrize("context", ["..", "/", "../..", "out", "environment/../.."])
def test_a_build_context_lies_in_the_task(context: str, task: Path) -> None:
    (task / "task.toml").unlink()
    (task.parent / "Dockerfile").write_text("FROM debian\n")
    (task / "out").symlink_to(task.parent)
    (task / "docker-compose.yaml").write_text(f"services: {{main: {{build: {{context: '{context}'}}}}}}\n")
    if context == "/":  # as Docker's context of a name that begins with a slash would be
        (task / "Dockerfile").unlink()
    with pytest.raises(ConfigError):
        read_task(task, {})


def test_a_link_within_the_task_is_followed(task: Path) -> None:
    (task / "text.md").write_text("Follow me.\n")
    (task / "instruction.md").unlink()
    (task / "instruction.md").symlink_to("text.md")
    assert read_task(task, {}).instruction == "Follow me.\n"


@pytest.mark.parametrize(
    "image", ["docker-archive:/etc/shadow", "oci:/", "oci:base", "docker-daemon:base", "dockerfile:/etc"]
)
def test_images_of_the_machine_are_not_a_tasks_to_name(image: str, task: Path) -> None:
    (task / "task.toml").write_text(f'[environment]\ndocker_image = "{image}"\n')
    with pytest.raises(ConfigError, match="is an image of this machine"):
        read_task(task, {})


def test_aliases_that_grow_are_refused(task: Path) -> None:
    (task / "task.toml").unlink()
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    (task / "docker-compose.yaml").write_text("\n".join([*lines, "services: {main: {build: *a11}}"]))
    with pytest.raises(ConfigError, match="aliases"):
        read_task(task, {})

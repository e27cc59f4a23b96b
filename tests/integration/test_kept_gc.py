"""``agentenv gc`` and kept farms: those somebody runs are no orphans, those nobody runs can be shown and ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings
from agentenv.process_marks import process_mark
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.local import LocalBackend
from tests import cli
from tests.integration.supervisor_harness import processes_with
from tests.waiting import START_S, wait_for

SETTINGS = ContainerSettings(slots_per_container=1, require_sandbox=False)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[cli.Command]:
    yield cli.Command({"AGENTENV_STATE_DIR": str(tmp_path)})
    assert processes_with(str(tmp_path)) == []


async def opened(state: Path, count: int) -> tuple[LocalBackend, dict[str, int]]:
    """A farm that somebody runs, and the processes of its containers."""
    backend = await LocalBackend(
        SETTINGS, detached=True, farm="f", state_dir=state, start_timeout_s=START_S
    ).__aenter__()
    await backend.scale(count)
    events = backend.events()
    async with asyncio.timeout(START_S):
        for _ in range(count):
            assert isinstance(await anext(events), ContainerStarted)
    return backend, backend.pids


async def closed(backend: LocalBackend) -> None:
    await backend.stop_all()
    await backend.__aexit__(None, None, None)


def test_a_farm_that_somebody_runs_is_left_alone(tmp_path: Path, command: cli.Command) -> None:
    with asyncio.Runner() as runner:
        backend, pids = runner.run(opened(tmp_path, 1))
        try:
            assert command.told("gc", "--observe", "0")["orphans"] == []
            code, _, stderr = command.run("gc", "--kept", "f", "--observe", "0")
            assert code != 0
            assert f"is run by process {os.getpid()}" in " ".join(stderr.split())
            assert all(map(process_mark, pids.values()))
        finally:
            runner.run(closed(backend))
    assert command.told("gc", "--observe", "0")["orphans"] == []


def test_the_containers_of_a_farm_that_nobody_runs_are_shown_and_ended(tmp_path: Path, command: cli.Command) -> None:
    async def left() -> dict[str, int]:
        backend, pids = await opened(tmp_path, 2)
        await backend.__aexit__(None, None, None)
        return pids

    pids = asyncio.run(left())
    low, high = sorted(pids)
    os.kill(pids[high], signal.SIGKILL)
    wait_for(lambda: not process_mark(pids[high]))
    shown = command.told("gc", "--dry-run", "--observe", "0")
    assert shown["removed"] == []
    assert {"kept container": low, "kept files": high}.items() <= {
        orphan["kind"]: orphan["name"] for orphan in shown["orphans"]
    }.items()
    collected = command.told("gc", "--observe", "0")
    assert high in collected["removed"]
    assert collected["left"] == [low], "it waits for the next who opens the farm"
    assert not list(tmp_path.rglob(high))
    ended = command.told("gc", "--kept", "f", "--observe", "0")
    assert ended["removed"] == [low, "f"]
    assert not (tmp_path / "kept").exists()
    assert list((tmp_path / "containers").iterdir()) == []


def test_a_farm_that_is_not_there_is_named(tmp_path: Path, command: cli.Command) -> None:
    (tmp_path / "kept" / "mine").mkdir(parents=True)
    code, _, stderr = command.run("gc", "--kept", "yours", "--observe", "0")
    assert code != 0
    assert "no kept farm is named 'yours'" in " ".join(stderr.split())
    assert "mine" in stderr


def test_only_farms_of_this_machine_are_kept(command: cli.Command) -> None:
    code, _, stderr = command.run("gc", "--backend", "nomad", "--kept", "f")
    assert code != 0
    assert "--kept" in stderr

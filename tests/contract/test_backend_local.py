"""What only real containers can show: their processes, their files, their end with ours."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.errors import ConnectionLostError, SandboxUnavailableError
from agentenv.slots.backends.base import ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.backends.local_files import FarmFiles
from agentenv.slots.pool import SlotPool
from agentenv.wire.spec import ContainerSpec, SandboxSpec
from tests.integration.supervisor_harness import cgroups_of, processes_with
from tests.waiting import START_S, until

SETTINGS = ContainerSettings(slots_per_container=1, require_sandbox=False)
PATIENT = PoolSettings(max_containers=1, acquire_timeout_s=START_S)


async def test_closing_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    async with SlotPool(LocalBackend(SETTINGS, state_dir=tmp_path), PATIENT) as pool:
        await pool.lease("t")
        assert processes_with(str(tmp_path))
    assert processes_with(str(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["containers"]
    assert list((tmp_path / "containers").iterdir()) == []


async def test_secrets_are_neither_arguments_nor_environment_nor_readable(tmp_path: Path) -> None:
    backend = LocalBackend(SETTINGS, state_dir=tmp_path)
    async with SlotPool(backend, PATIENT) as pool:
        lease = await pool.lease("t")
        token = lease.container.token.encode()
        files = list(tmp_path.glob("launch-*/*/*"))
        assert {path.name for path in files} == {"token", "spec.json", "events", "log"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        for pid in processes_with(str(tmp_path)):
            for name in ("cmdline", "environ"):
                assert token not in Path("/proc", str(pid), name).read_bytes()
        assert lease.container.token not in repr(lease.container)
        assert lease.key.secret not in repr(lease.key)


PARENT = """
import asyncio, sys
from pathlib import Path
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from tests.waiting import START_S

async def main():
    settings = ContainerSettings(slots_per_container=1, require_sandbox=False)
    backend = LocalBackend(settings, state_dir=Path(sys.argv[1]))
    async with SlotPool(backend, PoolSettings(acquire_timeout_s=START_S)) as pool:
        await pool.lease("t")
        print("leased", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_containers_end_with_the_process_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    assert parent.stdout is not None
    assert await asyncio.wait_for(parent.stdout.readline(), START_S) == b"leased\n"
    assert len(processes_with(str(tmp_path))) > 1
    parent.send_signal(number)
    await asyncio.wait_for(parent.wait(), 60)
    await until(lambda: processes_with(str(tmp_path)) == [])
    # Whatever lies about is swept by the next start.
    async with SlotPool(LocalBackend(SETTINGS, state_dir=tmp_path), PATIENT) as pool:
        await pool.lease("t")
        assert len(list(tmp_path.glob("launch-*"))) == 1
        assert len(list((tmp_path / "containers").iterdir())) == 1


async def test_the_end_of_a_container_is_told_with_its_last_words(tmp_path: Path) -> None:
    async with LocalBackend(SETTINGS, state_dir=tmp_path) as backend:
        await backend.scale(1)
        events = backend.events()
        started = await anext(events)
        assert isinstance(started, ContainerStarted)
        os.kill(backend.pids[started.handle.id], signal.SIGKILL)
        gone = await anext(events)
        assert isinstance(gone, ContainerGone)
        assert gone.id == started.handle.id
        assert "killed by SIGKILL" in gone.reason
        again = await anext(events)
        assert isinstance(again, ContainerStarted)
        assert (again.handle.index, again.handle.id != started.handle.id) == (0, True)
        async with ContainerControl(started.handle) as control:
            with pytest.raises(ConnectionLostError):
                await control.slots(timeout_s=0.5)


async def test_a_container_s_log_is_repeated_as_debug_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "agentenv.slots.backends.local_process")
    async with LocalBackend(SETTINGS, state_dir=tmp_path) as backend:
        await backend.scale(1)
        started = await anext(backend.events())
        assert isinstance(started, ContainerStarted)
        [log] = tmp_path.glob("launch-*/*/log")
        with log.open("a") as file:
            file.write("a line of a container\n")
        await until(lambda: f"{started.handle.id}: a line of a container" in caplog.messages)


async def test_a_machine_that_cannot_isolate_is_refused_at_once_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but Python is on PATH: no bubblewrap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = LocalBackend(SETTINGS, state_dir=tmp_path)
    async with SlotPool(backend, PoolSettings(acquire_timeout_s=60)) as pool:
        with pytest.raises(SandboxUnavailableError) as caught:
            await asyncio.wait_for(pool.lease("t"), 90)
    assert "bwrap" in str(caught.value) or "bubblewrap" in str(caught.value)
    assert caught.value.next_step


async def test_a_container_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    async with LocalBackend(SETTINGS, state_dir=tmp_path, start_timeout_s=0.05) as backend:
        await backend.scale(1)
        failed = await anext(backend.events())
        assert isinstance(failed, StartFailed)
        assert not failed.permanent
        assert "not ready within 0.05 s" in failed.reason
        await backend.scale(0)
        await until(lambda: processes_with(str(tmp_path)) == [])


async def test_state_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnavailableError, match="AGENTENV_STATE_DIR"):
        async with LocalBackend(SETTINGS, state_dir=tmp_path / "file"):
            pass


async def test_a_full_disk_is_said_at_once_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with SlotPool(LocalBackend(SETTINGS, state_dir=tmp_path), PoolSettings(acquire_timeout_s=60)) as pool:
        monkeypatch.setattr(os, "fdopen", full)
        with pytest.raises(SandboxUnavailableError, match="No space left") as caught:
            await asyncio.wait_for(pool.lease("t"), 90)
        monkeypatch.undo()
        assert {path.name for path in tmp_path.glob("launch-*/*")} == {"lock", "said.json"}
    assert "AGENTENV_STATE_DIR" in caught.value.next_step


def test_launch_directories_of_the_living_are_left_alone(tmp_path: Path) -> None:
    living = FarmFiles.temporary(tmp_path)
    files = living.new(0)
    spec = SandboxSpec.launch(
        ContainerSpec(), container=files.id, token_file=files.token_file, data_dir=living.data_dir
    )
    files.write(spec, "secret")
    dead = tmp_path / "launch-dead"
    dead.mkdir()
    (dead / "lock").touch()
    other = FarmFiles.temporary(tmp_path)
    assert not dead.exists()
    assert files.spec().container == files.id
    other.close()
    living.close()
    living.close()
    assert not list(tmp_path.glob("launch-*"))


async def test_what_a_killed_container_left_is_gone_with_it(tmp_path: Path) -> None:
    backend = LocalBackend(SETTINGS, state_dir=tmp_path)
    async with SlotPool(backend, PATIENT) as pool:
        first = (await pool.lease("t")).container.id
        os.kill(backend.pids[first], signal.SIGKILL)
        await asyncio.sleep(0.05)
    # closed at once: no container started after it has swept it away
    assert not (tmp_path / "containers" / first).exists()
    assert cgroups_of(first) == []


async def test_a_container_killed_by_a_signal_without_a_name_is_replaced(tmp_path: Path) -> None:
    backend = LocalBackend(SETTINGS, state_dir=tmp_path)
    async with SlotPool(backend, PATIENT) as pool:
        first = (await pool.lease("t")).container.id
        os.kill(backend.pids[first], 40)
        async with await pool.lease("t2", timeout_s=START_S) as second:
            assert second.container.id != first

"""A kept farm: its containers outlive the process that started them, and belong to whoever opens it next."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import ContainerSettings, PoolSettings, isolation_here
from agentenv.errors import ConfigError
from agentenv.process_marks import own_mark, process_mark
from agentenv.slots.backends.base import ContainerDraining, ContainerEvent, ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.backends.local_files import FarmFiles
from agentenv.slots.backends.local_process import LocalProcess, OtherProcess
from agentenv.slots.pool import SlotPool
from agentenv.wire.leases import LeaseKey, RenewRequest
from agentenv.wire.spec import SandboxSpec
from agentenv.wire.states import ContainerState
from tests.contract.conftest import Client
from tests.integration.supervisor_harness import cgroups_of, processes_with
from tests.nomad.containers import healthy
from tests.waiting import START_S, until

SETTINGS = ContainerSettings(slots_per_container=1, require_sandbox=False)
UNATTENDED_AFTER_S = 600
"""What a test that failed leaves running does not stay for ever."""


def farm(state: Path, settings: ContainerSettings = SETTINGS, **options: Any) -> LocalBackend:
    bounds = {"start_timeout_s": START_S, "unattended_after_s": UNATTENDED_AFTER_S}
    return LocalBackend(settings, detached=True, state_dir=state, **{**bounds, **options})


@pytest.fixture(autouse=True)
async def _nothing_is_left(tmp_path: Path) -> AsyncIterator[None]:
    """Whatever a test does, it leaves no container running, and no file."""
    yield
    async with farm(tmp_path) as backend:
        await backend.stop_all()
    assert processes_with(str(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["containers"]
    assert list((tmp_path / "containers").iterdir()) == []


async def started(events: AsyncIterator[ContainerEvent], count: int) -> list[ContainerStarted]:
    """The next events, all of which are starts; in order of index."""
    async with asyncio.timeout(START_S):
        found = [await anext(events) for _ in range(count)]
    assert all(isinstance(event, ContainerStarted) for event in found), found
    return sorted(
        (event for event in found if isinstance(event, ContainerStarted)), key=lambda event: event.handle.index
    )


async def begun(state: Path, count: int) -> list[ContainerStarted]:
    """Start a farm and leave it."""
    async with farm(state) as backend:
        await backend.scale(count)
        return await started(backend.events(), count)


OPENER = """
import asyncio, sys
from pathlib import Path
from agentenv.config import ContainerSettings
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.local import LocalBackend

async def main():
    settings = ContainerSettings(slots_per_container=1, require_sandbox=False)
    async with LocalBackend(settings, detached=True, state_dir=Path(sys.argv[1]), start_timeout_s=180) as backend:
        await backend.scale(2)
        events = backend.events()
        for _ in range(2):
            event = await anext(events)
            assert isinstance(event, ContainerStarted), event
            print(event.handle.index, event.handle.id, event.handle.base_url, event.handle.token, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def opener(state: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that opens the farm with two containers; killed in the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OPENER, str(state), stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: asyncio.subprocess.Process) -> list[str]:
    """The containers an opener has started, in order of index."""
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        return sorted([(await process.stdout.readline()).decode().strip() for _ in range(2)])


async def renewed(handle: Any, key: LeaseKey) -> bool:
    async with Client.open(handle) as client:
        return (await client.control.renew(RenewRequest(keys=(key,), ttl_s=60))).renewed == (key.slot,)


async def test_containers_and_their_leases_outlive_a_killed_process(tmp_path: Path) -> None:
    async with opener(tmp_path) as process:
        before = await said(process)
        with pytest.raises(ConfigError, match=f"is run by process {process.pid}"):
            await farm(tmp_path).__aenter__()
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with farm(tmp_path) as backend:
        first = await started(backend.events(), 2)
        assert [f"{it.index} {it.id} {it.base_url} {it.token}" for it in (event.handle for event in first)] == before
        assert (backend.found, backend.generation) == (2, 2)
        pids = backend.pids
        async with Client.open(first[0].handle) as client:
            key = await client.lease(ttl_s=60)
            result = await client.run(key, "nohup sleep 600 >/dev/null 2>&1 & echo $! > pid; echo begun")
            assert result.stdout == "begun\n"
    # Left, not killed: the same again, and what the lease's holder does goes on.
    async with farm(tmp_path) as backend:
        again = await started(backend.events(), 2)
        assert [event.handle for event in again] == [event.handle for event in first]
        assert (backend.generation, backend.pids) == (3, pids)
        assert await renewed(again[0].handle, key)
        async with Client.open(again[0].handle) as client:
            assert (await client.run(key, "kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        await backend.stop_all()


async def test_what_died_meanwhile_is_swept_and_replaced(tmp_path: Path) -> None:
    async with farm(tmp_path) as backend:
        await backend.scale(2)
        dead, alive = await started(backend.events(), 2)
        pid = backend.pids[dead.handle.id]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not process_mark(pid))
    async with farm(tmp_path) as backend:
        events = backend.events()
        assert await started(events, 1) == [alive]
        assert backend.found == 2
        assert cgroups_of(dead.handle.id) == []
        assert not list(tmp_path.rglob(f"*{dead.handle.id}*"))
        await backend.scale(2)
        [new] = await started(events, 1)
        assert (new.handle.index, new.handle.id != dead.handle.id) == (0, True)


async def test_the_end_of_an_adopted_container_is_noticed_and_told(tmp_path: Path) -> None:
    [first] = await begun(tmp_path, 1)
    async with farm(tmp_path) as backend:
        events = backend.events()
        assert await started(events, 1) == [first]
        os.kill(backend.pids[first.handle.id], signal.SIGKILL)
        async with asyncio.timeout(30):
            gone = await anext(events)
        assert isinstance(gone, ContainerGone)
        assert (gone.id, "killed" in gone.reason) == (first.handle.id, True)
        [new] = await started(events, 1)
        assert new.handle.index == 0


async def test_the_end_is_noticed_without_pidfds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such system call")

    monkeypatch.setattr(os, "pidfd_open", refused)
    async with farm(tmp_path) as backend:
        await backend.scale(1)
        events = backend.events()
        [first] = await started(events, 1)
        os.kill(backend.pids[first.handle.id], signal.SIGTERM)
        async with asyncio.timeout(30):
            gone = await anext(events)
        assert isinstance(gone, ContainerGone)
        assert gone.reason.startswith("exited with 0")


async def test_scaling_down_takes_the_highest_of_the_adopted(tmp_path: Path) -> None:
    low, *high = await begun(tmp_path, 3)
    async with farm(tmp_path) as backend:
        events = backend.events()
        await backend.scale(1)  # before anybody had the time to adopt them
        ids = {event.handle.id for event in high}
        await until(lambda: not any(processes_with(container) or cgroups_of(container) for container in ids))
        assert (await started(events, 1))[0].handle.id == low.handle.id
        await backend.scale(0)
        async with asyncio.timeout(30):
            assert [type(await anext(events)) for _ in range(2)] == [ContainerDraining, ContainerGone]
    assert list((tmp_path / "containers").iterdir()) == []


async def test_replace_is_for_good(tmp_path: Path) -> None:
    [first] = await begun(tmp_path, 1)
    async with farm(tmp_path, stop_grace_s=0.2) as backend:
        events = backend.events()
        await started(events, 1)
        launcher = backend.pids[first.handle.id]
        os.kill(launcher, signal.SIGSTOP)  # it does not stop in good order
        await backend.replace(first.handle.id, "broken")
        async with asyncio.timeout(30):
            assert await anext(events) == ContainerDraining(first.handle.id, "broken")
            assert await anext(events) == ContainerGone(first.handle.id, "broken")
        assert processes_with(first.handle.id) == []
        assert cgroups_of(first.handle.id) == []
        [new] = await started(events, 1)
    async with farm(tmp_path) as backend:
        assert await started(backend.events(), 1) == [new]


async def test_a_container_that_nobody_uses_ends_itself_in_good_order(tmp_path: Path) -> None:
    async with farm(tmp_path, unattended_after_s=15) as backend:
        await backend.scale(1)
        events = backend.events()
        [first] = await started(events, 1)
        async with asyncio.timeout(START_S):
            gone = await anext(events)
    assert isinstance(gone, ContainerGone)
    assert (gone.id, gone.reason.partition(";")[0]) == (first.handle.id, "nobody used it for 15 s")


async def test_a_container_whose_farm_is_gone_ends_itself(tmp_path: Path) -> None:
    async with farm(tmp_path, unattended_after_s=15) as backend:
        await backend.scale(1)
        [first] = await started(backend.events(), 1)
    await until(lambda: processes_with(first.handle.id) == [])
    assert cgroups_of(first.handle.id) == []
    assert list((tmp_path / "containers").iterdir()) == []


# -- half-started ----------------------------------------------------------------------------------


def half_started(state: Path, index: int = 0) -> tuple[FarmFiles, LocalProcess]:
    """A farm held by hand, and a container of it that is written but not started."""
    held = FarmFiles.open(state, "default")
    files = held.new(index)
    settings = SETTINGS.model_copy(update={"isolation": isolation_here("auto")})
    spec = SandboxSpec.launch(
        settings.spec(),
        container=files.id,
        token_file=files.token_file,
        data_dir=held.data_dir,
        unattended_after_s=UNATTENDED_AFTER_S,
    )
    files.write(spec, "t" * 32)
    return held, LocalProcess(files)


@pytest.mark.parametrize("launched", [True, False])
async def test_a_container_that_is_still_starting_is_awaited(tmp_path: Path, *, launched: bool) -> None:
    held, process = half_started(tmp_path)
    launching = asyncio.create_task(process.launch(detached=True))
    if launched:
        await launching
    else:
        await asyncio.sleep(0)  # as if its starter died before it has left it
    held.close()
    async with farm(tmp_path) as backend:
        await backend.scale(1)
        [first] = await started(backend.events(), 1)
        assert first.handle.id == process.files.id
        assert len(list((tmp_path / "kept" / "default").glob("default-*"))) == 1
    await launching


async def test_a_container_that_was_never_launched_is_swept(tmp_path: Path) -> None:
    held, process = half_started(tmp_path)
    held.close()
    async with farm(tmp_path) as backend:
        assert backend.found == 0
        assert not process.files.path.exists()


async def test_a_container_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    held, process = half_started(tmp_path)
    await process.launch(detached=True)
    held.close()
    async with farm(tmp_path, start_timeout_s=0.001) as backend:
        async with asyncio.timeout(30):
            failed = await anext(backend.events())
        assert isinstance(failed, StartFailed)
        assert f"{process.files.id} was not ready within" in failed.reason
        assert processes_with(process.files.id) == []
        assert not process.files.path.exists()
        await backend.stop_all()


async def test_a_container_that_ends_while_it_is_adopted_is_replaced_at_once(tmp_path: Path) -> None:
    async with farm(tmp_path) as backend:
        await backend.scale(1)
        [first] = await started(backend.events(), 1)
        launcher = backend.pids[first.handle.id]
    os.kill(launcher, signal.SIGSTOP)  # so that it still looks alive when it serves no more
    os.kill(int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text()), signal.SIGKILL)
    await until(lambda: processes_with(first.handle.id) == [launcher])
    await until(lambda: not healthy(first.handle.base_url))  # sockets are closed after the command line is gone
    async with farm(tmp_path) as backend:
        events = backend.events()
        os.kill(launcher, signal.SIGKILL)
        async with asyncio.timeout(START_S / 2):
            failed = await anext(events)
        assert isinstance(failed, StartFailed)
        assert "ended" in failed.reason
        [new] = await started(events, 1)
        assert (new.handle.index, new.handle.id != first.handle.id) == (0, True)


async def test_a_farm_left_while_a_container_starts_has_it_next_time(tmp_path: Path) -> None:
    async with farm(tmp_path) as backend:
        await backend.scale(1)
        await until(lambda: processes_with(str(tmp_path)))
    [path] = (tmp_path / "kept" / "default").glob("default-*")
    async with farm(tmp_path) as backend:
        assert (await started(backend.events(), 1))[0].handle.id == path.name


async def test_two_for_one_index_become_one(tmp_path: Path) -> None:
    [first] = await begun(tmp_path, 1)
    held, process = half_started(tmp_path)
    await process.launch(detached=True)
    held.close()
    async with farm(tmp_path) as backend:
        [kept] = await started(backend.events(), 1)
        assert kept.handle.id in (first.handle.id, process.files.id)
        assert [path.name for path in (tmp_path / "containers").iterdir()] == [kept.handle.id]


# -- what may not happen ---------------------------------------------------------------------------


async def test_running_containers_of_other_settings_are_not_adopted(tmp_path: Path) -> None:
    [first] = await begun(tmp_path, 1)
    other = SETTINGS.model_copy(update={"slots_per_container": 2})
    with pytest.raises(ConfigError, match="slots=1, requested was 2") as caught:
        await farm(tmp_path, other).__aenter__()
    assert "agentenv gc --kept default" in caught.value.next_step
    async with farm(tmp_path) as backend:
        assert backend.generation == 2, "an opening that was refused is none"
        assert await started(backend.events(), 1) == [first]


async def test_farms_of_two_names_have_nothing_in_common(tmp_path: Path) -> None:
    async with farm(tmp_path, farm="a") as one, farm(tmp_path, farm="b") as other:
        await one.scale(1)
        await started(one.events(), 1)
        assert other.found == 0
        await other.stop_all()
        assert len(one.pids) == 1
        await one.stop_all()


@pytest.mark.parametrize("name", ["", "../up", "a.b", "-a", "x" * 33])
async def test_a_name_that_is_no_directory_s_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="farm"):
        await farm(tmp_path, farm=name).__aenter__()


async def test_secrets_are_neither_arguments_nor_environment_nor_readable(tmp_path: Path) -> None:
    [first] = await begun(tmp_path, 1)
    files = list((tmp_path / "kept" / "default" / first.handle.id).iterdir())
    assert {path.name for path in files} == {"lock", "token", "spec.json", "events", "log"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "kept" / "default").stat().st_mode) == 0o700
    for pid in processes_with(str(tmp_path)):
        for name in ("cmdline", "environ"):
            assert first.handle.token.encode() not in Path("/proc", str(pid), name).read_bytes()


async def test_nothing_in_a_slot_holds_the_container_s_lock_or_the_farm_s(tmp_path: Path) -> None:
    """They could release it."""
    async with farm(tmp_path) as backend:
        await backend.scale(1)
        [first] = await started(backend.events(), 1)
        launcher = backend.pids[first.handle.id]
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        lock = tmp_path / "kept" / "default" / first.handle.id / "lock"
        assert set(map(str, holders(lock))) == {str(launcher), *children}
        assert holders(tmp_path / "kept-default" / "lock") == [os.getpid()]


def holders(lock: Path) -> list[int]:
    """Processes with an open descriptor of this file."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and any(link == str(lock) for link in _links(entry / "fd"))
    ]


def _links(directory: Path) -> list[str]:
    links = []
    with contextlib.suppress(OSError):  # the process has ended
        for entry in list(directory.iterdir()):
            with contextlib.suppress(OSError):  # the listing's own
                links.append(str(entry.readlink()))
    return links


async def test_a_pool_keeps_the_containers_it_finds_until_they_have_been_idle(tmp_path: Path) -> None:
    before = {event.handle.id for event in await begun(tmp_path, 2)}
    patient = PoolSettings(min_containers=1, max_containers=4, idle_containers_after_s=3600)
    async with SlotPool(backend := farm(tmp_path), patient) as pool:
        await until(lambda: pool.statistics().containers.get(ContainerState.ready) == 2, START_S)
        assert pool.statistics().goal_containers == 2
        assert backend.pids.keys() == before
    hasty = patient.model_copy(update={"idle_containers_after_s": 1})
    async with SlotPool(backend := farm(tmp_path), hasty) as pool:
        await until(lambda: pool.statistics().goal_containers == 1, START_S)
        await until(lambda: len(backend.pids) == 1, START_S)
        assert backend.pids.keys() < before


# -- pids ------------------------------------------------------------------------------------------


async def test_a_process_that_has_another_s_pid_is_not_taken_for_it() -> None:
    boot, namespace, pid, ticks = own_mark().rsplit(":", 3)
    assert OtherProcess.open(os.getpid(), f"{boot}:{namespace}:{pid}:{int(ticks) - 1}") is None
    same = OtherProcess.open(os.getpid(), own_mark())
    assert same is not None
    same.close()


async def test_an_ended_process_has_no_mark_and_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    mark = process_mark(child.pid)
    assert mark.rsplit(":", 2)[1] == str(child.pid)
    process = OtherProcess.open(child.pid, mark)
    assert process is not None
    child.kill()
    async with asyncio.timeout(30):
        await process.ended()
        await child.wait()
    assert process_mark(child.pid) == ""
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(os, "killpg", lambda *given: sent.append(given))
    process.terminate()
    process.kill_group()
    assert sent == []
    process.close()

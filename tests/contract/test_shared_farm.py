"""The farm that all of a process share: from any event loop and thread, and quiet at the process's end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from agentenv import AsyncSandbox, ContainerSettings, SharedFarm, shared_farm
from agentenv.config import PoolSettings
from agentenv.errors import ConfigError, PoolClosedError, SandboxUnavailableError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.registry import BackendName
from tests.farm_service import served
from tests.waiting import START_S


@pytest.fixture(params=["fake", "local"])
def farm(request: pytest.FixtureRequest) -> Iterator[SharedFarm]:
    opened = of(request.param)
    yield opened
    opened.blocking.close()


def of(backend: BackendName, slots: int = 8, env: dict[str, str] | None = None) -> SharedFarm:
    return shared_farm(backend, slots=slots, start_timeout_s=START_S, env=env or {})


def test_equal_settings_are_one_farm_and_others_another() -> None:
    assert of("fake") is of("fake")
    assert of("fake") is not of("fake", slots=7)
    assert of("fake") is not of("fake", env={"A": "b"})
    assert of("fake", env={"A": "b"}) is of("fake", env={"A": "b"})


def test_one_sandbox_is_used_from_several_loops(farm: SharedFarm) -> None:
    async def opened() -> AsyncSandbox:
        box = await farm.sandbox().open()
        await box.write_file("note", "kept")
        return box

    async def used(box: AsyncSandbox) -> None:
        assert await box.read_file("note") == "kept"
        await box.close()
        assert not box.is_open

    box = asyncio.run(opened())
    asyncio.run(used(box))


async def test_what_it_gives_out_is_used_from_the_callers_loop(farm: SharedFarm, tmp_path: Path) -> None:
    async with farm.sandbox(workdir="/workspace/sub") as box:
        assert isinstance(box, AsyncSandbox)
        program = await box.start(["sh", "-c", "cat; echo done >&2"], output="stream")
        async with program:
            await program.write("one\ntwo\n")
            await program.close_stdin()
            assert [line async for line in program.stdout] == [b"one\n", b"two\n"]
            assert (await program.stderr.read(), await program.wait(), program.exit_code) == (b"done\n", 0, 0)
        process = await box.start("echo a; sleep 0.2; echo b")
        assert b"".join([piece async for piece in process.output()]) == b"a\nb\n"
        async with box.python() as python:
            await python.run("n = 6")
            assert (await python.run("n * 7")).text == "42"
        (tmp_path / "file").write_text("up")
        await box.upload(tmp_path / "file", "file")
        (fork,) = await box.fork()
        async with fork:
            assert await fork.read_file("file") == "up"


async def test_connections_are_streams_of_the_callers_loop(farm: SharedFarm) -> None:
    # The fake's slots share this machine's ports: one that is held and does not listen is nobody else's meanwhile.
    script = (
        "import socket; here = ('127.0.0.1', 0)\n"
        "s = socket.create_server(here); deaf = socket.socket(); deaf.bind(here)\n"
        "print(s.getsockname()[1], deaf.getsockname()[1], flush=True)\n"
        "c = s.accept()[0]; c.sendall(c.recv(9)[::-1]); c.close(); s.accept()"
    )
    async with farm.sandbox() as box:
        server = await box.start(["python3", "-c", script])
        answering, deaf = map(int, (await anext(server.output())).split())
        async with box.connect(answering) as (reader, writer):
            writer.write(b"abc")
            assert await reader.read(9) == b"cba"
        with pytest.raises(ConnectionRefusedError):
            async with box.connect(deaf):
                pass


async def test_an_application_that_is_served_runs_in_the_callers_loop(farm: SharedFarm) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def answer(request: web.Request) -> web.Response:
        loops.append(asyncio.get_running_loop())
        return web.Response(text="from here")

    app = web.Application()
    app.router.add_get("/", answer)
    ask = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    async with farm.sandbox() as box, box.serve(app) as served:
        assert (await box.exec(["python3", "-c", ask, served.url])).stdout == "from here\n"
    assert loops == [asyncio.get_running_loop()]


async def test_callbacks_are_called_in_the_callers_thread_and_cancel_by_what_they_raise(farm: SharedFarm) -> None:
    seen: list[tuple[str, asyncio.AbstractEventLoop]] = []

    def show(stream: str, text: str) -> None:
        seen.append((text, asyncio.get_running_loop()))

    def refuse(stream: str, text: str) -> None:
        raise ValueError(text)

    async with farm.sandbox() as box:
        await box.run("echo shown", on_output=show)
        assert seen == [("shown\n", asyncio.get_running_loop())]
        with pytest.raises(ValueError, match="too much"):
            await box.run("echo too much; sleep 1000", 1000, on_output=refuse)
        assert (await box.run("echo goes on")).stdout == "goes on\n"


async def test_cancelling_a_call_ends_it_in_the_slot(farm: SharedFarm) -> None:
    async with farm.sandbox() as box:
        call = asyncio.create_task(box.run("echo $$ > pid; exec sleep 1000", 1000))
        started = await box.start("until test -s pid; do sleep 0.05; done")
        assert await started.wait(60) == 0
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await box.run("kill -0 $(cat pid)")).exit_code == 1


async def test_the_first_who_asks_may_be_cancelled(farm: SharedFarm) -> None:
    first = asyncio.create_task(farm.open())
    second = asyncio.create_task(farm.sandbox().open())
    await asyncio.sleep(0.05)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    box = await second
    assert (await box.run("echo open")).stdout == "open\n"
    await box.close()


async def test_a_cancelled_opening_gives_its_slot_back() -> None:
    farm = of("fake", slots=1)
    for delay_s in (0.0, 0.001, 0.01, 0.05):
        opening = asyncio.create_task(farm.sandbox().__aenter__())
        await asyncio.sleep(delay_s)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await (await opening).close()
    async with farm.sandbox() as box:
        assert (await box.run("echo free")).stdout == "free\n"
    await farm.close()


def test_more_threads_than_slots(farm: SharedFarm) -> None:
    def work(number: int) -> str:
        with farm.blocking.sandbox() as box:
            return box.run(f"sleep 0.1; echo {number}").stdout.strip()

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(work, range(24))) == [str(number) for number in range(24)]


def test_more_loops_than_slots(farm: SharedFarm) -> None:
    async def work(number: int) -> str:
        async with farm.sandbox() as box:
            return (await box.run(f"echo {number}")).stdout.strip()

    with ThreadPoolExecutor(24) as threads:
        found = threads.map(lambda number: asyncio.run(work(number)), range(24))
        assert list(found) == [str(number) for number in range(24)]


async def test_one_that_was_closed_is_replaced() -> None:
    farm = of("fake")
    async with farm, farm.sandbox() as box:
        assert (await farm).is_open
        assert (await box.run("true")).exit_code == 0
    assert farm.is_open
    await farm.close()
    with pytest.raises(PoolClosedError):
        await farm.sandbox().open()
    assert of("fake") is not farm


async def test_one_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    farm = of("fake", slots=3)
    with monkeypatch.context() as broken:

        async def fails(_: FakeBackend) -> FakeBackend:
            raise SandboxUnavailableError("no container today")

        broken.setattr(FakeBackend, "__aenter__", fails)
        for _ in range(2):
            with pytest.raises(SandboxUnavailableError, match="no container today"):
                await farm.sandbox().open()
    again = of("fake", slots=3)
    assert again is not farm
    await again.open()
    await again.close()


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="slots"):
        shared_farm("fake", slots=0)
    with pytest.raises(ConfigError, match="output_bytes"):
        shared_farm("fake", output_bytes=1)
    with pytest.raises(ConfigError, match="memory_mib"):
        of("fake").sandbox(memory_mib=100)


@pytest.fixture
async def of_service() -> AsyncIterator[SharedFarm]:
    settings = ContainerSettings(slots_per_container=4)
    async with served(FakeBackend(settings), PoolSettings(max_containers=1)) as service:
        access = service.access("tests")
        farm = shared_farm("farm", farm=access, start_timeout_s=START_S)
        assert farm is shared_farm("farm", farm=access, start_timeout_s=START_S)
        yield farm
        await farm.close()


async def test_over_a_farm_service(of_service: SharedFarm) -> None:
    farm = of_service
    assert await farm.sandboxes() == []
    async with farm.sandbox(name="build") as box:
        await box.write_file("note", "kept")
    async with farm.connect("build") as box:
        assert await box.read_file("note") == "kept"
        await box.kill()

    def work() -> str:
        with farm.blocking.sandbox() as one:
            return one.run("echo here").stdout

    assert await asyncio.to_thread(work) == "here\n"


@pytest.mark.parametrize("verb", ["pause", "kill"])
async def test_what_is_done_by_name_opens_it(of_service: SharedFarm, verb: str) -> None:
    """Without an event loop too: nobody has used the farm before."""
    with pytest.raises(ConfigError, match="no sandbox 'none'"):
        await asyncio.to_thread(getattr(of_service.blocking, verb), "none")


PROGRAM = """
    import asyncio, os, sys
    from agentenv import shared_farm

    async def main():
        farm = shared_farm({backend!r}, slots=2, start_timeout_s={start_s!r})
        box = await farm.sandbox().open()
        assert (await box.run("echo ran")).stdout == "ran\\n"
        print("ready", flush=True)
        if sys.argv[1] == "raise":
            raise ValueError("on purpose")
        if sys.argv[1] == "interrupt":
            await asyncio.sleep(600)
        return farm

    farm = asyncio.run(main())
    if sys.argv[1] == "fork":
        child = os.fork()
        if not child:
            mine = shared_farm({backend!r}, slots=2, start_timeout_s={start_s!r})
            assert mine is not farm
            with mine.blocking.sandbox() as other:
                assert other.run("echo mine").stdout == "mine\\n"
            try:
                farm.blocking.sandbox().open()
            except Exception as error:
                print(type(error).__name__, flush=True)
            sys.exit()
        os.waitpid(child, 0)
        with farm.blocking.sandbox() as box:
            assert box.run("echo alive").stdout == "alive\\n"
"""


@pytest.mark.parametrize("backend", ["fake", "local"])
@pytest.mark.parametrize(
    ("how", "last"),
    [("end", ""), ("raise", "ValueError: on purpose"), ("interrupt", "KeyboardInterrupt"), ("fork", "")],
)
def test_the_end_of_the_process_is_quiet(backend: str, how: str, last: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(backend=backend, start_s=START_S)))
    state = tmp_path / "state"
    running = subprocess.Popen(
        [sys.executable, program, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGENTENV_STATE_DIR": str(state)},
        start_new_session=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    if how == "interrupt":
        os.killpg(running.pid, signal.SIGINT)
    try:
        said, errors = running.communicate(timeout=START_S)
    finally:
        running.kill()
    assert said == ("PoolClosedError\n" if how == "fork" else "")
    # A container that a loaded machine is slow to end is killed, which is told.
    told = [line for line in errors.strip().splitlines() if "did not stop within" not in line]
    assert told[-1:] == [last] * bool(last)
    assert "Unclosed" not in errors
    assert "never" not in errors
    assert "sys.meta_path" not in errors
    assert [path for path in state.rglob("*") if not path.is_dir()] == []
    with pytest.raises(ProcessLookupError):  # nothing of its process group is left
        os.killpg(running.pid, 0)

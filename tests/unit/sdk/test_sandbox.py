"""Sandbox and AsyncSandbox: the same names, one implementation, nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from agentenv import AsyncFarm, AsyncSandbox, ContainerSettings, Farm, OutputBytes, Sandbox
from agentenv.config import ContainerFields
from agentenv.containers.connect import Streams
from agentenv.containers.programs import StreamedProgram
from agentenv.errors import (
    AcquireTimeoutError,
    CheckpointError,
    ConfigError,
    InvalidArgumentsError,
    PoolClosedError,
    UnknownToolError,
)
from agentenv.sdk.loop_thread import LoopThread
from agentenv.sdk.processes import SlotProcess
from agentenv.sdk.python import SlotPython
from agentenv.sdk.sandbox import Process, Python, StreamedProcess
from agentenv.sdk.serving import Served
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.spec import Bind

AWAITED: dict[object, object] = {
    AsyncSandbox: Sandbox,
    list[Self]: list[Sandbox],  # type: ignore[misc]  # what a fork is
    AsyncFarm | None: Farm | None,
    SlotProcess: Process,
    SlotPython: Python,
    SlotProcess | StreamedProgram: Process | StreamedProcess,
    AsyncIterator[bytes]: Iterator[bytes],
    AsyncIterator[str]: Iterator[str],
    AsyncIterator[Streams]: Iterator[socket.socket],
    AsyncIterator[Served]: Iterator[Served],
}
"""What stands for what is awaited."""


def public(kind: type) -> dict[str, object]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


AT_ONCE = {(Farm, "connect"), (Farm, "sandbox"), (Sandbox, "python")}
"""They return what is opened later."""


def parameters(of: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Their types are in its hints."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(of).parameters.values()]


@pytest.mark.parametrize(
    ("plain", "awaited", "without"),
    [
        (Sandbox, AsyncSandbox, {"lease_for_transfer", "slot_session"}),
        (Farm, AsyncFarm, {"session"}),
        (Process, SlotProcess, set()),
        (StreamedProcess, StreamedProgram, set()),
    ],
)
def test_both_have_the_same_methods_with_the_same_types(plain: type, awaited: type, without: set[str]) -> None:
    attributes = {name for name, found in public(plain).items() if isinstance(found, property)} - {"is_open"}
    assert public(plain).keys() - attributes == public(awaited).keys() - without
    methods = {name for name, found in public(plain).items() if inspect.isfunction(found)}
    for name in (*methods, "__init__") if plain in (Farm, Sandbox) else methods:
        here, there = getattr(plain, name), getattr(awaited, name)
        hints = {
            hint: (AWAITED | {Self: plain}).get(found, found) for hint, found in typing.get_type_hints(there).items()
        }
        own = {hint: plain if found is Self else found for hint, found in typing.get_type_hints(here).items()}
        assert own == hints, name
        assert parameters(here) == parameters(there), name
        waits = inspect.iscoroutinefunction(there) or inspect.isasyncgenfunction(inspect.unwrap(there))
        assert waits == (name != "__init__" and (plain, name) not in AT_ONCE), name


def test_arguments_are_the_fields_of_the_settings() -> None:
    assert ContainerFields.__annotations__.keys() == ContainerSettings.model_fields.keys()
    made = ContainerSettings.made(
        ContainerSettings(env={"A": "1"}),
        {"isolation": "user", "binds": ["/opt/a:/a"], "limits": {"processes": 7}},
    )
    assert (made.isolation, made.env, made.binds, made.limits.processes) == (
        "user", {"A": "1"}, (Bind("/opt/a", "/a"),), 7,
    )  # fmt: skip
    with Sandbox("fake", env={"GREETING": "hi"}) as box:
        assert box.run("echo $GREETING").stdout == "hi\n"
    wrong: list[tuple[dict[str, typing.Any], str]] = [
        ({"isolation": "none"}, "isolation"),
        ({"isolatoin": "user"}, "isolatoin"),
        ({"binds": ["relative:/x"]}, "binds"),
        ({"settings": {"isolation": "user"}}, "settings.*isolation='user'"),
        ({"backend": FakeBackend(), "env": {}}, "cannot be given with a backend object"),
    ]
    for given, named in wrong:
        with pytest.raises(ConfigError, match=named):
            Sandbox(**given)
    with pytest.raises(ConfigError, match="slots"):
        Farm("fake", slots=0)
    for backend in ("farm", FakeBackend()):
        with pytest.raises(ConfigError, match="memory_mib: is of the backend's containers"):
            Farm(backend, memory_mib=512)
    with pytest.raises(ConfigError, match="memory_mib: got 0"):
        Farm("fake", memory_mib=0)


def test_a_second_open_changes_nothing() -> None:
    box = Sandbox("fake").open()
    box.write_file("x", "1")
    with pytest.raises(PoolClosedError, match="already open"):
        box.open()
    with box as same:
        assert same is box
        assert box.read_file("x") == "1"
    assert not box.is_open
    with pytest.raises(PoolClosedError, match="closed"), box:
        pass


async def test_a_second_open_changes_nothing_where_it_is_awaited() -> None:
    box = await AsyncSandbox("fake").open()
    with pytest.raises(PoolClosedError, match="already open"):
        await box.open()
    async with box:
        assert (await box.run("echo x")).stdout == "x\n"
    with pytest.raises(PoolClosedError, match="opened before"):
        await box.open()


def test_the_sandboxes_of_a_farm_share_containers() -> None:
    backend = FakeBackend(ContainerSettings(slots_per_container=10))
    with Farm(backend, slots=30) as farm:
        boxes = [farm.sandbox() for _ in range(30)]
        opening = [threading.Thread(target=box.open) for box in boxes]
        for thread in opening:
            thread.start()
        for thread in opening:
            thread.join(60)
        assert len({box.run("pwd").stdout for box in boxes}) == 30
        assert len(backend.containers) == 3
        boxes[0].write_file("x", "1")
        boxes[0].close()
        with pytest.raises(PoolClosedError):
            boxes[0].run("true")
        with farm.sandbox() as another:
            assert another.list_files().entries == ()
        assert boxes[1].run("echo still here").exit_code == 0
    with pytest.raises(PoolClosedError):
        boxes[1].run("true")
    boxes[1].close()
    assert "agentenv sandbox" not in threads()


def test_a_farm_is_a_pool_of_sandboxes() -> None:
    backend = FakeBackend(ContainerSettings(slots_per_container=10))
    with Farm(backend, slots=20) as farm:
        boxes = [Sandbox(pool=farm).open() for _ in range(12)]
        assert len({box.run("pwd").stdout for box in boxes}) == 12
        assert len(backend.containers) == 2
        boxes[0].close()
        assert boxes[1].run("true").exit_code == 0, "the farm goes on"
        for wrong in (
            {"backend": "fake"},
            {"isolation": "user"},
            {"memory_mib": 100},
            {"timeout_s": 5.0},
            {"forks": 1},
        ):
            with pytest.raises(ConfigError, match="pool"):
                Sandbox(pool=farm, **wrong)
    with pytest.raises(PoolClosedError, match="not open"):
        Sandbox(pool=Farm("fake")).open()


def test_a_workspace_is_gone_back_to_and_forked_without_an_image() -> None:
    with Sandbox("fake", forks=2) as box:
        box.write_file("state", "prepared")
        prepared = box.checkpoint()
        box.write_file("state", "changed")
        box.restore(prepared)
        box.drop(prepared)
        for number, fork in enumerate(box.fork(2)):
            with fork:
                assert fork.read_file("state") == "prepared"
                fork.write_file("state", str(number))
        assert box.read_file("state") == "prepared"
        with pytest.raises(CheckpointError, match="cannot become one"):
            box.commit()


@pytest.mark.parametrize(("forks", "asked"), [(0, 1), (2, 3)])
def test_more_forks_than_the_container_has_slots_for_are_refused_at_once(forks: int, asked: int) -> None:
    with Sandbox("fake", forks=forks) as box:
        box.write_file("kept", "here")
        shell = box.start("sleep 1000")
        with pytest.raises(ConfigError, match=rf"slot's has {forks + 1} \(open it with Sandbox\(forks={asked}\)"):
            box.fork(asked)
        assert shell.state().exit_code is None, "nothing was killed for a checkpoint"
        assert box.read_file("kept") == "here"


def test_limits_of_a_result_and_of_a_file_are_named() -> None:
    with Sandbox("fake", output_bytes=2000) as box:
        program = ["python3", "-c", "print('x' * 5000); import sys; print('short', file=sys.stderr)"]
        cut, whole = box.exec(program), box.exec(program, output_bytes=6000)
        assert (cut.truncated, len(cut.stdout_bytes), cut.stdout_dropped_bytes, cut.stderr_dropped_bytes) == (
            True, 2000, 3001, 0,
        )  # fmt: skip
        assert (whole.truncated, len(whole.stdout_bytes)) == (False, 5001)
        box.run(f"truncate -s {MAX_FILE_BYTES + 1} large")
        with pytest.raises(
            OSError, match=rf"{MAX_FILE_BYTES + 1} bytes, .* {MAX_FILE_BYTES} of one call; download"
        ) as raised:
            box.read_file("large", binary=True)
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, "large")


def test_a_sandbox_starts_in_its_workdir() -> None:
    with Sandbox("fake", workdir="/workspace/src") as box:
        box.write_file("main.py", "print(1)")
        assert box.run("python3 main.py").stdout == "1\n"
        assert box.exec(["pwd"]).stdout.endswith("/workspace/src\n")
    with Farm("fake", slots=2) as farm, Sandbox(pool=farm, workdir="/workspace/src") as box:
        assert box.run("pwd").stdout.endswith("/workspace/src\n")
    with pytest.raises(ConfigError, match=r"workdir: got 'src' \(allowed: an absolute path"):
        Sandbox("fake", workdir="src")


async def test_calls_of_a_sandbox_run_one_at_a_time_and_programs_beside_them() -> None:
    async with AsyncSandbox("fake") as box:
        await box.write_file("line", "")
        both = "[ -e busy ] && echo twice >> line; touch busy; sleep 0.3; rm busy"
        beside = await box.start("sleep 1000")
        await asyncio.gather(box.run(both), box.exec(["bash", "-c", both]), box.run(both))
        assert await box.read_file("line") == ""
        assert (await beside.state()).exit_code is None


async def test_a_farm_is_a_pool_of_awaited_sandboxes() -> None:
    async with AsyncFarm("fake", slots=2) as farm, AsyncSandbox(pool=farm) as one, AsyncSandbox(pool=farm) as other:
        assert (await one.run("pwd")).stdout != (await other.run("pwd")).stdout


async def test_a_farm_without_a_free_slot_says_what_to_raise() -> None:
    async with AsyncFarm("fake", slots=1, start_timeout_s=10) as farm, farm.sandbox() as box:
        with pytest.raises(AcquireTimeoutError, match="of a Farm: slots"):
            await farm.sandbox().open()
        assert (await box.run("true")).exit_code == 0


FORK = """
import os, sys
from agentenv import Sandbox
from agentenv.errors import PoolClosedError
box = Sandbox("fake").open()
directory = box.run("pwd").stdout.strip()
if not (child := os.fork()):
    try:
        box.run("true")
    except PoolClosedError as error:
        assert "forked" in str(error), error
        box.close()
        del box
        sys.exit(7)  # with everything that an interpreter does at its end
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert box.run("pwd").stdout.strip() == directory
box.close()
assert not os.path.exists(directory)
"""


def test_a_forked_child_cannot_use_it_and_does_it_no_harm() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_day_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/data.bin").write_bytes(os.urandom(3_000_000))
    seen: list[tuple[int, int | None]] = []
    with Sandbox("fake") as box:
        assert box.write_file("src/hello.py", "print('hello')\n") == 15
        assert box.run("python3 src/hello.py").stdout == "hello\n"
        assert box.run("exit 3").exit_code == 3
        assert [match.line for match in box.search("hel+o", glob="*.py").matches] == [1]
        diff = "--- a/src/hello.py\n+++ b/src/hello.py\n@@ -1 +1 @@\n-print('hello')\n+print('bye')\n"
        assert box.patch(diff).files[0].action == "modified"
        assert box.read_file("src/hello.py") == "print('bye')\n"
        assert box.read_file("src/hello.py", binary=True) == b"print('bye')\n"
        assert [entry.path for entry in box.list_files("src").entries] == ["hello.py"]
        sent = box.upload(tmp_path / "in", "data", progress=lambda done, total: seen.append((done, total)))
        assert sent.total_bytes == 3_000_000
        assert seen[-1] == (3_000_000, 3_000_000)
        got = box.download("data", tmp_path / "out")
        assert got == sent
        assert (tmp_path / "out/data.bin").read_bytes() == (tmp_path / "in/data.bin").read_bytes()
        (file,) = box.archive("src").files
        assert file.sha256 == hashlib.sha256(b"print('bye')\n").hexdigest()
        assert box.list_artifacts("src").files == (file,)
        assert box.read_artifact("src/hello.py").data == b"print('bye')\n"
        assert box.call_tool("bash", {"command": "echo x"}).stdout == "x\n"
        box.seal()
        with pytest.raises(FileNotFoundError):
            box.read_file("missing")
        with pytest.raises(FileNotFoundError):
            box.download("missing", tmp_path / "no")
        with pytest.raises(InvalidArgumentsError, match="hunk 1 of 1"):
            box.patch(diff)
        with pytest.raises(UnknownToolError):
            box.call_tool("no_such_tool")
    with pytest.raises(PoolClosedError):
        box.run("true")
    box.close()


def test_a_prompt_shows_what_matters() -> None:
    with Sandbox("fake") as box:
        assert repr(box.run("echo hi")) == "CallResult(exit_code=0, stdout='hi\\n')"
        assert repr(box.run("echo no >&2; exit 3")) == "CallResult(exit_code=3, stderr='no\\n')"
        late = box.run("sleep 60", 0.1)
        assert repr(late) == f"CallResult(exit_code={late.exit_code}, timed_out=True)"
        assert len(repr(box.run("yes | head -c 100000"))) < 3_000
        with pytest.raises(FileNotFoundError) as missing:
            box.read_file("nope")
        assert str(missing.value) == "[Errno 2] No such file or directory: 'nope'"


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_it_closes_fully_even_when_nobody_closes_it() -> None:
    box = Sandbox("fake").open()
    directory = box.run("pwd").stdout.strip()
    assert Path(directory).is_dir()
    assert "agentenv sandbox" in threads()
    del box
    gc.collect()
    assert "agentenv sandbox" not in threads()
    assert not Path(directory).exists()


def test_what_is_wrong_is_said_and_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="local, nomad, fake"):
        Sandbox("docker")  # type: ignore[arg-type]
    backend = FakeBackend()
    backend.fail_next_start("no kernel", permanent=True, next_step="find one")
    with pytest.raises(Exception, match="no kernel"):
        Sandbox(backend).open()
    box = Sandbox("fake")
    with pytest.raises(PoolClosedError, match="not open"):
        box.run("true")
    box.close()
    assert "agentenv sandbox" not in threads()


async def test_it_works_where_a_loop_runs_already() -> None:
    with Sandbox("fake") as box:
        assert box.run("echo in a notebook").stdout == "in a notebook\n"
        async with AsyncSandbox("fake") as other:
            both = await asyncio.gather(asyncio.to_thread(box.run, "echo 1"), other.run("echo 2"))
    assert [result.stdout for result in both] == ["1\n", "2\n"]


def test_several_threads_may_use_it() -> None:
    with Sandbox("fake") as box:
        results: list[str] = []
        workers = [threading.Thread(target=lambda n=n: results.append(box.run(f"echo {n}").stdout)) for n in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert sorted(results) == [f"{n}\n" for n in range(8)]


def test_output_of_a_program_is_shown_before_it_ends() -> None:
    """It waits for a file that is written once its first line has been seen."""
    with Sandbox("fake") as box, ThreadPoolExecutor(1) as other:
        shown: list[tuple[str, str]] = []
        first = threading.Event()

        def show(stream: str, text: str) -> None:
            shown.append((stream, text))
            first.set()

        script = "echo one; until [ -e go ]; do sleep 0.05; done; printf 'two \\377' >&2"
        running = other.submit(box.exec, ["bash", "-c", script], on_output=show)
        assert first.wait(60)
        assert not running.done()
        box.terminal("touch go")
        assert running.result(60).stdout_bytes == b"one\n"
        assert (shown[0], "".join(text for stream, text in shown if stream == "stderr")) == (
            ("stdout", "one\n"),
            "two \ufffd",
        )


async def test_a_callback_may_be_a_coroutine_function_and_get_bytes() -> None:
    heard: list[tuple[str, bytes]] = []

    async def slowly(stream: str, data: bytes) -> None:
        await asyncio.sleep(0.3)  # longer than the command takes: its end must not cut this off
        heard.append((stream, data))

    async def broken(stream: str, text: str) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError(f"{stream}: {text}")

    async with AsyncSandbox("fake") as box:
        done = await box.exec(["printf", "a\\377b"], on_output=OutputBytes(slowly))
        assert heard == [("stdout", b"a\xffb")] == [("stdout", done.stdout_bytes)]
        heard.clear()
        script = "head -c 3000000 /dev/zero; sleep 0.3; echo end"
        done = await box.exec(["bash", "-c", script], output_bytes=1000, on_output=OutputBytes(slowly))
        last = b"".join(data for _, data in heard)
        assert done.truncated
        assert len(done.stdout_bytes) <= len(last) <= 3_000_004
        assert last.endswith(b"\0end\n")
        with pytest.raises(ZeroDivisionError, match="stdout: x"):
            await box.run("echo x; sleep 60", on_output=broken)
        async with box.python() as python:
            heard.clear()
            await python.run("print('x')", on_output=OutputBytes(slowly))
            with pytest.raises(ZeroDivisionError, match="stdout: 1"):
                await python.run("print(1)", on_output=broken)
        assert heard == [("stdout", b"x\n")]


@pytest.mark.parametrize(("kib", "count"), [(129, 1), (100, 25), (100, 130)])
async def test_arguments_that_linux_does_not_take_end_as_in_a_shell(kib: int, count: int) -> None:
    """The last are more than any message holds."""
    words = ["x" * kib * 1024] * count
    env = {f"V{number}": each for number, each in enumerate(words)}
    async with AsyncSandbox("fake") as box:
        ended = await box.exec(["true", *words])
        assert (ended.exit_code, ended.stderr) == (126, "true: Argument list too long\n")
        ended = await box.exec(["true"], env=env)
        assert (ended.exit_code, ended.stderr) == (126, "true: Argument list too long\n")
        assert (await box.exec(["no-such-program", *words])).exit_code == 127
        called = await box.run("true", env=env)
        assert (called.exit_code, called.stderr) == (126, "bash: cannot start: Argument list too long\n")
        assert await (await box.start(["true", *words])).wait() == 126
        async with await box.start(["true", *words], output="stream") as program:
            assert await program.wait() == 126
            assert await program.stderr.read() == b"true: cannot start: Argument list too long\n"
        with pytest.raises(InvalidArgumentsError, match="surrogate"):
            await box.exec(["\ud800", *words])


async def test_what_linux_takes_arrives_whole() -> None:
    words = ["\x01é𝄞" * 13_000] * 18
    async with AsyncSandbox("fake") as box:
        done = await box.exec(["printf", "%s", *words], output_bytes=4_000_000)
        assert done.stdout == "".join(words)
        async with await box.start(["printf", "%s", *words], output="stream") as program:
            assert (await program.stdout.read()).decode() == "".join(words)


def test_a_callback_cannot_deadlock_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with Sandbox("fake") as box:
        for wrong in (box.close, lambda: box.run("true")):
            with pytest.raises(RuntimeError, match="its own callbacks"):
                box.upload(tmp_path / "file", "file", progress=lambda *_, wrong=wrong: wrong())
        assert box.run("true").exit_code == 0


def test_a_forgotten_one_may_be_found_in_its_own_thread() -> None:
    box = Sandbox("fake").open()
    directory = Path(box.run("pwd").stdout.strip())
    held, thread = [box], box._loop

    async def forget() -> None:
        held.clear()
        gc.collect()

    del box
    thread.run(forget())
    for waiting in threading.enumerate():
        if waiting.name == "agentenv sandbox":
            waiting.join(30)
    assert not thread.running
    assert not directory.exists()


SCRIPT = """
import sys
from agentenv import Sandbox
with Sandbox("fake") as box:
    print(box.run("pwd").stdout.strip(), flush=True)
    try:
        box.run("echo $$ > pid; echo started >&2; touch started; sleep 600", 900)
    except KeyboardInterrupt:
        print("interrupted", box.run("echo still usable").stdout.strip(), flush=True)
"""


def test_ctrl_c_ends_the_call_and_leaves_a_usable_sandbox() -> None:
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    with script:
        assert script.stdout is not None
        workspace = Path(script.stdout.readline().strip())
        deadline = 30.0
        pause = threading.Event()
        while not (workspace / "started").exists():
            pause.wait(0.02)
            deadline -= 0.02
            assert deadline > 0
        sleeper = int((workspace / "pid").read_text())
        script.send_signal(signal.SIGINT)
        assert script.stdout.readline() == "interrupted still usable\n"
        assert script.wait(30) == 0
    assert not Path(f"/proc/{sleeper}").exists()
    assert not workspace.exists()


def test_a_loop_thread_cancels_what_an_interrupt_leaves() -> None:
    thread = LoopThread()
    cleaned: list[str] = []

    async def work() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(600)
        finally:
            cleaned.append("yes")

    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(work())
        assert cleaned == ["yes"]
    finally:
        thread.close()
    assert not thread.running

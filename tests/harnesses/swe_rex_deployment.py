"""SWE-ReX on slots of this machine, by examples/harnesses/swe_rex.py. Run in an environment that has swe-rex
(scripts/harnesses makes it)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from agentenv.errors import InfraError
from examples.harnesses.swe_rex import SlotDeployment, SlotRuntime
from tests.harnesses.lost_container import kill_container_of

IMAGE = "debian:bookworm-slim"


@pytest.fixture
async def runtime() -> AsyncIterator[SlotRuntime]:
    deployment = SlotDeployment(IMAGE, workdir="/repo")
    with pytest.raises(DeploymentNotStartedError):
        _ = deployment.runtime
    await deployment.start()
    assert await deployment.is_alive()
    yield deployment.runtime
    await deployment.stop()


async def test_a_session(runtime: SlotRuntime) -> None:
    await runtime.write_file(WriteFileRequest(path="/etc/begin", content="COLOUR=blue\n"))
    await runtime.create_session(CreateBashSessionRequest(startup_source=["/etc/begin"]))
    with pytest.raises(SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest())
    done = await runtime.run_in_session(BashAction(command="cd /tmp\necho $COLOUR"))
    assert (done.output, done.exit_code) == ("blue\n", 0)
    done = await runtime.run_in_session(BashAction(command="pwd; echo oops >&2; (exit 3)", check="silent"))
    assert (done.output, done.exit_code) == ("/tmp\noops\n", 3)
    with pytest.raises(NonZeroExitCodeError, match="no such thing"):
        await runtime.run_in_session(BashAction(command="nosuch", error_msg="no such thing"))
    with pytest.raises(BashIncorrectSyntaxError) as wrong:
        await runtime.run_in_session(BashAction(command="for do"))
    assert "syntax error" in wrong.value.extra_info["bash_stderr"]
    assert (await runtime.run_in_session(BashAction(command="true", check="ignore"))).exit_code is None
    await runtime.close_session(CloseBashSessionRequest())
    with pytest.raises(SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="true"))


async def test_a_command_that_takes_too_long_is_interrupted(runtime: SlotRuntime) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    await runtime.run_in_session(BashAction(command="kept=1"))
    with pytest.raises(CommandTimeoutError):
        await runtime.run_in_session(BashAction(command="cat", timeout=1))
    await runtime.run_in_session(BashInterruptAction(timeout=60))
    assert (await runtime.run_in_session(BashAction(command="echo $kept"))).output == "1\n"


async def test_what_is_refused(runtime: SlotRuntime) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    with pytest.raises(NotImplementedError):
        await runtime.run_in_session(BashAction(command="gdb", is_interactive_command=True))


async def test_commands_and_files(runtime: SlotRuntime, tmp_path: Path) -> None:
    done = await runtime.execute(Command(command=["sh", "-c", "pwd; echo oops >&2; exit 4"]))
    assert (done.stdout, done.stderr, done.exit_code) == ("/repo\n", "oops\n", 4)
    merged = Command(command="echo $A; echo b >&2", shell=True, merge_output_streams=True, env={"A": "a"}, cwd="/tmp")
    assert (await runtime.execute(merged)).stdout == "a\nb\n"
    with pytest.raises(NonZeroExitCodeError):
        await runtime.execute(Command(command="false", check=True))
    with pytest.raises(SwerexException, match="missing from the output"):
        await runtime.execute(Command(command=["head", "-c", "70M", "/dev/zero"]))
    with pytest.raises(CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "60"], timeout=1))
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_text("text")
    await runtime.upload(UploadRequest(source_path=str(tmp_path / "d"), target_path="/up/there"))
    assert (await runtime.read_file(ReadFileRequest(path="/up/there/f"))).content == "text"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/nosuch"))


@pytest.mark.parametrize("session", [True, False])
async def test_a_lost_container_is_raised(session: bool) -> None:
    deployment = SlotDeployment(IMAGE, slots=2)
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    words = f"300.2{int(session)}"
    if session:
        running = asyncio.ensure_future(deployment.runtime.run_in_session(BashAction(command=f"sleep {words}")))
    else:
        running = asyncio.ensure_future(deployment.runtime.execute(Command(command=["sleep", words])))
    await asyncio.to_thread(kill_container_of, "sleep", words)
    with pytest.raises(InfraError):
        await running
    assert not await deployment.is_alive()
    await deployment.stop()

"""File operations reach what the slot's own user reaches, never more, whatever links and races the slot prepares."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile

import pytest

from agentenv.executor.session import ToolSession
from tests.security.conftest import Slots, sh
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

ELSEWHERE = [
    "/etc/passwd",
    "../etc/passwd",
    "a/../../etc/passwd",
    "/workspace/../etc/passwd",
    "link",
    "directory/passwd",
    "/proc/1/environ",
    "/proc/version",
    "/run/agentenv",
    "/root/.bashrc",
    "/dev/shm",
]


async def _prepared(slots: Slots) -> ToolSession:
    session = await slots.open("paths")
    await sh(session, "ln -s /etc/passwd link; ln -s /etc directory; ln -s /proc/self/root root; mkdir inner")
    return session


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_reading_shows_what_a_command_sees(slots: Slots, path: str) -> None:
    session = await _prepared(slots)
    command = await session.call("bash", {"command": f"cat {path}"})
    result = await session.call("read_file", {"path": path})
    assert result.fault == "none", result
    if command.exit_code == 0:
        assert isinstance(result.content, dict), result
        assert result.content["text"] == command.stdout
    else:
        assert result.exit_code != 0
        assert result.content is None


@pytest.mark.parametrize("path", ["/etc/agentenv", "../x", "directory/x", "root/tmp/x", "/proc/1/root/tmp/x", "/sys/x"])
async def test_writing_elsewhere_fails(slots: Slots, path: str) -> None:
    """`root/` is a link of /proc, which file operations never take."""
    session = await _prepared(slots)
    result = await session.call("write_file", {"path": path, "text": "x"})
    assert (result.fault, result.content) == ("none", None), result
    assert result.exit_code != 0
    assert await sh(session, "ls -A /tmp") == ""


async def test_a_slot_reaches_no_file_of_another(slots: Slots) -> None:
    mine, other = await slots.open("mine"), await slots.open("other")
    for path in ("/tmp/secret", "/dev/shm/secret", "secret"):
        result = await mine.call("write_file", {"path": path, "text": "mine"})
        assert result.exit_code in (0, None), result
        result = await other.call("read_file", {"path": path})
        assert (result.fault, result.content) == ("none", None), result


async def test_a_race_of_symlinks_never_leads_out_of_what_is_unpacked(slots: Slots) -> None:
    """A process swaps a directory for a link to /tmp as fast as it can; no file of an archive may ever land there."""
    session = await slots.open("race")
    await sh(
        session,
        "mkdir -p into/real; ln -s /tmp into/fake; cd into;"
        "(while :; do ln -sfn real swap; ln -sfn /tmp swap; done) >/dev/null 2>&1 &",
    )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("swap/landed"))
    given = {"action": "extract", "path": "into", "data": base64.b64encode(packed.getvalue()).decode()}
    faults = {(await session.call("artifacts", given)).fault for _ in range(200)}
    assert faults <= {"none", "policy"}
    assert await sh(session, "ls -A /tmp") == ""


async def test_a_fifo_or_device_never_blocks_a_read(slots: Slots) -> None:
    session = await slots.open("fifo")
    await sh(session, "mkfifo pipe")
    async with asyncio.timeout(DEADLINE_S):
        for path in ("pipe", "/dev/zero", "/dev/tty"):
            result = await session.call("read_file", {"path": path}, timeout_s=600)
            assert result.exit_code != 0

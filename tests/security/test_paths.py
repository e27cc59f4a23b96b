"""File operations stay in the workspace, whatever links and races the slot prepares."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.executor.session import ToolSession
from tests.security.conftest import Slots, sh

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUTSIDE = [
    "/etc/passwd",
    "../etc/passwd",
    "a/../../etc/passwd",
    "/workspace/../etc/passwd",
    "link",
    "directory/passwd",
    "/proc/1/environ",
]


async def _prepared(slots: Slots) -> ToolSession:
    session = await slots.open("paths")
    await sh(session, "ln -s /etc/passwd link; ln -s /etc directory; ln -s /proc/self/root root; mkdir inner")
    return session


@pytest.mark.parametrize("path", [*OUTSIDE, "root/etc/passwd"])
async def test_reading_outside_is_refused(slots: Slots, path: str) -> None:
    session = await _prepared(slots)
    result = await session.call("read_file", {"path": path})
    assert result.fault == "policy", result
    assert result.content is None
    assert "workspace" in result.message


@pytest.mark.parametrize("path", ["/etc/agentenv", "../x", "directory/x", "/tmp/x", "root/tmp/x"])
async def test_writing_outside_is_refused(slots: Slots, path: str) -> None:
    session = await _prepared(slots)
    result = await session.call("write_file", {"path": path, "text": "x"})
    assert result.fault == "policy", result
    assert await sh(session, "ls -A /tmp") == ""


async def test_a_race_of_symlinks_never_leads_outside(slots: Slots) -> None:
    """A process swaps a directory for a link to /etc as fast as it can; no read may ever win."""
    session = await slots.open("race")
    await sh(
        session,
        "mkdir real; echo mine > real/passwd; ln -s /etc fake;"
        "(while :; do ln -sfn real swap; ln -sfn fake swap; done) >/dev/null 2>&1 &",
    )
    kinds = set()
    for _ in range(200):
        result = await session.call("read_file", {"path": "swap/passwd"})
        kinds.add(result.fault)
        if result.fault == "none" and result.exit_code == 0:
            assert isinstance(result.content, dict)
            assert result.content["text"] == "mine\n"
    assert kinds <= {"none", "policy"}


async def test_a_fifo_or_device_never_blocks_a_read(slots: Slots) -> None:
    session = await slots.open("fifo")
    await sh(session, "mkfifo pipe")
    async with asyncio.timeout(10):
        result = await session.call("read_file", {"path": "pipe"})
    assert result.exit_code != 0

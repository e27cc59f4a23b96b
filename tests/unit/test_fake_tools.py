"""What only the fake's own way of running a command can get wrong."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agentenv.slots.backends.fake_tools import FakeShell
from agentenv.wire.tools import BashArguments


@pytest.mark.parametrize("turns", range(4))
async def test_a_command_cancelled_while_it_starts_leaves_no_child(tmp_path: Path, turns: int) -> None:
    shell = FakeShell(tmp_path, {}, 4_096)
    child = "(until [ -e go ]; do sleep 0.02; done; touch late)"
    running = asyncio.create_task(shell.run(BashArguments(command=f"{child} & wait")))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.5)  # bash goes on, our loop does not
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (tmp_path / "go").touch()
    await asyncio.sleep(0.3)
    assert not (tmp_path / "late").exists()
    shell.kill_all()

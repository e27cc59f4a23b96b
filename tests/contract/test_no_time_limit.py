"""Calls without a time limit, where the farm's own would have ended them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest

from agentenv import AsyncSandbox
from agentenv.errors import InvalidArgumentsError
from tests.waiting import START_S


@pytest.fixture(params=["fake", "local"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(request.param, timeout_s=0.3, start_timeout_s=START_S) as opened:
        yield opened


async def test_a_call_ends_by_the_limit_of_its_farm_unless_it_has_none(box: AsyncSandbox) -> None:
    command = "sleep 1; echo done"
    assert (await box.run(command)).timed_out
    assert (await box.run(command, math.inf)).stdout == "done\n"
    assert (await box.exec(["sh", "-c", command], timeout_s=math.inf)).stdout == "done\n"
    async with await box.start(command, output="stream", timeout_s=math.inf) as program:
        assert (await program.stdout.read(), await program.wait()) == (b"done\n", 0)
    async with box.python() as python:
        assert (await python.run("import time; time.sleep(1); 7", math.inf)).text == "7"
    assert (await box.call_tool("terminal", {"command": command}, timeout_s=math.inf)).stdout == "done\n"


async def test_it_is_still_cancelled(box: AsyncSandbox) -> None:
    with pytest.raises(ValueError, match="started"):
        await box.run("echo started; sleep 1000", math.inf, on_output=_refuse)
    assert (await box.run("echo goes on", 60)).stdout == "goes on\n"


def _refuse(stream: str, text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("wrong", [0, -1, -math.inf, math.nan, 86_401, True])
async def test_what_is_no_limit_is_refused(wrong: float) -> None:
    async with AsyncSandbox("fake") as box:
        with pytest.raises(InvalidArgumentsError, match=r"timeout_s is .*math\.inf for no limit"):
            await box.run("true", wrong)

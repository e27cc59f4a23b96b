"""A slot without an image that starts in a directory of its own choice."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.wire.roots import RootSpec
from agentenv.wire.tools import ReadFileReply, SearchReply
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def placed(executor: ToolExecutor) -> AsyncIterator[ToolSession]:
    async with executor.open(
        "placed", acquire_timeout_s=START_S, root=RootSpec("", workdir="/workspace/a/b")
    ) as opened:
        yield opened


async def test_commands_start_there_and_paths_are_below_it(placed: ToolSession) -> None:
    written = await placed.call("write_file", {"path": "note", "text": "here\n"})
    assert written.exit_code == 0
    for tool, arguments in (
        ("bash", {"command": "pwd; cat note"}),
        ("bash", {"command": "pwd; cat note", "cwd": "/workspace/a/b"}),
        ("bash", {"command": "pwd; cat note", "cwd": "../b"}),
        ("terminal", {"command": "pwd; cat note"}),
    ):
        shown = (await placed.call(tool, arguments)).stdout.split()
        assert shown[0].endswith("/workspace/a/b")
        assert shown[1] == "here"
    for path in ("note", "/workspace/a/b/note", "../b/note"):
        read = ReadFileReply.model_validate((await placed.call("read_file", {"path": path})).content)
        assert read.text == "here\n", path
    found = SearchReply.model_validate((await placed.call("search", {"pattern": "he.e"})).content)
    assert [match.path for match in found.matches] == ["note"]
    patched = await placed.call("patch", {"patch": "--- a/note\n+++ b/note\n@@ -1 +1 @@\n-here\n+there\n"})
    assert patched.exit_code == 0, patched.stderr
    missing = await placed.call("read_file", {"path": "no"})
    assert missing.exit_code == 2
    assert (await placed.call("bash", {"command": "cat note"})).stdout == "there\n"


async def test_it_stays_through_what_is_done_to_the_slot(placed: ToolSession) -> None:
    await placed.call("bash", {"command": "echo 1 > note"})
    kept = await placed.checkpoint()
    await placed.call("bash", {"command": "cd ../.. && rm -r a"})
    await placed.restore(kept)
    (fork,) = await placed.fork()
    for one in (placed, fork):
        shown = (await one.call("bash", {"command": "pwd; cat note"})).stdout.split()
        assert shown[0].endswith("/workspace/a/b")
        assert shown[1] == "1"
    await fork.aclose()
    await placed.seal()
    assert (await placed.call("bash", {"command": "cat note"})).stdout == "1\n"
    await placed.drop(kept)


async def test_the_next_trajectory_starts_in_the_workspace(executor: ToolExecutor) -> None:
    for _ in range(4):  # each slot
        async with executor.open("next", acquire_timeout_s=START_S) as session:
            assert (await session.call("bash", {"command": "pwd"})).stdout.endswith("/workspace\n")


async def test_a_directory_that_cannot_be_made_is_said_by_each_command(executor: ToolExecutor) -> None:
    async with executor.open("file", acquire_timeout_s=START_S, root=RootSpec("", workdir="/etc/passwd/x")) as session:
        result = await session.call("bash", {"command": "pwd"})
        assert result.exit_code != 0
        assert "/etc/passwd/x" in result.stderr

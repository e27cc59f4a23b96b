"""What goes in comes out, at every size round the one at which content leaves the messages."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.base import LARGE_BYTES
from tests.sizes import around, contents

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES = around(LARGE_BYTES, steps=(-1, 0, 1))


async def written(session: ToolSession, content: bytes) -> None:
    """What the slot's own programs find in the file."""
    found = await session.call("bash", {"command": "sha256sum < f"})
    assert found.stdout.split()[0] == hashlib.sha256(content).hexdigest(), (len(content), content[:8])


@pytest.mark.parametrize("size", SIZES)
async def test_files_are_what_was_written(session: ToolSession, size: int) -> None:
    context = ToolContext(session)
    for content in contents(size):
        assert await context.write_file("f", content) == len(content)
        await written(session, content)
        assert await context.read_file("f", binary=True) == content
        text = content.decode("utf-8", "ignore")
        assert await context.write_file("f", text) == len(text.encode())
        await written(session, text.encode())
        assert await context.read_file("f") == text


async def test_a_models_own_bytes_are_written(session: ToolSession) -> None:
    for size in SIZES:
        content = next(contents(size))
        data = base64.b64encode(content).decode()
        result = await session.call("write_file", json.dumps({"path": "f", "data": data}))
        assert (result.fault, result.exit_code) == ("none", 0)
        await written(session, content)


async def test_programs_read_what_they_are_given_and_print_it(session: ToolSession) -> None:
    context = ToolContext(session)
    for size in SIZES:
        for content in contents(size):
            done = await context.exec(["cat"], stdin=content, output_bytes=8 * LARGE_BYTES)
            assert (done.stdout_bytes, done.stdout_dropped_bytes) == (content, 0)
            text = content.decode("utf-8", "ignore")
            both = await session.call("bash", {"command": "tee /dev/stderr", "stdin": text})
            if len(text.encode()) < 1024 * 1024:
                assert (both.stdout, both.stderr) == (text, text)


async def test_background_processes_read_what_is_written_to_them(session: ToolSession) -> None:
    context = ToolContext(session)
    for size in SIZES[::3]:
        content = next(contents(size))
        process = await context.start("cat > f")
        await process.write(content)
        await process.close_input()
        await process.wait()
        await written(session, content)


async def test_archives_are_unpacked(session: ToolSession) -> None:
    context = ToolContext(session)
    for size in SIZES[::3]:
        content = next(contents(max(0, size - 10240)))
        await context.write_file("in/f", content)
        archive = (await context.archive("in")).data
        assert archive is not None
        await context.extract(archive, ".")
        await written(session, content)

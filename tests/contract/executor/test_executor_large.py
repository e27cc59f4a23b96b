"""Large arguments and results: whole, in order, and nobody's wait but their own call's."""

from __future__ import annotations

import asyncio
import base64
import errno
import secrets

import pytest

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.tool_context import ToolContext
from agentenv.sessions.head_tail import seam
from agentenv.wire.base import LARGE_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "é\u4e16x" * (2 * LARGE_BYTES)


async def test_a_large_text_is_written_and_read_whole(session: ToolSession) -> None:
    context = ToolContext(session)
    assert await context.write_file("f", TEXT) == len(TEXT.encode())
    assert await context.read_file("f") == TEXT


async def test_large_bytes_are_written_and_read_whole(session: ToolSession) -> None:
    context, content = ToolContext(session), secrets.token_bytes(3 * LARGE_BYTES + 2)
    await context.write_file("f", content)
    assert await context.read_file("f", binary=True) == content
    assert (await context.read_artifact("f")).data == content
    archive = (await context.archive("f")).data
    assert archive is not None
    await context.extract(archive, "sub")
    assert await context.read_file("sub/f", binary=True) == content
    result = await session.call("read_file", {"path": "f", "binary": True})
    assert isinstance(result.content, dict)
    assert base64.b64decode(str(result.content["data"])) == content
    assert result.attachments == ()


async def test_what_is_no_text_is_said_wherever_the_pieces_end(session: ToolSession) -> None:
    content = (b"ab\xe4\xb8\x96" * LARGE_BYTES)[:-1] + b"\xff" + b"\xc3\xa9" * LARGE_BYTES
    await ToolContext(session).write_file("f", content)
    result = await session.call("read_file", {"path": "f"})
    assert isinstance(result.content, dict)
    assert result.content["text"] == content.decode("utf-8", "replace")
    assert result.content["lossy"] is True


@pytest.mark.parametrize("size", [1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1])
@pytest.mark.parametrize("at", [0, -1])
async def test_what_is_no_text_is_refused_or_shown_as_pythons_decoder_does(
    session: ToolSession, size: int, at: int
) -> None:
    context, content = ToolContext(session), bytearray(b"x" * size)
    content[at] = 0xE9
    await context.terminal(f"head -c {size - 1} /dev/zero | tr '\\0' x > x; printf '\\351' > e")
    await context.terminal("cat e x > f" if at == 0 else "cat x e > f")
    with pytest.raises(UnicodeDecodeError) as decoding:
        content.decode()
    with pytest.raises(OSError, match=rf"not UTF-8 at byte {decoding.value.start} \(0xe9\); binary=True") as refused:
        await context.read_file("f")
    assert refused.value.errno == errno.EILSEQ
    for errors in ("replace", "ignore", "surrogateescape", "backslashreplace"):
        assert await context.read_file("f", errors=errors) == content.decode("utf-8", errors)
    assert await context.read_file("f", binary=True) == content


async def test_a_part_of_a_text_ends_between_characters_and_says_where_it_goes_on(session: ToolSession) -> None:
    await ToolContext(session).write_file("f", TEXT)
    read, offset = "", 0
    for limit in (5, 2 * LARGE_BYTES, 10**7):
        result = await session.call("read_file", {"path": "f", "offset": offset, "limit": limit})
        assert isinstance(result.content, dict)
        assert result.content["lossy"] is False
        read += str(result.content["text"])
        following = result.content["next_offset"]
        assert (following is None) == (result.content["truncated"] is False)
        offset = following if isinstance(following, int) else offset
    assert (read, following) == (TEXT, None)


async def test_large_output_and_input(session: ToolSession) -> None:
    result = await session.call("bash", {"command": "tee copy; cat copy >&2", "stdin": TEXT[:300_000]})
    assert (result.stdout, result.stderr) == (TEXT[:300_000], TEXT[:300_000])
    cut = await session.call("bash", {"command": "head -c 3000000 /dev/zero | tr '\\0' x"})
    missing = seam(3_000_000 - 2**20)
    assert cut.stdout == "x" * 2**19 + missing + "x" * 2**19
    assert (cut.stdout_dropped_bytes, cut.truncated) == (3_000_000 - 2**20, True)


async def test_a_long_list_and_large_bytes_in_one_result(session: ToolSession) -> None:
    """The JSON of the list is an attachment then, and the bytes are one beside it."""
    await session.call("bash", {"command": f"mkdir many; cd many; for n in $(seq 2000); do : > {'n' * 100}$n; done"})
    archive = await ToolContext(session).archive("many")
    assert len(archive.files) == 2000
    assert archive.data is not None
    assert len(archive.data) > LARGE_BYTES
    listed = await ToolContext(session).list_files("many")
    assert len(listed.entries) == 2000


async def test_calls_stay_in_the_order_they_were_made(session: ToolSession) -> None:
    written, counted, removed = await asyncio.gather(
        session.call("write_file", {"path": "ordered", "text": TEXT}),
        session.call("bash", {"command": "wc -c < ordered"}),
        session.call("bash", {"command": "rm ordered && echo removed"}),
    )
    assert written.exit_code == 0
    assert counted.stdout.strip() == str(len(TEXT.encode()))
    assert removed.stdout == "removed\n"


async def test_what_waits_behind_a_call_of_one_slot_holds_up_no_other(executor: ToolExecutor) -> None:
    """Nor does it hold up its own cancellation."""
    text = "x" * 60_000_000
    async with executor.open("bulky") as bulky, executor.open("neighbour") as neighbour:
        first = asyncio.create_task(bulky.call("bash", {"command": "sleep 300"}, timeout_s=400))
        await asyncio.sleep(0)
        others = [
            asyncio.create_task(bulky.call("write_file", {"path": f"f{n}", "text": text}, timeout_s=400))
            for n in range(5)
        ]
        for turn in range(20):
            assert (await neighbour.call("bash", {"command": f"echo {turn}"}, timeout_s=30)).stdout == f"{turn}\n"
            await asyncio.sleep(0.1)
        assert not first.done()
        for call in (first, *others):
            call.cancel()
        await asyncio.gather(first, *others, return_exceptions=True)
        assert (await bulky.call("bash", {"command": "echo free"}, timeout_s=60)).stdout == "free\n"

"""Wrong calls of the file tools, and slots that lie about what they did."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from agentenv.errors import (
    InvalidArgumentsError,
    ProtocolError,
    UnknownToolError,
)
from agentenv.sandbox.server.tools.artifacts import MAX_ENTRIES
from agentenv.sandbox.server.tools.files import Finished, run_file_tool
from agentenv.sandbox.slotagent.build import ensure_built
from tests.unit.sandbox.server.file_tools_box import Box, FixedRunner, box_fixture  # noqa: F401
from tests.waiting import START_S


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read_file", {}),
        ("read_file", {"path": ""}),
        ("read_file", {"path": "x", "offset": -1}),
        ("write_file", {"path": "x", "data": "not base64!"}),
        ("list_files", {"path": ".", "depth": 0}),
        ("artifacts", {"action": "steal"}),
        ("paths", {"action": "rename", "path": "x"}),
        ("paths", {"action": "stat", "path": "x", "target": "y"}),
    ],
)
async def test_arguments_that_no_client_sends_are_ours(box: Box, tool: str, arguments: Mapping[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        await run_file_tool(tool, arguments, box.runner, paths=box.paths)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read_file", {"path": "a\0b"}),
        ("write_file", {"path": "x"}),
        ("write_file", {"path": "x", "text": "1", "data": "MQ=="}),
        ("artifacts", {"action": "extract"}),
        ("artifacts", {"action": "archive", "data": "MQ=="}),
        ("artifacts", {"action": "list", "data": "MQ=="}),
        ("artifacts", {"action": "read", "path": "x", "data": "MQ=="}),
        ("bash", {"command": "true"}),
        ("paths", {"action": "rename", "path": "x", "target": "a\0b"}),
    ],
)
async def test_wrong_arguments_are_refused(box: Box, tool: str, arguments: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidArgumentsError):
        await run_file_tool(tool, arguments, box.runner, paths=box.paths)


async def test_an_unknown_tool_is_refused(box: Box) -> None:
    with pytest.raises(UnknownToolError):
        await run_file_tool("chmod_file", {}, box.runner, paths=box.paths)


def _record(kind: bytes, path: bytes = b"", *, size: int = 0, mode: int = 0o644) -> bytes:
    header = kind + b"\0" + mode.to_bytes(2, "little") + len(path).to_bytes(4, "little") + b"\0" * 8
    return header + size.to_bytes(8, "little") + b"\0" * 8 + path


HOSTILE = [
    b"",
    b"short",
    _record(b"f", b"a"),
    _record(b"x") + _record(b"e"),
    _record(b"f", b"../a") + _record(b"e"),
    _record(b"f", b"/a") + _record(b"e"),
    _record(b"f", b"") + _record(b"e"),
    _record(b"n", b"a") + _record(b"e"),
    _record(b"f", b"a", size=2**64 - 1) + _record(b"e"),
    _record(b"f", b"a") * 3 + _record(b"e"),
    _record(b"e") + b"more",
    _record(b"f", b"a")[:20] + b"\xff" * 40,
]


@pytest.mark.parametrize("printed", HOSTILE)
async def test_a_slot_that_prints_nonsense_is_a_protocol_error(printed: bytes) -> None:
    runner = FixedRunner(Finished(0, printed, b"", 0))
    with pytest.raises(ProtocolError):
        await run_file_tool("list_files", {"limit": 2}, runner)


@pytest.mark.parametrize("printed", [b"", _record(b"f") + b"x" * 12, _record(b"d"), _record(b"e")])
async def test_a_slot_that_answers_a_read_with_nonsense_is_a_protocol_error(printed: bytes) -> None:
    with pytest.raises(ProtocolError):
        await run_file_tool("read_file", {"path": "x", "limit": 10}, FixedRunner(Finished(0, printed, b"", 0)))


@pytest.mark.parametrize(
    "printed",
    [_record(b"f", b"a") + b"\xff\xff\xff\xff", _record(b"f", b"a") + b"\5\0\0\0abc", _record(b"f", b"a") + b"\0" * 4],
)
async def test_a_slot_that_archives_nonsense_is_a_protocol_error(printed: bytes) -> None:
    for action in ("archive", "list"):
        with pytest.raises(ProtocolError):
            await run_file_tool("artifacts", {"action": action}, FixedRunner(Finished(0, printed, b"", 0)))


async def test_a_slot_that_sends_more_files_than_it_may_is_not_listened_to() -> None:
    printed = (_record(b"f", b"a") + b"\0" * 4) * (MAX_ENTRIES + 1) + _record(b"e")
    done = await run_file_tool("artifacts", {"action": "list"}, FixedRunner(Finished(0, printed, b"", 0)))
    assert (done.content, done.exit_code) == (None, errno.EFBIG)


async def test_dropped_output_is_never_taken_for_the_whole() -> None:
    done = await run_file_tool("list_files", {}, FixedRunner(Finished(0, _record(b"e"), b"", 1)))
    assert (done.content, done.exit_code) == (None, errno.EFBIG)


@pytest.mark.parametrize(
    ("code", "error"),
    [(201, ProtocolError), (203, ProtocolError), (205, ProtocolError), (255, ProtocolError)],
)
async def test_verdicts_that_are_ours_are_raised(code: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        await run_file_tool("list_files", {}, FixedRunner(Finished(code, b"", b"No such file or directory", 0)))


async def test_a_killed_operation_is_data() -> None:
    done = await run_file_tool("list_files", {}, FixedRunner(Finished(137, b"", b"", 0)))
    assert done.exit_code == 137
    assert "signal 9" in done.stderr


def test_slotfiles_refuses_nonsense_arguments() -> None:
    files = str(ensure_built().files)
    for argv in (
        [],
        ["relative", "read", "x", "0", "1"],
        ["/tmp", "read"],
        ["/tmp", "read", "x", "-1", "1"],
        ["/tmp", "steal", "x"],
    ):
        assert subprocess.run([files, *argv], capture_output=True, timeout=START_S).returncode == 205, argv


async def test_a_write_of_other_than_what_was_sent_is_a_protocol_error() -> None:
    runner = FixedRunner(Finished(0, _record(b"n", size=3), b"", 0))
    with pytest.raises(ProtocolError, match="wrote 3 of 4 bytes"):
        await run_file_tool("write_file", {"path": "x", "text": "four"}, runner)

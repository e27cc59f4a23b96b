from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.process_run import ProcessRun
from agentenv.errors import (
    ConnectionLostError,
    InfraError,
    InvalidArgumentsError,
    PolicyRefusalError,
    PoolClosedError,
    ToolCallError,
    UnknownToolError,
)
from agentenv.tool_context import ToolContext
from agentenv.wire.calls import CallResult
from tests.unit.agent_stubs import StubSession, echo, ok


def context(result: CallResult | Exception) -> tuple[ToolContext, StubSession]:
    def behave(*_: Any) -> CallResult:
        if isinstance(result, Exception):
            raise result
        return result

    session = StubSession("t", behave)
    return ToolContext(session), session


async def test_it_is_callable_and_terminal_is_bash() -> None:
    session = StubSession("t-1", echo)
    exec_tool = ToolContext(session)
    await exec_tool("list_files", {"path": "."}, timeout_s=3)
    await exec_tool.terminal("ls", 5, cwd="/workspace/x", env={"A": "1"})
    assert session.calls == [
        ("list_files", {"path": "."}, 3),
        ("bash", {"command": "ls", "cwd": "/workspace/x", "env": {"A": "1"}}, 5),
    ]
    assert exec_tool.trajectory_id == "t-1"


@pytest.mark.parametrize(
    ("fault", "code", "kind"),
    [
        ("model", "unknown_tool", UnknownToolError),
        ("model", "invalid_arguments", InvalidArgumentsError),
        ("policy", "refused", PolicyRefusalError),
        ("model", "something new", ToolCallError),
    ],
)
async def test_a_wrong_call_is_a_result_when_called_and_an_error_through_methods(
    fault: Any, code: str, kind: type[Exception]
) -> None:
    exec_tool, _ = context(CallResult(id="c", fault=fault, error=code, message="no"))
    assert (await exec_tool("bash", {})).fault == fault
    with pytest.raises(kind, match="no"):
        await exec_tool.terminal("ls")
    assert exec_tool.infra_error is None


async def test_the_first_infra_fault_is_remembered() -> None:
    exec_tool, _ = context(ConnectionLostError("cut"))
    for _n in range(2):
        with pytest.raises(ConnectionLostError):
            await exec_tool.terminal("ls")
    assert isinstance(exec_tool.infra_error, ConnectionLostError)
    exec_tool, _ = context(CallResult(id="c", fault="infra", error="call_lost", message="lost"))
    with pytest.raises(InfraError):
        await exec_tool("bash", {})
    assert exec_tool.infra_error is not None


async def test_file_methods() -> None:
    exec_tool, session = context(CallResult(id="c", content={"size_bytes": 2, "created": True}))
    assert await exec_tool.write_file("a", b"\x00\xff", mode=0o755) == 2
    assert session.calls[0][1] == {"path": "a", "mode": 0o755, "data": base64.b64encode(b"\x00\xff").decode()}
    exec_tool, _ = context(CallResult(id="c", content={"data": "AP8=", "size_bytes": 2, "mode": 420}))
    assert await exec_tool.read_file("a", binary=True) == b"\x00\xff"
    exec_tool, _ = context(CallResult(id="c", content={"text": "x", "size_bytes": 9, "mode": 420, "truncated": True}))
    with pytest.raises(OSError, match="9 bytes"):
        await exec_tool.read_file("a")
    exec_tool, _ = context(ok(exit_code=2, stderr="no such file"))
    with pytest.raises(FileNotFoundError, match="no such file"):
        await exec_tool.read_file("a")


async def test_search_tells_no_match_from_a_bad_pattern() -> None:
    exec_tool, session = context(ok("a:1:x\n"))
    assert await exec_tool.search("it's", "dir") == ["a:1:x"]
    assert "-- 'it'\"'\"'s' dir" in session.calls[0][1]["command"]
    assert await context(ok(exit_code=1))[0].search("x") == []
    with pytest.raises(InvalidArgumentsError, match="unmatched"):
        await context(ok(exit_code=2, stderr="grep: unmatched ("))[0].search("(")


async def test_web_and_browser_need_a_tool_server() -> None:
    exec_tool, _ = context(ok())
    for method in ("web_search", "web_extract", "browser_navigate", "browser_snapshot"):
        with pytest.raises(ToolCallError, match="needs a tool server"):
            await getattr(exec_tool, method)("x")


async def test_nothing_goes_through_a_closed_context() -> None:
    exec_tool, session = context(ok())
    await exec_tool.cleanup()
    await exec_tool.cleanup()
    with pytest.raises(PoolClosedError):
        await exec_tool.terminal("ls")
    assert session.calls == []


class Source:
    """Gives items 0, 1, …; those in ``bad`` fail ``bad[n]`` times before they succeed."""

    def __init__(self, items: int, bad: dict[int, int]) -> None:
        self.curr_step = 0
        self.kept: list[int] = []
        self._items = list(range(items))
        self._bad = bad

    async def get_next_item(self) -> Any:
        return self._items.pop(0) if self._items else None

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        if self._bad.get(item, 0):
            self._bad[item] -= 1
            return None, [item]
        return {"item": item}, []

    async def keep_group(self, group: dict[str, Any], item: Any) -> None:
        self.kept.append(item)


async def test_process_makes_exactly_what_was_asked_for_and_brings_items_back() -> None:
    source = Source(10, {1: 2})
    await ProcessRun(source, 5, at_once=2, give_up_after=5).run()
    assert (source.curr_step, len(source.kept)) == (5, 5)
    assert 1 in source.kept
    source = Source(3, {})
    await ProcessRun(source, 5, at_once=2, give_up_after=5).run()
    assert sorted(source.kept) == [0, 1, 2]


async def test_process_gives_up_after_failures_in_a_row() -> None:
    source = Source(10, dict.fromkeys(range(10), 99))
    with pytest.raises(InfraError, match="3 groups in a row"):
        await ProcessRun(source, 5, at_once=1, give_up_after=3).run()


@pytest.mark.parametrize("member", ["../out", "/abs", "link", "device"])
async def test_a_download_never_leaves_its_directory(tmp_path: Path, member: str) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(member)
        if member == "link":
            entry.type, entry.linkname = tarfile.SYMTYPE, "../../etc"
        if member == "device":
            entry.type = tarfile.CHRTYPE
        tar.addfile(entry)
        tar.addfile(tarfile.TarInfo("second"))
    data = base64.b64encode(archive.getvalue()).decode()
    exec_tool, _ = context(CallResult(id="c", content={"data": data, "files": [], "total_bytes": 0}))
    if member == "/abs":  # made relative, as tar itself does
        await exec_tool.download("dir", tmp_path / "in")
        assert (tmp_path / "in" / "abs").exists()
    else:
        with pytest.raises(PermissionError):
            await exec_tool.download("dir", tmp_path / "in")
    assert {path.name for path in tmp_path.iterdir()} == {"in"}

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentenv.agent.generate import ProcessRun
from agentenv.agent.tool_call import ToolCall
from agentenv.errors import (
    ConnectionLostError,
    InfraError,
    InvalidArgumentsError,
    PolicyRefusalError,
    PoolClosedError,
    TaskError,
    ToolCallError,
    UnknownToolError,
)
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.calls import CallResult
from tests.unit.agent.agent_stubs import StubSession, echo, ok


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
    assert session.calls[0][1] == {"path": "a", "mode": 0o755, "data": b"\x00\xff"}
    exec_tool, _ = context(CallResult(id="c", content={"data": "AP8=", "size_bytes": 2, "mode": 420}))
    assert await exec_tool.read_file("a", binary=True) == b"\x00\xff"
    exec_tool, _ = context(CallResult(id="c", content={"text": "x", "size_bytes": 9, "mode": 420, "truncated": True}))
    with pytest.raises(OSError, match="9 bytes"):
        await exec_tool.read_file("a")
    exec_tool, _ = context(ok(exit_code=2, stderr="no such file"))
    with pytest.raises(FileNotFoundError, match="no such file"):
        await exec_tool.read_file("a")


async def test_a_session_is_the_terminal_tool() -> None:
    session = StubSession("t", echo)
    exec_tool = ToolContext(session)
    await exec_tool.terminal("make", 5, session="build", cwd="src", pty=True)
    given = {"command": "make", "session": "build", "timeout_s": 5, "workdir": "src", "pty": True}
    assert session.calls == [("terminal", given, None)]
    with pytest.raises(InvalidArgumentsError, match="stdin"):
        await exec_tool.terminal("cat", stdin="x", session="build")


async def test_search_and_patch() -> None:
    found = {"matches": [{"path": "a", "line": 1, "text": "x"}], "files_searched": 1}
    exec_tool, session = context(CallResult(id="c", content=found))
    (match,) = (await exec_tool.search("it's", "dir", glob="*.py")).matches
    assert (match.path, match.line, match.text) == ("a", 1, "x")
    assert session.calls[0][:2] == ("search", {"pattern": "it's", "path": "dir", "glob": "*.py", "limit": 200})
    exec_tool, session = context(CallResult(id="c", content={"files": [{"path": "a", "action": "modified"}]}))
    assert (await exec_tool.patch("--- a\n", fuzz=0)).files[0].action == "modified"
    assert session.calls[0][:2] == ("patch", {"patch": "--- a\n", "path": ".", "fuzz": 0})
    with pytest.raises(InvalidArgumentsError, match="hunk 1"):
        await context(ok(exit_code=1, stderr="a: hunk 1 of 1"))[0].patch("x")
    with pytest.raises(OSError, match="No space"):
        await context(ok(exit_code=28, stderr="No space left"))[0].patch("x")


async def test_artifacts_are_listed_read_and_archived() -> None:
    file = {"path": "a", "size_bytes": 2, "sha256": "0" * 64}
    exec_tool, session = context(CallResult(id="c", content={"data": "AP8=", "files": [file], "total_bytes": 2}))
    assert (await exec_tool.read_artifact("out/a")).data == b"\x00\xff"
    assert (await exec_tool.list_artifacts("out")).files[0].sha256 == "0" * 64
    assert (await exec_tool.archive()).total_bytes == 2
    assert [given for _, given, _ in session.calls] == [
        {"action": "read", "path": "out/a"},
        {"action": "list", "path": "out"},
        {"action": "archive", "path": "."},
    ]
    with pytest.raises(FileNotFoundError):
        await context(ok(exit_code=2, stderr="no such file"))[0].list_artifacts("missing")


async def test_a_file_call_cut_short_is_no_empty_file() -> None:
    exec_tool, _ = context(CallResult(id="c", timed_out=True))
    with pytest.raises(TimeoutError):
        await exec_tool.read_file("a")


async def test_web_and_browser_go_to_the_tool_server() -> None:
    exec_tool, session = context(ok())
    await exec_tool.web_search("query", count=3)
    await exec_tool.web_extract("http://x")
    await exec_tool.browser_navigate("http://x")
    await exec_tool.browser_snapshot()
    await exec_tool.browser_click("e1")
    await exec_tool.browser_type("e2", "text", submit=True)
    await exec_tool.browser_select_option("e3", ("a", "b"))
    await exec_tool.browser_press("Enter")
    await exec_tool.browser_scroll("down")
    await exec_tool.browser_back()
    await exec_tool.browser_screenshot()
    assert session.calls == [
        ("web_search", {"query": "query", "count": 3}, None),
        ("web_extract", {"url": "http://x"}, None),
        ("browser_navigate", {"url": "http://x"}, None),
        ("browser_snapshot", {}, None),
        ("browser_click", {"ref": "e1"}, None),
        ("browser_type", {"ref": "e2", "text": "text", "submit": True}, None),
        ("browser_select_option", {"ref": "e3", "values": ["a", "b"]}, None),
        ("browser_press", {"key": "Enter"}, None),
        ("browser_scroll", {"direction": "down"}, None),
        ("browser_back", {}, None),
        ("browser_screenshot", {}, None),
    ]


async def test_without_a_tool_server_the_error_says_how_to_have_one() -> None:
    exec_tool, _ = context(CallResult(id="c", fault="model", error="unknown_tool", message="unknown tool"))
    for method, given in (
        ("web_search", "x"),
        ("web_extract", "x"),
        ("browser_navigate", "x"),
        ("browser_snapshot", ""),
    ):
        with pytest.raises(UnknownToolError, match=f"{method} needs a tool server.*set tool_server_url"):
            await getattr(exec_tool, method)(*([given] if given else []))
    assert "set tool_server_url" in (await exec_tool(ToolCall("http_fetch", {"url": "x"}))).error
    assert (await exec_tool("my_tool", {})).message == "unknown tool"


async def test_transfers_need_a_lease() -> None:
    exec_tool, _ = context(ok())
    with pytest.raises(InvalidArgumentsError, match="it has no slot"):
        await exec_tool.upload("x", "y")
    with pytest.raises(InvalidArgumentsError, match="it has no slot"):
        await exec_tool.download("x", "y")


async def test_nothing_goes_through_a_closed_context() -> None:
    exec_tool, session = context(ok())
    await exec_tool.cleanup()
    await exec_tool.cleanup()
    with pytest.raises(PoolClosedError):
        await exec_tool.terminal("ls")
    with pytest.raises(PoolClosedError):
        await exec_tool.upload("x", "y")
    assert session.calls == []


class Source:
    """Gives items 0, 1, …; those in ``bad`` fail ``bad[n]`` times before they succeed, all of it by ``fault``."""

    def __init__(self, items: int, bad: dict[int, int], fault: str = "infra", item_retries: int = 1000) -> None:
        self.curr_step = 0
        self.counts: Counter[str] = Counter()
        self._fault = fault
        self._item_retries = item_retries
        self.kept: list[int] = []
        self._items = list(range(items))
        self._bad = bad

    async def get_next_item(self) -> Any:
        return self._items.pop(0) if self._items else None

    def to_play(self, position: int, item: Any) -> bool:
        return item is not None

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        if self._bad.get(item, 0):
            self._bad[item] -= 1
            self._item_retries -= 1
            self.counts[f"fault_{self._fault}"] += 1
            return None, [item] if self._item_retries >= 0 else []
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
    with pytest.raises(
        InfraError, match=r"3 groups in a row had no scored member \(faults: 3 infra\); see runs/a/log\.txt"
    ):
        await ProcessRun(source, 5, at_once=1, give_up_after=3, log="runs/a/log.txt").run()


async def test_it_is_a_task_error_when_the_tasks_code_alone_failed_the_groups() -> None:
    source = Source(10, dict.fromkeys(range(2, 10), 99), fault="task")
    source.counts["fault_infra"] = 7  # before the newest group with a score
    with pytest.raises(TaskError, match=r"3 groups in a row had no scored member \(faults: 3 task\)"):
        await ProcessRun(source, 5, at_once=1, give_up_after=3).run()


async def test_items_that_are_all_dropped_are_a_failure_too() -> None:
    source = Source(2, dict.fromkeys(range(2), 99), fault="task", item_retries=0)
    with pytest.raises(TaskError, match="2 groups in a row"):
        await ProcessRun(source, 5, at_once=1, give_up_after=10).run()

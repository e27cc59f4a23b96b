from __future__ import annotations

from typing import Any

import pytest
from pydantic import JsonValue

from agentenv.agent.loop import MODEL_READ_BYTES, bounded
from agentenv.agent.observations import cut_middle, shown
from agentenv.sessions.head_tail import seam
from agentenv.wire.calls import CallResult
from tests.unit.agent.agent_stubs import ok


def test_streams_are_apart_with_the_exit_code_first() -> None:
    text = shown("bash", ok("out\n", exit_code=3, stderr="err\n"), 1000)
    assert text == "exit code: 3\nstdout:\nout\nstderr:\nerr"


def test_silence_is_said() -> None:
    assert shown("bash", ok(), 1000) == "exit code: 0\n(no output)"


def test_a_timeout_and_an_oom_are_said() -> None:
    text = shown("bash", CallResult(id="c", exit_code=137, timed_out=True, oom_killed=True, duration_s=60.2), 1000)
    assert text.startswith(
        "exit code: 137 (timed out after 60 s; the command and everything it started were killed; "
        "killed: out of memory)"
    )


def test_bytes_dropped_in_the_slot_and_here_are_counted_together() -> None:
    printed = "a" * 1500 + seam(100) + "b" * 1500
    text = shown("bash", ok(printed, stdout_dropped_bytes=100, truncated=True), 1000)
    assert text == f"exit code: 0\nstdout:\n{'a' * 500}{seam(2100)}{'b' * 500}"
    assert shown("bash", ok(printed, stdout_dropped_bytes=100), 5000) == f"exit code: 0\nstdout:\n{printed}"
    uneven = "a" * 100 + seam(7) + "b" * 3000
    assert cut_middle(uneven, 1000, 7) == "a" * 100 + seam(2107) + "b" * 900


def test_a_progress_bar_is_shown_as_it_ended() -> None:
    bar = "".join(f"\r{done:3}% " + "#" * done for done in range(101)) + "\ndone\n"
    content: dict[str, JsonValue] = {"session": "default", "state": "idle", "cwd": "/workspace", "pty": True}
    on_terminal = shown(
        "terminal", CallResult(id="c", exit_code=0, stdout=f"\x1b[32mok\x1b[0m{bar}", content=content), 5000
    )
    assert on_terminal.splitlines()[2:4] == ["100% " + "#" * 100, "done"]
    assert shown("bash", ok(stderr=bar), 5000).splitlines()[-2:] == ["100% " + "#" * 100, "done"]
    assert shown("bash", ok("a\r\nb\x1b[0m\r\n"), 5000).endswith("a\r\nb\x1b[0m"), "a file with CRLF is shown as it is"


def test_a_long_command_is_not_repeated_in_every_answer() -> None:
    process: JsonValue = {"process": "p1", "command": "cat <<E\n" + "x\n" * 900, "state": "running", "runs_s": 2.0}
    text = shown("process", CallResult(id="c", content={"process": process}), 1000)
    assert (
        text == "still running (waited 0.0 s)\n(no new output)\n[process p1: running, 2.0 s, 0 bytes printed, cat <<E…]"
    )


@pytest.mark.parametrize("text", ["", "abc", "é" * 500, "x" * 10_000, "🙂" * 1000, "\ud800" * 600])
def test_cut_middle_keeps_head_and_tail_within_the_limit(text: str) -> None:
    kept = cut_middle(text, 400)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size <= 400:
        assert kept == text
    else:
        assert len(kept.encode("utf-8", "surrogatepass")) <= 400 + 60
        before, _, after = kept.partition("\n[... ")
        dropped, _, after = after.partition(" bytes dropped ...]\n")
        assert len(before.encode()) + len(after.encode()) + int(dropped) == size


def test_file_tools_read_as_text() -> None:
    read = CallResult(id="c", content={"text": "hello", "size_bytes": 9, "truncated": True, "lossy": True, "mode": 420})
    assert shown("read_file", read, 100).startswith("hello\n[truncated: the file has 9 bytes]\n[not valid UTF-8")
    wrote = CallResult(id="c", content={"size_bytes": 5, "created": True})
    assert shown("write_file", wrote, 100) == "created, 5 bytes"
    entries = [
        {"path": "a", "kind": "directory", "size_bytes": 0, "mode": 0, "modified_s": 0},
        {"path": "a/b", "kind": "file", "size_bytes": 7, "mode": 0, "modified_s": 0},
    ]
    listed = CallResult(id="c", content={"entries": entries, "truncated": True})
    assert shown("list_files", listed, 100) == "a/\na/b  7\n[more entries were omitted]"


def test_a_screenshot_is_not_shown_as_text() -> None:
    content = {"url": "http://x/", "title": "X", "type": "image/jpeg", "size_bytes": 3, "image": "AAAA"}
    said = "screenshot of http://x/ saved (3 bytes); not shown here"
    assert shown("browser_screenshot", CallResult(id="c", exit_code=0, content=content), 100) == said


def test_artifacts_read_as_sums_and_half_a_base64_text_is_never_shown() -> None:
    files: JsonValue = [{"path": "a/b", "size_bytes": 3, "sha256": "0" * 64}]
    content: dict[str, JsonValue] = {"data": None, "files": files, "total_bytes": 3}
    listed = f"{'0' * 64}  3  a/b\n[1 files, 3 bytes]"
    assert shown("artifacts", CallResult(id="c", content=content), 100) == listed
    whole = {**content, "data": "QUJD"}
    assert shown("artifacts", CallResult(id="c", content=whole), 100) == f"{listed}\ndata (base64):\nQUJD"
    large = {**content, "data": "Q" * 101}
    assert shown("artifacts", CallResult(id="c", content=large), 100).endswith(
        "[data: 101 characters of base64, not shown]"
    )
    nothing: dict[str, JsonValue] = {"files": [], "total_bytes": 0}
    assert shown("artifacts", CallResult(id="c", content=nothing), 100) == "(no files)\n[0 files, 0 bytes]"


def test_a_failing_file_operation_reads_as_a_command_that_failed() -> None:
    assert shown("read_file", ok(exit_code=2, stderr="no such file"), 100) == "exit code: 2\nstderr:\nno such file"


def test_wrong_and_refused_calls_show_their_message() -> None:
    for fault in ("model", "policy"):
        assert shown("bash", CallResult(id="c", fault=fault, message="why"), 100) == "error: why"


def test_a_sessions_output_is_shown_with_how_it_stands() -> None:
    content: dict[str, JsonValue] = {"session": "default", "state": "idle", "cwd": "/workspace"}
    text = shown("terminal", CallResult(id="c", exit_code=0, stdout="42\n", content=content), 1000)
    assert text == "exit code: 0\nstdout:\n42\n[session default: idle, without pty, in /workspace]"
    failed = shown("terminal", CallResult(id="c", exit_code=3, content=content), 1000)
    assert failed.startswith("exit code: 3\n(no output)\n[session")
    running = {**content, "state": "running", "command": "make", "note": "an empty command gets more"}
    text = shown("terminal", CallResult(id="c", timed_out=True, duration_s=3.0, stdout="x\n", content=running), 1000)
    assert text.startswith("still running (waited 3.0 s): make\nstdout:\nx\n")
    assert "stopped" not in text
    assert text.endswith("[an empty command gets more]")
    asking = {**running, "pty": True, "waiting_for_input": True}
    text = shown("terminal", CallResult(id="c", timed_out=True, duration_s=0.4, content=asking), 1000)
    assert text.startswith("waiting for input (after 0.4 s): make\n")
    assert "[session default: running, with pty, in /workspace]" in text


def test_where_there_is_no_session_none_is_said_to_stand() -> None:
    reset: dict[str, JsonValue] = {"session": "default", "state": "none", "cwd": "/workspace", "note": "it was ended"}
    assert shown("terminal", CallResult(id="c", content=reset), 1000) == "session reset\n(no output)\n[it was ended]"
    process: JsonValue = {"process": "p1", "command": "make", "state": "running", "runs_s": 0.0}
    text = shown("terminal", CallResult(id="c", content={**reset, "process": process, "note": "p1 began"}), 1000)
    assert text.startswith("still running")
    assert "session default" not in text


def test_a_background_process_is_shown_with_how_it_stands() -> None:
    process: JsonValue = {"process": "p1", "command": "make", "state": "running", "runs_s": 2.0, "total_bytes": 7}
    content: JsonValue = {"process": process, "next_offset": 7, "notices": ["p2 (x) ended"]}
    text = shown("process", CallResult(id="c", stdout="output\n", content=content), 1000)
    assert text.startswith("still running")
    assert "[process p1: running, 2.0 s, 7 bytes printed, make]" in text
    assert text.endswith("[p2 (x) ended]")
    listed = shown("process", CallResult(id="c", content={"processes": [process]}), 1000)
    assert listed == "p1: running, 2.0 s, 7 bytes printed, make"
    for tool in ("process", "tmux"):
        assert shown(tool, CallResult(id="c", content={}), 1000) == "(none)"
    noticed = shown("process", CallResult(id="c", content={"notices": ["p2 (x) ended"]}), 1000)
    assert noticed == "[p2 (x) ended]"


@pytest.mark.parametrize(
    ("told", "state", "first"),
    [
        ({"matched": False}, {"state": "running"}, "timed out after waiting 2.0 s"),
        ({"matched": False}, {"state": "exited", "exit_code": 3}, "exit code: 3"),
        ({}, {"state": "running", "idle": False}, "timed out after waiting 2.0 s"),
        ({"matched": True}, {"state": "exited", "exit_code": 3}, "exit code: 3"),
        ({"matched": True}, {"state": "running"}, "session running"),
        ({}, {"state": "running", "idle": True}, "session running"),
        ({}, {"state": "exited"}, "session ended"),
    ],
)
def test_what_a_wait_in_tmux_came_to_is_said_first(
    told: dict[str, JsonValue], state: dict[str, JsonValue], first: str
) -> None:
    code = state.get("exit_code")
    content: JsonValue = {"session": {"session": "main", **state}, **told}
    result = CallResult(id="c", duration_s=2.0, stdout="$ x\n", content=content, exit_code=code)
    lines = shown("tmux", result, 1000).splitlines()
    assert lines[:3] == [first, "stdout:", "$ x"]
    assert lines[3].startswith(f"[session main: {state['state']}")
    assert ("[matched: True]" in lines) is bool(told.get("matched"))


def test_a_recording_is_for_the_transcript_and_not_for_the_model() -> None:
    content: JsonValue = {"session": {"session": "main", "state": "running", "rows": 40}, "recording": "[0.1]" * 1000}
    text = shown("tmux", CallResult(id="c", stdout="$ \n", content=content), 1000)
    assert "[0.1]" not in text
    assert "[session main: running, cursor at row 0, column 0]" in text


def test_matches_are_shown_as_grep_prints_them() -> None:
    content = {"matches": [{"path": "a.py", "line": 3, "text": "x = 1"}], "truncated": True, "binary_skipped": 2}
    text = shown("search", CallResult(id="c", content=content), 1000)
    assert text == "a.py:3:x = 1\n[more matches were omitted; narrow the search]\n[2 binary files were skipped]"
    assert shown("search", CallResult(id="c", content={"matches": [], "files_searched": 3}), 1000) == "(no match)"
    partly = {"matches": [{"path": "a", "line": 1, "text": "\ufffd", "cut": True, "lossy": True}]}
    assert shown("search", CallResult(id="c", content=partly), 1000) == (
        "a:1:\ufffd\n[1 of the lines are long: only the text around their match is shown]"
        "\n[not valid UTF-8; invalid bytes are shown as \ufffd]"
    )
    nothing = CallResult(id="c", content={"matches": [], "files_searched": 0, "binary_skipped": 2})
    assert shown("search", nothing, 1000) == "(no match: no file was searched)\n[2 binary files were skipped]"


@pytest.mark.parametrize(
    ("tool", "arguments", "limit"),
    [
        ("read_file", {"path": "f"}, MODEL_READ_BYTES),
        ("read_file", {"path": "f", "limit": None}, MODEL_READ_BYTES),
        ("read_file", {"path": "f", "limit": 2**30}, MODEL_READ_BYTES),
        ("read_file", {"path": "f", "limit": 10}, 10),
        ("read_file", {"path": "f", "limit": "many"}, "many"),
        ("write_file", {"path": "f"}, None),
    ],
)
def test_a_model_reads_a_part_of_a_large_file_at_a_time(tool: str, arguments: dict[str, Any], limit: object) -> None:
    bounded_arguments = bounded(tool, arguments)
    assert isinstance(bounded_arguments, dict)
    assert bounded_arguments.get("limit") == limit
    assert bounded("read_file", "no json") == "no json"


def test_a_model_is_told_where_a_file_goes_on() -> None:
    content: JsonValue = {"text": "abc", "size_bytes": 9, "mode": 420, "truncated": True, "next_offset": 3}
    told = shown("read_file", CallResult(id="c", exit_code=0, content=content), 100)
    assert told == "abc\n[truncated: the file has 9 bytes; continue with offset=3]"

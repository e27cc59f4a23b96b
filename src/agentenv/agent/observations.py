"""Observations: the text a model is shown for a tool's result. Compact, stable and pure.

Infrastructure faults never reach this module: they end the attempt as exceptions before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentenv.agent.terminal_text import rendered, without_overwritten
from agentenv.sessions.head_tail import seam
from agentenv.wire.calls import CallResult
from agentenv.wire.sessions import SESSION_TOOLS

LONGEST_BASE64 = 4096
"""Longest base64 data shown, in characters; longer data is of no use to a model."""

_NOT_UTF8 = "not valid UTF-8; invalid bytes are shown as \ufffd"


def cut_middle(text: str, limit_bytes: int, dropped_bytes: int = 0) -> str:
    """``text`` in at most ``limit_bytes`` of UTF-8, head and tail kept, plus one line with the number of bytes
    dropped.

    ``dropped_bytes`` are missing from ``text`` already, at its :func:`agentenv.sessions.head_tail.seam`:
    one line then counts both.
    """
    before, mark, after = text.partition(seam(dropped_bytes)) if dropped_bytes else (text, "", "")
    first = before.encode("utf-8", "surrogatepass")
    last = after.encode("utf-8", "surrogatepass") if mark else first
    kept_bytes = len(first) + len(last) if mark else len(first)
    if kept_bytes <= limit_bytes:
        return text
    head_bytes = limit_bytes // 2
    tail_bytes = limit_bytes - head_bytes
    if mark:  # what one side does not need is left to the other
        head_bytes = max(head_bytes, limit_bytes - len(last))
        tail_bytes = max(tail_bytes, limit_bytes - len(first))
    head = first[:head_bytes].decode("utf-8", "ignore")
    tail = last[max(0, len(last) - tail_bytes) :].decode("utf-8", "ignore")
    missing = kept_bytes - len(head.encode()) - len(tail.encode()) + dropped_bytes
    return f"{head}{seam(missing)}{tail}"


def shown(tool: str, result: CallResult, limit_bytes: int) -> str:
    """The content of the tool message for one result."""
    if result.fault in ("model", "policy"):
        return f"error: {result.message or result.error}"
    if tool in SESSION_TOOL_NAMES and isinstance(result.content, dict):
        standing = session_standing(result.content)
        if is_listing(result.content):
            return standing or "(none)"
        first = session_ending(result.content, result.exit_code, result.duration_s)
        nothing = "(no new output)" if tool == "process" else "(no output)"
        terminal = tool != "tmux" and has_pty(result.content)
        text = _command(result, limit_bytes, first, nothing=nothing, terminal=terminal)
        return text + (f"\n{standing}" if standing else "")
    if result.content is not None and (result.stdout or result.stderr or result.exit_code):
        return f"{_command(result, limit_bytes)}\n{json.dumps(result.content, ensure_ascii=False)}"
    if result.content is not None:
        return content_shown(tool, result.content, limit_bytes)
    return _command(result, limit_bytes)


def _command(
    result: CallResult,
    limit_bytes: int,
    first: str | None = None,
    *,
    nothing: str = "(no output)",
    terminal: bool = False,
) -> str:
    """``nothing`` is shown for empty output; ``terminal``: rendered as it looks on a terminal."""
    parts = [_ending(result) if first is None else first]
    for name, text, dropped in (
        ("stdout", result.stdout, result.stdout_dropped_bytes),
        ("stderr", result.stderr, result.stderr_dropped_bytes),
    ):
        kept = cut_middle(rendered(text) if terminal else without_overwritten(text), limit_bytes, dropped)
        if kept:
            parts.append(f"{name}:\n{kept.rstrip()}")
    if len(parts) == 1:
        parts.append(nothing)
    return "\n".join(parts)


def _ending(result: CallResult) -> str:
    notes = []
    if result.timed_out:
        notes.append(f"timed out after {result.duration_s:.0f} s; the command and everything it started were killed")
    if result.oom_killed:
        notes.append("killed: out of memory")
    code = "none" if result.exit_code is None else result.exit_code
    return f"exit code: {code}" + (f" ({'; '.join(notes)})" if notes else "")


def content_shown(tool: str, content: Any, limit_bytes: int) -> str:
    """A result's content: that of the file tools as their shell counterparts print it, a document as its text, other
    content as JSON."""
    if isinstance(content, dict):
        if tool in RENDERERS:
            field, render = RENDERERS[tool]
            if content.get(field) is not None:
                return render(content, limit_bytes)
        if isinstance(content.get("text"), str):
            return _document(content, limit_bytes)
    return cut_middle(json.dumps(content, ensure_ascii=False), limit_bytes)


def _matches(content: dict[str, Any], limit_bytes: int) -> str:
    """Formatted as by grep; files that were not searched are mentioned below."""
    found = [f"{one['path']}:{one['line']}:{one['text']}" for one in content["matches"]]
    nothing = "(no match: no file was searched)" if content.get("files_searched") == 0 else "(no match)"
    text = cut_middle("\n".join(found) or nothing, limit_bytes)
    skipped = {name: content.get(f"{name}_skipped") for name in ("binary", "large", "unreadable")}
    notes = ["[more matches were omitted; narrow the search]"] if content.get("truncated") else []
    notes += [f"[{count} {name} files were skipped]" for name, count in skipped.items() if count]
    cut = sum(bool(one.get("cut")) for one in content["matches"])
    notes += [f"[{cut} of the lines are long: only the text around their match is shown]"] if cut else []
    notes += [f"[{_NOT_UTF8}]"] if any(one.get("lossy") for one in content["matches"]) else []
    return "\n".join([text, *notes])


def _artifacts(content: dict[str, Any], limit_bytes: int) -> str:
    """Files as sha256sum prints them, with sizes. Base64 data is shown completely or not at all."""
    files = content["files"]
    lines = [f"{file['sha256']}  {file['size_bytes']}  {file['path']}" for file in files]
    text = cut_middle("\n".join(lines) or "(no files)", limit_bytes)
    parts = [text, f"[{len(files)} files, {content.get('total_bytes')} bytes]"]
    data = content.get("data")
    if isinstance(data, str):
        fits = len(data) <= min(limit_bytes, LONGEST_BASE64)
        parts.append(f"data (base64):\n{data}" if fits else f"[data: {len(data)} characters of base64, not shown]")
    return "\n".join(parts)


def _document(content: dict[str, Any], limit_bytes: int) -> str:
    """A document that is mostly text (a web page): other fields as lines above it, how to continue below."""
    around = {name: value for name, value in content.items() if name not in ("text", "next_offset", "truncated")}
    lines = [
        f"{name}: {value}" for name, value in around.items() if isinstance(value, (str, int, float)) and value != ""
    ]
    text = cut_middle(content["text"], limit_bytes)
    notes = [f"[more: offset={content['next_offset']}]"] if content.get("next_offset") else []
    notes += ["[the source was truncated]"] if content.get("truncated") else []
    return "\n".join([*lines, "", text, *notes]).strip()


def _file_text(content: dict[str, Any], limit_bytes: int) -> str:
    text = cut_middle(content["text"], limit_bytes)
    notes = [
        note
        for flag, note in (
            (content.get("truncated"), _goes_on(content)),
            (content.get("lossy"), _NOT_UTF8),
        )
        if flag
    ]
    return text + "".join(f"\n[{note}]" for note in notes)


def _goes_on(content: dict[str, Any]) -> str:
    known = f"truncated: the file has {content.get('size_bytes')} bytes"
    return f"{known}; continue with offset={content['next_offset']}" if content.get("next_offset") else known


def _listing(content: dict[str, Any], limit_bytes: int) -> str:
    marks = {"directory": "/", "symlink": "@"}
    lines = [
        f"{entry['path']}{marks.get(entry['kind'], '')}"
        + (f"  {entry['size_bytes']}" if entry["kind"] == "file" else "")
        for entry in content["entries"]
    ]
    text = cut_middle("\n".join(lines) or "(empty)", limit_bytes)
    return text + ("\n[more entries were omitted]" if content.get("truncated") else "")


def _written(content: dict[str, Any], _: int) -> str:
    return f"{'created' if content.get('created') else 'overwritten'}, {content['size_bytes']} bytes"


def _screenshot(content: dict[str, Any], _: int) -> str:
    """A picture is for people: the model gets a note that there is one."""
    return f"screenshot of {content.get('url')} saved ({content.get('size_bytes')} bytes); not shown here"


RENDERERS: Final[Mapping[str, tuple[str, Callable[[dict[str, Any], int], str]]]] = {
    "read_file": ("text", _file_text),
    "write_file": ("size_bytes", _written),
    "list_files": ("entries", _listing),
    "search": ("matches", _matches),
    "artifacts": ("files", _artifacts),
    "browser_screenshot": ("image", _screenshot),
}
"""By tool: the field that its content has when it succeeded, and how that is shown within a number of bytes."""


SESSION_TOOL_NAMES: Final = tuple(one.name for one in SESSION_TOOLS)
LONGEST_COMMAND = 80
"""Longest command shown in a state line, in characters: enough to distinguish commands."""


def session_ending(content: Mapping[str, Any], exit_code: int | None, duration_s: float) -> str:
    """The first line: how the command ended, that it is still running, or that a wait in tmux timed out."""
    tmux, process = _of(content, "session"), _of(content, "process")
    if exit_code is not None:
        return f"exit code: {exit_code}"
    if content.get("matched") is False or tmux.get("idle") is False:
        return f"timed out after waiting {duration_s:.1f} s"
    if tmux:
        return "session running" if tmux.get("state") == "running" else "session ended"
    if process.get("state") == "running":
        return f"still running (waited {duration_s:.1f} s)"
    if content.get("waiting_for_input"):
        return f"waiting for input (after {duration_s:.1f} s): {_brief(content.get('command'))}"
    if content.get("state") == "none" and not process:
        return "session reset"
    if content.get("state") == "running":
        return f"still running (waited {duration_s:.1f} s): {_brief(content.get('command'))}"
    return "no command has finished"


def session_standing(content: Mapping[str, Any]) -> str:
    """The last lines: state of the session or process, notes, and notices about background processes."""
    lines = []
    for name in ("session", "process"):
        found = content.get(name)
        if isinstance(found, Mapping):
            lines.append(f"[{name} {found.get('session') or found.get('process')}: {_facts(found)}]")
    if isinstance(content.get("session"), str) and content.get("state") != "none":
        pty = "with pty" if content.get("pty") else "without pty"
        lines.append(f"[session {content['session']}: {content.get('state')}, {pty}, in {content.get('cwd')}]")
    for name in ("processes", "sessions"):
        listed = content.get(name) or ()
        lines += [f"{one.get('process') or one.get('session')}: {_facts(one)}" for one in listed]
    shown = ("matched", "written_bytes", "offset", "next_offset")
    lines += [f"[{name}: {content[name]}]" for name in shown if content.get(name)]
    if content.get("truncated"):
        lines.append("[more output follows]")
    lines += [f"[{text}]" for text in (content.get("note"), *(content.get("notices") or ())) if text]
    return "\n".join(lines)


def is_listing(content: Mapping[str, Any]) -> bool:
    """Whether the result lists processes or sessions instead of reporting on one."""
    return "session" not in content and "process" not in content


def _facts(state: Mapping[str, Any]) -> str:
    facts = [str(state.get("state"))]
    if state.get("exit_code") is not None:
        facts.append(f"exit code {state['exit_code']}")
    if "cursor_row" in state or "rows" in state:
        facts.append(f"cursor at row {state.get('cursor_row', 0)}, column {state.get('cursor_column', 0)}")
    if "runs_s" in state:
        facts.append(f"{state['runs_s']:.1f} s, {state.get('total_bytes', 0)} bytes printed")
    if state.get("unread_bytes"):
        facts.append(f"{state['unread_bytes']} of them unread")
    if state.get("dropped_bytes"):
        facts.append(f"first {state['dropped_bytes']} bytes discarded")
    if state.get("command"):
        facts.append(_brief(state["command"]))
    return ", ".join(facts)


def has_pty(content: Mapping[str, Any]) -> bool:
    """Whether the output was written to a terminal."""
    return bool(content.get("pty") or _of(content, "process").get("pty"))


def _brief(command: object) -> str:
    """The first line of a command, shortened, so that a long script does not fill every result."""
    first, _, rest = str(command).strip().partition("\n")
    return first[:LONGEST_COMMAND] + "…" if rest or len(first) > LONGEST_COMMAND else first


def _of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}

"""Observations for session tools (terminal, process, tmux): output first, then the state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentenv.wire.sessions import SESSION_TOOLS

SESSION_TOOL_NAMES: Final = tuple(one.name for one in SESSION_TOOLS)
LONGEST_COMMAND = 80
"""Longest command shown in a state line, in characters: enough to tell commands apart."""


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

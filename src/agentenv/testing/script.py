"""Scripts for a scripted policy: the player of each conversation, and its replies.

A *player* plays one conversation. It is a list of replies (the n-th model turn gets the n-th; after the last, the
conversation ends with an empty answer), or a function from :class:`Turn` to a reply. A *script* gives each task its
players: member k of a task is played by player ``k % len(players)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError


@dataclass(frozen=True)
class Call:
    """A tool call. ``arguments`` given as text are sent unchanged, even if they are not JSON."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One assistant message. ``finish_reason`` None: ``tool_calls`` if there are any, else ``stop``."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Failure:
    """An HTTP error instead of a message, for tests."""

    status: int = 500
    message: str = "scripted failure"
    code: str | None = None


@dataclass(frozen=True)
class Turn:
    """A player's input: its task and member, the step (0 first), the conversation, the tools that are offered (with
    token ids, both are in one message: the text of the prompt)."""

    task: str
    member: int
    step: int
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def last_output(self) -> str:
        """The content of the newest message: a tool's output, after the first step."""
        return str(self.messages[-1].get("content") or "") if self.messages else ""


Answer = Reply | Failure
Player = Sequence[Answer] | Callable[[Turn], Answer]
Script = Mapping[str, Sequence[Player]]
"""Players by task id; ``"*"`` plays all other tasks."""


def answer(script: Script, turn: Turn) -> Answer:
    """The script's reply at this turn. A task without players gets a fixed answer saying so."""
    players = script.get(turn.task) or script.get("*")
    if not players:
        return Reply(f"(scripted policy: no player for task {turn.task!r})")
    player = players[turn.member % len(players)]
    if callable(player):
        return player(turn)
    return player[turn.step] if turn.step < len(player) else Reply("")


def load_script(path: Path | str) -> Script:
    """Read ``{"tasks": {task id: [[reply, …] per player, …]}}``, a reply being
    ``{"text": …, "calls": [{"name": …, "arguments": {…}}]}`` or ``{"status": 500}``.

    Raises: ConfigError naming the place that is wrong.
    """
    try:
        tasks = json.loads(Path(path).read_text())["tasks"]
        return {
            task: [[_answer(entry, f"tasks.{task}[{k}][{n}]") for n, entry in enumerate(player)]
                   for k, player in enumerate(players)]
            for task, players in tasks.items()
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"is not a script: {type(error).__name__}: {error}"
        raise ConfigError(
            "script", f"{path}: {problem}", next_step="`python -m agentenv.testing --help` shows the format"
        ) from error


def _answer(entry: dict[str, Any], where: str) -> Answer:
    unknown = set(entry) - {"text", "calls", "finish_reason", "status", "message", "code"}
    if unknown:
        raise ConfigError(where, f"unknown key {min(unknown)!r}", next_step="allowed: text, calls, status")
    if "status" in entry:
        return Failure(**entry)
    calls = tuple(Call(call["name"], call.get("arguments", {})) for call in entry.get("calls", ()))
    return Reply(entry.get("text", ""), calls, entry.get("finish_reason"))

"""Keeping a conversation within its token budget by shortening old tool outputs. Pure.

All old outputs are shortened at once, and only when the next turn would not fit: each change of what
was said earlier makes a managed server begin a new token sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.agent.ports import Message
from agentenv.agent.settings import AgentSettings
from agentenv.agent.transcript import Shortening

HEAD_BYTES = 256
"""What stays of a shortened output."""
BYTES_PER_TOKEN = 3.0
"""Assumed until a server has reported how many tokens a prompt came to."""


@dataclass
class ContextBudget:
    """Watches one conversation. Without ``context_tokens`` or ``keep_tool_outputs`` it changes nothing."""

    settings: AgentSettings
    bytes_per_token: float = BYTES_PER_TOKEN

    def learn(self, messages: Sequence[Message], usage: dict[str, Any] | None) -> None:
        """Take the server's count of these messages' tokens for later estimates."""
        counted = (usage or {}).get("prompt_tokens")
        if isinstance(counted, int) and counted > 0:
            self.bytes_per_token = max(0.5, size_bytes(messages) / counted)

    def fit(self, messages: Sequence[Message], step: int) -> tuple[list[Message], Shortening | None]:
        """The messages to ask with, and what was taken out of them."""
        limit, kept = self.settings.context_tokens, self.settings.keep_tool_outputs
        expected = size_bytes(messages) / self.bytes_per_token + (self.settings.max_tokens or 0)
        if limit is None or kept is None or expected <= limit:
            return list(messages), None
        return shorten(messages, kept, step)


def size_bytes(messages: Sequence[Message]) -> int:
    """About how much text the messages are."""
    return sum(
        len(str(message.get("content") or "").encode("utf-8", "replace"))
        + sum(len(str(call["function"].get("arguments") or "")) for call in message.get("tool_calls") or ())
        for message in messages
    )


def shorten(messages: Sequence[Message], kept: int, step: int) -> tuple[list[Message], Shortening | None]:
    """All tool outputs but the last ``kept`` cut to their beginning, with a note of what is missing."""
    outputs = [at for at, message in enumerate(messages) if message.get("role") == "tool"]
    fitted, changed, removed = list(messages), 0, 0
    for at in outputs[: max(0, len(outputs) - kept)]:
        raw = str(messages[at].get("content") or "").encode("utf-8", "replace")
        head = raw[:HEAD_BYTES].decode("utf-8", "ignore")
        cut = len(raw) - len(head.encode())
        note = f"\n[... {cut} more bytes of this old output were removed to save context ...]"
        if cut <= 2 * len(note):  # nothing to gain; also true of what was shortened before
            continue
        fitted[at] = {**messages[at], "content": head + note}
        changed, removed = changed + 1, removed + cut
    return fitted, Shortening(step=step, outputs=changed, bytes_removed=removed) if changed else None

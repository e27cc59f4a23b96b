"""Keeping a conversation within its token budget by shortening old tool outputs. Pure.

All old outputs are shortened at once, and only when the next turn would not fit: every change of earlier messages
makes a managed server begin a new token sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.agent.protocols import Message
from agentenv.agent.settings import AgentSettings
from agentenv.agent.transcript import Shortening

HEAD_BYTES = 256
"""Bytes kept of a shortened output."""
BYTES_PER_TOKEN = 3.0
"""Assumed until the server's token counts of two prompts are known."""


class ContextBudget:
    """Watches one conversation. Without ``context_tokens`` and ``keep_tool_outputs`` it changes nothing."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._bytes_per_token = BYTES_PER_TOKEN
        self._counted = (0, 0)  # bytes and tokens of the last prompt

    def learn(self, messages: Sequence[Message], usage: dict[str, Any] | None) -> None:
        """Use the server's token count of these messages for later estimates."""
        tokens = (usage or {}).get("prompt_tokens")
        if not isinstance(tokens, int) or tokens <= 0:
            return
        size = size_bytes(messages)
        more_bytes, more_tokens = size - self._counted[0], tokens - self._counted[1]
        if self._counted[1] and more_bytes > 0 and more_tokens > 0:
            self._bytes_per_token = min(8.0, max(0.5, more_bytes / more_tokens))
        self._counted = (size, tokens)

    def fit(self, messages: Sequence[Message], step: int) -> tuple[list[Message], Shortening | None]:
        """The messages to send, and the record of what was shortened because too little room is expected."""
        limit = self._settings.context_tokens
        size, tokens = self._counted
        expected = tokens + (size_bytes(messages) - size) / self._bytes_per_token + (self._settings.max_tokens or 0)
        return (list(messages), None) if limit is None or expected <= limit else self.shrink(messages, step)

    def shrink(self, messages: Sequence[Message], step: int) -> tuple[list[Message], Shortening | None]:
        """The messages with old outputs shortened; unchanged if the settings do not allow it."""
        kept = self._settings.keep_tool_outputs
        return (list(messages), None) if kept is None else shorten(messages, kept, step)


def size_bytes(messages: Sequence[Message]) -> int:
    """Approximate size of the text of the messages."""
    return sum(
        len(str(message.get("content") or "").encode("utf-8", "replace"))
        + sum(len(str(call["function"].get("arguments") or "")) for call in message.get("tool_calls") or ())
        for message in messages
    )


def shorten(messages: Sequence[Message], kept: int, step: int) -> tuple[list[Message], Shortening | None]:
    """Cut all tool outputs but the last ``kept`` to their beginning, with a note of how much was removed."""
    outputs = [at for at, message in enumerate(messages) if message.get("role") == "tool"]
    fitted, changed, removed = list(messages), 0, 0
    for at in outputs[: max(0, len(outputs) - kept)]:
        raw = str(messages[at].get("content") or "").encode("utf-8", "replace")
        head = raw[:HEAD_BYTES].decode("utf-8", "ignore")
        cut = len(raw) - len(head.encode())
        note = f"\n[... {cut} more bytes of this old output were removed to save context ...]"
        if cut <= 2 * len(note):  # no gain; also true of outputs shortened before
            continue
        fitted[at] = {**messages[at], "content": head + note}
        changed, removed = changed + 1, removed + cut
    return fitted, Shortening(step=step, outputs=changed, bytes_removed=removed) if changed else None

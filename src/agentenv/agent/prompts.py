"""Texts shown to a model before its task."""

from __future__ import annotations

from agentenv.agent.protocols import Message

SYSTEM_PROMPT = """\
You solve tasks on a Linux machine by calling tools. Your files are in /workspace, which is the initial \
working directory. Each bash call starts a new shell: files persist, variables and directory changes \
do not. A command that exceeds its time limit is stopped and its partial output is shown. Work step by \
step, verify your result by running it, and when the task is done answer without calling a tool."""


def opening(system_prompt: str, task: str) -> list[Message]:
    """The first messages of a conversation; an empty system prompt is omitted."""
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": task}]

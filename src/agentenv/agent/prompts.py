"""The texts a model is given before its task."""

from __future__ import annotations

from agentenv.agent.ports import Message

SYSTEM_PROMPT = """\
You solve tasks on a Linux machine by calling tools. Your files are in /workspace, which is the \
directory commands start in. Each bash call is a fresh shell: files stay, variables and directories \
changed into do not. A command that runs too long is stopped and its partial output shown. Work step \
by step, check your result by running it, and when the task is done answer without calling a tool."""


def opening(system_prompt: str, task: str) -> list[Message]:
    """The first messages of a conversation; an empty system prompt is left out."""
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": task}]

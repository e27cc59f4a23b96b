"""Conversations in every dialect: requests as programs write them, and what they send back of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.gateway.canonical import Dialect
from agentenv.gateway.dialects import chat, google, messages, responses
from tests.unit.gateway.dialects.answers import SCHEMA

Result = tuple[str, str, str]
"""The id and the name of a call, and the text of its result."""
PNG = "data:image/png;base64,AA"


@dataclass(frozen=True)
class Program:
    """One that speaks a dialect. ``request`` makes the body of a request from the text of the user and what follows
    it; ``back`` is what follows: an answer as it came, and the results of its calls. ``full`` is a body with all that
    programs send."""

    dialect: Dialect
    path: str
    request: Callable[..., dict[str, Any]]
    back: Callable[[Any, Sequence[Result]], list[Any]]
    full: dict[str, Any]

    def __str__(self) -> str:
        return self.path


def _chat(text: str, rest: Sequence[Any] = ()) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}, *rest]}


def _chat_back(answer: Any, results: Sequence[Result]) -> list[Any]:
    said = answer["choices"][0]["message"]
    return [said, *({"role": "tool", "tool_call_id": call_id, "content": text} for call_id, _, text in results)]


def _responses(text: str, rest: Sequence[Any] = ()) -> dict[str, Any]:
    return {"model": "m", "input": [{"role": "user", "content": text}, *rest]}


def _responses_back(answer: Any, results: Sequence[Result]) -> list[Any]:
    items = [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, _, text in results]
    return [*answer["output"], *items]


def _messages(text: str, rest: Sequence[Any] = ()) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": text}, *rest]}


def _messages_back(answer: Any, results: Sequence[Result]) -> list[Any]:
    blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, _, text in results]
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": blocks or "go on"}]


def _google(text: str, rest: Sequence[Any] = ()) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": text}]}, *rest]}


def _google_back(answer: Any, results: Sequence[Result]) -> list[Any]:
    parts = [
        {"functionResponse": {"id": call_id, "name": name, "response": {"output": text}}}
        for call_id, name, text in results
    ]
    return [answer["candidates"][0]["content"], {"role": "user", "parts": parts or [{"text": "go on"}]}]


_ARGUMENTS = json.dumps({"command": "ls"})
PROGRAMS = [
    Program(
        chat.DIALECT,
        "/v1/chat/completions",
        _chat,
        _chat_back,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG}}],
                },
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "bash", "arguments": _ARGUMENTS}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]},
                {"role": "developer", "content": "Go on."},
            ],
            "tools": [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}],
            "tool_choice": "auto",
            "temperature": 0.5,
            "max_tokens": 9,
            "n": 1,
            "stream": False,
            "stream_options": {"include_usage": True},
        },
    ),
    Program(
        responses.DIALECT,
        "/v1/responses",
        _responses,
        _responses_back,
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG}],
                },
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c", "name": "bash", "arguments": _ARGUMENTS},
                {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
                {"type": "function_call_output", "call_id": "c", "output": "a"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "b"}]},
            ],
            "tools": [
                {"type": "function", "name": "bash", "description": "Run.", "parameters": SCHEMA, "strict": False},
                {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
                {"type": "web_search"},
            ],
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low"},
            "max_output_tokens": 9,
            "stream": False,
        },
    ),
    Program(
        messages.DIALECT,
        "/v1/messages",
        _messages,
        _messages_back,
        {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url"}}],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]},
                        {"type": "text", "text": "Go on."},
                    ],
                },
            ],
            "tools": [{"name": "bash", "description": "Run.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "output_config": {"effort": "low"},
            "stream": False,
        },
    ),
    Program(
        google.DIALECT,
        "/v1beta/models/m:generateContent",
        _google,
        _google_back,
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "I look."},
                        {"functionCall": {"name": "bash", "args": {"command": "ls"}}, "thoughtSignature": "s"},
                    ],
                },
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "bash", "response": {"output": "a"}}}, {"text": "Go on."}],
                },
            ],
            "tools": [
                {"functionDeclarations": [{"name": "bash", "description": "Run.", "parameters": SCHEMA}]},
                {"googleSearch": {}},
            ],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "generationConfig": {"maxOutputTokens": 9, "temperature": 0.5, "thinkingConfig": {"thinkingBudget": 9}},
        },
    ),
]

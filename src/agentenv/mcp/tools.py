"""The tools as MCP describes them, and their results as it carries them. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from mcp import types

from agentenv.agent.observations import shown
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult

MAX_IMAGE_BYTES: Final = 5 * 1024 * 1024
"""Largest image that is sent; models take no larger ones."""
_SHOWN_BYTES: Final = 30_000
_OFFERED: Final = ("bash", "terminal", "process", "tmux", "read_file", "write_file", "patch", "list_files", "search")
_READ_ONLY: Final = frozenset({"read_file", "list_files", "search"})
_IMAGES: Final = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def offered(names: tuple[str, ...]) -> ToolCatalog:
    """The tools of these names; without names all that a model has a use for. Raises ConfigError."""
    return ToolCatalog.builtin().subset(names or _OFFERED)


def described(catalog: ToolCatalog) -> list[types.Tool]:
    """The tools, for ``tools/list``."""
    return [
        types.Tool(
            name=tool["name"],
            description=tool["description"],
            input_schema=tool["parameters"],
            annotations=types.ToolAnnotations(read_only_hint=tool["name"] in _READ_ONLY, open_world_hint=False),
        )
        for tool in (each["function"] for each in catalog.openai_tools())
    ]


def text_result(text: str, *, wrong: bool = False) -> types.CallToolResult:
    """A result that is a text. ``wrong``: the model should see that something failed."""
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=wrong)


def result_of(tool: str, result: CallResult) -> types.CallToolResult:
    """What a call did: as models are shown it, or an image. A wrong call and a command that failed are errors of the
    model's, not of the protocol."""
    content = result.content if isinstance(result.content, Mapping) else {}
    if tool == "read_file" and (picture := image_of(content)) is not None:
        return types.CallToolResult(content=[picture])
    wrong = result.fault != "none" or bool(result.exit_code) or result.timed_out
    return text_result(shown(tool, result, _SHOWN_BYTES), wrong=wrong)


def may_be_image(tool: str, result: CallResult) -> bool:
    """Whether the file has to be read again as bytes to see: it is no text."""
    content = result.content
    return tool == "read_file" and isinstance(content, Mapping) and bool(content.get("lossy"))


def image_of(content: Mapping[str, Any]) -> types.ImageContent | None:
    """The image that a file's bytes are; None when they are none, or not all of it."""
    data = content.get("data")
    if not isinstance(data, str) or content.get("truncated"):
        return None
    try:
        first = base64.b64decode(data[:64])
    except binascii.Error:
        return None
    kind = next((name for mark, name in _IMAGES if first.startswith(mark)), "")
    if first[:4] == b"RIFF" and first[8:12] == b"WEBP":
        kind = "image/webp"
    return types.ImageContent(type="image", data=data, mime_type=kind) if kind else None

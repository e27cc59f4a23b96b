"""Tool-call parsers by name, one file per model family, for the text of managed servers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agentenv.agent.parsers.base import Malformed, Parsed, ParsedCall, ToolCallParser
from agentenv.agent.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from agentenv.agent.parsers.glm import Glm45Parser, Glm47Parser
from agentenv.agent.parsers.hermes import HermesParser, QwenParser
from agentenv.agent.parsers.kimi_k2 import KimiK2Parser
from agentenv.agent.parsers.llama3_json import Llama3JsonParser
from agentenv.agent.parsers.longcat import LongcatParser
from agentenv.agent.parsers.mistral import MistralParser
from agentenv.agent.parsers.qwen3_coder import Qwen3CoderParser
from agentenv.errors import ConfigError
from agentenv.tools.schema import closest

PARSERS: Final[Mapping[str, type[ToolCallParser]]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            HermesParser, MistralParser, Llama3JsonParser, QwenParser, Qwen3CoderParser, DeepSeekV3Parser,
            DeepSeekV31Parser, KimiK2Parser, Glm45Parser, Glm47Parser, LongcatParser,
        )
    }
)  # fmt: skip


def parser_named(name: str) -> ToolCallParser:
    """The parser of that name. Raises: ConfigError naming the closest match and all parsers."""
    kind = PARSERS.get(name)
    if kind is None:
        match = closest(name, PARSERS)
        hint = f"; did you mean {match!r}?" if match else ""
        raise ConfigError("tool_call_parser", f"got {name!r}{hint}", next_step=f"allowed: {', '.join(PARSERS)}")
    return kind()


def format_of(text: str) -> str:
    """The name of a parser that finds a call in the text; empty if none does. Llama's comes last: its calls may be bare
    JSON, which others have between marks of their own."""
    found = [name for name, kind in PARSERS.items() if kind().parse(text).calls]
    return min(found, key=lambda name: PARSERS[name] is Llama3JsonParser, default="")


__all__ = ["PARSERS", "Malformed", "Parsed", "ParsedCall", "ToolCallParser", "parser_named"]

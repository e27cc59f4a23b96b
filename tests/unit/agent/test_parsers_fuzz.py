"""No text makes a parser raise, run something half read, or take long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.agent.parsers import PARSERS, Parsed, ParsedCall, parser_named
from agentenv.agent.parsers.base import ToolCallParser
from agentenv.tools.catalog import ToolCatalog
from tests.unit.agent.parser_samples import SAMPLES

TOOLS = [
    *ToolCatalog.builtin().openai_tools(),
    {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "number"}, "o": {"type": "object"}}}}},
    {"function": {"name": "odd", "parameters": {"properties": {"x": {"anyOf": [None, {"type": 5}]}, "y": True}}}},
]

# fmt: off
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "<scratch_pad>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "<longcat_tool_call>", "</longcat_tool_call>", "<|python_tag|>", "<function=",
    "<function=f>", "</function>", "<parameter=", "<parameter=n>", "<parameter=o>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "```json", "```", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.bash:0", "<|im_end|>", "</s>", "function",
    '{"name": "bash", "arguments": {}}', '{"name": "f", "parameters": ', '"name"', "{", "}", "[", "]", '"', ":", ",",
    "\\", "\n", " ", "bash", "f", "null", "1e999", "NaN", "-", "ü🙂", "\ud800", "\x00",
]
# fmt: on

messages = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.tuples(st.sampled_from(sorted(SAMPLES.values())), st.integers(0, 500), st.sampled_from(PIECES)).map(
        lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]
    ),
)


def check(parsed: Parsed) -> None:
    for call in parsed.calls:
        assert call.name.strip() == call.name != ""
        if isinstance(call.arguments, dict):
            json.dumps(call.arguments)
    assert isinstance(parsed.content, str)
    assert isinstance(parsed.reasoning, str)


@pytest.mark.parametrize("name", PARSERS)
@given(text=messages, opened=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_text_makes_it_raise(name: str, text: str, opened: bool) -> None:
    check(parser_named(name).parse(text, TOOLS, reasoning_open=opened))


words = st.text(st.characters(codec="utf-8"), max_size=30)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"qwen3_coder", "glm45", "glm47"}))
@given(arguments=st.dictionaries(words, json_values, max_size=4))
@settings(max_examples=100, deadline=None)
def test_whatever_json_is_written_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    parser = parser_named(name)
    text = parser.written([ParsedCall("f", arguments), ParsedCall("g", {})])
    parsed = parser.parse("so:" + text)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", arguments), ("g", {})]


MARKS = [
    "<tool_call>", "</tool_call>", "<longcat_tool_call>", "</longcat_tool_call>", "[TOOL_CALLS]", "<think>", "</think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|python_tag|>", "```", "```json", "; ", "</s>", "<|im_end|>",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"qwen3_coder", "glm45", "glm47"}))
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_in_an_argument_does_not_end_its_call(name: str, mark: str) -> None:
    """A policy may well be asked to write a chat template."""
    parser = parser_named(name)
    for arguments in ({mark: None}, {"a": mark}, {"a": f"\\{mark}{mark}\n"}, {"a": [{"b": f"}}{mark}"}]}):
        text = parser.written([ParsedCall("f", arguments), ParsedCall("g", {})])
        parsed = parser.parse("so:" + text)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("f", arguments), ("g", {})]


# fmt: off
REPEATED = [
    "<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<think></think>", "</think>", "{", "[", '{"a":', '{"',
    '{"a":x', '{"\\"', "[TOOL_CALLS]", "[TOOL_CALLS] [", "</s>", "<|im_end|>", "<tool_call><function=a><parameter=b>",
    "<parameter=n>[x]", "<function=f><parameter=o>[x]</function>", "<arg_key>k</arg_key><arg_value>v</arg_value>",
    "<tool_call>f<arg_key>o</arg_key><arg_value>[x]</arg_value></tool_call>", "<arg_key>", "<longcat_tool_call>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>a:1",
    "<|tool_calls_section_begin|><|tool_call_begin|>", "1", "-", '{"name": "f", "parameters": ', "\\", "\n",
]
# fmt: on
BEFORE = ("", "<tool_call><function=f><parameter=n>")
MEGABYTE = 1_000_000
LONGEST_S = 2.0
"""In CPU time; under half a second on the machine it was written on. A quadratic scan would take minutes."""


def parsing_s(parser: ToolCallParser, text: str) -> float:
    began_s = time.thread_time()
    check(parser.parse(text, TOOLS))
    return time.thread_time() - began_s


@pytest.mark.parametrize("name", PARSERS)
def test_a_megabyte_of_anything_is_read_in_linear_time(name: str) -> None:
    parser = parser_named(name)
    for before in BEFORE:
        for piece in REPEATED:
            text = before + piece * (MEGABYTE // len(piece.encode())) + "</parameter></arg_value></tool_call>"
            assert any(parsing_s(parser, text) < LONGEST_S for _ in range(3)), (before, piece)

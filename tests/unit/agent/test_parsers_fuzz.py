"""No text makes a parser raise, run something half read, or take long."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.agent.parsers import PARSERS, Parsed, parser_named
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


# fmt: off
REPEATED = [
    "<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<think></think>", "</think>", "{", "[", '{"a":', '{"',
    '{"a":x', '{"\\"', "[TOOL_CALLS]", "[TOOL_CALLS] [", "</s>", "<|im_end|>", "<tool_call><function=a><parameter=b>",
    "<parameter=n>[x]", "<function=f><parameter=o>[x]</function>", "<arg_key>k</arg_key><arg_value>v</arg_value>",
    "<tool_call>f<arg_key>o</arg_key><arg_value>[x]</arg_value></tool_call>", "<arg_key>", "<longcat_tool_call>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>a:1",
    "<|tool_calls_section_begin|><|tool_call_begin|>", "1", "-", '{"name": "f", "parameters": ', "\\", "\n",
    "</parameter>", "</parameter>\n", "</arg_value>", "</arg_value> ", "<function=f></function>", '{"a": 1} <think>',
    "[TOOL_CALLS]f{}", '[TOOL_CALLS][{"name": "f"}]', '{"name": "f", "parameters": {}}; ', "<|python_tag|>",
    '<think><tool_call>{"name": "f"}</tool_call>', "<think><tool_call>f</tool_call>", "<think>[TOOL_CALLS]f{}",
    '<think>{"name": "f", "parameters": {}}',
]
# fmt: on
BEFORE = (
    "",
    "<tool_call><function=f><parameter=n>",
    "<tool_call>f<arg_key>n</arg_key><arg_value>",
    '<tool_call>{"a": "',
    "<think>",
)  # fmt: skip
BYTES = 256 * 1024
GROWTH = 4
NOISE_S = 0.02


def parsing_s(parser: ToolCallParser, text: str) -> float:
    """In CPU time of this thread, which other processes hardly change."""
    began_s = time.thread_time()
    check(parser.parse(text, TOOLS))
    return time.thread_time() - began_s


def is_linear(parser: ToolCallParser, before: str, piece: str) -> bool:
    """Whether four times the text takes about four times as long, and not sixteen times."""
    part, whole = (
        before + piece * (size // len(piece.encode())) + "</parameter></arg_value></tool_call>"
        for size in (BYTES // GROWTH, BYTES)
    )
    return parsing_s(parser, whole) < 2 * GROWTH * parsing_s(parser, part) + NOISE_S


@pytest.mark.parametrize("name", PARSERS)
def test_any_text_is_read_in_linear_time(name: str) -> None:
    parser = parser_named(name)
    for before in BEFORE:
        for piece in REPEATED:
            assert any(is_linear(parser, before, piece) for _ in range(4)), (before, piece)

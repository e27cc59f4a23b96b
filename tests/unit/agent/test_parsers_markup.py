"""The formats without JSON around their calls, and those that are read call by call."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.agent.parsers import parser_named
from tests.unit.agent.parser_samples import calls, problem, tool

# -- Qwen3-Coder ----------------------------------------------------------------------------------

CODER = "<tool_call>\n<function=f>\n<parameter=k>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "  two\n\n  lines\\n &lt; ", "  two\n\n  lines\\n &lt; "),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "2.50", 2.5),
        ({"type": "number"}, "3.0", 3),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "array"}, "['a', None, True]", ["a", None, True]),
        ({"type": "object"}, "{'a': (1, 2)}", {"a": [1, 2]}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "[" * 3000, "[" * 3000),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({"type": ["integer", "null"]}, "NULL", None),
        ({}, "5", "5"),
        (None, "5", "5"),
    ],
)
def test_qwen3_coder_gives_values_the_types_of_the_schema(schema: Any, text: str, expected: Any) -> None:
    tools = [tool("f", k=schema)] if schema is not None else []
    assert calls("qwen3_coder", CODER.format(text), tools) == [("f", {"k": expected})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<function=f><parameter=a>1</parameter></function>", [("f", {"a": "1"})]),
        ("<function=f></function>\n<function=g></function>", [("f", {}), ("g", {})]),
        ("<function=f>\n</function>\n</tool_call>", [("f", {})]),
        ("<tool_call><function=f><parameter=a>x<y></parameter></function>", [("f", {"a": "x<y>"})]),
        (
            "<tool_call>\n\n<function=f>\n<parameter= a >\n\n</parameter>\n</function>\n\n</tool_call>",
            [("f", {"a": ""})],
        ),
    ],
)
def test_qwen3_coder_s_lax_layouts(text: str, expected: list[Any]) -> None:
    assert calls("qwen3_coder", text) == expected


def test_qwen3_coder_without_outer_tags_may_go_on() -> None:
    parsed = [
        parser_named("qwen3_coder").parse(f"{before}<function=f></function>{behind}")
        for before, behind in (("<tool_call>", "</tool_call>"), ("", "</tool_call>"), ("<tool_call>", ""), ("", ""))
    ]
    assert [(len(one.calls), one.open_ended) for one in parsed] == [(1, False), (1, False), (1, True), (1, True)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>bash</tool_call>",
        "<tool_call><function=ba",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f><parameter=command>rm -rf /tmp/x",
        "<tool_call><function=f><parameter=comm",
        "<tool_call><function=f><parameter=a>1<parameter=b>2</function></tool_call>",
        "<tool_call><function=f><parameter=a>1</tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter></tool_call>",
        "<tool_call><function=f><parameter=a>\n1</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a>1\n</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter> <parameter=b>2</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a\nb>1</parameter></function></tool_call>",
        "<tool_call><function=f></function> so </tool_call>",
        "<tool_call><function=f></function><function=g></function></tool_call>",
    ],
)
def test_qwen3_coder_malformed_and_cut_values_never_run(text: str) -> None:
    problem("qwen3_coder", text)


# -- DeepSeek and Kimi: a section has nothing but calls ---------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "cut"),
    [
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{\n  \"command\": \"```\"\n}\n```"
            "<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{\"command\": ",
        ),
        (
            "deepseek_v3_1",
            "<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{\"command\":\n \"```\"}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{\"comm",
        ),
        (
            "kimi_k2",
            ' <|tool_call_begin|> functions.bash:3 <|tool_call_argument_begin|> {"command": "```"} <|tool_call_end|>',
            '<|tool_call_begin|>functions.bash:4<|tool_call_argument_begin|>{"comm',
        ),
    ],
)  # fmt: skip
def test_sections_of_calls(name: str, good: str, cut: str) -> None:
    section = {"kimi_k2": "<|tool_calls_section_begin|>"}.get(name, "<｜tool▁calls▁begin｜>")
    assert calls(name, f"so: {section}{good}") == [("bash", {"command": "```"})]
    assert calls(name, section + good.replace('"```"', '"a\n\tb"')) == [("bash", {"command": "a\n\tb"})]
    assert "not valid JSON" in problem(name, section + good + cut)
    assert "not valid JSON" in problem(name, section + cut + good)
    assert "tool call 1 is not closed" in problem(
        name, section + good.replace("call▁end", "x").replace("call_end", "x")
    )
    assert "no call" in problem(name, section + "hello")
    assert "outside a tool call" in problem(name, good), "without its section"
    assert "behind a tool call" in problem(name, section + good + "hello" + good)


def test_deepseek_arguments_that_are_no_object_are_handed_on_to_be_refused_by_name() -> None:
    section = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
    assert calls("deepseek_v3_1", section.format("bash<｜tool▁sep｜>[1]")) == [("bash", "[1]")]
    assert calls("deepseek_v3_1", section.format('bash<｜tool▁sep｜>{"a": "b\nc"}')) == [("bash", {"a": "b\nc"})]
    problem("deepseek_v3", section.format("function<｜tool▁sep｜>bash\n```json\n{oops\n```"))
    problem("deepseek_v3", section.format("function<｜tool▁sep｜>bash\n{}"))
    problem("deepseek_v3_1", section.format("bash {}"))


@pytest.mark.parametrize(
    ("call_id", "name"),
    [("functions.bash:0", "bash"), ("bash:12", "bash"), ("functions.ns.read_file:1", "read_file"), ("call_abc", None),
     ("functions.bash:x", None), (":0", None)],
)  # fmt: skip
def test_kimi_ids_name_the_tool(call_id: str, name: str | None) -> None:
    text = f"<|tool_call_section_begin|><|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    if name is None:
        problem("kimi_k2", text)
        return
    (call,) = parser_named("kimi_k2").parse(text).calls
    assert (call.name, call.call_id) == (name, call_id)


# -- GLM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glm45", "glm47"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>f</tool_call>", {}),
        ("<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", {"n": 5}),
        ("<tool_call>f<arg_key>s</arg_key>\\n<arg_value> 5 </arg_value></tool_call>", {"s": " 5 "}),
        ("<tool_call>f<arg_key> u </arg_key><arg_value>['a']</arg_value></tool_call>", {"u": ["a"]}),
        (
            "<tool_call>f<arg_key>u</arg_key><arg_value>plain &lt; text</arg_value></tool_call>",
            {"u": "plain &lt; text"},
        ),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>null</arg_value></tool_call>", {"n": None}),
        ("<tool_call>f<arg_key>s</arg_key><arg_value>a <arg_key> b</arg_value></tool_call>", {"s": "a <arg_key> b"}),
    ],
)
def test_glm_layouts_and_types(name: str, text: str, expected: Any) -> None:
    tools = [tool("f", n={"type": "integer"}, s={"type": "string"})]
    assert calls(name, text, tools) == [("f", expected)]


@pytest.mark.parametrize("name", ["glm45", "glm47"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f<arg_key>a</arg_key><arg_value>1",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_value>a</arg_value></tool_call>",
        "<tool_call>f<arg_key>a</arg_key>x<arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value> so </tool_call>",
        "<tool_call>f<arg_key>a</arg_key>\n\n<arg_value>1</arg_value></tool_call>",
        "<tool_call>f</tool_call><tool_call>g<arg_key>",
    ],
)
def test_glm_malformed(name: str, text: str) -> None:
    problem(name, text)

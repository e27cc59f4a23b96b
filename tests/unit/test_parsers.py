"""Every family's format: as its models write it, and as they get it wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.parsers import PARSERS, ParsedCall, parser_named
from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog
from tests.unit.parser_samples import COMMAND, NESTED, SAMPLES

TOOLS = ToolCatalog.builtin().openai_tools()


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def calls(parser: str, text: str, tools: Any = TOOLS) -> list[tuple[str, Any]]:
    parsed = parser_named(parser).parse(text, tools)
    assert not parsed.problem
    return [(call.name, call.arguments) for call in parsed.calls]


def problem(parser: str, text: str) -> str:
    """What is wrong with a text of which nothing may run and all must be kept."""
    parsed = parser_named(parser).parse(text, TOOLS)
    assert parsed.calls == ()
    assert parsed.content == text
    assert parsed.problem
    return parsed.problem


def test_the_registry_names_the_closest_match() -> None:
    assert set(SAMPLES) == set(PARSERS)
    with pytest.raises(ConfigError, match="did you mean 'hermes'") as caught:
        parser_named("hermse")
    assert caught.value.field == "tool_call_parser"
    assert all(name in str(caught.value) for name in PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_two_calls_as_the_family_writes_them(name: str) -> None:
    parsed = parser_named(name).parse(SAMPLES[name], TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        ("bash", {"command": COMMAND}),
        ("write_file", NESTED),
    ]
    assert (parsed.content, parsed.problem, parsed.reasoning) == ("I look around.", "", "")


@pytest.mark.parametrize("name", PARSERS)
def test_what_it_writes_it_reads_back(name: str) -> None:
    parser = parser_named(name)
    given = [
        ParsedCall("bash", {"command": COMMAND, "timeout_s": 5}),
        ParsedCall("write_file", dict(NESTED)),
        ParsedCall("artifacts", {}),
    ]
    tools = [tool("bash", command={"type": "string"}, timeout_s={"type": "integer"}), *TOOLS[1:]]
    read = parser.parse(parser.written(given), tools)
    assert [(call.name, call.arguments) for call in read.calls] == [(call.name, call.arguments) for call in given]
    assert parser.parse(parser.example()).calls == (ParsedCall("TOOL_NAME", {"ARGUMENT": "VALUE"}, read_id(parser)),)


@pytest.mark.parametrize("name", PARSERS)
def test_the_documented_sample_is_one_call(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    found = re.search(rf"^#### {name}$.*?^````?text\n(.*?)^````?$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert calls(name, found.group(1).removesuffix("\n")) == [("bash", {"command": "ls -la"})]


def read_id(parser: Any) -> str | None:
    return "functions.TOOL_NAME:0" if parser.name == "kimi_k2" else None


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text", ["", " ", "The answer is 42.", 'It is {"a": 1} ü.', "a < b > c </tool_call>", "\x00\ud800"]
)
def test_text_without_a_call_is_kept_as_it_is(name: str, text: str) -> None:
    parsed = parser_named(name).parse(text, TOOLS)
    assert (parsed.content, parsed.calls, parsed.problem) == (text, (), "")


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_inside_closed_reasoning_is_never_run(name: str) -> None:
    parser = parser_named(name)
    drafted = SAMPLES[name].removesuffix("<|im_end|>")
    for text, opened in ((f"<think>{drafted}</think>Done.", False), (f"{drafted}</think>Done.", True)):
        parsed = parser.parse(text, TOOLS, reasoning_open=opened)
        assert (parsed.content, parsed.calls, parsed.problem) == ("Done.", (), "")
        assert "I look around." in parsed.reasoning


@pytest.mark.parametrize("name", PARSERS)
def test_calls_after_reasoning_run_and_marks_in_their_arguments_are_text(name: str) -> None:
    parser = parser_named(name)
    command = "echo '<think>' && echo '</think>'"
    text = "<think>hm\nhm</think>\n" + parser.written([ParsedCall("bash", {"command": command})])
    parsed = parser.parse(text, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("bash", {"command": command})]
    assert (parsed.reasoning, parsed.content) == ("hm\nhm", "")


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "llama3_json"])
def test_reasoning_never_closed_ends_where_a_call_begins_and_says_so(name: str) -> None:
    parser = parser_named(name)
    parsed = parser.parse("<think>I run " + parser.written([ParsedCall("bash", {"command": "ls"})]), TOOLS)
    assert [call.name for call in parsed.calls] == ["bash"]
    assert (parsed.reasoning, parsed.open_ended) == ("I run", True)
    assert parser.parse("<think>only thought").reasoning == "only thought"
    assert parser.parse("<think>only thought").content == ""


@pytest.mark.parametrize("name", PARSERS)
def test_every_prefix_of_a_message_is_safe_to_read(name: str) -> None:
    """A cut message gives only calls the whole message has, whole: never one with cut arguments."""
    parser, text = parser_named(name), SAMPLES[name]
    whole = [(call.name, call.arguments) for call in parser.parse(text, TOOLS).calls]
    for end in range(len(text)):
        parsed = parser.parse(text[:end], TOOLS)
        for call in parsed.calls:
            if isinstance(call.arguments, dict) and not parsed.open_ended:
                assert (call.name, call.arguments) in whole, text[:end]


# -- JSON in tags ---------------------------------------------------------------------------------

TAGS = {"hermes": ("<tool_call>", "</tool_call>"), "longcat": ("<longcat_tool_call>", "</longcat_tool_call>")}


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize(
    "inner",
    [
        '{"name": "bash", "arguments": {"command": "ls",}}',
        "{'name': 'bash', 'arguments': {}}",
        '{"name": "bash", "arguments": {"a": True}}',
        '{"name": "bash", "arguments": {"command": "a\nb"}}',
        '{"name": "bash", "arguments": {}} {"name": "bash", "arguments": {}}',
        '```json\n{"name": "bash", "arguments": {}}\n```',
        '[{"name": "bash", "arguments": {}}]',
        '{"name": "bash", "parameters": {}}',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "bash", "arguments": {"command": "</tool_call></longcat_tool_call>"}}',
        "",
        "[" * 5000,
        "1" * 5000,
    ],
)
def test_one_bad_block_drops_them_all_and_keeps_the_text(name: str, inner: str) -> None:
    opener, closer = TAGS[name]
    good = f'{opener}{{"name": "bash", "arguments": {{"command": "ls"}}}}{closer}'
    assert "tool call 2" in problem(name, f"text {good}\n{opener}\n{inner}\n{closer}")


@pytest.mark.parametrize("name", TAGS)
def test_a_last_block_never_closed_counts_when_its_json_is_complete(name: str) -> None:
    opener, _ = TAGS[name]
    assert calls(name, f'{opener}{{"name": "bash", "arguments": {{"command": "ls"}}}}\n') == [
        ("bash", {"command": "ls"})
    ]
    assert "not valid JSON" in problem(name, f'{opener}{{"name": "bash", "arguments": {{"comm')


def test_odd_arguments_are_handed_on_to_be_refused_by_name() -> None:
    text = '<tool_call>{"name": "bash", "arguments": %s}</tool_call>'
    assert calls("hermes", '<tool_call>{"name": "bash"}</tool_call>') == [("bash", {})]
    assert calls("hermes", text % '"{}"') == [("bash", '"{}"')]
    assert calls("hermes", text % "[1]") == [("bash", "[1]")]
    assert calls("hermes", text % '{"command": "<tool_call>"}') == [("bash", {"command": "<tool_call>"})]


def test_hermes_scratch_pads_are_reasoning() -> None:
    parsed = parser_named("hermes").parse("<scratch_pad>Goal: x</scratch_pad>\n" + SAMPLES["hermes"])
    assert (parsed.reasoning, len(parsed.calls)) == ("Goal: x", 2)


# -- Mistral --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}] and so on', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS] {"name": "bash", "arguments": {}}', [("bash", {})]),
        ('[TOOL_CALLS]bash{"command": "ls"}[TOOL_CALLS]artifacts{}', [("bash", {"command": "ls"}), ("artifacts", {})]),
        ('[TOOL_CALLS]bash[ARGS]{"command": "ls"}', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS]bash[CALL_ID]aB3dE6gH9[ARGS]{"command": "ls"}', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS]bash{"command": ', [("bash", '{"command":')]),
    ],
)
def test_both_of_mistral_s_forms(text: str, expected: list[Any]) -> None:
    assert calls("mistral", text) == expected


def test_mistral_ids_are_kept_and_made_with_nine_characters() -> None:
    parser = parser_named("mistral")
    assert [call.call_id for call in parser.parse(SAMPLES["mistral"]).calls] == ["aB3dE6gH9", None]
    assert parser.parse("[TOOL_CALLS]bash[CALL_ID]aB3dE6gH9[ARGS]{}").calls[0].call_id == "aB3dE6gH9"
    made = {parser.call_id(step, number) for step in (0, 7, 99_999) for number in (0, 999)}
    assert len(made) == 6
    assert all(len(one) == 9 and one.isalnum() for one in made)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] [{"name": "bash", "arguments": {"comm',
        '[TOOL_CALLS] [{"arguments": {}}]',
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS]bash",
        "[TOOL_CALLS]two words{}",
        "[TOOL_CALLS][[[[[" + "[" * 5000,
    ],
)
def test_mistral_malformed(text: str) -> None:
    problem("mistral", "before " + text)


def test_magistral_reasons_in_its_own_marks() -> None:
    parsed = parser_named("mistral").parse("[THINK]x [TOOL_CALLS]bash{}[/THINK]y[TOOL_CALLS]artifacts{}")
    assert (parsed.reasoning, parsed.content) == ("x [TOOL_CALLS]bash{}", "y")
    assert [call.name for call in parsed.calls] == ["artifacts"]


# -- Llama ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "bash", "parameters": {"command": "{}"}}', ["bash"]),
        ('```json\n{"name": "bash", "arguments": {}}\n```\nis what I do', ["bash"]),
        ('[{"name": "a", "parameters": {}}, {"name": "b", "parameters": {}}]', ["a", "b"]),
        (
            '{"name": "a", "parameters": {}}\n{"name": "b", "parameters": {}};{"name":"c","parameters":{}}',
            ["a", "b", "c"],
        ),
        ('{broken {"name": "a", "parameters": {"x": {"name": "inner", "parameters": {}}}}', ["a"]),
        ('{"name": "a", "parameters": {}} {"name": "b", "param', ["a"]),
        ('{"answer": 42}', []),
        ('{"name": "Ada"}', []),
        ('{"name": 5, "parameters": {}}', []),
    ],
)
def test_llama_finds_objects_anywhere(text: str, names: list[str]) -> None:
    assert [name for name, _ in calls("llama3_json", text)] == names


@pytest.mark.parametrize(
    "text",
    ['{"name": "bash", "parameters": {"command": "l', "<|python_tag|>print(1)", '{"name": "a", "parameters": {}'],
)
def test_llama_malformed(text: str) -> None:
    problem("llama3_json", text)


# -- Qwen3-Coder ----------------------------------------------------------------------------------

CODER = "<tool_call>\n<function=f>\n<parameter=k>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "  two\n\n  lines\\n &lt; ", "  two\n\n  lines\\n &lt; "),
        ({"type": "string"}, "null", None),
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "2.50", 2.5),
        ({"type": "number"}, "3.0", 3),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", False),
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
        ("<tool_call><function=f><parameter=a>1<parameter=b>2</function>", [("f", {"a": "1", "b": "2"})]),
        ("<tool_call><function=f></function><function=g></function></tool_call>", [("f", {}), ("g", {})]),
        ("<tool_call><function=f><parameter=a>1</tool_call>", [("f", {"a": "1"})]),
        ("<tool_call><function=f><parameter=a>x<y>\n</parameter></function>", [("f", {"a": "x<y>"})]),
    ],
)
def test_qwen3_coder_s_lax_layouts(text: str, expected: list[Any]) -> None:
    assert calls("qwen3_coder", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>bash</tool_call>",
        "<tool_call><function=ba",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f><parameter=command>rm -rf /tmp/x",
        "<tool_call><function=f><parameter=comm",
        "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 1001 + "</function></tool_call>",
    ],
)
def test_qwen3_coder_malformed_and_cut_values_never_run(text: str) -> None:
    problem("qwen3_coder", text)


# -- DeepSeek and Kimi: what is not closed is passed over, and the model is told -------------------


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
    parser = parser_named(name)
    section = {"kimi_k2": "<|tool_calls_section_begin|>"}.get(name, "<｜tool▁calls▁begin｜>")
    for text, reported in ((good, False), (good + cut, True), (cut + good, True)):
        parsed = parser.parse("so: " + section + text, TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("bash", {"command": "```"})]
        assert ("not closed" in parsed.problem) is reported
    assert "not closed" in problem(name, section + cut)
    assert "no call" in problem(name, section + "hello")
    assert calls(name, good) == [], "without its section it is text"


def test_deepseek_arguments_that_are_no_object_are_handed_on() -> None:
    section = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
    assert calls("deepseek_v3_1", section.format("bash<｜tool▁sep｜>[1]")) == [("bash", "[1]")]
    assert calls("deepseek_v3", section.format("function<｜tool▁sep｜>bash\n```json\n{oops\n```")) == [
        ("bash", "{oops")
    ]
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
        ("<tool_call>f<arg_key>s</arg_key>\\n<arg_value> 5 </arg_value></tool_call>", {"s": "5"}),
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
    ],
)
def test_glm_malformed(name: str, text: str) -> None:
    problem(name, text)


def test_glm_runs_the_closed_calls_and_tells_of_the_open_one() -> None:
    parsed = parser_named("glm47").parse("<tool_call>f</tool_call><tool_call>g<arg_key>")
    assert [call.name for call in parsed.calls] == ["f"]
    assert "tool call 2 is not closed" in parsed.problem

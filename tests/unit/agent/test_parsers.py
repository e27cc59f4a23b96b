"""Every family's format: as its models write it, and as they get it wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.parsers import PARSERS, ParsedCall, parser_named
from agentenv.errors import ConfigError
from tests.unit.agent.parser_samples import COMMAND, NESTED, SAMPLES, TOOLS, calls, problem, tool


def test_the_registry_names_the_closest_match() -> None:
    assert set(SAMPLES) == set(PARSERS)
    with pytest.raises(ConfigError, match="did you mean 'hermes'") as caught:
        parser_named("hermse")
    assert caught.value.field == "tool_call_parser"
    assert all(name in str(caught.value) for name in PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_two_calls_as_the_family_writes_them(name: str) -> None:
    parser = parser_named(name)
    parsed = parser.parse(SAMPLES[name], TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        ("bash", {"command": COMMAND}),
        ("write_file", NESTED),
    ]
    assert (parsed.content, parsed.problem, parsed.reasoning) == ("I look around.", "", "")
    assert parser.written(parsed.calls) in SAMPLES[name]


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
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    found = re.search(rf"^#### {name}$.*?^````?text\n(.*?)^````?$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert calls(name, found.group(1).removesuffix("\n")) == [("bash", {"command": "ls -la"})]


def read_id(parser: Any) -> str | None:
    return "functions.TOOL_NAME:0" if parser.name == "kimi_k2" else None


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text", ["", " ", "The answer is 42.", 'It is {"a": 1} ü.', "a < b > c </parameter></function>", "\x00\ud800"]
)
def test_text_without_a_call_is_kept_as_it_is(name: str, text: str) -> None:
    parsed = parser_named(name).parse(text, TOOLS)
    assert (parsed.content, parsed.calls, parsed.problem) == (text, (), "")


@pytest.mark.parametrize("name", PARSERS)
def test_text_around_reasoning_is_kept(name: str) -> None:
    parsed = parser_named(name).parse("first <think>hm</think>then", TOOLS)
    assert (parsed.content, parsed.reasoning) == ("first then", "hm")
    parsed = parser_named(name).parse("the prompt opened it</think>then", TOOLS)
    assert (parsed.content, parsed.reasoning) == ("then", "the prompt opened it")


@pytest.mark.parametrize("name", PARSERS)
def test_marks_of_a_turn_s_end_are_no_text(name: str) -> None:
    parser = parser_named(name)
    for mark in parser.end_marks:
        assert [parser.parse(text + mark * 2).content for text in ("", "Done.")] == ["", "Done."]


@pytest.mark.parametrize("name", PARSERS)
def test_text_behind_a_call_may_be_a_part_of_it_where_values_have_no_quotes(name: str) -> None:
    parser = parser_named(name)
    call = parser.written([ParsedCall("bash", {"command": "ls"})])
    assert not parser.parse(call, TOOLS).open_ended
    bare = name in ("qwen3_coder", "glm45", "glm47")
    assert parser.parse(f"{call} Done.", TOOLS).open_ended == bare


@pytest.mark.parametrize("name", PARSERS)
def test_half_a_surrogate_is_written_so_that_it_can_be_sent(name: str) -> None:
    value = {"text": "ü", "half": "\ud800"}
    written = parser_named(name).written([ParsedCall("bash", {"command": value})])
    assert '{"text": "\\u00fc", "half": "\\ud800"}' in written.encode().decode()


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
    text = f'{opener}{{"name": "bash", "arguments": {{"command": "ls"}}}}\n'
    assert calls(name, text) == [("bash", {"command": "ls"})]
    assert parser_named(name).parse(text).open_ended
    said = problem(name, f'{opener}{{"name": "bash", "arguments": {{"comm')
    assert said.endswith("is not valid JSON: Unterminated string starting at character 31")


def test_odd_arguments_are_handed_on_to_be_refused_by_name() -> None:
    text = '<tool_call>{"name": "bash", "arguments": %s}</tool_call>'
    assert calls("hermes", '<tool_call>{"name": "bash"}</tool_call>') == [("bash", {})]
    assert calls("hermes", text % '"{}"') == [("bash", '"{}"')]
    assert calls("hermes", text % "[1]") == [("bash", "[1]")]


@pytest.mark.parametrize("fields", ['"args": {"path": "a"}', '"arguments": {}, "path": "a"', '"input": {}'])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[(name, f'{opener}{{"name": "list_files", %s}}{closer}') for name, (opener, closer) in TAGS.items()],
        ("mistral", '[TOOL_CALLS] [{"name": "list_files", %s}]'),
        ("llama3_json", '{"name": "list_files", "parameters": {}, %s}'),
    ],
)
def test_a_call_with_a_field_that_is_not_read_is_refused(name: str, text: str, fields: str) -> None:
    """It would run without what the policy gave it there."""
    assert "has the field" in problem(name, text % fields)


def test_hermes_scratch_pads_are_reasoning() -> None:
    parsed = parser_named("hermes").parse("<scratch_pad>Goal: x</scratch_pad>\n" + SAMPLES["hermes"])
    assert (parsed.reasoning, len(parsed.calls)) == ("Goal: x", 2)


# -- Mistral --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}] and so on', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS]bash{"command": "a\nb"} and so on', [("bash", {"command": "a\nb"})]),
        ('[TOOL_CALLS] {"name": "bash", "arguments": {}}', [("bash", {})]),
        ('[TOOL_CALLS]bash{"command": "ls"}[TOOL_CALLS]artifacts{}', [("bash", {"command": "ls"}), ("artifacts", {})]),
        ('[TOOL_CALLS]bash[ARGS]{"command": "ls"}', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS]bash[CALL_ID]aB3dE6gH9[ARGS]{"command": "ls"}', [("bash", {"command": "ls"})]),
    ],
)
def test_both_of_mistral_s_forms(text: str, expected: list[Any]) -> None:
    assert calls("mistral", text) == expected


def test_mistral_ids_are_kept_and_made_with_nine_characters() -> None:
    parser = parser_named("mistral")
    assert [call.call_id for call in parser.parse(SAMPLES["mistral"]).calls] == ["aB3dE6gH9", None]
    assert parser.parse("[TOOL_CALLS]bash[CALL_ID]aB3dE6gH9[ARGS]{}").calls[0].call_id == "aB3dE6gH9"
    made = {parser.call_id(step, number) for step in (0, 7, 99_999) for number in (0, 999)}
    assert len(parser.call_id(100_000, 1_000)) == 9
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
        '[TOOL_CALLS]bash{"command": ',
        '[TOOL_CALLS]bash{"command": "ls"}}',
        "[TOOL_CALLS][[[[[" + "[" * 5000,
    ],
)
def test_mistral_malformed(text: str) -> None:
    problem("mistral", "before " + text)


def test_magistral_reasons_in_its_own_marks() -> None:
    parsed = parser_named("mistral").parse("[THINK]x [TOOL_CALLS]bash{}[/THINK]y[TOOL_CALLS]artifacts{}")
    assert (parsed.reasoning, parsed.content) == ("x [TOOL_CALLS]bash{}", "y")
    assert [call.name for call in parsed.calls] == ["artifacts"]


def test_mistral_s_newer_form_takes_strings_as_they_are() -> None:
    assert calls("mistral", '[TOOL_CALLS]bash{"command": "a\n\tb"}') == [("bash", {"command": "a\n\tb"})]


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
        ('{"answer": 42} {"name": "a", "parameters": {}}', ["a"]),
        ('{"answer": 42}', []),
        ('{"name": "Ada"}', []),
        ('{"name": 5, "parameters": {}}', []),
    ],
)
def test_llama_finds_objects_anywhere(text: str, names: list[str]) -> None:
    assert [name for name, _ in calls("llama3_json", text)] == names


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "bash", "parameters": {"command": "l',
        "<|python_tag|>print(1)",
        '<|python_tag|>{"answer": 42}',
        '{"name": "a", "parameters": {}',
        '{"name": "a", "parameters": {}} {"name": "b", "param": ',
        '{"name": "a", "parameters": {}} {"answer": 42}',
        '{"a": x} {"name": "a", "parameters": {}}',
    ],
)
def test_llama_malformed(text: str) -> None:
    problem("llama3_json", text)

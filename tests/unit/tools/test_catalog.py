"""What a model is told of tools, and what it is told when it gets a call wrong."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from agentenv.errors import AgentEnvError, ConfigError, InvalidArgumentsError, UnknownToolError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.spec import ToolSpec
from agentenv.wire.base import MAX_COMMAND_BYTES
from agentenv.wire.tools import BashArguments

CATALOG = ToolCatalog.builtin()


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid", title="A Point")
    title: str = Field(description="its name")
    x: Annotated[int, Field(ge=0)]


class SearchArguments(BaseModel):
    model_config = ConfigDict(extra="forbid")
    query: str = Field(description="what to look for")
    near: Point | None = None
    points: list[Point] = Field(default_factory=list)
    engine: Literal["fast", "deep"] = "fast"


SEARCH = ToolSpec(
    name="web_search", description="Search.", arguments=SearchArguments, default_timeout_s=5, kind="external"
)


class Tree(BaseModel):
    children: list[Tree] = Field(default_factory=list)


def refusal(arguments: dict[str, Any] | str, tool: str = "bash", catalog: ToolCatalog = CATALOG) -> str:
    with pytest.raises(InvalidArgumentsError) as caught:
        catalog.validate(tool, arguments)
    return str(caught.value)


def walk(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in walk(item)]
    if not isinstance(node, dict):
        return []
    return [node, *(found for value in node.values() for found in walk(value))]


def test_the_builtin_tools() -> None:
    names = "bash, terminal, process, tmux, read_file, write_file, list_files, search, patch, artifacts"
    assert CATALOG.names == tuple(names.split(", "))
    assert repr(CATALOG) == f"<ToolCatalog {names}>"


def test_the_schema_of_bash_is_what_a_model_should_read() -> None:
    function = CATALOG.openai_tools()[0]["function"]
    assert function["name"] == "bash"
    assert function["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["command"],
        "properties": {
            "command": {"type": "string", "description": "The bash command to run. It may span several lines."},
            "cwd": {"type": "string", "description": "Working directory; by default the workspace."},
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Additional environment variables.",
            },
            "stdin": {"type": "string", "description": "Text passed to the command on standard input."},
        },
    }


def test_no_schema_has_references_titles_or_null() -> None:
    for tool in CATALOG.extended(SEARCH).openai_tools():
        json.dumps(tool)
        for node in walk(tool["function"]["parameters"]):
            assert not {"$defs", "$ref"} & node.keys()
            assert node.get("type") != "null"
            assert not isinstance(node.get("title"), str)


def test_a_schema_has_only_the_keywords_that_models_and_servers_know() -> None:
    """A bound that pydantic cannot place is written under its own name, as ``ge``, which no reader enforces."""
    known = {
        "type", "description", "enum", "const", "default", "properties", "required", "additionalProperties", "items",
        "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "anyOf",
        "format", "contentEncoding", "minProperties", "maxProperties",
    }  # fmt: skip
    for tool in CATALOG.openai_tools():
        for node in schemas(tool["function"]["parameters"]):
            assert set(node) <= known, f"{tool['function']['name']}: {set(node) - known}"


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """This schema and those in it."""
    if isinstance(schema, dict):
        yield schema
        parts = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), schema.get("items")]
        for part in (*parts, schema.get("additionalProperties")):
            yield from schemas(part)


def test_nested_models_are_written_out_and_a_property_may_be_called_title() -> None:
    (tool,) = ToolCatalog([SEARCH]).openai_tools()
    properties = tool["function"]["parameters"]["properties"]
    assert properties["near"]["properties"]["title"] == {"type": "string", "description": "its name"}
    assert properties["points"]["items"]["properties"]["x"] == {"type": "integer", "minimum": 0}
    assert properties["engine"] == {"type": "string", "enum": ["fast", "deep"], "default": "fast"}


@pytest.mark.parametrize("name", CATALOG.names)
def test_a_tool_is_described_without_others_which_may_not_be_offered(name: str) -> None:
    said = json.dumps(CATALOG.subset([name]).openai_tools()[0])
    assert {found for found in re.findall(r"`?(\w+)`? tool\b", said) if found in CATALOG} <= {name}


def test_openai_tools_are_the_callers_own() -> None:
    CATALOG.openai_tools()[0]["function"]["parameters"].clear()
    assert CATALOG.openai_tools()[0]["function"]["parameters"]["required"] == ["command"]


def test_a_tool_whose_arguments_contain_themselves_is_refused() -> None:
    with pytest.raises(ConfigError, match="refers to itself"):
        ToolCatalog([ToolSpec(name="tree", description="", arguments=Tree)])


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "ls"},
        '{"command": "ls"}',
        '  {"command": "ls"}\n',
        {"command": "ls", "cwd": None},
        '{"command": "ls", "cwd": null}',
    ],
)
def test_good_arguments(arguments: dict[str, Any] | str) -> None:
    checked = CATALOG.validate("bash", arguments)
    BashArguments.model_validate(checked)
    assert checked["command"] == "ls"


@pytest.mark.parametrize(
    ("tool", "given", "sent"),
    [
        ("terminal", {"command": "ls", "timeout": 5}, {"command": "ls", "timeout_s": 5.0}),
        ("process", {"action": "wait", "session_id": "p1", "timeout": 9}, {"process": "p1", "timeout_s": 9.0}),
        ("process", {"action": "submit", "session_id": "p1", "data": "y"}, {"process": "p1", "input": "y"}),
        ("tmux", {"action": "start", "pane_width": 80, "pane_height": 24}, {"columns": 80, "rows": 24}),
        ("tmux", {"action": "send_keys", "keys": "C-c"}, {"keys": ["C-c"]}),
        ("tmux", {"action": "stream", "max_bytes": 4096}, {"action": "capture", "what": "difference"}),
        ("tmux", {"action": "stream", "reset": True}, {"action": "capture", "what": "scrollback"}),
        ("tmux", {"action": "capture", "capture_entire": True}, {"action": "capture", "what": "scrollback"}),
        ("tmux", {"action": "capture", "capture_entire": False}, {"action": "capture", "what": "screen"}),
        ("write_file", {"path": "a", "content": "b"}, {"path": "a", "text": "b"}),
        ("search", {"query": "x", "path": "."}, {"pattern": "x", "path": "."}),
    ],
)
def test_names_of_other_harnesses_are_accepted_but_not_shown(
    tool: str, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    action = {"action": given["action"]} if "action" in given else {}
    assert CATALOG.validate(tool, given) == action | sent
    shown = CATALOG.subset([tool]).openai_tools()[0]["function"]["parameters"]["properties"]
    assert not (set(given) - set(sent) - {"action"}) & set(shown)


def test_a_wait_of_null_is_the_default() -> None:
    assert CATALOG.validate("tmux", {"action": "wait", "max_wait_s": None}) == {"action": "wait"}


@pytest.mark.parametrize(
    ("tool", "given", "here", "there"),
    [
        ("terminal", {"command": "ls", "timeout_s": 5, "timeout": 5}, "timeout_s", "timeout"),
        ("write_file", {"path": "a", "content": "b", "text": "b"}, "text", "content"),
    ],
)
def test_two_names_of_one_argument_are_refused(tool: str, given: dict[str, Any], here: str, there: str) -> None:
    assert refusal(given, tool).endswith(f": '{there}' and '{here}' mean the same; give only one of them")


def test_another_harness_s_name_is_unknown_where_it_is_not_accepted() -> None:
    assert "unknown argument 'timeout'" in refusal({"command": "ls", "timeout": 5})


def test_no_arguments_at_all() -> None:
    assert CATALOG.validate("list_files", "") == {}
    assert CATALOG.validate("list_files", {}) == {}
    assert "missing argument 'command' (string: The bash command to run" in refusal("")


def test_a_raw_line_break_inside_a_string_is_understood() -> None:
    assert CATALOG.validate("bash", '{"command": "a\nb"}') == {"command": "a\nb"}


@pytest.mark.parametrize("data", [b"\x00\xff", bytes(200_000), bytes(300_000)], ids=len)
def test_bytes_stay_bytes(data: bytes) -> None:
    """Whoever gave them: a hook, or a model as base64."""
    for argument in (data, base64.b64encode(data).decode()):
        checked = CATALOG.validate("write_file", {"path": "x", "data": argument})
        assert checked == {"path": "x", "data": data}
        assert CATALOG.validate("write_file", checked) == checked


@pytest.mark.parametrize(
    ("tool", "hint"),
    [
        ("Bash", "did you mean 'bash'?"),
        ("readfile", "did you mean 'read_file'?"),
        ("list_file", "did you mean 'list_files'?"),
        ("zzzzzz", "available tools: bash, terminal, process, tmux, read_file"),
        ("", "available tools: bash"),
    ],
)
def test_unknown_tools_are_answered_with_the_closest_and_the_list(tool: str, hint: str) -> None:
    with pytest.raises(UnknownToolError) as caught:
        CATALOG.validate(tool, {})
    assert hint in str(caught.value)
    assert "artifacts" in str(caught.value)
    assert caught.value.fault == "model"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cmd": "ls"}, "unknown argument 'cmd'; did you mean 'command'? (allowed: command, cwd, env, stdin)"),
        ({"cmd": "ls"}, "missing argument 'command'"),
        ({"command": 5}, "argument 'command' must be a string (got 5)"),
        ({"command": ["ls"]}, "argument 'command' must be a string (got [\"ls\"])"),
        ({"command": "a\0b"}, "argument 'command' must not contain NUL bytes"),
        ({"command": "x", "env": {"A=B": "c"}}, "'A=B' is not a valid environment variable"),
        ({"command": "x", "env": {"A": 1}}, "argument 'env.A' must be a string (got 1)"),
        ("[1]", "must be a JSON object, got [1]"),
        ('"ls"', 'must be a JSON object, got "ls"'),
        ("null", "must be a JSON object, got null"),
        ('{"command": "ls"', "are not valid JSON: Expecting ',' delimiter at line 1 column 17"),
        ('{"command":\n ls}', "at line 2 column 2, near"),
        ("{'command': 'ls'}", "are not valid JSON"),
        ('{"command": NaN}', "NaN is not a JSON value"),
        ('{"command": "ls"} extra', "Extra data at line 1 column 19"),
        ("[" * 100_000, "nested too deeply"),
        ('{"command": ' + "9" * 5000 + "}", "are not valid JSON"),
        ('{"command": "ls", "command": "rm"}', 'are not valid JSON: the key "command" appears twice'),
        ('{"command": "ls", "env": {"A": "1", "A": "2"}}', 'the key "A" appears twice'),
        ('{"command": 1e400}', "1e400 is beyond the range of numbers"),
        ('{"command": "\\ud800"}', "argument 'command' has half of a surrogate pair"),
    ],
)
def test_every_refusal_says_what_to_change(arguments: dict[str, Any] | str, said: str) -> None:
    assert said in refusal(arguments)


def test_json_refusals_show_the_shape_that_is_wanted() -> None:
    assert 'send one JSON object: {"command": …}' in refusal("{")


def test_a_literal_and_a_bound() -> None:
    assert "must be 'archive', 'extract', 'list' or 'read'" in refusal({"action": "zip"}, "artifacts")
    assert "greater than or equal to 1" in refusal({"depth": 0}, "list_files")
    assert "is not base64" in refusal({"path": "x", "data": "%%%"}, "write_file")
    assert "argument 'keys' must be a list (got 5)" in refusal({"action": "send_keys", "keys": 5}, "tmux")
    assert "argument 'keys' must have at most 1000 items" in refusal(
        {"action": "send_keys", "keys": ["a"] * 1001}, "tmux"
    )
    assert "argument 'pty' must be true or false" in refusal({"command": "x", "pty": "maybe"}, "terminal")


def test_refusals_stay_short_whatever_was_sent() -> None:
    assert len(refusal({"command": "x" * (MAX_COMMAND_BYTES + 1)})) < 500
    assert len(refusal({"x" * 100_000: 1, "command": ["y" * 100_000]})) < 2000
    assert len(refusal({f"key{index}": index for index in range(1000)})) < 2000
    assert len(refusal('{"command": ' + "z" * 100_000)) < 500


@settings(max_examples=200, deadline=None)
@given(st.text() | st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.lists(st.text())))
def test_anything_a_model_sends_is_validated_or_refused(arguments: dict[str, Any] | str) -> None:
    for name in CATALOG.names:
        checked = validated(name, arguments)
        if isinstance(checked, AgentEnvError):
            assert checked.fault == "model"
            assert len(str(checked)) < 4000
        else:
            assert CATALOG.validate(name, json.dumps(checked)) == checked


def validated(tool: str, arguments: dict[str, Any] | str) -> dict[str, Any] | AgentEnvError:
    try:
        return CATALOG.validate(tool, arguments)
    except AgentEnvError as error:
        return error


def test_subset_keeps_the_catalogs_order_and_refuses_unknown_names() -> None:
    assert CATALOG.subset(["read_file", "bash"]).names == ("bash", "read_file")
    assert CATALOG.subset([]).names == ()
    with pytest.raises(ConfigError, match=r"unknown tool 'bsh'; did you mean 'bash'\?"):
        CATALOG.subset(["bsh"])
    with pytest.raises(UnknownToolError):
        CATALOG.subset(["bash"]).validate("read_file", {"path": "x"})


def test_adding_a_tool_is_one_spec() -> None:
    catalog = CATALOG.extended(SEARCH)
    assert "web_search" in catalog
    assert "web_search" not in CATALOG
    assert catalog.validate("web_search", '{"query": "cats", "near": {"title": "a", "x": "3"}}') == {
        "query": "cats",
        "near": {"title": "a", "x": 3},
    }
    assert "argument 'near.x' must be greater than or equal to 0" in refusal(
        {"query": "q", "near": {"title": "a", "x": -1}}, "web_search", catalog
    )


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'bash'"):
        CATALOG.extended(ToolSpec(name="bash", description="", arguments=SearchArguments))


@pytest.mark.parametrize(
    ("name", "timeout_s"),
    [
        ("", None),
        ("a b", None),
        ("x" * 65, None),
        ("é", None),
        ("ok", 0),
        ("ok", -1),
        ("ok", float("nan")),
        ("ok", 1e9),
    ],
)
def test_specs_that_could_not_work_are_refused(name: str, timeout_s: float | None) -> None:
    with pytest.raises(ConfigError):
        ToolSpec(name=name, description="", arguments=SearchArguments, default_timeout_s=timeout_s)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_refused(number: float) -> None:
    """Of a tool of anybody's, too, wherever it is."""

    class Anything(BaseModel):
        value: Any

    catalog = CATALOG.extended(ToolSpec("anything", "Take anything.", Anything, kind="external"))
    for value in (number, [number], {"a": (number,)}):
        with pytest.raises(
            InvalidArgumentsError, match=r"argument 'value.*' is -?(nan|inf), which JSON has no number for"
        ):
            catalog.validate("anything", {"value": value})

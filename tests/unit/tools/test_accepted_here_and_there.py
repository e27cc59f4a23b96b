"""What a client's catalog accepts fits in the container too: a container that refuses it reports a failure of ours."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentenv.errors import AgentEnvError, InvalidArgumentsError, ProtocolError
from agentenv.sandbox.server.calls import parse_arguments
from agentenv.tools.catalog import ToolCatalog

CATALOG = ToolCatalog.builtin()
VALUES: list[Any] = [
    *("", "x", ".", "a/b", "a\0b", "1", "1.0", "true", "MQ==", "not base64!", "\u2028", "\n", "é🙂", "Enter", " "),
    *(None, True, False, 0, 1, -1, 7, 511, 10**6, 2**63, 0.5, 1.0, 1e400, [], ["a"], ["", "b"], [1], {}),
    *({"A": "b"}, {"A=B": "c"}, {"": "c"}, {"A": 1}, b"", b"\xff\0"),
]


def drawn(schema: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """The arguments that a tool requires, often good ones, and some others."""
    properties: dict[str, Any] = schema["properties"]
    words = {name: [*field.get("enum", ())] for name, field in properties.items()}
    required = {name: source.choice(words[name] or ["x"]) for name in schema.get("required", ())}
    names = source.sample(sorted(properties), source.randint(0, min(3, len(properties))))
    return required | {name: source.choice([*VALUES, *words[name]]) for name in names}


@pytest.mark.parametrize("tool", [spec.name for spec in CATALOG.specs if spec.kind == "slot"])
def test_what_the_catalog_accepts_the_container_accepts(tool: str) -> None:
    [schema] = [each["function"]["parameters"] for each in CATALOG.openai_tools() if each["function"]["name"] == tool]
    source, accepted = random.Random(tool), 0
    for _ in range(2000):
        try:
            sent = CATALOG.validate(tool, drawn(schema, source))
        except AgentEnvError:
            continue
        accepted += 1
        parse_arguments(tool, json.loads(json.dumps({k: v for k, v in sent.items() if not isinstance(v, bytes)})))
    assert accepted > 50


def test_what_does_not_fit_in_the_container_is_a_failure_of_ours() -> None:
    with pytest.raises(ProtocolError, match=r"write_file: data: .*is not base64"):
        parse_arguments("write_file", {"path": "x", "data": "not base64!"})


def _numbers() -> list[tuple[str, str]]:
    """The arguments that are numbers, by the schema that a model is given."""
    found = list[tuple[str, str]]()
    for tool in CATALOG.openai_tools():
        for name, field in tool["function"]["parameters"]["properties"].items():
            types = {each.get("type") for each in field.get("anyOf", [field])}
            if types & {"integer", "number"} and "boolean" not in types:
                found.append((tool["function"]["name"], name))
    return found


def test_there_are_numbers() -> None:
    assert {("read_file", "offset"), ("process", "timeout_s"), ("process", "check_interval")} < set(_numbers())


@pytest.mark.parametrize(("tool", "name"), _numbers())
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_number(tool: str, name: str, value: bool) -> None:
    """Pydantic would read 1 and 0."""
    with pytest.raises(InvalidArgumentsError, match=f"argument '{name}' must be a number, not {str(value).lower()}"):
        CATALOG.validate(tool, json.dumps({name: value}))


def test_a_text_that_is_a_number_is_one() -> None:
    assert CATALOG.validate("read_file", json.dumps({"path": "x", "offset": "12"})) == {"path": "x", "offset": 12}

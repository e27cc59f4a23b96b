"""Arguments for code only: hooks and scripts may give them, models are neither shown them nor may give them."""

from __future__ import annotations

import json

import pytest

from agentenv.errors import InvalidArgumentsError
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.sessions import FOR_CODE

CATALOG = ToolCatalog.builtin()


def test_which_they_are() -> None:
    assert {tool: names for tool, names in FOR_CODE.items() if names} == {
        "bash": {"argv", "binary", "output_bytes", "stdin_data", "user"},
        "terminal": {"user"},
        "process": {"argv", "binary", "input_data", "user"},
    }


def test_a_model_is_not_shown_them() -> None:
    for tool in CATALOG.openai_tools():
        shown = tool["function"]["parameters"]["properties"].keys()
        assert not FOR_CODE[tool["function"]["name"]] & shown


def test_code_may_give_them_and_the_text_of_a_model_may_not() -> None:
    given = {"command": "id", "user": "root"}
    assert CATALOG.validate("bash", given) == given
    with pytest.raises(InvalidArgumentsError, match="unknown argument 'user'"):
        CATALOG.validate("bash", json.dumps(given))

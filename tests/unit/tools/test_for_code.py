"""Arguments and tools for code only: hooks and scripts may use them, models are neither shown them nor may use them."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from agentenv.errors import ConfigError, InvalidArgumentsError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.spec import ToolSpec
from agentenv.tools.toolsets import TOOLSETS, choose
from agentenv.wire.sessions import FOR_CODE
from agentenv.wire.tools import CODE_TOOLS

CATALOG = ToolCatalog.builtin()


def test_which_they_are() -> None:
    assert {tool: names for tool, names in FOR_CODE.items() if names} == {
        "bash": {"argv", "binary", "output_bytes", "stdin_data", "user"},
        "terminal": {"user"},
        "process": {"argv", "binary", "input_data", "user"},
        **{tool: {"user"} for tool in ("read_file", "write_file", "list_files", "search", "patch", "artifacts")},
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


def test_tools_for_code_are_run_and_in_no_toolset() -> None:
    names = {tool.name for tool in CODE_TOOLS}
    assert names == {"paths"}
    for catalog in (CATALOG, choose(CATALOG, None, None), choose(CATALOG, ["all"], None), *map(only, TOOLSETS)):
        assert names.isdisjoint(catalog.names)
    with pytest.raises(ConfigError, match="'paths'"):
        choose(CATALOG, ["paths"], None)
    executor = ToolExecutor(Mock(), CATALOG.subset(["bash"]))
    assert executor.catalog.names == ("bash", "paths")
    own = ToolSpec("paths", "An environment's own.", CATALOG.spec("bash").arguments)
    assert ToolExecutor(Mock(), CATALOG.extended(own)).catalog.spec("paths") is own


def only(toolset: str) -> ToolCatalog:
    return CATALOG.subset(name for name in TOOLSETS[toolset] if name in CATALOG)

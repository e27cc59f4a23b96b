"""docs/porting.md names what there is: every name of its tables, and every name that the code accepts or refuses."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.result import AgentResult
from agentenv.agent.tool_call import ToolResult
from agentenv.agent.transcript import Step, ToolRecord
from agentenv.env.environment import AgentEnv, AgentEnvConfig
from agentenv.env.hermes import BlockingToolContext, HermesAgentBaseEnv
from agentenv.env.older_names import ALIASES, DRIVERS, REFUSED
from agentenv.tools.distributions import DISTRIBUTIONS
from agentenv.tools.toolsets import ABSENT, TOOL_ALIASES, TOOLSETS
from agentenv.wire.sessions import SLOT_TOOLS

PAGE = (Path(__file__).resolve().parents[3] / "docs/porting.md").read_text()
CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (AgentEnv, HermesAgentBaseEnv, BlockingToolContext, AgentResult, ToolResult, Step, ToolRecord)
}
ARGUMENTS = {tool.name: tool.arguments.model_fields for tool in SLOT_TOOLS}
WORDS = {"local", "nomad", "inprocess", "hermes", "reset", "build_task", "terminal", "timeout", "make nomad-dev"}


def here() -> set[str]:
    """The code in the last column of every table."""
    rows = [line.strip("|").split(" | ")[-1] for line in PAGE.splitlines() if line.startswith("| ")]
    return {code for row in rows for code in re.findall(r"`([^`]+)`", row)}


def exists(name: str) -> bool:
    first, _, rest = name.partition(".")
    if first == "agentenv":
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    if first in CLASSES and rest:
        kind = CLASSES[first]
        return hasattr(kind, rest) or rest in kind.__annotations__ or rest in getattr(kind, "model_fields", {})
    if first in ARGUMENTS and rest:
        return rest in ARGUMENTS[first]
    word = name.partition("=")[0]
    return word in (*AgentEnvConfig.model_fields, *ARGUMENTS["tmux"], *WORDS, *CLASSES)


def test_every_name_on_this_side_is_there() -> None:
    assert len(here()) > 60
    assert sorted(name for name in here() if not exists(name) and not name.startswith("{")) == []


@pytest.mark.parametrize("name", [*ALIASES, *REFUSED, *DRIVERS, *ABSENT, *TOOL_ALIASES])
def test_every_other_name_that_the_code_knows_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", PAGE)


def test_every_other_name_of_an_argument_is_on_the_page() -> None:
    others = {
        choice
        for fields in ARGUMENTS.values()
        for name, field in fields.items()
        for choice in getattr(field.validation_alias, "choices", [])
        if choice != name
    }
    assert len(others) >= 6
    assert {name for name in others if f"`{name}`" not in PAGE} == set()


def test_distributions_are_made_of_toolsets() -> None:
    assert {name for chances in DISTRIBUTIONS.values() for name in chances} <= set(TOOLSETS)

"""Named sets of tools: what they choose, and what they refuse."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.spec import ToolSpec
from agentenv.tools.toolsets import TOOLSETS, choose


class Nothing(BaseModel):
    pass


def catalog(*names: str) -> ToolCatalog:
    return ToolCatalog(ToolSpec(name=name, description="", arguments=Nothing) for name in names)


WHOLE = catalog("bash", "read_file", "write_file", "web_search", "web_extract", "lookup")


def test_a_set_is_what_is_there_of_it_and_a_tool_its_own_set() -> None:
    assert choose(WHOLE, ["web"], None).names == ("web_search", "web_extract")
    assert choose(WHOLE, ["file", "lookup"], None).names == ("read_file", "write_file", "lookup")
    assert choose(WHOLE, ["files"], None).names == choose(WHOLE, ["file"], None).names
    assert choose(WHOLE, None, ["web", "bash"]).names == ("read_file", "write_file", "lookup")


def test_disabling_what_is_not_there_changes_nothing() -> None:
    assert choose(WHOLE, None, ["browser", "tmux"]).names == WHOLE.names


@pytest.mark.parametrize(
    ("enabled", "disabled", "field", "said"),
    [
        (["terminl"], None, "enabled_toolsets", "did you mean 'terminal'?"),
        (None, ["brwser"], "disabled_toolsets", "did you mean 'browser'?"),
        (["zzz"], None, "enabled_toolsets", "allowed: terminal, process,"),
        (["browser"], None, "enabled_toolsets", "set tool_server_url"),
        (["browser_navigate"], None, "enabled_toolsets", "runs on a tool server"),
        (["tmux"], None, "enabled_toolsets", "toolset 'tmux' is not available"),
        (["bash"], ["terminal"], "enabled_toolsets", "no tool is left"),
    ],
)
def test_what_cannot_be_chosen_is_named(
    enabled: list[str] | None, disabled: list[str] | None, field: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(WHOLE, enabled, disabled)
    assert caught.value.field == field
    assert said in str(caught.value)


def test_every_built_in_tool_is_in_a_set() -> None:
    members = {tool for tools in TOOLSETS.values() for tool in tools}
    assert set(ToolCatalog.builtin().names) <= members

"""Draws of toolsets: reproducible, independent, and as likely as they are said to be."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from agentenv.env.config import AgentFields
from agentenv.env.tools import GroupTools
from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.distributions import DISTRIBUTIONS, Distribution, distribution
from agentenv.tools.spec import ToolSpec
from agentenv.tools.toolsets import TOOLSETS

BUILTIN = ToolCatalog.builtin()


def test_the_same_seed_and_key_draw_the_same_whatever_else_is_in_it() -> None:
    one = Distribution("one", {"terminal": 1, "file": 0.5})
    other = Distribution("other", {"web": 0.5, "file": 0.5, "terminal": 1})
    drawn = [one.draw(7, f"item-{n}") for n in range(50)]
    assert drawn == [one.draw(7, f"item-{n}") for n in range(50)]
    assert ["file" in each for each in drawn] == ["file" in other.draw(7, f"item-{n}") for n in range(50)]


def test_draws_are_what_they_were_in_every_version() -> None:
    drawn = [Distribution("d", {"terminal": 0.5, "file": 0.5}).draw(1, f"i{n}") for n in range(4)]
    assert drawn == [("terminal",), ("terminal", "file"), ("terminal", "file"), ("terminal",)]


def test_another_seed_or_key_is_another_draw_and_chances_hold() -> None:
    half = Distribution("half", {"terminal": 1.0, "file": 0.3})
    drawn = [half.draw(1, f"item-{n}") for n in range(2_000)]
    assert all("terminal" in each for each in drawn)
    assert 0.25 < sum("file" in each for each in drawn) / len(drawn) < 0.35
    assert drawn != [half.draw(2, f"item-{n}") for n in range(2_000)]


def test_no_draw_is_empty() -> None:
    rare = Distribution("rare", {"file": 0.01, "terminal": 0.02})
    assert {rare.draw(0, f"k{n}") for n in range(30)} <= {("terminal",), ("file",), ("file", "terminal")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("terminal_onyl", "did you mean 'terminal_only'?"),
        ("nothing", "or a JSON object"),
        ('{"terminal": 1.5}', "0 to 1"),
        ('{"terminal": true}', "0 to 1"),
        ('{"terminal": NaN}', "0 to 1"),
        ('{"terminal": 0}', "never has a tool"),
        ("{}", 'example: {"terminal": 1'),
        ("{oops", "not a JSON object"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        distribution(text)
    assert caught.value.field == "distribution"
    assert said in str(caught.value)


def test_shipped_distributions_name_toolsets() -> None:
    assert all(set(chances) <= set(TOOLSETS) for chances in DISTRIBUTIONS.values())
    assert distribution("research").chances == DISTRIBUTIONS["research"]


def test_sets_that_are_not_there_are_refused_before_anything_is_drawn() -> None:
    with pytest.raises(ConfigError, match=r"distribution.*'web'.*set tool_server_url"):
        distribution('{"terminal": 1, "web": 0.01}').check(BUILTIN)
    with pytest.raises(ConfigError, match="did you mean 'terminal'"):
        distribution('{"termnal": 1}').check(BUILTIN)
    distribution('{"terminal": 1, "web": 0}').check(BUILTIN)  # never drawn


def test_groups_of_an_item_are_drawn_anew_and_the_same_in_every_run() -> None:
    chances = distribution('{"terminal": 0.5, "file": 0.5}')
    first, second = (GroupTools(BUILTIN, chances, seed=3) for _ in range(2))
    drawn = [first.draw("item").names for _ in range(20)]
    assert drawn == [second.draw("item").names for _ in range(20)]
    assert len(set(drawn)) > 1
    assert GroupTools(BUILTIN, None, seed=0).draw("item") is BUILTIN


def test_a_distribution_may_draw_single_tools() -> None:
    class Nothing(BaseModel):
        pass

    whole = BUILTIN.extended(ToolSpec(name="lookup", description="", arguments=Nothing, kind="external"))
    assert distribution('{"lookup": 1}').catalog(whole, 0, "k").names == ("lookup",)


def test_the_config_takes_a_name_or_an_object() -> None:
    assert AgentFields(distribution='{"terminal": 1}').distribution == '{"terminal": 1}'
    assert AgentFields(distribution="sandbox", distribution_seed=4).distribution_seed == 4

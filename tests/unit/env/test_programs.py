"""Plain slots of this machine see the program of an environment's class."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv import agents
from agentenv.agents.trees import tree
from agentenv.config import ContainerSettings
from agentenv.env.programs import with_program
from agentenv.errors import ConfigError
from agentenv.wire.spec import Bind

CODEX = agents.RECIPES["codex"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    made = tree(CODEX.name, CODEX.version)
    made.mkdir(parents=True)
    return made


def test_a_recipes_program_is_shown_where_the_recipe_looks_for_it(here: Path) -> None:
    found = with_program(ContainerSettings(), agents.codex())
    assert found.binds == (Bind(str(here), "/opt/agents/codex"),)


def test_what_is_elsewhere_or_somebody_elses_needs_nothing(here: Path) -> None:
    assert here.is_dir()
    for program in (None, agents.codex(at=None), agents.codex(at="/else"), agents.AgentProgram(["/bin/agent"])):
        assert with_program(ContainerSettings(), program).binds == ()


def test_what_a_user_shows_there_stays(here: Path) -> None:
    own = (Bind("/srv/codex", "/opt/agents/codex"), Bind(str(here), "/else"))
    assert with_program(ContainerSettings(binds=own), agents.codex()).binds == own


def test_a_program_that_is_not_on_this_machine_is_named_with_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        with_program(ContainerSettings(), agents.codex())
    assert "codex is not on this machine" in str(refused.value)
    assert refused.value.next_step == "in a checkout of agentenv, run scripts/agent-programs codex"

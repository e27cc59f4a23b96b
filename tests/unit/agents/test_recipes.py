"""What programs are given, what is said of them, and what is pinned elsewhere."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from agentenv import Bind
from agentenv.agents import RECIPES, binds, codex, gemini_cli, mini_swe_agent, opencode, qwen_code
from agentenv.agents.facts import Recipe
from agentenv.agents.recipes import AT, CODEX_HOME, STATE
from agentenv.agents.trees import NODE_VERSION, tree
from agentenv.errors import ConfigError
from agentenv.gateway.server import DIALECTS

PINS = Path(__file__).parents[3] / "scripts/agents"
KNOWN = {
    "url": "http://127.0.0.1:1/v1",
    "root": "http://127.0.0.1:1",
    "key": "a-key",
    "model": "policy",
    "task": '--say "{model}"\nand go',
    "context_tokens": "5000",
    "turn_tokens": "600",
}
EACH = [pytest.param(recipe, api, id=f"{recipe.name}-{api}") for recipe in RECIPES.values() for api in recipe.programs]


def pinned(name: str) -> str:
    if name == "mini-swe-agent":
        return str(re.findall(r"^mini-swe-agent==(.*)$", (PINS / "mini-swe-agent.txt").read_text(), re.M)[0])
    return str(re.findall(rf"^{name} \S+@([0-9.]+)\S* ", (PINS / "npm.txt").read_text(), re.M)[0])


def test_the_versions_of_recipes_are_those_that_the_script_makes() -> None:
    assert (PINS / "node.txt").read_text().endswith(f"=={NODE_VERSION}\n")
    packaged = [recipe for recipe in RECIPES.values() if recipe.packaged]
    assert {recipe.name: pinned(recipe.name) for recipe in packaged} == {each.name: each.version for each in packaged}


@pytest.mark.parametrize(("recipe", "api"), EACH)
def test_a_recipe_is_whole_when_its_places_are_filled(recipe: Recipe, api: str) -> None:
    program = recipe.programs[api]().filled(KNOWN)
    given = [*program.argv, *program.env.values(), *program.files.values()]
    assert [text for text in given if KNOWN["task"] in text], "the task"
    for name in KNOWN:
        assert not [text for text in given if f"{{{name}}}" in text.replace(KNOWN["task"], "")], name
    assert any(KNOWN["root"] in text for text in given)
    assert program.title == recipe.name
    assert api in {dialect.name for dialect in DIALECTS}
    assert all(path.startswith((STATE, CODEX_HOME)) for path in program.files), "nothing is left in what it works on"
    for path, text in program.files.items():
        if path.endswith(".json"):
            json.loads(text)


def test_programs_know_how_long_a_conversation_and_an_answer_may_be() -> None:
    settings = tomllib.loads(codex().filled(KNOWN).files[f"{CODEX_HOME}/config.toml"])
    assert settings["model_context_window"] == 5000
    provider = json.loads(opencode("messages").filled(KNOWN).files[f"{STATE}/opencode.json"])["provider"]["gateway"]
    assert (provider["npm"], provider["models"]["policy"]["limit"]) == (
        "@ai-sdk/anthropic",
        {"context": 5000, "output": 600},
    )
    qwen = qwen_code().filled(KNOWN)
    assert json.loads(qwen.files[f"{STATE}/qwen/settings.json"])["model"]["generationConfig"] == {
        "contextWindowSize": 5000
    }
    assert qwen.env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "600"


def test_limits_of_turns_are_the_programs_own() -> None:
    assert "agent.step_limit=7" in mini_swe_agent(step_limit=7).argv
    assert not [word for word in mini_swe_agent().argv if "step_limit" in word]
    assert list(qwen_code(step_limit=7).argv)[-3:-1] == ["--max-session-turns", "7"]
    (settings,) = gemini_cli(step_limit=7).files.values()
    assert json.loads(settings)["model"] == {"maxSessionTurns": 7}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_program_is_found_where_it_is_said_to_be(recipe: Recipe) -> None:
    for make in recipe.programs.values():
        (command,) = (word for word in make(at="/else").argv if word.startswith("/else/"))
        assert command.startswith(f"/else/{recipe.name}/bin/")
        assert command.rpartition("/")[2] in make(at=None).argv


def test_a_program_s_tree_is_shown_to_slots_with_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    tree("node", NODE_VERSION).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"qwen-code is not on this machine.*scripts/agent-programs qwen-code codex"):
        binds("qwen-code", "codex")
    wanted = []
    for name, version in (("node", NODE_VERSION), *((name, RECIPES[name].version) for name in ("qwen-code", "codex"))):
        tree(name, version).mkdir(parents=True, exist_ok=True)
        wanted.append(Bind(f"{tmp_path}/agents/{name}-{version}", f"{AT}/{name}"))
    assert binds("qwen-code", "codex") == tuple(wanted)
    with pytest.raises(ConfigError, match=r"nothing makes a tree of 'claude-code'.*there are .*mini-swe-agent"):
        binds("claude-code")


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("mini-swe-agent", json.dumps({"info": {"model_stats": {"api_calls": 2}}})),
        ("codex", '{"type": "token_usage_record"}\n{"type": "event_msg"}\n{"type": "token_usage_record"}\n'),
        ("opencode", '{"type": "step_start"}\n{"type": "step_finish"}\n{"type": "step_finish"}\n'),
        ("qwen-code", json.dumps([{}, {"stats": {"models": {"a": {"api": {"totalRequests": 3, "totalErrors": 1}}}}}])),
        ("gemini-cli", json.dumps({"stats": {"models": {"a": {"api": {"totalRequests": 2, "totalErrors": 0}}}}})),
        (
            "openhands",
            'Goodbye\n{"llm_response_id": "a"}\n{"llm_response_id": "a"}\n{"llm_response_id": "b"}\n{"id": "x"}',
        ),
        ("claude-code", json.dumps({"num_turns": 2})),
    ],
)
def test_the_turns_of_a_program_s_own_log_are_counted(name: str, log: str) -> None:
    kept = RECIPES[name].log
    assert kept is not None
    assert kept.turns(log) == 2
    for other in ("", "no JSON", "{}"):
        with pytest.raises((ValueError, LookupError)):
            kept.turns(other)

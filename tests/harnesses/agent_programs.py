"""The programs of agentenv.agents as scripts/agent-programs makes them: each mends a bug by every dialect that it
speaks, on slots of this machine without network; its own log has the gateway's turns. Run by scripts/harnesses."""

from __future__ import annotations

import dataclasses

import pytest

from agentenv import AsyncSandbox
from agentenv.agent.program import AgentProgram
from agentenv.agents import RECIPES, binds, gemini_cli, mini_swe_agent, qwen_code
from agentenv.agents.check import Checked, checked

PROVED = [(name, api) for name, recipe in RECIPES.items() if recipe.status == "proved" for api in recipe.programs]


async def check(name: str, api: str, program: AgentProgram | None = None) -> Checked:
    recipe = RECIPES[name]
    if program is not None:
        recipe = dataclasses.replace(recipe, programs={api: lambda: program})
    async with AsyncSandbox(binds=binds(name)) as box:
        return await checked(recipe, api, box)


@pytest.mark.parametrize(("name", "api"), PROVED)
async def test_a_program_mends_a_bug_by_the_gateway(name: str, api: str) -> None:
    found = await check(name, api)
    assert found.faults == []
    assert found.dialects == {api}
    assert found.program.dropped == {}
    assert len(found.program.conversations) == 1


@pytest.mark.parametrize(
    ("name", "api", "program", "finish_reason"),
    [
        ("mini-swe-agent", "chat", mini_swe_agent(step_limit=2), "stop"),
        ("qwen-code", "chat", qwen_code(step_limit=2), "program_failed"),
        ("gemini-cli", "google", gemini_cli(step_limit=2), "program_failed"),
    ],
)
async def test_a_program_s_own_limit_of_turns_ends_it(
    name: str, api: str, program: AgentProgram, finish_reason: str
) -> None:
    found = await check(name, api, program)
    assert (found.turns, found.finish_reason, found.solved) == (2, finish_reason, True)

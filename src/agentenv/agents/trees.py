"""Where the trees are that ``scripts/agent-programs`` makes of agent programs, on this machine and in slots."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentenv.agent.program import AgentProgram
from agentenv.agents.facts import RECIPES
from agentenv.agents.recipes import AT
from agentenv.config import cache_dir
from agentenv.errors import ConfigError
from agentenv.wire.spec import Bind

NODE: Final = "node"
NODE_VERSION: Final = "22.20.0"


def binds(*names: str) -> tuple[Bind, ...]:
    """What shows plain slots these programs (names of RECIPES) where recipes look for them: for ``binds`` of an
    environment, a sandbox or a farm. Raises ConfigError for a program that is not on this machine."""
    found: dict[str, Path] = {}
    for name in names:
        recipe = RECIPES.get(name)
        if recipe is None or not recipe.packaged:
            known = ", ".join(one.name for one in RECIPES.values() if one.packaged)
            raise ConfigError("agent program", f"nothing makes a tree of {name!r}", next_step=f"there are {known}")
        if recipe.node:
            found[NODE] = tree(NODE, NODE_VERSION)
        found[name] = tree(name, recipe.version)
    for name, where in found.items():
        if not where.is_dir():
            raise ConfigError(
                "agent program",
                f"{name} is not on this machine: there is no {where}",
                next_step=f"in a checkout of agentenv, run scripts/agent-programs {' '.join(names)}",
            )
    return tuple(Bind(str(where), f"{AT}/{name}") for name, where in found.items())


def binds_for(program: AgentProgram) -> tuple[Bind, ...]:
    """What a program needs that is started where plain slots are shown it: none, if it is another or elsewhere. Raises:
    as :func:`binds`."""
    recipe = RECIPES.get(program.name)
    there = any(word.startswith(f"{AT}/{program.name}/") for word in program.argv)
    return binds(program.name) if recipe is not None and recipe.packaged and there else ()


def tree(name: str, version: str) -> Path:
    """Where a program is in this machine's cache, whether it is there or not."""
    return cache_dir() / "agents" / f"{name}-{version}"

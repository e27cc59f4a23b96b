"""AgentRepairEnv: the repair environment, whose agent is a program that somebody else has written.

    python -m examples.agents.env process --env.agent codex --openai.base_url URL --openai.model_name MODEL ...

The programs have to be on this machine (``scripts/agent-programs``), or with ``--env.agent_image`` in that image.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from agentenv import ImageRoot
from agentenv.agent.program import AgentProgram
from agentenv.agents import RECIPES, Recipe, binds
from agentenv.errors import ConfigError
from agentenv.wire.spec import Bind
from examples.repair.env import RepairConfig, RepairEnv


class AgentRepairConfig(RepairConfig):
    """The repair environment's settings, and which program is its agent."""

    agent: str = Field(default="mini-swe-agent", description=f"The program: {', '.join(RECIPES)}")
    agent_api: str | None = Field(default=None, description="By which API it asks, if it knows several")
    agent_image: str | None = Field(
        default=None, description="Image with the programs; by default plain slots see them"
    )
    tool_server_url: str | None = Field(default=None, description="External tools, which programs do not use")

    @model_validator(mode="after")
    def _known(self) -> AgentRepairConfig:
        for field, value, known in (
            ("agent", self.agent, RECIPES),
            ("agent_api", self.agent_api, self.recipe.programs if self.agent in RECIPES else {}),
        ):
            if value is not None and value not in known:
                raise ConfigError(field, f"there is no {value!r}", next_step=f"there are {', '.join(known)}")
        return self

    @property
    def recipe(self) -> Recipe:
        """What is known of the program."""
        return RECIPES[self.agent]


class AgentRepairEnv(RepairEnv):
    """Repair a real package. All that differs from the environment with the built-in loop is ``agent_program``, and
    that slots have the programs."""

    name = "agents"
    env_config_cls = AgentRepairConfig
    config: AgentRepairConfig

    def agent_program(self, item: Any) -> AgentProgram:  # noqa: ARG002 - the same for all
        """The program, by the API that was chosen."""
        programs = self.config.recipe.programs
        return programs[self.config.agent_api or next(iter(programs))]()

    def task_image(self, item: Any) -> ImageRoot | None:  # noqa: ARG002 - the same for all
        """The image with the programs, if there is one."""
        return ImageRoot(self.config.agent_image) if self.config.agent_image else None

    @property
    def shown(self) -> tuple[Bind, ...]:
        """Plain slots see the program's files, too."""
        programs = binds(self.config.agent) if self.config.agent_image is None else ()
        return (*super().shown, *programs)


if __name__ == "__main__":
    AgentRepairEnv.cli()

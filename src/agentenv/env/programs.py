"""Agent programs in an environment: their settings, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

from agentenv.agent.program import AgentProgram, ProgramRunner, TurnHeaders
from agentenv.agent.protocols import Handle, Model
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.agents.play import ProgramPlay, ProgramSettings
from agentenv.agents.trees import binds_for
from agentenv.config import ContainerSettings
from agentenv.errors import HookError
from agentenv.sdk.tool_context import ToolContext


class ProgramFields(BaseModel):
    """Settings of agent programs (docs/agents.md); those of the agent hold for them, too."""

    program_timeout_s: float | None = Field(
        default=None, gt=0, description="An agent program is killed after this, and verified; agent_max_s by default"
    )
    program_reasoning: bool = Field(
        default=ProgramSettings.reasoning, description="Agent programs are shown the model's reasoning"
    )
    program_output_bytes: int = Field(
        default=ProgramSettings.output_bytes,
        ge=2,
        description="Kept of a program's stdout and stderr each: the first and the last bytes",
    )
    program_max_conversations: int = Field(
        default=ProgramSettings.max_conversations,
        ge=1,
        description="Most conversations of a program in one rollout: sub-agents, titles, compactions",
    )
    program_train: Literal["all", "main"] = Field(
        default=ProgramSettings.train,
        description="Conversations of a program that are trained on; main: those that were offered tools",
    )

    def program_settings(self) -> ProgramSettings:
        """Settings of every program."""
        return ProgramSettings(
            timeout_s=self.program_timeout_s,
            reasoning=self.program_reasoning,
            output_bytes=self.program_output_bytes,
            max_conversations=self.program_max_conversations,
            train=self.program_train,
        )


def runner_of(settings: ProgramSettings) -> ProgramRunner:
    """What runs the programs of an environment."""

    def run(
        program: AgentProgram,
        handle: Handle,
        model_for: Callable[[], Model],
        agent: AgentSettings,
        timeline: Timeline,
        turn_headers: TurnHeaders | None,
    ) -> ProgramPlay:
        assert isinstance(handle, ToolContext)  # as rollouts of environments are given
        return ProgramPlay(program, handle, model_for, agent, settings, timeline, turn_headers=turn_headers)

    return run


def with_program(settings: ContainerSettings, program: AgentProgram | None) -> ContainerSettings:
    """Settings of containers of this machine whose plain slots see a program of ``scripts/agent-programs``. Raises:
    ConfigError when it is not on this machine."""
    given = {one.target for one in settings.binds}
    found = [one for one in (binds_for(program) if program is not None else ()) if one.target not in given]
    return settings.model_copy(update={"binds": (*settings.binds, *found)}) if found else settings


def check_programs(kind: Any, base: Any) -> None:
    """Raises: HookError when an environment with agent programs has a hook that they leave no place for. ``base``: the
    class of all environments."""
    programs = kind.program is not None or kind.agent_program is not base.agent_program
    if programs and kind.continue_task is not base.continue_task:
        raise HookError(
            f"{kind.__name__}.continue_task",
            "goes with the built-in loop only: an agent program is given its task once",
            next_step="leave it out, or leave out program and agent_program",
        )

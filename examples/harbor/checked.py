"""The environment as the check plays it: its oracle finds the task's solution."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentenv import ToolContext
from agentenv.env.config import Names
from agentenv.errors import TaskError
from agentenv.testing.scripted_policy import MEMBER_MARK
from examples.harbor.env import HarborConfig, HarborEnv
from examples.harbor.players import SOLUTION, script_of
from examples.harbor.rewards import NoRewardError
from examples.harbor.verifier import lay


class CheckConfig(HarborConfig):
    """An environment's settings, and who plays."""

    players: Names = Field(default_factory=list, description="The scripted agent of each member of a group")


class CheckedEnv(HarborEnv):
    """The oracle finds its task's solution in a directory, uploaded as root before it begins, as Harbor's does. Nobody
    else has it."""

    env_config_cls = CheckConfig

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **named: Any) -> dict[str, Any]:
        """As every rollout's; with the solution, if it is the oracle's. Raises TaskError."""
        workspace = await super().setup_trajectory_workspace(item, exec_tool=exec_tool, **named)
        task = self.tasks[item["task_id"]]
        member = MEMBER_MARK.search(named["trajectory_id"])
        if member and self.config.players[int(member[1])] == "oracle" and (script := script_of(task)):
            try:
                await lay(exec_tool, SOLUTION, (task.solution,), script)
            except NoRewardError as error:
                raise TaskError(f"the solution of {task.name} cannot be uploaded: {error}") from error
        return workspace

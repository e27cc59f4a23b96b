"""my-env: add up numbers in a file. Put your own task, workspace and score in its place."""

import itertools
import random
from typing import Any

from agentenv import AgentEnv, ToolContext


class MyEnv(AgentEnv):
    """Every hook is explained in agentenv's docs/environments.md."""

    name = "my-env"

    async def setup_agent_env(self) -> None:
        """Called once, before the first item."""
        self.seeds = itertools.count()

    async def get_next_item(self) -> dict[str, Any]:
        """What one group of rollouts works on; None would end the run."""
        seed = next(self.seeds)
        return {"id": f"sum-{seed}", "numbers": random.Random(seed).sample(range(1000), k=20)}

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ToolContext) -> None:
        """Prepare a rollout's slot before the first turn."""
        await exec_tool.write_file("numbers.txt", "".join(f"{number}\n" for number in item["numbers"]))

    def build_task(self, item: Any) -> str:
        """What the model is asked to do."""
        return "Add up the numbers in numbers.txt, one per line, and write the sum to the file sum.txt."

    async def verify_and_score_trajectory(
        self, item: Any, final_response: str, *, exec_tool: ToolContext
    ) -> tuple[float, dict[str, Any]]:
        """The score, and what to keep beside it, judged by what the model left in its slot."""
        try:
            found = await exec_tool.read_file("sum.txt")
        except OSError:  # not there, or a directory: the model's doing, so it is scored
            found = ""
        return float(found.strip() == str(sum(item["numbers"]))), {"found": found[:100]}


if __name__ == "__main__":
    MyEnv.cli()

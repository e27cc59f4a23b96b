"""The smallest useful environment: the model counts the words of a file in its slot."""

import itertools
from typing import Any

from agentenv import AgentEnv, ToolContext


class CountWords(AgentEnv):
    name = "count-words"

    async def setup_agent_env(self) -> None:
        self.lengths = itertools.cycle(range(10, 1000, 7))

    async def get_next_item(self) -> dict[str, int]:
        return {"words": next(self.lengths)}

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ToolContext) -> None:
        await exec_tool.write_file("text.txt", "word " * item["words"])

    def build_task(self, item: Any) -> str:
        return "How many words are in text.txt? Answer with the number alone."

    def score_trajectory(self, item: Any, final_response: str) -> float:
        return float(final_response.strip() == str(item["words"]))


if __name__ == "__main__":
    CountWords.cli()

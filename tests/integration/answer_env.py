"""An environment with a command line, run as a process by the tests of ``process``, ``serve``, ``evaluate``."""

from __future__ import annotations

from typing import Any

from agentenv.env.environment import AgentEnv


class CommandEnv(AgentEnv):
    name = "command"
    count = 0

    async def get_next_item(self) -> Any:
        self.count += 1
        return {"id": f"item-{self.count}"}

    def build_task(self, item: Any) -> str:
        return f"[task:{item['id']}] write 42 to the file answer"

    def score_trajectory(self, item: Any, final_response: str) -> float:
        return float(final_response == "done")


if __name__ == "__main__":
    CommandEnv.cli()

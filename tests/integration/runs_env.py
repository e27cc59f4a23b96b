"""An environment whose runs the tests end and resume: what it scores is in a file, with the trajectory's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agentenv.env.environment import AgentEnv


class RunsEnv(AgentEnv):
    name = "runs"
    count = 0

    async def get_next_item(self) -> Any:
        self.count += 1
        if self.count > int(os.environ.get("RUNS_ENV_ITEMS", "1000")):
            return None
        return {"id": f"{os.environ.get('RUNS_ENV_ITEM', 'item')}-{self.count}"}

    def build_task(self, item: Any) -> str:
        return f"[task:{item['id']}] write 42 to the file answer"

    def verify_and_score_trajectory(self, item: Any, final_response: str, *, trajectory_id: str) -> Any:
        with Path("scored.txt").open("a") as file:
            file.write(f"{trajectory_id}\n")
        return (len(final_response) + int(item["id"].rpartition("-")[2])) % 2 / 1, {}


if __name__ == "__main__":
    RunsEnv.cli()

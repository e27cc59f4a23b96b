"""An environment with a command line, run as a process by the tests of ``process``, ``serve``, ``evaluate``."""

from __future__ import annotations

import os
from typing import Any

from agentenv.env.environment import AgentEnv


class CommandEnv(AgentEnv):
    name = "command"
    count = 0

    async def get_next_item(self) -> Any:
        self.count += 1
        if os.environ.get("ANSWER_ENV_BUG") == "item":
            raise KeyError("no such item")
        if os.environ.get("ANSWER_ENV_BUG") == "none":
            return None
        return {"id": f"item-{self.count}"}

    def build_task(self, item: Any) -> str:
        if os.environ.get("ANSWER_ENV_BUG") == "task":
            raise KeyError("no such task")
        return f"[task:{item['id']}] write 42 to the file answer"

    def score_trajectory(self, item: Any, final_response: str) -> float:
        if os.environ.get("ANSWER_ENV_BUG") == "score":
            raise KeyError("no such key")
        if os.environ.get("ANSWER_ENV_BUG") == "text":
            return "1.0"  # type: ignore[return-value]
        return float(final_response == "done")


if os.environ.get("ANSWER_ENV_BUG") == "misspelt":
    del CommandEnv.score_trajectory
    CommandEnv.score_trajectroy = lambda self, item, final_response: 1.0

if __name__ == "__main__":
    CommandEnv.cli()

"""The smallest environment of the terminal: a later command needs what an earlier one set up in the session.

The model reads a settings file into its shell, and then calls a function that only that shell knows: with a new
shell for every command, two commands cannot do it.
"""

import itertools
from typing import Any

from agentenv import AgentEnv, ToolContext

SETTINGS = """cd "$HOME/project/inner"
factor={factor}
answer() {{ echo $(( factor * $(cat number) )); }}
"""


class TerminalSmoke(AgentEnv):
    """Two commands in one session; the second needs the state left by the first."""

    name = "terminal-smoke"

    async def setup_agent_env(self) -> None:
        """An endless series of numbers, the same in every run."""
        self.pairs = zip(itertools.cycle(range(12, 90)), itertools.cycle(range(103, 990, 7)), strict=False)

    async def get_next_item(self) -> dict[str, int]:
        """Two factors."""
        factor, number = next(self.pairs)
        return {"factor": factor, "number": number}

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **_: Any) -> None:
        """One factor is in the settings, the other in a file in the directory they change to."""
        await exec_tool.write_file("project/settings.sh", SETTINGS.format(factor=item["factor"]))
        await exec_tool.write_file("project/inner/number", f"{item['number']}\n")

    def build_task(self, item: Any) -> str:  # noqa: ARG002 (every item has the same words)
        """The task, and in how many commands."""
        return (
            "In a terminal session run `. project/settings.sh`. Then run `answer` as a separate command "
            "in the same session. Reply with only the number it prints."
        )

    def score_trajectory(self, item: Any, final_response: str) -> float:
        """1 for the product, 0 for anything else."""
        return float(final_response.strip() == str(item["factor"] * item["number"]))


if __name__ == "__main__":
    TerminalSmoke.cli()

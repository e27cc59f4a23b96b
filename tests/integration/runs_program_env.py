"""The environment whose runs the tests end and resume, with an agent program in the place of the loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentenv.agent.program import AgentProgram

sys.path.append(str(Path(__file__).parents[2]))
from tests.integration.runs_env import RunsEnv

PROGRAM = Path(__file__).parents[1] / "small_agent.py"


class RunsProgramEnv(RunsEnv):
    name = "runs"

    def agent_program(self, item: Any) -> AgentProgram:
        return AgentProgram(
            ["python3", "small_agent.py", "rewriting", "{task}"],
            env={"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"},
            plain_files={"/workspace/small_agent.py": PROGRAM.read_text()},
        )


if __name__ == "__main__":
    RunsProgramEnv.cli()

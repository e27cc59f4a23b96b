"""The model finds a code with an external tool, and writes it to a file in its slot.

The records can be read only with a key, which the tool server holds. The tool uses it, the slot has no network, and
nothing shown to the policy contains the key's value.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from agentenv import AgentEnv, AgentEnvConfig, AgentResult, ToolContext
from agentenv.api.tool_server.core import ToolServer
from examples.toolserver_smoke.records import NAMES, Records, tool_server_of


class ToolServerSmoke(AgentEnv):
    """One external tool and a file."""

    name = "toolserver-smoke"

    @classmethod
    def config_init(cls) -> Any:
        """A tool server in this process."""
        _, servers = super().config_init()
        return AgentEnvConfig(tool_server_url="inprocess", verification="sealed"), servers

    def build_tool_server(self) -> ToolServer:
        """Our own, with the service it queries."""
        self.records = Records()
        return tool_server_of(self.records)

    async def setup_agent_env(self) -> None:
        """Every record is a task."""
        self.names = itertools.cycle(NAMES)

    async def get_next_item(self) -> dict[str, str]:
        """The next record's name."""
        return {"id": next(self.names)}

    def build_task(self, item: Any) -> str:
        """The task's text."""
        return (
            f"[task:{item['id']}] Look up the record of {item['id']} and write its code, alone, to the file code.txt."
        )

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,  # noqa: ARG002
        *,
        exec_tool: ToolContext,
        agent_result: AgentResult,
        **_: Any,
    ) -> tuple[float, dict[str, Any]]:
        """1 for the right code. A leaked key is the environment's failure: no score at all."""
        if self.records.key in json.dumps(agent_result.messages):
            raise RuntimeError("the key of the records was seen by the policy")
        try:
            wrote = (await exec_tool.read_file("code.txt")).strip()
        except OSError as error:  # nothing there, or something that is no file
            return 0.0, {"wrote": None, "because": str(error)}
        return float(wrote == self.records.codes[item["id"]]), {"wrote": wrote}


if __name__ == "__main__":
    ToolServerSmoke.cli()

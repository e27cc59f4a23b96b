"""An environment written for the Nomad branch's AgentEnv; only its imports were changed."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Tuple

from atroposlib.envs.base import APIServerConfig, Item
from pydantic import Field

from agentenv import AgentEnv, AgentEnvConfig, AgentResult
from agentenv import AgentSettings as AgentConfig

SYSTEM_PROMPT = None
COMMAND = 'python -c "import secrets; print(secrets.token_hex(16))"'


class SandboxTerminalSmokeEnvConfig(AgentEnvConfig):
    server_base_url: str = Field(default="http://127.0.0.1:8080")
    server_model: str = Field(default="scripted")


class SandboxTerminalSmokeEnv(AgentEnv[SandboxTerminalSmokeEnvConfig]):
    name = "sandbox_terminal_smoke_env"
    env_config_cls = SandboxTerminalSmokeEnvConfig

    def __init__(
        self,
        config: SandboxTerminalSmokeEnvConfig,
        server_configs: List[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ):
        super().__init__(config, server_configs, slurm, testing)
        self._iter = 0

    @classmethod
    def config_init(cls) -> Tuple[SandboxTerminalSmokeEnvConfig, List[APIServerConfig]]:
        base_url = os.getenv("ATROPOS_SERVER_BASE_URL") or "http://127.0.0.1:8080"
        env_config = SandboxTerminalSmokeEnvConfig(
            group_size=1,
            use_wandb=False,
            include_messages=True,
            ensure_scores_are_not_same=False,
            total_steps=2,
            batch_size=1,
            server_base_url=base_url,
            enabled_toolsets=["terminal"],
            disabled_toolsets=[],
            purge_job_on_start=True,
            purge_job_on_shutdown=True,
        )
        server_configs = [
            APIServerConfig(
                model_name="scripted",
                base_url=f"{base_url.rstrip('/')}/v1",
                api_key="local",
                num_max_requests_at_once=1,
                num_requests_for_eval=1,
                timeout=120,
            )
        ]
        return env_config, server_configs

    async def setup_agent_env(self) -> None:
        return None

    async def get_next_item(self) -> Item:
        self._iter += 1
        return {
            "command": COMMAND,
            "prompt": f"You MUST use the terminal tool. Run this command:\n{COMMAND}\nAnswer with what it printed.",
        }

    def build_task(self, item: Item) -> str:
        return str(item.get("prompt") or "")

    def build_agent_config(self, item: Item) -> AgentConfig:
        return AgentConfig(
            max_steps=min(8, int(self.config.agent_max_steps)),
            temperature=0.2,
            max_tokens=None,
            system_prompt=SYSTEM_PROMPT,
        )

    async def score_trajectory(self, item: Item, final_response: str) -> float:
        return 0.0

    async def verify_and_score_trajectory(
        self,
        item: Item,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool,
        agent_result: AgentResult | None = None,
    ) -> tuple[float, Dict[str, Any]]:
        if agent_result is None:
            return 0.0, {"error": "Missing agent_result"}
        observed = ""
        for step in agent_result.steps:
            for res in step.tool_results:
                if not res.success:
                    return 0.0, {"error": res.error, "output": res.output}
                out = (res.output or "").strip()
                if out:
                    observed = out.splitlines()[-1].strip()
        final = (final_response or "").strip()
        score = 1.0 if agent_result.total_tool_calls > 0 and observed and final == observed else 0.0
        return score, {"observed": observed, "tool_calls": agent_result.total_tool_calls}


if __name__ == "__main__":
    SandboxTerminalSmokeEnv.cli()

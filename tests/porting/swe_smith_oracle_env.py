"""An environment written for the Nomad branch's AgentEnv; its imports were changed, and how repositories are fetched.

It kept one clone per container below /data, which slots cannot share: here each slot clones from a bound directory.
"""

from __future__ import annotations

import random
from typing import Any, Dict, List, Optional, Tuple

from atroposlib.envs.base import APIServerConfig, Item
from pydantic import Field

from agentenv import AgentEnv, AgentEnvConfig, ToolCall
from agentenv import AgentSettings as AgentConfig


class SweSmithOracleEnvConfig(AgentEnvConfig):
    dataset_name: str = Field(default="someone/some-swe-dataset")
    dataset_split: str = Field(default="train")
    max_items: int = Field(default=0, description="0 = no limit")
    shuffle: bool = Field(default=True)
    seed: int = Field(default=0)
    score_include_fail_to_pass: bool = Field(default=True)
    repo_base_url: str = Field(default="/repositories")
    install_command: str = Field(default="python -m venv .venv && .venv/bin/pip install -e . pytest")
    install_timeout_s: float = Field(default=600.0)
    test_timeout_s: float = Field(default=600.0)


class SweSmithOracleEnv(AgentEnv[SweSmithOracleEnvConfig]):
    name = "swe_smith_oracle_env"
    env_config_cls = SweSmithOracleEnvConfig

    def __init__(
        self,
        config: SweSmithOracleEnvConfig,
        server_configs: List[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ):
        super().__init__(config, server_configs, slurm, testing)
        self._dataset = None
        self._indices: List[int] = []
        self._cursor = 0

    @classmethod
    def config_init(cls) -> Tuple[SweSmithOracleEnvConfig, List[APIServerConfig]]:
        env_config = SweSmithOracleEnvConfig(
            group_size=1,
            use_wandb=False,
            total_steps=1,
            batch_size=1,
            steps_per_eval=1,
            max_token_length=8192,
            enabled_toolsets=["terminal"],
            disabled_toolsets=[],
        )
        server = APIServerConfig(model_name="scripted", base_url="http://127.0.0.1:8080/v1", api_key="local")
        return env_config, [server]

    async def setup_agent_env(self) -> None:
        from datasets import load_dataset

        self._dataset = load_dataset(self.config.dataset_name, split=self.config.dataset_split)
        self._indices = [n for n in range(len(self._dataset)) if self._is_python_row(self._dataset[n])]
        if self.config.shuffle:
            random.Random(self.config.seed).shuffle(self._indices)
        if self.config.max_items > 0:
            self._indices = self._indices[: self.config.max_items]

    def _is_python_row(self, row: Dict[str, Any]) -> bool:
        nodeids = row.get("PASS_TO_PASS")
        return isinstance(nodeids, list) and bool(nodeids) and all(".py::" in nodeid for nodeid in nodeids)

    async def get_next_item(self) -> Item:
        if self._cursor >= len(self._indices):
            self._cursor = 0
        idx = self._indices[self._cursor]
        self._cursor += 1
        return dict(self._dataset[idx])

    def _repo_name(self, item: Item) -> str:
        return str(item["repo"]).split("/")[-1]

    def build_task(self, item: Item) -> str:
        tests = "\n".join(f"- {test}" for test in self._tests_for_item(item))
        return (
            "You are a senior software engineer. Fix the repository so the specified tests pass.\n"
            f"Repository: {item['repo']}, in ./{self._repo_name(item)}\n\n{item['problem_statement']}\n\n"
            f"Run these tests to verify:\n{tests}"
        )

    def build_agent_config(self, item: Item) -> AgentConfig:
        return AgentConfig(
            max_steps=self.config.agent_max_steps,
            temperature=self.config.agent_temperature,
            max_tokens=self.config.agent_max_tokens,
            tool_delay_s=self.config.agent_tool_delay_s,
        )

    async def setup_trajectory_workspace(self, item: Item, *, trajectory_id: str, exec_tool) -> Dict[str, Any]:
        repo_dir = self._repo_name(item)
        clone = (
            f"git clone --quiet {self.config.repo_base_url}/{item['repo']}.git {repo_dir} && "
            f"git -C {repo_dir} checkout --quiet --detach {item['base_commit']}"
        )
        res = await exec_tool(
            ToolCall(name="terminal", arguments={"command": clone, "timeout": self.config.install_timeout_s})
        )
        if not res.success:
            raise RuntimeError(f"git clone failed (repo={item['repo']}): {res.error}\n{res.output}")
        return {"repo_dir": repo_dir, "base_commit": item["base_commit"]}

    def _tests_for_item(self, item: Item) -> List[str]:
        keys = ("PASS_TO_PASS", "FAIL_TO_PASS") if self.config.score_include_fail_to_pass else ("PASS_TO_PASS",)
        return sorted({test for key in keys for test in item.get(key) or []})

    async def verify_and_score_trajectory(
        self,
        item: Item,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool,
        agent_result=None,
        workspace_meta: Optional[Dict[str, Any]] = None,
    ) -> tuple[float, Dict[str, Any]]:
        repo_dir = self._repo_name(item)
        if agent_result is not None and getattr(agent_result, "total_tool_calls", 0) <= 0:
            return 0.0, {"error": "No tool calls were made by the agent"}
        setup = await exec_tool(
            ToolCall(
                name="terminal",
                arguments={
                    "command": f"cd {repo_dir} && {self.config.install_command}",
                    "timeout": self.config.install_timeout_s,
                },
            )
        )
        messages = [{"role": "user", "content": setup.to_xml()}]
        if not setup.success:
            return 0.0, {"phase": "install", "error": setup.error, "verification_messages": messages}
        tests = " ".join(self._tests_for_item(item))
        res = await exec_tool(
            ToolCall(
                name="terminal",
                arguments={
                    "command": f"cd {repo_dir} && python -m pytest -q {tests}",
                    "timeout": self.config.test_timeout_s,
                },
            )
        )
        messages.append({"role": "user", "content": res.to_xml()})
        if not res.success:
            return 0.0, {"phase": "pytest", "error": res.error, "verification_messages": messages}
        return 1.0, {"passed": True, "verification_messages": messages}

    async def score_trajectory(self, item: Item, final_response: str) -> float:
        return 0.0


if __name__ == "__main__":
    SweSmithOracleEnv.cli()

"""An environment written for hermes-agent's base class; only its imports were changed."""

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from atroposlib.envs.server_handling.server_manager import APIServerConfig

from agentenv import AgentResult
from agentenv.env.hermes import BlockingToolContext as ToolContext
from agentenv.env.hermes import HermesAgentBaseEnv, HermesAgentEnvConfig

TRAIN_TASKS = [
    {
        "prompt": "Create ~/greeting.txt: Good morning",
        "path": "~/greeting.txt",
        "expected": "Good morning",
    },
    {"prompt": "Create ~/count.txt with the lines 1 to 4", "path": "~/count.txt", "expected": "1\n2\n3\n4"},
]
EVAL_TASKS = [{"prompt": "What is 6 * 7? Answer with the number.", "expected": "42"}]


class TerminalTestEnvConfig(HermesAgentEnvConfig):
    """Defaults for terminal tests."""


class TerminalTestEnv(HermesAgentBaseEnv):
    """Files in the home directory, judged by cat."""

    name = "terminal-test"
    env_config_cls = TerminalTestEnvConfig

    @classmethod
    def config_init(cls) -> Tuple[TerminalTestEnvConfig, List[APIServerConfig]]:
        env_config = TerminalTestEnvConfig(
            enabled_toolsets=["terminal", "file"],
            disabled_toolsets=None,
            distribution=None,
            max_agent_turns=10,
            max_token_length=16000,
            agent_temperature=1.0,
            system_prompt="You have a terminal and file tools. Follow the instructions exactly.",
            terminal_backend="local",
            group_size=3,
            tool_call_parser="hermes",
            steps_per_eval=3,
            total_steps=3,
            use_wandb=False,
            wandb_name="terminal-test",
            ensure_scores_are_not_same=False,
            dataset_name=None,
        )
        server_configs = [
            APIServerConfig(
                base_url="http://127.0.0.1:9004/v1",
                model_name="scripted",
                server_type="openai",
                api_key=os.getenv("OPENROUTER_API_KEY", "unused"),
                health_check=False,
            )
        ]
        return env_config, server_configs

    async def setup(self):
        self.train_tasks = list(TRAIN_TASKS)
        self.iter = 0
        self.reward_buffer: List[float] = []

    async def get_next_item(self) -> Dict[str, str]:
        item = self.train_tasks[self.iter % len(self.train_tasks)]
        self.iter += 1
        return item

    def format_prompt(self, item: Dict[str, str]) -> str:
        return item["prompt"]

    async def compute_reward(self, item: Dict[str, str], result: AgentResult, ctx: ToolContext) -> float:
        found = ctx.terminal(f"cat {item['path']}")
        if found["exit_code"] != 0:
            self.reward_buffer.append(0.0)
            return 0.0
        same = ctx.read_file(item["path"]).get("content", "").strip() == item["expected"]
        actual = found.get("output", "").strip()
        reward = 1.0 if same and actual == item["expected"] else 0.5 if item["expected"] in actual else 0.0
        self.reward_buffer.append(reward)
        return reward

    async def evaluate(self, *args, **kwargs):
        start_time, samples = time.time(), []
        for task in EVAL_TASKS:
            completion = await self.server.chat_completion(
                messages=[
                    {"role": "system", "content": self.config.system_prompt or ""},
                    {"role": "user", "content": task["prompt"]},
                ],
                n=1,
                max_tokens=self.config.max_token_length,
                temperature=0.0,
                split="eval",
            )
            response = completion.choices[0].message.content if completion.choices else ""
            samples.append({"prompt": task["prompt"], "response": response, "expected": task["expected"]})
        correct = sum(sample["response"] == sample["expected"] for sample in samples)
        metrics = {"eval/accuracy": correct / len(samples)}
        await self.evaluate_log(metrics=metrics, samples=samples, start_time=start_time, end_time=time.time())

    async def wandb_log(self, wandb_metrics: Optional[Dict[str, Any]] = None):
        wandb_metrics = wandb_metrics or {}
        if self.reward_buffer:
            wandb_metrics["train/avg_reward"] = sum(self.reward_buffer) / len(self.reward_buffer)
            self.reward_buffer = []
        await super().wandb_log(wandb_metrics)


if __name__ == "__main__":
    TerminalTestEnv.cli()

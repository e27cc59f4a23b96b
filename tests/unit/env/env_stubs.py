"""A small environment on fake slots and a scripted model, for tests of AgentEnv."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from agentenv.env.environment import AgentEnv, AgentEnvConfig
from agentenv.slots.backends.base import ContainerBackend
from agentenv.testing import Call, Player, Reply, ScriptedPolicy, build_tokenizer
from tests.waiting import START_S

WRITE = [Reply("writing", (Call("bash", {"command": "echo 42 > answer"}),)), Reply("done")]
SOLVE: Player = WRITE
IDLE: Player = [Reply("I give up")]


class AnswerEnv(AgentEnv):
    """The task is to write 42 to a file. Tests put their own hooks in place of these."""

    name = "answer"
    items: list[Any]
    backend: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.items = [{"id": f"item-{n}"} for n in range(100)]

    async def get_next_item(self) -> Any:
        return self.items.pop(0) if self.items else None

    def build_task(self, item: Any) -> Any:
        return f"[task:{item['id']}] write 42 to the file answer"

    def score_trajectory(self, item: Any, final_response: str) -> Any:
        raise AssertionError("verify_and_score_trajectory is written, so this is not called")

    async def verify_and_score_trajectory(
        self, item: Any, final_response: str, *, exec_tool: Any, **_: Any
    ) -> tuple[float, dict[str, Any]]:
        result = await exec_tool.terminal("cat answer")
        return float(result.stdout.strip() == "42"), {"exit_code": result.exit_code}

    def build_backend(self) -> ContainerBackend:
        self.backend = super().build_backend()
        return self.backend  # type: ignore[no-any-return]


E = TypeVar("E", bound=AgentEnv)


def settings(directory: Path, **changed: Any) -> AgentEnvConfig:
    chosen: dict[str, Any] = {
        "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
        "tool_pool_mode": "fake",
        "group_size": 4,
        "use_wandb": False,
        **({} if changed.get("tool_pool_mode") == "farm" else {"max_containers": 2, "slots_per_container": 3}),
        "rollouts_path": str(directory / "rollouts.jsonl"),
        "send_trajectory_id": True,
        "agent_max_steps": 6,
        "infra_retry_delay_s": 0,
        **changed,
    }
    return AgentEnvConfig(**chosen)


def server_of(policy: ScriptedPolicy) -> list[APIServerConfig]:
    return [APIServerConfig(base_url=policy.base_url, model_name="scripted", api_key="x", timeout=30)]


@asynccontextmanager
async def environment(kind: Callable[..., E], directory: Path, script: Any = None, **changed: Any) -> AsyncIterator[E]:
    """A set-up environment; at the end every slot must be free and everything is closed."""
    async with (
        ScriptedPolicy(script if script is not None else {"*": [SOLVE]}) as policy,
        kind(settings(directory, **changed), server_of(policy)) as env,
    ):
        yield env
        if env.config.tool_pool_mode != "farm":  # whose slots others use as well
            await all_free(env)


async def all_free(env: AgentEnv) -> None:
    """Lease every slot there can be: none is held by anybody any more, or this times out."""
    sessions = env._opened().sessions
    number = env.config.max_containers * env.config.slots_per_container
    opened = []
    try:
        for n in range(number):
            session = sessions.open(f"probe-{n}", acquire_timeout_s=START_S)
            await session.__aenter__()
            opened.append(session)
    finally:
        for session in opened:
            await session.__aexit__(None, None, None)

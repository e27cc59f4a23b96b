"""An environment on a managed server: the scripted policy speaks tokens, as vLLM and SGLang do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from transformers import AutoTokenizer

from agentenv.env.environment import AgentEnv
from agentenv.testing import ScriptedPolicy, TokenSpeaker, build_tokenizer
from tests.unit.env.env_stubs import SOLVE, all_free, settings

E = TypeVar("E", bound=AgentEnv)


def tokenizer_of(directory: Path, **options: Any) -> Any:
    return AutoTokenizer.from_pretrained(str(build_tokenizer(directory / "tokenizer", **options)))


@asynccontextmanager
async def managed(
    kind: Callable[..., E],
    directory: Path,
    script: Any = None,
    *,
    server_type: str = "vllm",
    parser: str = "hermes",
    speaker: dict[str, Any] | None = None,
    **changed: Any,
) -> AsyncIterator[tuple[E, TokenSpeaker]]:
    """A set-up environment and its policy; at the end every slot must be free."""
    voice = TokenSpeaker(tokenizer_of(directory), parser, **(speaker or {}))
    config = settings(directory, **{"tool_call_parser": parser, "agent_max_tokens": 4000, **changed})
    async with ScriptedPolicy(script if script is not None else {"*": [SOLVE]}, speaker=voice) as policy:
        server = APIServerConfig(
            base_url=policy.base_url, model_name="scripted", api_key="x", timeout=30, server_type=server_type
        )
        async with kind(config, [server]) as env:
            yield env, voice
            if env.config.tool_pool_mode != "farm":  # whose slots others use as well
                await all_free(env)

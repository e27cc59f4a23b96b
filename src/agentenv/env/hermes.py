"""The base class of hermes-agent's environments, for porting them: a thin class over :class:`agentenv.AgentEnv`.

Their hooks (``setup``, ``format_prompt``, ``compute_reward``) and their tool context, whose methods block and return
dicts. docs/porting.md says what differs. An environment of your own is simpler as an AgentEnv.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
from pydantic import Field

from agentenv.agent.hooks import check_not_overridden, check_signature, finite
from agentenv.agent.observations import SESSION_TOOL_NAMES
from agentenv.agent.protocols import ToolDefinition
from agentenv.agent.result import AgentResult
from agentenv.agent.rollout_metrics import conversation
from agentenv.agent.settings import AgentSettings
from agentenv.agent.tool_call import ToolCall, one_shot
from agentenv.env.blocking import run_with_waits, wait
from agentenv.env.environment import AgentEnv, AgentEnvConfig
from agentenv.errors import PolicyRefusalError, ToolCallError
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.calls import CallResult

__all__ = ["BlockingToolContext", "HermesAgentBaseEnv", "HermesAgentEnvConfig"]

T = TypeVar("T")

_COMMANDS = frozenset({"bash", *SESSION_TOOL_NAMES})

TIMED_OUT = 124
"""Exit code of a command that was killed at its time limit, as of ``timeout(1)``."""
REFUSED = -1
"""Exit code of a command that was not run."""


class HermesAgentEnvConfig(AgentEnvConfig):
    """The settings of AgentEnvConfig with the defaults of hermes-agent. Without ``agent_max_tokens`` a turn may have
    ``max_token_length`` tokens."""

    temperature_there: ClassVar[float] = 1.0
    last_turn_scored_there: ClassVar[bool] = True

    agent_max_steps: int = Field(default=30, ge=1)
    agent_temperature: float | None = Field(default=1.0, ge=0)
    tool_timeout_s: float = Field(default=120.0, gt=0, description="Time limit of one tool call")
    terminal_lifetime: float | None = Field(default=3600.0, gt=0)
    tool_call_parser: str | None = "hermes"
    system_prompt: str | None = Field(default=None, description="None: no system message")

    def agent_settings(self) -> AgentSettings:
        """Limits and sampling of the agent; there is no default system message."""
        max_tokens = self.agent_max_tokens or self.max_token_length
        return replace(super().agent_settings(), system_prompt=self.system_prompt or "", max_tokens=max_tokens)


class HermesAgentBaseEnv(AgentEnv[HermesAgentEnvConfig], ABC):
    """Write ``setup``, ``get_next_item``, ``format_prompt`` and ``compute_reward``; ``evaluate`` is optional.

    Unlike there, a reward hook that raises gives no reward (its rollout is not scored), and tools run in slots.
    """

    name = "hermes-agent"
    env_config_cls = HermesAgentEnvConfig

    @abstractmethod
    async def setup(self) -> None:
        """Load the dataset and initialize state; called once, when slots are available."""

    @abstractmethod
    def format_prompt(self, item: Any) -> str:
        """The user message of an item."""

    @abstractmethod
    async def compute_reward(self, item: Any, result: AgentResult, ctx: BlockingToolContext) -> float:
        """The reward of a rollout, with tools on its slot."""

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.setup_agent_env = self.setup  # type: ignore[method-assign]
        self.setup = super().setup  # type: ignore[method-assign]  # what atropos calls first
        self.text_of = self._format_trajectory_for_display

    def _check_hooks(self) -> None:
        super()._check_hooks()
        instead = "the server's type (--openai.server_type vllm or sglang) decides whether there are exact tokens"
        check_not_overridden(type(self), HermesAgentBaseEnv, "_use_managed_server", instead)
        given = {"setup": (), "format_prompt": ("item",), "compute_reward": ("item", "result", "ctx")}
        for name, arguments in given.items():
            check_signature(self, name, arguments)

    def build_task(self, item: Any) -> str:
        """:meth:`format_prompt`."""
        return self.format_prompt(item)

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,  # noqa: ARG002
        *,
        exec_tool: ToolContext,
        agent_result: AgentResult,
        **_: Any,
    ) -> tuple[float, dict[str, Any]]:
        """:meth:`compute_reward`."""
        ctx = BlockingToolContext(exec_tool)
        return finite("compute_reward", await run_with_waits(self.compute_reward, item, agent_result, ctx)), {}

    def tools_of_group(self, item: str) -> list[ToolDefinition]:  # noqa: ARG002
        """The tools of :meth:`_resolve_tools_for_group`."""
        tools, names = self._resolve_tools_for_group()
        return [tool for tool in tools if tool["function"]["name"] in names]

    def _resolve_tools_for_group(self) -> tuple[list[ToolDefinition], set[str]]:
        """The schemas of a group's tools, and the names of those that may be called; drawn once per group."""
        drawn = list(super().tools_of_group("group"))
        return drawn, {tool["function"]["name"] for tool in drawn}

    def _use_managed_server(self) -> bool:
        """Whether the model's server gives exact tokens (vllm, sglang). Not to be overridden."""
        return self._models.exact

    @staticmethod
    def _format_trajectory_for_display(messages: list[dict[str, Any]]) -> str:
        """The conversation for human readers, in the table ``train/rollouts``."""
        return conversation(messages)


class BlockingToolContext:
    """The tools of a rollout's slot, called without ``await``: for :meth:`HermesAgentBaseEnv.compute_reward`.

    Every tool returns a dict (:meth:`call_tool` as JSON). What the slot or a tool server refuses is its ``error``; an
    infrastructure failure raises InfraError, and decides the rollout even if it is caught.
    """

    def __init__(self, tools: ToolContext) -> None:
        self._tools = tools
        self._loop = asyncio.get_running_loop()

    @property
    def task_id(self) -> str:
        """Name of the rollout."""
        return self._tools.trajectory_id

    def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:
        """Run a command in a new shell: ``exit_code`` (124 if it was killed after ``timeout`` seconds, -1 if it was
        refused) and ``output``."""
        ran = self._reply(self._content("bash", {"command": command, "timeout": timeout}))
        return {"exit_code": REFUSED, "output": ""} | ran

    def read_file(self, path: str) -> dict[str, Any]:
        """``content``: the text of a file."""
        return self._reply(self._named("content", self._tools.read_file(path)))

    def write_file(self, path: str, content: str) -> dict[str, Any]:
        """Write a file: ``bytes_written``."""
        return self._reply(self._named("bytes_written", self._tools.write_file(path, content)))

    def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Lines that match a regular expression: ``matches``, and what was skipped."""
        return self._reply(self._dumped(self._tools.search(query, path)))

    def upload_file(self, local_path: str, remote_path: str) -> dict[str, Any]:
        """Copy a local file into the slot: ``exit_code`` (0, or 1 with the ``error``) and ``output``."""
        reply = self._reply(self._dumped(self._tools.upload(local_path, remote_path)))
        return {"exit_code": int("error" in reply), "output": reply.get("error", ""), **reply}

    def upload_dir(self, local_dir: str, remote_dir: str) -> dict[str, Any]:
        """Copy a local directory into the slot."""
        return self.upload_file(local_dir, remote_dir)

    def download_file(self, remote_path: str, local_path: str) -> dict[str, Any]:
        """Copy a file of the slot to a local path: ``success`` and ``bytes``, or ``success`` false and ``error``."""
        Path(local_path).parent.mkdir(parents=True, exist_ok=True)
        reply = self._reply(self._dumped(self._tools.download(remote_path, local_path)))
        return {"success": False, "bytes": reply.get("total_bytes", 0), **reply}

    def download_dir(self, remote_dir: str, local_dir: str) -> dict[str, Any]:
        """Copy a directory of the slot to a local path."""
        return self.download_file(remote_dir, local_dir)

    def web_search(self, query: str) -> dict[str, Any]:
        """Search the web through the tool server."""
        return self._reply(self._content("web_search", {"query": query}))

    def web_extract(self, urls: Sequence[str]) -> dict[str, Any]:
        """The text of web pages: ``results``, one per URL."""
        return {"results": [self._reply(self._content("web_extract", {"url": url})) for url in urls]}

    def browser_navigate(self, url: str) -> dict[str, Any]:
        """Open a page in the rollout's browser."""
        return self._reply(self._content("browser_navigate", {"url": url}))

    def browser_snapshot(self) -> dict[str, Any]:
        """The open page as text."""
        return self._reply(self._content("browser_snapshot", {}))

    def call_tool(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Call any tool by its name; the reply as JSON: its content, and of a command ``output`` and ``exit_code``
        (124 if it was killed at its time limit). A ``terminal`` with nothing but a command is a new shell."""
        return json.dumps(self._reply(self._content(tool_name, arguments)))

    def cleanup(self) -> None:
        """End the use of this context; the slot belongs to the rollout."""
        self._wait(self._tools.cleanup())

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:  # a thread of the hook's
            here = None
        return wait(call) if here is self._loop else asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _reply(self, call: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            return self._wait(call)
        except (OSError, ToolCallError, PolicyRefusalError) as error:
            return {"error": str(error)}

    async def _named(self, name: str, call: Coroutine[Any, Any, Any]) -> dict[str, Any]:
        return {"success": True, name: await call}

    async def _dumped(self, call: Coroutine[Any, Any, Any]) -> dict[str, Any]:
        reply = await call
        fields = asdict(reply) if is_dataclass(reply) and not isinstance(reply, type) else reply.model_dump(mode="json")
        return {"success": True, **fields}

    async def _content(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        name, given, limit_s = one_shot(ToolCall(tool, arguments))
        return _as_dict(name, await self._tools.call_tool(name, given, timeout_s=limit_s))


def _as_dict(tool: str, result: CallResult) -> dict[str, Any]:
    """The content of a result. Of a command also its ``output`` and ``exit_code``; of a file operation that failed
    its ``error``."""
    content = result.content if isinstance(result.content, dict) else {}
    if tool in _COMMANDS:
        killed = result.timed_out and tool == "bash"
        return {**content, "output": result.printed, "exit_code": TIMED_OUT if killed else result.exit_code}
    return {"error": result.output} if result.exit_code else content or {"output": result.output}

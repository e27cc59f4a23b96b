"""The model of a trajectory, chosen by the type of the model's server.

``openai``: the server parses tool calls itself, and gives no tokens to train on. ``vllm``, ``sglang``: atropos'
ManagedServer keeps tokens, masks and logprobs, and the text is parsed here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_manager import ServerManager

from agentenv.agent.models.chat_template import ChatRenderer
from agentenv.agent.models.managed import TEMPLATE_OPTIONS, ManagedModel, PromptTokenizer
from agentenv.agent.models.openai import ServedModel
from agentenv.agent.parsers import parser_named
from agentenv.agent.protocols import Model
from agentenv.env.config import AgentFields
from agentenv.errors import ConfigError


class EnvModels:
    """Creates models. ``trainer_limit`` returns the longest sequence the trainer accepts, once known.

    Raises: ConfigError when the parser is unknown, or the tokenizer's chat template cannot be used.
    """

    def __init__(
        self,
        config: AgentFields,
        kind: str,
        server: ServerManager,
        tokenizer: Any,
        trainer_limit: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._server = server
        self._tokenizer = tokenizer
        self._trainer_limit = trainer_limit
        self.exact = kind != "openai"
        """Whether models give exact tokens and logprobs."""
        if self.exact and server.use_proxy:
            problem = "atropos' proxy parses by different rules and is not used"
            raise ConfigError("server_type", problem, next_step="unset ATROPOS_PROXY_URL")
        self._renderer = self._rendering() if self.exact else None

    def _rendering(self) -> ChatRenderer:
        options = (self._config.extra_body or {}).get(TEMPLATE_OPTIONS)
        return ChatRenderer(self._tokenizer, parser_named(self._config.tool_call_parser or ""), options)

    def of(self, trajectory: str) -> Model:
        """A new model for one trajectory."""
        config = self._config
        constant = {"user": trajectory} if config.send_trajectory_id else {}
        if self._renderer is None:
            return ServedModel(self._server.chat_completion, timeout_s=config.model_timeout_s, constant=constant)
        return ManagedModel(
            self._opened,
            self._tokenizer,
            self._renderer,
            timeout_s=config.model_timeout_s,
            max_tokens=config.agent_max_tokens or config.max_token_length,
            context_tokens=self._context_tokens(),
            constant=constant,
        )

    def _context_tokens(self) -> int | None:
        limits = [limit for limit in (self._config.agent_context_tokens, self._trainer_limit()) if limit is not None]
        return min(limits, default=None)

    @asynccontextmanager
    async def _opened(self, tokenizer: PromptTokenizer) -> AsyncIterator[ManagedServer]:
        """atropos' managed server over one of the servers, for as long as a trajectory lasts.

        Anything else that atropos may return is refused: the tokens of its dummy server are invented, and its proxy
        parses by different rules.
        """
        async with self._server.managed_server(tokenizer=tokenizer) as managed:
            if type(managed) is not ManagedServer:
                raise ConfigError(
                    "server_type",
                    f"atropos gives a {type(managed).__name__}, whose tokens are not the policy's",
                    next_step="use server_type vllm or sglang, and unset ATROPOS_PROXY_URL",
                )
            yield managed

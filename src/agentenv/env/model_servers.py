"""Clients of the model's servers with a single layer of retries, keeping the server's message when a request is
refused.

atropos' wrappers retry any error, even of a malformed request, in nested layers: 27 requests and minutes for one
failure of an OpenAI-style server. Their health checks request a completion every second. Those of vLLM and SGLang
drop the body of an error, so that a conversation that is too long looks like a bug.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import openai
from atroposlib.envs import base as atropos
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer

from agentenv.agent.models.openai import ended_by
from agentenv.backoff import pause_s
from agentenv.deadlines import scaled
from agentenv.errors import ConfigError, ModelServerError

logger = logging.getLogger(__name__)

ATTEMPTS = 3
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
PROBE_TIMEOUT_S = scaled(5.0)
TRAJECTORY_HEADER = "X-Trajectory"
"""Header with the trajectory's name for a managed server, sent when ``send_trajectory_id`` is set."""


class Refused(Exception):
    """HTTP error of a model server, with its message. Has the attributes of the openai client's errors."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(f"HTTP {status_code}: {message}")
        self.status_code = status_code


class OnceRetryingServer(OpenAIServer):  # type: ignore[misc]
    """An OpenAI-style server with the openai client's own retries only."""

    async def chat_completion(self, **kwargs: Any) -> Any:
        """One ChatCompletion. Raises: ModelServerError when it could not be reached; else what the openai client
        raises."""
        kwargs["model"] = self.config.model_name
        semaphore = self.sem if kwargs.pop("split", "train") == "train" else self.eval_sem
        kwargs = self._inject_reasoning_kwargs(kwargs)
        async with semaphore:
            started_at = time.time()
            try:
                reply = await self._chat_completion_wrapper(**kwargs)
            except openai.APIConnectionError as error:
                if isinstance(error, openai.APITimeoutError):
                    raise
                raise unreachable(address_of(self), error.__cause__ or error) from error
            self.request_timings.append(time.time() - started_at)
            self.attempts_list.append(1)
        return reply


class _TokenServer:
    """Mixin for atropos' servers that return tokens and logprobs; placed before their class."""

    config: APIServerConfig
    sem: asyncio.Semaphore
    eval_sem: asyncio.Semaphore
    request_timings: list[float]
    attempts_list: list[int]

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list[int], list[Any], list[Any], list[Any]]:
        """(prompt tokens, and per answer: tokens, logprobs, finish reason).

        Raises: Refused; ModelServerError when an answer is incomplete, or the server was unreachable in three
        attempts.
        """
        semaphore = self.sem if kwargs.pop("split", "train") == "train" else self.eval_sem
        kwargs.pop("model", None)
        kwargs.pop("prompt", None)
        prompt = kwargs.pop("input_ids")
        headers = kwargs.pop("extra_headers", None) or {}
        if user := kwargs.pop("user", None):
            headers = {**headers, TRAJECTORY_HEADER: user}
        async with semaphore:
            started_at = time.time()
            reply, attempts = await self._posted(self._request(prompt, kwargs), headers)
            self.request_timings.append(time.time() - started_at)
            self.attempts_list.append(attempts)
        tokens, logprobs, reasons = self._read(reply)
        for reason in reasons:
            ended_by(reason.get("type") if isinstance(reason, dict) else reason)
        if len(reasons) != len(tokens):
            raise ModelServerError(f"the model's server gave {len(reasons)} finish reasons of {len(tokens)} answers")
        return prompt, tokens, logprobs, reasons

    async def _posted(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[Any, int]:
        """The reply's JSON and the number of attempts. Requests to a busy or failing server are repeated."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._post(body, headers), attempt
            except (aiohttp.ClientConnectionError, Refused) as error:
                final = isinstance(error, Refused) and error.status_code < 500 and error.status_code != 429
                if final or (attempt == ATTEMPTS and isinstance(error, Refused)):
                    raise
                if attempt == ATTEMPTS:
                    raise unreachable(address_of(self), error) from error
            await asyncio.sleep(pause_s(FIRST_DELAY_S, LONGEST_DELAY_S, attempt))
        raise AssertionError("unreachable")

    async def _post(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        if self.config.api_key:
            headers = {**headers, "Authorization": f"Bearer {self.config.api_key}"}
        url = f"{(self.config.base_url or '').rstrip('/').removesuffix('/v1')}/generate"
        timeout = aiohttp.ClientTimeout(total=self.config.timeout)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=body, headers=headers) as reply,
        ):
            if reply.status >= 400:
                raise Refused(reply.status, (await reply.text())[:2000])
            return await reply.json()

    def _request(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _read(self, reply: Any) -> tuple[list[list[int]], list[list[float]], list[Any]]:
        raise NotImplementedError


class TokensFromVLLM(_TokenServer, VLLMServer):  # type: ignore[misc]
    """atropos' vLLM server (its ``/generate``) with :class:`_TokenServer`'s requests."""

    def _request(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, **sampling}

    def _read(self, reply: Any) -> tuple[list[list[int]], list[list[float]], list[Any]]:
        chosen = [[next(iter(position[0].items())) for position in answer] for answer in reply["logprobs"]]
        tokens = [[int(token) for token, _ in answer] for answer in chosen]
        return tokens, [[float(logprob) for _, logprob in answer] for answer in chosen], list(reply["finish_reasons"])


class TokensFromSGLang(_TokenServer, SGLangServer):  # type: ignore[misc]
    """SGLang's ``/generate``."""

    def _request(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        sampling = dict(sampling)
        sampling["max_new_tokens"] = sampling.pop("max_tokens")
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    def _read(self, reply: Any) -> tuple[list[list[int]], list[list[float]], list[Any]]:
        described = [answer["meta_info"] for answer in (reply if isinstance(reply, list) else [reply])]
        chosen = [answer["output_token_logprobs"] for answer in described]
        tokens = [[int(entry[1]) for entry in answer] for answer in chosen]
        logprobs = [[float(entry[0]) for entry in answer] for answer in chosen]
        return tokens, logprobs, [answer["finish_reason"] for answer in described]


def address_of(server: Any) -> str | None:
    """The base URL of a server of atropos, None if it has none."""
    client = getattr(server, "openai", None)
    return server.config.base_url or (str(client.base_url) if client is not None else None)


def printed(url: str | None) -> str:
    """An address as it is printed: without a user's name and password."""
    return re.sub(r"(?<=://)[^/@]*@", "", url or "")


def unreachable(url: str | None, error: BaseException) -> ModelServerError:
    """The failure of a request that did not get to a server."""
    return ModelServerError(
        f"no model server answers at {printed(url)}: {error}", next_step="start it, or set --openai.base_url"
    )


async def expect_servers(servers: Sequence[Any], *, wait_s: float) -> None:
    """Return when a model's server answers anything at all, over HTTP. Raises: ModelServerError naming the addresses
    when none does within ``wait_s`` seconds (and three attempts)."""
    urls = sorted({url for server in servers if (url := address_of(server))})
    ends_s, attempt = time.monotonic() + wait_s, 0
    while urls:
        attempt += 1
        problems = [problem for problem in await asyncio.gather(*map(_problem, urls)) if problem is not None]
        if len(problems) < len(urls):
            return
        if attempt >= ATTEMPTS and time.monotonic() >= ends_s:
            raise unreachable(", ".join(urls), problems[0])
        if attempt == ATTEMPTS:
            logger.warning("%s; waiting up to %g s", unreachable(", ".join(urls), problems[0]).message, wait_s)
        await asyncio.sleep(pause_s(FIRST_DELAY_S, LONGEST_DELAY_S, attempt))


async def _problem(url: str) -> BaseException | None:
    """Why nothing can be connected to there; None if something answers, however."""
    timeout = aiohttp.ClientTimeout(total=2 * PROBE_TIMEOUT_S, sock_connect=PROBE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as client,
            client.get(f"{url.rstrip('/')}/models") as reply,
        ):
            await reply.read()
    except aiohttp.ClientSSLError:
        return None
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        return error
    except (aiohttp.ClientError, TimeoutError):
        return None
    return None


def with_tokenizer(server: ServerBaseline, tokenizer_name: str) -> ServerBaseline:
    """The configuration with the environment's tokenizer if it names none; otherwise atropos would look up the
    model's name on a hub."""
    if server.tokenizer_name != "none":
        return server
    return server.model_copy(update={"tokenizer_name": tokenizer_name})


class NoTokenizer:
    """In place of a tokenizer that nobody named, where its tokens would be for reading only."""

    @classmethod
    def from_pretrained(cls, _: str) -> NoTokenizer:
        """The same for every name."""
        return cls()

    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        """Nothing, for which a group has a placeholder."""
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        """What atropos shows of a rollout at wandb."""
        return "(no text: tokenizer_name is not set)"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no tokenizer is loaded, so it has no {name}: set tokenizer_name")


@contextmanager
def tokenizer_loaded(needed: bool) -> Iterator[None]:
    """For the body that runs atropos' constructor, which always loads one: unless ``needed``, it gets
    :class:`NoTokenizer`."""
    loader = atropos.AutoTokenizer
    atropos.AutoTokenizer = loader if needed else NoTokenizer
    try:
        yield
    finally:
        atropos.AutoTokenizer = loader


SERVERS: dict[str, type[APIServer]] = {
    "openai": OnceRetryingServer,
    "vllm": TokensFromVLLM,
    "sglang": TokensFromSGLang,
}


def server_type_of(configs: Sequence[ServerBaseline], tool_call_parser: str | None) -> str:
    """The common type of all servers. Raises: ConfigError when they differ, when the type gives no tokens and
    logprobs and is not OpenAI-style either, or when a parser is missing for it."""
    kinds = {config.server_type for config in configs}
    if len(kinds) != 1:
        raise ConfigError("server_type", f"{', '.join(sorted(kinds))} cannot be mixed", next_step="use one type")
    kind = str(kinds.pop())
    if kind not in SERVERS:
        raise ConfigError(
            "server_type", f"{kind!r} gives no tokens with logprobs", next_step=f"allowed: {', '.join(SERVERS)}"
        )
    if kind != "openai" and tool_call_parser is None:
        raise ConfigError(
            "tool_call_parser", f"is not set, and {kind!r} gives text", next_step="name the model family's format"
        )
    return kind

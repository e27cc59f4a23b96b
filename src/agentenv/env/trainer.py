"""The connection to the trainer's API, which may die and come back without its memory.

atropos' own requests give up after three attempts, and a restarted API answers 500 to an environment it has forgotten.
Here they wait; a forgotten environment registers again, and its slots stay open meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
from atroposlib.envs.base import BaseEnv
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_exponential_jitter

from agentenv.errors import ConfigError, InfraError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


class NotStartedError(Exception):
    """The API runs, but no trainer has started it."""


class TrainerLink:
    """Mixin for AgentEnv, placed before atropos' class. Every request waits up to ``trainer_wait_s`` for an API that
    does not answer, and then raises InfraError."""

    config: Any
    status_dict: dict[str, Any]
    register_env: Callable[[], Awaitable[None]]

    def prepare_link(self) -> None:
        """Called once by the constructor."""
        self._asking = asyncio.Lock()
        self._silent_since: float | None = None
        self._reason: type[BaseException] | None = None
        self._may_be_forgotten = False

    async def setup_wandb(self) -> None:
        """As in atropos."""
        await self._answered(super().setup_wandb)  # type: ignore[misc]

    async def get_server_info(self) -> None:
        """As in atropos. Raises: ConfigError when the trainer's batches are smaller than a group."""
        try:
            await self._answered(super().get_server_info)  # type: ignore[misc]
        except ValueError as error:
            size, batch = self.config.group_size, self.config.batch_size
            if size <= batch:
                raise
            raise ConfigError(
                "group_size",
                f"{size} is more than the trainer's batch_size of {batch}",
                next_step=f"allowed: 1 to {batch}",
            ) from error

    async def _register_env(self) -> Any:
        """The API's answer, once a trainer has started it."""
        return await self._answered(self._registration)

    async def _registration(self) -> Any:
        config = self.config
        body = {
            "max_token_length": config.max_token_length,
            "desired_name": config.wandb_name,
            "weight": config.inference_weight,
            "min_batch_allocation": config.min_batch_allocation,
            "group_size": config.group_size,
        }
        url = f"{config.rollout_server_url}/register-env"
        async with aiohttp.ClientSession() as client, client.post(url, json=body) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        if answer["status"] != "success":
            raise NotStartedError("no trainer has registered with it yet")
        self._may_be_forgotten = False
        return answer

    async def get_status(self) -> None:
        """As in atropos; registers again first when the API has forgotten this environment."""
        async with self._asking:  # one at a time: senders and atropos' loop must not both register
            await self._answered(self._status)

    async def _status(self) -> None:
        if self._may_be_forgotten:
            await self._register_again()
        try:
            await _once(BaseEnv.get_status, self)
        except aiohttp.ClientResponseError as error:
            if error.status != 500:
                raise
            await self._register_again()
            await self._status_of_a_registered()

    async def _status_of_a_registered(self) -> None:
        try:
            await _once(BaseEnv.get_status, self)
        except aiohttp.ClientResponseError as error:
            if error.status != 500:
                raise
            raise InfraError(
                f"the trainer's API at {self.config.rollout_server_url} fails for an environment that has just "
                f"registered: {error}",
                next_step="see its log",
            ) from error

    async def _register_again(self) -> None:
        queued = getattr(self, "status_dict", {}).get("self_queue_size", 0)
        await self.register_env()
        logger.warning(
            "the trainer's API was restarted and lost this environment's registration: registered again, with the "
            "same slots; groups the trainer had not fetched are lost (%d in the API's queue at its last answer)",
            queued,
        )
        await _once(BaseEnv.get_server_info, self)

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """As in atropos. Asks for the status first: an API that was restarted must not get data before it knows this
        environment, because data would make it skip its own initialisation."""

        async def send() -> None:
            await self.get_status()
            await _once(BaseEnv._send_scored_data_to_api, self, scored_data)

        await self._answered(send)

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What ``ask`` returns, as soon as the API answers. Raises: InfraError after ``trainer_wait_s``."""
        attempts = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=stop_after_delay(self.config.trainer_wait_s),
            before_sleep=self._before_sleep,
            reraise=True,
        )
        try:
            answer: T = await attempts(ask)
        except Exception as error:
            if not (_may_pass(error) or isinstance(error, aiohttp.ClientError)):
                raise
            raise InfraError(
                f"the trainer's API at {self.config.rollout_server_url} failed: {_said(error)}",
                next_step="start it with `run-api`, or set --env.rollout_server_url",
            ) from error
        if self._silent_since is not None:
            logger.warning("the trainer's API answers, after %.0f s", time.monotonic() - self._silent_since)
            self._silent_since = self._reason = None
        return answer

    def _before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, aiohttp.ClientConnectorError) and hasattr(self, "env_id"):
            self._may_be_forgotten = True  # nothing listens: the process is dead, and its memory with it
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        if error is not None and self._reason is not type(error):
            self._reason = type(error)
            waiting = f"waiting up to {self.config.trainer_wait_s:g} s; slots stay leased"
            logger.warning("the trainer's API at %s: %s; %s", self.config.rollout_server_url, _said(error), waiting)


async def _once(method: Any, *arguments: Any) -> Any:
    """A method of atropos without its own retries."""
    return await getattr(method, "__wrapped__", method)(*arguments)


def _may_pass(error: BaseException) -> bool:
    """Whether the API may answer later: it is not there, is not started, or fails."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= 500
    # atropos raises a plain Exception for a 5xx when it sends
    return isinstance(error, (aiohttp.ClientError, TimeoutError, NotStartedError)) or type(error) is Exception


def _said(error: BaseException | None) -> str:
    return str(error) or type(error).__name__

"""AgentEnv: an atropos environment whose rollouts use tools in sandbox slots.

Subclass it and write ``build_task`` and ``score_trajectory``; docs/environments.md has the other hooks and the
failure contract. Rollouts are implemented in :mod:`agentenv.agent`, independent of any trainer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import signal
import sys
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Self

import aiohttp
from atroposlib.envs.base import BaseEnv, BaseEnvConfig, generate_html
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from pydantic import Field, ValidationError
from tenacity import RetryError

from agentenv.agent.alone import run_alone
from agentenv.agent.datasets import load_items
from agentenv.agent.generate import ProcessRun
from agentenv.agent.group import ItemRetries, end_all, outcome_of, run_group, summary
from agentenv.agent.hooks import call_hook
from agentenv.agent.jsonable import item_id
from agentenv.agent.loop import AgentResult
from agentenv.agent.protocols import Model
from agentenv.agent.rollout import Rollout, RolloutServices
from agentenv.agent.rollout_log import RolloutLog
from agentenv.agent.sequences import exact_group, scored_group
from agentenv.agent.settings import AgentSettings
from agentenv.agent.shutdown import closed_at_end
from agentenv.agent.transcript import Transcript
from agentenv.agent.turns import Turns
from agentenv.config import explain
from agentenv.env.config import AgentFields, explained, joined_negatives
from agentenv.env.model_servers import SERVERS, server_type_of, with_tokenizer
from agentenv.env.models import EnvModels
from agentenv.env.tools import EnvTools, GroupServices, default_tool_server
from agentenv.env.tracking import WandbReporting
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.metrics.exporter import Meter
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog

if TYPE_CHECKING:
    from agentenv.api.tool_server.core import ToolServer

logger = logging.getLogger(__name__)


class AgentEnvConfig(AgentFields, BaseEnvConfig):  # type: ignore[misc]
    """atropos' settings and ours in one flat model. Raises: ConfigError (see :class:`AgentFields`)."""

    worker_timeout: float = Field(
        default=7200, description="Seconds after which atropos cancels a group and forgets its item; -1: never"
    )


class AgentEnv(WandbReporting, BaseEnv):  # type: ignore[misc]
    """Base of agent environments. Hooks may be plain or ``async``; a hook that raises is a TaskError,
    reported and never scored. ``async with env`` sets it up and closes it outside atropos' commands."""

    name = "agentenv"
    env_config_cls = AgentEnvConfig
    server_cls: type[APIServer] = APIServer
    _items: Iterator[Any] | None

    @classmethod
    def config_init(cls) -> tuple[AgentEnvConfig, list[APIServerConfig]]:
        """Defaults that the command line and YAML override. A list of one server on purpose: otherwise atropos
        ignores ``--openai.base_url`` in ``process`` and ``evaluate``."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://127.0.0.1:9004/v1", api_key="unused")]

    # -- hooks an environment must implement ------------------------------------------------------

    @abstractmethod
    def build_task(self, item: Any) -> str | Awaitable[str]:
        """The task's text for the model."""

    def score_trajectory(self, item: Any, final_response: str) -> float | Awaitable[float]:
        """The score, judged by the final answer only; alternatively implement ``verify_and_score_trajectory``."""
        raise NotImplementedError("write score_trajectory or verify_and_score_trajectory")

    # -- optional hooks -----------------------------------------------------------------------------

    def setup_agent_env(self) -> Any:
        """Called once, when slots are available and before the first item."""

    async def get_next_item(self) -> Any:
        """The next item, None if there are no more. By default: ``dataset_name``, repeated endlessly."""
        if self._items is None:
            name, split = self.config.dataset_name, self.config.dataset_split
            self._items = itertools.cycle(await asyncio.to_thread(load_items, name, split))
        return next(self._items)

    def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ToolContext) -> Any:  # noqa: ARG002
        """Prepare the trajectory's slot; a dict returned here is passed to the verifier as ``workspace_meta``."""
        return {}

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,
        *,
        trajectory_id: str,  # noqa: ARG002
        exec_tool: ToolContext,  # noqa: ARG002
        agent_result: AgentResult,  # noqa: ARG002
        workspace_meta: dict[str, Any],  # noqa: ARG002
    ) -> tuple[float, dict[str, Any]]:
        """The score, and data to record in the transcript. By default: ``score_trajectory``."""
        return await call_hook("score_trajectory", self.score_trajectory, item, final_response), {}

    def score_destroyed_slot(
        self,
        item: Any,  # noqa: ARG002
        agent_result: AgentResult,  # noqa: ARG002
        *,
        trajectory_id: str,  # noqa: ARG002
        workspace_meta: dict[str, Any],  # noqa: ARG002
    ) -> float | Awaitable[float | None] | None:
        """The score of a rollout whose slot was destroyed by the policy's own commands. There is nothing left to
        verify; by default the attempt has failed: 0.0. None: no score, the group continues without it."""
        return 0.0

    def build_agent_config(self, item: Any) -> AgentSettings | Awaitable[AgentSettings]:  # noqa: ARG002
        """Limits and sampling for this item; by default from the config."""
        return self.config.agent_settings()  # type: ignore[no-any-return]

    def build_tools(self) -> ToolCatalog:
        """The tools of this environment; by default the built-in ones and the tool server's that the config enables."""
        return self._env_tools.offered()

    def build_tool_server(self) -> ToolServer:
        """Runs external tools with ``tool_server_url="inprocess"``; by default configured by ``tool_server_config``."""
        return default_tool_server(self.config)

    # -- for use by environments --------------------------------------------------------------------

    async def run_agent(self, task: str, *, settings: AgentSettings | None = None) -> AgentResult:
        """Run one agent on a fresh slot, outside any group; nothing is scored.

        A hook may call it if ``hook_slots`` reserves slots for that; docs/environments.md describes its failures.

        Raises: InfraError, SlotDestroyedError (never in a hook); ConfigError when the first prompt does not fit the
        model, or in a hook without ``hook_slots``.
        """
        return await run_alone(self._opened(), settings or self.config.agent_settings(), task)

    async def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Roll out ``eval_items`` items once each; return the mean score, logged the way atropos logs evaluations."""
        if self.config.eval_items == 0:
            return {}
        began_s = time.time()
        items = [
            item for item in [await self.get_next_item() for _ in range(self.config.eval_items)] if item is not None
        ]
        transcripts = list(itertools.chain(*await asyncio.gather(*(self._roll_out(item, 1) for item in items))))
        metrics, samples = summary(transcripts)
        logger.info("evaluation: %s", metrics)
        await self.evaluate_log(metrics, start_time=began_s, end_time=time.time(), samples=samples, verbose=False)
        return metrics

    # -- construction and life cycle ----------------------------------------------------------------

    def __init__(
        self,
        config: AgentEnvConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Opens nothing yet. Raises: ConfigError when the model's server, its tokenizer or the file cannot be used."""
        own, base = type(self), AgentEnv
        if own.score_trajectory is base.score_trajectory and (
            own.verify_and_score_trajectory is base.verify_and_score_trajectory
        ):
            raise TypeError(f"{own.__name__} must write score_trajectory or verify_and_score_trajectory")
        configs = server_configs if isinstance(server_configs, list) else [server_configs]
        kind = server_type_of(configs, config.tool_call_parser)
        configs = [with_tokenizer(server, config.tokenizer_name) for server in configs]
        config.wandb_name = config.wandb_name or self.name  # the trainer's API refuses to register without one
        # atropos takes a lone APIServerConfig for four servers on localhost, whatever its base_url says.
        several = isinstance(server_configs, (APIServerConfig, list))
        if type(self).server_cls is APIServer:
            self.server_cls = SERVERS[kind]
        with explained(self, config):
            super().__init__(config, configs if several else configs[0], slurm, testing)
        self._models = EnvModels(config, kind, self.server, self.tokenizer, self._trainer_limit)
        self.counts: Counter[str] = Counter()
        self._items = None
        self._farm: RolloutServices | None = None
        self._group_farms: GroupServices
        self._env_tools = EnvTools(config)
        self._resources = AsyncExitStack()
        self._retries = ItemRetries(config.item_retries)
        self._tokenizing = asyncio.Lock()
        self._log = RolloutLog(config.rollouts_path)
        self.prepare_reports()

    async def setup(self) -> None:
        """Start the pool and the executor, check that a slot is available, then call ``setup_agent_env``.

        Raises: SandboxUnavailableError or a subclass, with cause and cure; TaskError when the hook raised.
        """
        config: AgentEnvConfig = self.config
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._env_tools.opened(self.build_tool_server))
            catalog = self.build_tools()
            meter = Meter(config.tool_pool_mode, config.metrics_port, config.metrics_host)
            pool = await stack.enter_async_context(SlotPool(self.build_backend(), config.pool_settings()))
            tools, run = self._env_tools.runnable(catalog)
            executor = await stack.enter_async_context(
                ToolExecutor(pool, tools, config.executor_settings(), external=run, observer=meter.observer)
            )
            if url := await stack.enter_async_context(meter.serving(pool, executor)):
                logger.info("metrics are at %s", url)
            async with await pool.lease("setup", timeout_s=config.start_timeout_s):
                logger.info("slots are available: %r", pool)
            self._farm = RolloutServices(
                sessions=executor,
                tools=tuple(catalog.openai_tools()),
                model_for=self.model_for,
                handle_for=ToolContext,
                turns=Turns(config.max_containers * config.slots_per_container, kept=config.hook_slots),
                acquire_timeout_s=config.acquire_timeout_s,
                infra_retries=config.infra_retries,
                infra_retry_delay_s=config.infra_retry_delay_s,
                verification=config.verification,
            )
            self._group_farms = self._env_tools.group_farms(self._farm, executor, catalog)
            await call_hook("setup_agent_env", self.setup_agent_env)
            self._resources = stack.pop_all()

    async def close(self) -> None:
        """End every rollout, then close everything :meth:`setup` started. Repeatable."""
        tasks = {*self.workers, *self.eval_workers, *([self.eval_runner] if self.eval_runner else [])}
        tasks.discard(asyncio.current_task())
        await end_all(tasks)
        self._farm = None
        await self._resources.aclose()
        await end_all([task for server in self.server.servers if (task := getattr(server, "check_task", None))])
        for server in self.server.servers:
            if client := getattr(server, "openai", None):
                await client.close()
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()

    async def __aenter__(self) -> Self:
        await self.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def build_backend(self) -> ContainerBackend:
        """The backend of the farm, by default the one ``tool_pool_mode`` names. Override it to use your own."""
        config = self.config
        return make_backend(
            config.tool_pool_mode,
            config.container_settings(),
            nomad=config.nomad_settings(),
            start_timeout_s=config.start_timeout_s,
        )

    def model_for(self, trajectory: str) -> Model:
        """The model for one trajectory."""
        return self._models.of(trajectory)

    def _trainer_limit(self) -> int | None:
        """Longest sequence the trainer accepts, if known: atropos skips whole groups because of a longer one."""
        serving = getattr(self, "env_id", None) is not None and self.max_token_len > 0
        return self.max_token_len - 1 if serving else None

    # -- groups -----------------------------------------------------------------------------------

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """One group: its scored members, or ``(None, [item])`` when none could be scored.

        An item whose group failed ``1 + item_retries`` times is dropped, logged and counted.
        """
        transcripts = await self._roll_out(item, self.config.group_size)
        self.report_group(self.config.group_size, transcripts)
        outcome = outcome_of(transcripts)
        self.counts[f"groups_{outcome}"] += 1
        group = exact_group(transcripts) if self._models.exact else None
        if outcome == "retry" or (group is not None and not group["tokens"]):  # an overridden model_for may give none
            if group is not None and outcome != "retry":
                logger.error("item %s: its models gave no tokens; there is nothing to train on", item_id(item))
            again = self._retries.again(item, transcripts)
            self.counts["items_dropped"] += not again
            return None, again
        self._retries.succeeded(item)
        if group is not None:
            return group, []
        async with self._tokenizing:  # a fast tokenizer used by two threads at once may fail
            return await asyncio.to_thread(scored_group, self.tokenizer, transcripts), []

    async def _roll_out(self, item: Any, size: int) -> list[Transcript]:
        key = item_id(item)
        group = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', key)[:80]}-{uuid.uuid4().hex[:8]}"
        self._opened()
        together = max(size, self.config.infra_retries)
        rollout = Rollout(self._group_farms.of(group, key), self, item, key, retries_together=together)
        transcripts = await run_group([f"{group}-{n}" for n in range(size)], rollout.run, key)
        for transcript in transcripts:
            self.counts["rollouts"] += 1
            self.counts["infra_retries"] += len(transcript.earlier_attempts)
            if self._models.exact and transcript.score is not None and not transcript.token_sequences:
                self.counts["rollouts_without_tokens"] += 1
            if transcript.fault != "none":
                self.counts[f"fault_{transcript.fault}"] += 1
        if not await self._log.add(group, item, size, transcripts):
            self.counts["records_lost"] += 1
        return transcripts

    def _opened(self) -> RolloutServices:
        if self._farm is None:
            raise InfraError("the environment is not set up", next_step="use it as 'async with env', or call setup()")
        return self._farm

    # -- atropos' commands ------------------------------------------------------------------------

    async def env_manager(self) -> None:
        """``serve``: atropos' loop, with everything closed however it ends. Raises: InfraError when the trainer's
        API is unreachable or fails."""
        async with closed_at_end(self.close):
            try:
                await super().env_manager()
            except (aiohttp.ClientError, RetryError) as error:
                cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
                raise InfraError(
                    f"the trainer's API at {self.config.rollout_server_url} failed: {cause}",
                    next_step="start it with `run-api`, or set --env.rollout_server_url",
                ) from error

    async def _run_evaluate(self) -> None:
        """``evaluate``."""
        if self.config.eval_items == 0 and type(self).evaluate is AgentEnv.evaluate:
            raise ConfigError("eval_items", "is 0: nothing to evaluate", next_step="set it, or write evaluate()")
        async with closed_at_end(self.close):
            await self.setup()
            await self.evaluate()

    async def process_manager(self) -> None:
        """``process``: ``total_steps`` groups into ``data_path_to_save_groups``.

        atropos' own implementation runs one group at a time, forgets items to retry and never gives up; this one
        keeps ``max_num_workers`` groups running, and raises InfraError after ``give_up_after_failed_groups`` failed
        groups in a row.
        """
        self.config.group_size = self.group_size_to_process
        self.curr_step = 0
        self.max_token_len = self.config.max_token_length  # only used in warnings here: nothing is skipped
        async with closed_at_end(self.close):
            self.start_wandb()
            await self.setup()
            await ProcessRun(
                self, self.n_groups_to_process, self.max_num_workers, self.config.give_up_after_failed_groups
            ).run()
            logger.info("processed %d groups: %s", self.curr_step, dict(self.counts))
        await asyncio.to_thread(generate_html, self.config.data_path_to_save_groups)

    async def keep_group(self, group: dict[str, Any], item: Any) -> None:
        """Write a group of ``process`` to its file; nothing is sent to a trainer."""
        await self.handle_send_to_api(
            await self.postprocess_histories(group), item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
        )
        await self.wandb_log()

    @classmethod
    def cli(cls) -> NoReturn:
        """``serve``, ``process``, ``evaluate``. An AgentEnvError ends it with one line and status 2 (config) or 1."""
        sys.argv[1:] = joined_negatives(sys.argv[1:])
        try:
            super().cli()
        except ValidationError as error:
            _exit_with(explain(error), 2)
        except ConfigError as error:
            _exit_with(error, 2)
        except AgentEnvError as error:
            _exit_with(error, 1)
        except KeyboardInterrupt:  # everything is closed by now
            sys.exit(128 + signal.SIGINT)
        sys.exit(0)


def _exit_with(error: AgentEnvError, status: int) -> NoReturn:
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.exit(status)

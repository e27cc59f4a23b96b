"""AgentEnv: an atropos environment whose rollouts use tools in sandbox slots.

Subclass it and write ``build_task`` and ``score_trajectory``; docs/environments.md has the other hooks and the
failure contract. Rollouts are implemented in :mod:`agentenv.agent`, independent of any trainer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NoReturn, Self

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from pydantic import Field, model_validator
from typing_extensions import TypeVar

from agentenv.agent.datasets import load_items
from agentenv.agent.failure_log import FailureLog
from agentenv.agent.generate import ProcessRun, no_items, nothing_scored
from agentenv.agent.group import PLACE, ItemRetries, Place, end_all, outcome_of, summary
from agentenv.agent.hook_slot_gate import HookSlotGate
from agentenv.agent.hooks import (
    call_hook,
    finite,
    outside_rollouts,
    watched,
)
from agentenv.agent.jsonable import item_id
from agentenv.agent.preparation import Preparations
from agentenv.agent.program import AgentProgram
from agentenv.agent.protocols import Model, ToolDefinition
from agentenv.agent.result import AgentResult
from agentenv.agent.results import counted
from agentenv.agent.rollout import Rollout, RolloutServices
from agentenv.agent.sequences import exact_group, scored_group
from agentenv.agent.settings import AgentSettings
from agentenv.agent.shutdown import closed_at_end
from agentenv.agent.single_run import run_single
from agentenv.agent.transcript import ConversationRecord, Transcript
from agentenv.env.command_line import run_command
from agentenv.env.config import AgentFields, explained
from agentenv.env.farm import open_pool
from agentenv.env.images import ItemsAhead, RootsOf
from agentenv.env.invocation import Invocation
from agentenv.env.model_servers import (
    SERVERS,
    address_of,
    expect_servers,
    printed,
    server_type_of,
    tokenizer_loaded,
    with_tokenizer,
)
from agentenv.env.models import EnvModels
from agentenv.env.older_names import differing_defaults
from agentenv.env.preflight import (
    check_hooks,
    check_numbers,
    check_servers,
    first_item,
    is_typed,
    places,
    probe,
    warn_of_queueing,
)
from agentenv.env.programs import check_programs, runner_of, with_program
from agentenv.env.progress import RunProgress, print_rows
from agentenv.env.records import RunFiles, groups_in_run
from agentenv.env.tools import EnvTools, GroupServices, default_tool_server
from agentenv.env.tracking import WandbReporting
from agentenv.env.trainer import TrainerLink
from agentenv.errors import ConfigError, InfraError, TaskError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.metrics.exporter import Meter
from agentenv.runs.manifest import Verb
from agentenv.runs.spans import Served
from agentenv.runs.tracing import Tracing
from agentenv.sdk.images import StoredImages
from agentenv.sdk.roots import ImageRoot, farm_images
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.leases import RunKind

if TYPE_CHECKING:
    from agentenv.api.tool_server.core import ToolServer

logger = logging.getLogger(__name__)

DEFAULT_TOKENIZER: Final[str] = BaseEnvConfig.model_fields["tokenizer_name"].default


class AgentEnvConfig(AgentFields, BaseEnvConfig):  # type: ignore[misc]
    """atropos' settings and ours in one flat model. Raises: ConfigError (see :class:`AgentFields`)."""

    worker_timeout: float = Field(
        default=7200, description="Seconds after which atropos cancels a group and forgets its item; -1: never"
    )

    tokenizer_name: str = Field(
        default=DEFAULT_TOKENIZER,
        description="A Hugging Face name or a directory; the default is not loaded with server_type openai",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_numbers(self)
        return self


ConfigT = TypeVar("ConfigT", bound=AgentEnvConfig, default=AgentEnvConfig)


class AgentEnv(WandbReporting, TrainerLink, BaseEnv, Generic[ConfigT]):  # type: ignore[misc]
    """Base of agent environments. Hooks may be plain or ``async``, and declare the keywords that they use; a hook
    that raises is a TaskError, reported and never scored. ``AgentEnv[MyConfig]`` gives ``self.config`` its type.
    ``async with env`` sets it up and closes it outside atropos' commands."""

    name = "agentenv"
    config: ConfigT
    env_config_cls: type[AgentEnvConfig] = AgentEnvConfig
    server_cls: type[APIServer] = APIServer
    program: AgentProgram | None = None
    """The agent program of every item; None: the built-in loop."""
    as_json: ClassVar[bool] = False
    """Whether the command prints its results as one JSON document: ``--json``."""
    dry_run: ClassVar[bool] = False
    """Whether the command ends before its first rollout: ``--dry-run``."""
    invocation: ClassVar[Invocation | None] = None
    """How a user has started the command; None for an environment that is used as a library."""
    jsonl_writer: Any
    _items: Iterator[Any] | None

    @classmethod
    def config_init(cls) -> tuple[AgentEnvConfig, list[APIServerConfig]]:
        """Defaults that the command line and YAML override. A list of one server on purpose: otherwise atropos
        ignores ``--openai.base_url`` in ``process`` and ``evaluate``."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://127.0.0.1:9004/v1", api_key="unused")]

    # A hook declares the keywords that it uses. `*_: Any, **keywords: Any` lets type checkers accept any of them in an
    # override, and `Awaitable` in what it returns both plain and async ones.

    # -- hooks an environment must implement ------------------------------------------------------

    def build_task(self, item: Any) -> str | Awaitable[str]:
        """The task's text for the model; by default the item's field ``prompt_field``."""
        field = self.config.prompt_field
        if not isinstance(item, Mapping) or not isinstance(item.get(field), str):
            raise TaskError(f"the item has no text in {field!r}", next_step="write build_task, or set prompt_field")
        return str(item[field])

    def score_trajectory(self, item: Any, final_response: str) -> float | Awaitable[float]:
        """The score, judged by the final answer only; alternatively implement ``verify_and_score_trajectory``."""
        raise NotImplementedError("write score_trajectory or verify_and_score_trajectory")

    # -- optional hooks -----------------------------------------------------------------------------

    def setup_agent_env(self) -> Any:
        """Called once, when slots are available and before the first item."""

    def get_next_item(self) -> Any:
        """The next item, None if there are no more. By default: ``dataset_name``, repeated endlessly."""
        return self._next_of_dataset()

    async def _next_of_dataset(self) -> Any:
        if self._items is None:
            name, split = self.config.dataset_name, self.config.dataset_split
            self._items = itertools.cycle(await asyncio.to_thread(load_items, name, split))
        return next(self._items)

    def prepare(self, item: Any, *_: Any, **keywords: Any) -> Any:  # noqa: ARG002
        """Make the files that all rollouts of an item begin with; a dict returned here is part of the verifier's
        ``workspace_meta``. Called in every slot, or with ``prepare = "once"`` in one, from which the others are forked:
        then no process that it started is left. Keyword: ``exec_tool``."""
        return {}

    def prepare_key(self, item: Any) -> Awaitable[str | None] | str | None:
        """Names what ``prepare`` makes of this item, for ``prepare = "once"``: slots of one key (and one image, with
        the same limits) begin alike. By default the item's id. None: every rollout of this item prepares its own."""
        return item_id(item)

    def setup_trajectory_workspace(self, item: Any, *_: Any, **keywords: Any) -> Any:  # noqa: ARG002
        """Prepare the trajectory's slot; a dict returned here is passed to the verifier as ``workspace_meta``.
        Keywords: ``trajectory_id``, ``exec_tool``."""
        return {}

    def continue_task(self, item: Any, *_: Any, **keywords: Any) -> Any:  # noqa: ARG002
        """A further task for the model, once it has ended its turns: in the same conversation and slot, with limits
        counted anew. A text, or a text and an ``AgentSettings``; None, the default: the rollout is scored. Keywords:
        ``trajectory_id``, ``exec_tool``, ``agent_result``, ``workspace_meta``, to which it may add."""
        return None

    def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,
        *_: Any,
        **keywords: Any,  # noqa: ARG002
    ) -> float | tuple[float, dict[str, Any]] | Awaitable[float | tuple[float, dict[str, Any]]]:
        """The score, and data to record in the transcript. By default: ``score_trajectory``. Keywords:
        ``trajectory_id``, ``exec_tool``, ``agent_result``, ``workspace_meta``."""
        return self._final_response_scored(item, final_response)

    async def _final_response_scored(self, item: Any, final_response: str) -> tuple[float, dict[str, Any]]:
        score = await call_hook("score_trajectory", self.score_trajectory, item, final_response)
        return finite("score_trajectory", score), {}

    def score_destroyed_slot(
        self,
        item: Any,  # noqa: ARG002
        agent_result: AgentResult,  # noqa: ARG002
        *_: Any,
        **keywords: Any,  # noqa: ARG002
    ) -> float | Awaitable[float | None] | None:
        """The score of a rollout whose slot was destroyed by the policy's own commands. There is nothing left to
        verify; by default the attempt has failed: 0.0. None: no score, the group continues without it. Keywords:
        ``trajectory_id``, ``workspace_meta``."""
        return 0.0

    def build_agent_config(self, item: Any) -> AgentSettings | Awaitable[AgentSettings]:  # noqa: ARG002
        """Limits and sampling for this item; by default from the config. What is left None or empty is from there
        too."""
        return self.config.agent_settings()

    def task_image(self, item: Any) -> Awaitable[ImageRoot | str | None] | ImageRoot | str | None:  # noqa: ARG002
        """The image that is the root of this item's slots, with limits or without; it is fetched if this machine does
        not have it. None, the default: plain slots."""
        return None

    def agent_program(self, item: Any) -> Awaitable[AgentProgram | None] | AgentProgram | None:  # noqa: ARG002
        """The agent program that runs in this item's slots in the place of the built-in loop (docs/agents.md); by
        default ``program``. None: the built-in loop."""
        return self.program

    def trains_conversation(self, conversation: ConversationRecord) -> Awaitable[bool] | bool:
        """Whether a conversation of an agent program is trained on; by default as ``program_train`` says, which is
        ``conversation.trained``."""
        return conversation.trained

    def build_tools(self) -> ToolCatalog:
        """The tools of this environment; by default the built-in ones and the tool server's that the config enables."""
        return self._env_tools.offered()

    def build_tool_server(self) -> ToolServer:
        """Runs external tools with ``tool_server_url="inprocess"``; by default configured by ``tool_server_config``."""
        return default_tool_server(self.config)

    # -- for use by environments --------------------------------------------------------------------

    async def run_agent(
        self, task: str, *, settings: AgentSettings | None = None, trajectory_id: str | None = None
    ) -> AgentResult:
        """Run one agent on a fresh slot, outside any group; nothing is scored. ``final_response, debug = await
        run_agent(task)`` unpacks the result.

        A hook may call it if ``hook_slots`` reserves slots for that; docs/environments.md describes its failures.

        Raises: InfraError, SlotDestroyedError (never in a hook); ConfigError when the first prompt does not fit the
        model, or in a hook without ``hook_slots``.
        """
        return await run_single(self._opened(), settings or self.config.agent_settings(), task, trajectory_id)

    async def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Roll out ``eval_items`` items once each; return the mean score, logged the way atropos logs evaluations."""
        if self.config.eval_items == 0:
            return {}
        began_s = time.time()
        given = [await self.get_next_item() for _ in range(self.config.eval_items)]
        counted = self.progress.verb != "serve"  # where the results are those of training

        async def attempts(position: int, item: Any) -> Sequence[Transcript]:
            if counted and not self._files.to_play(position, item):
                return self._files.kept.evaluated.get(position, ())
            PLACE.set(Place(position if counted else None))  # of this task
            return await self._roll_out(item, self.config.eval_epochs, kind="eval", counted=counted)

        rollouts = await asyncio.gather(*itertools.starmap(attempts, enumerate(given)))
        metrics, samples = summary(rollouts)
        if not counted:
            self.progress.say(f"evaluation at step {self.curr_step}: {metrics}")
        if (directory := self.config.data_dir_to_save_evals) is None:
            return metrics
        try:
            await self.evaluate_log(metrics, start_time=began_s, end_time=time.time(), samples=samples, verbose=False)
        except OSError as error:
            self._files.lost("evaluation", directory, error.strerror or str(error))
        return metrics

    # -- construction and life cycle ----------------------------------------------------------------

    def __init__(
        self,
        config: AgentEnvConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Opens nothing yet. Raises: ConfigError when the model's server, its tokenizer, the file or a toolset cannot
        be used; HookError when a hook is missing, could not be called, or would never be called."""
        self._check_hooks()
        self._env_tools = EnvTools(config)
        if type(self).build_tools is AgentEnv.build_tools:  # another may know more names
            self._env_tools.check_names()
        if config.prepare == "once" and type(self).prepare is AgentEnv.prepare:
            raise ConfigError("prepare", "'once', but there is no prepare()", next_step="write it, or leave this out")
        own_settings = type(self).build_agent_config is not AgentEnv.build_agent_config
        if is_typed(type(self), AgentEnv) and (found := differing_defaults(config, own_settings=own_settings)):
            logger.warning("this is not as in other harnesses, and may change scores: %s", "; ".join(found))
        configs = server_configs if isinstance(server_configs, list) else [server_configs]
        kind = server_type_of(configs, config.tool_call_parser)
        if type(self).model_for is AgentEnv.model_for:
            check_servers(configs)
        configs = [with_tokenizer(server, config.tokenizer_name) for server in configs]
        config.wandb_name = config.wandb_name or self.name  # the trainer's API refuses to register without one
        # atropos takes a lone APIServerConfig for four servers on localhost, whatever its base_url says.
        several = isinstance(server_configs, (APIServerConfig, list))
        if type(self).server_cls is APIServer:
            self.server_cls = SERVERS[kind]
        named = config.tokenizer_name != DEFAULT_TOKENIZER
        with (
            explained(self, config),
            tokenizer_loaded(named or kind != "openai"),
            groups_in_run(config, self.invocation),
        ):
            super().__init__(config, configs if several else configs[0], slurm, testing)
        self.counts: Counter[str] = Counter()
        self._items = None
        self.get_next_item = watched("get_next_item", self.get_next_item)  # type: ignore[method-assign]  # for atropos
        self._farm: RolloutServices | None = None
        self._group_farms: GroupServices
        self._resources = AsyncExitStack()
        self._retries = ItemRetries(config.item_retries)
        self._tokenizing = asyncio.Lock()
        self.progress = RunProgress(as_json=self.as_json)
        self._files = RunFiles(config, self.name, self._model_name(), self.counts, self.progress, self.invocation)
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
            self.jsonl_writer = self._files.groups_file()
        try:
            self._models = EnvModels(config, kind, self.server, self.tokenizer, self._trainer_limit)
        except ConfigError:
            if self.jsonl_writer is not None:
                self.jsonl_writer.close()  # which removes the empty file
            raise
        self._tracing = Tracing(self._files.run, Served(*self._provider_and_url(kind)))
        warn_of_queueing(configs, config.group_size)
        self.prepare_reports()
        self.prepare_link()

    def _check_hooks(self) -> None:
        check_hooks(self, AgentEnv)
        check_programs(type(self), AgentEnv)

    async def setup(self) -> None:
        """Start the pool and the executor, check that a slot is available, then call ``setup_agent_env``.

        Raises: SandboxUnavailableError or a subclass, with cause and cure; TaskError when the hook raised.
        """
        config: AgentEnvConfig = self.config
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._env_tools.opened(self.build_tool_server))
            with outside_rollouts("build_tools"):
                catalog = self.build_tools()
            if self.progress.verb or self.dry_run:
                await self._probe_model(catalog)
            meter = Meter(config.tool_pool_mode, config.metrics_port, config.metrics_host)
            own_backend = type(self).build_backend is not AgentEnv.build_backend
            name = config.wandb_name or self.name
            pool, slots, patience_s = await open_pool(stack, config, name, self.build_backend, own=own_backend)
            tools, run = self._env_tools.runnable(catalog)
            executor = await stack.enter_async_context(
                ToolExecutor(pool, tools, config.executor_settings(), external=run, observer=meter.observer)
            )
            if url := await stack.enter_async_context(meter.serving(pool, executor)):
                logger.info("metrics are at %s", url)
            logger.info("slots are available: %r", pool)
            failures = FailureLog()
            preparations = Preparations(failures, self.counts)
            if config.tool_pool_mode == "farm":
                stack.push_async_callback(preparations.drop_all, executor)
            self._farm = RolloutServices(
                sessions=executor,
                tools=tuple(catalog.openai_tools()),
                model_for=self.model_for,
                handle_for=ToolContext,
                slot_gate=HookSlotGate(slots, reserved=config.hook_slots),
                acquire_timeout_s=patience_s,
                infra_retries=config.infra_retries,
                infra_retry_delay_s=config.infra_retry_delay_s,
                verification=config.verification,
                root_of=RootsOf(StoredImages(pool)),
                failures=failures,
                preparations=preparations if config.prepare == "once" else None,
                agent=config.agent_settings(),
                programs=runner_of(config.program_settings()),
                continues=type(self).continue_task is not AgentEnv.continue_task,
            )
            self._group_farms = self._env_tools.group_farms(self._farm, executor, catalog)
            if (images := farm_images(pool)) is not None and type(self).task_image is not AgentEnv.task_image:
                ahead = ItemsAhead(self.get_next_item, self.task_image, images.prefetch)
                self.get_next_item = ahead.next  # type: ignore[method-assign]
            await call_hook("setup_agent_env", self.setup_agent_env)
            if self.progress.verb:
                self._files.begin()
                if self._files.groups and self.jsonl_writer is None:
                    self.jsonl_writer = self._files.groups_file()
            self._resources = stack.pop_all()

    async def close(self) -> None:
        """End every rollout, then close everything :meth:`setup` started. Repeatable."""
        tasks = {*self.workers, *self.eval_workers, *([self.eval_runner] if self.eval_runner else [])}
        tasks.discard(asyncio.current_task())
        await end_all(tasks)
        if self._farm is not None:
            self._farm.failures.close()
        self._farm = None
        await self._resources.aclose()
        await end_all([task for server in self.server.servers if (task := getattr(server, "check_task", None))])
        for server in self.server.servers:
            if client := getattr(server, "openai", None):
                await client.close()
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()

    async def shutdown_tool_backend(self) -> None:
        """:meth:`close`, by the name it has in other harnesses."""
        await self.close()

    async def __aenter__(self) -> Self:
        await self.setup()
        self._tracing.open()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self.close()
        await asyncio.to_thread(self._tracing.close, "", self.progress.results, error)

    def build_backend(self) -> ContainerBackend:
        """The backend of the farm, by default the one ``tool_pool_mode`` names. Override it to use your own."""
        config = self.config
        if config.tool_pool_mode == "farm":
            raise ConfigError("tool_pool_mode", "'farm' has no backend of its own")
        settings = config.container_settings()
        if config.tool_pool_mode == "local" and type(self).task_image is AgentEnv.task_image:
            settings = with_program(settings, self.program)
        return make_backend(
            config.tool_pool_mode,
            settings,
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
        group = await self._group_of(transcripts) if outcome != "retry" else None
        if group is None or not group["tokens"]:  # an overridden model_for may give none
            if group is not None:
                logger.error("item %s: no tokens from its models; nothing to train on", item_id(item))
            again = self._retries.again(item, transcripts)
            if not again:
                self.counts["items_dropped"] += 1
                self.progress.results.missing.no_score(item_id(item), transcripts)
            return None, again
        self._retries.succeeded(item)
        return group, []

    async def _group_of(self, transcripts: Sequence[Transcript]) -> dict[str, Any]:
        """The scored ones as a group for a trainer."""
        messages = self.config.include_messages
        if self._models.exact:
            return exact_group(transcripts, include_messages=messages)
        async with self._tokenizing:  # a fast tokenizer used by two threads at once may fail
            return await asyncio.to_thread(scored_group, self.tokenizer, transcripts, include_messages=messages)

    def tools_of_group(self, item: str) -> Sequence[ToolDefinition]:
        """The tools of the next group of an item: all that are offered, or drawn from the ``distribution``."""
        return self._group_farms.draws.draw(item).openai_tools()

    async def _roll_out(
        self, item: Any, size: int, *, kind: RunKind = "train", counted: bool = True
    ) -> list[Transcript]:
        key = item_id(item)
        new = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', key)[:80]}-{uuid.uuid4().hex[:8]}"
        self._opened()
        together = max(size, self.config.infra_retries)
        began_unix_s = time.time()
        services = self._group_farms.of(new, self.tools_of_group(key), key, kind)
        services = replace(services, turn_headers=self._tracing.turn_headers(new))
        rollout = Rollout(services, self, item, key, retries_together=together)
        group, transcripts, played = await self._files.play(item, size, new, rollout.run)
        for transcript in played:
            self.counts["rollouts"] += 1
            self.counts["infra_retries"] += len(transcript.earlier_attempts)
            if self._models.exact and transcript.score is not None and not transcript.token_sequences:
                self.counts["rollouts_without_tokens"] += 1
            if transcript.fault != "none":
                self.counts[f"fault_{transcript.fault}"] += 1
        if counted:
            self.progress.add(key, transcripts)
            if kind == "eval" and outcome_of(transcripts) == "retry":
                self.progress.results.missing.no_score(key, transcripts)
        self._tracing.add(new, key, kind, began_unix_s, played)
        await self._files.add(group, item, size, transcripts)
        return transcripts

    def _opened(self) -> RolloutServices:
        if self._farm is None:
            raise InfraError("the environment is not set up", next_step="use it as 'async with env', or call setup()")
        return self._farm

    # -- atropos' commands ------------------------------------------------------------------------

    @contextmanager
    def _command(self, verb: Verb, what: str, goal: int | None, size: int, *, resumable: bool = True) -> Iterator[None]:
        """One of atropos' commands: its run, its progress, its results. Raises: as the body; at the end TaskError or
        InfraError when a score is missing (but with ``serve``), or something could not be written."""
        about = f"{what}; model {self._model_and_place()}; slots: {self.config.tool_pool_mode}"
        metrics = self.config.data_dir_to_save_evals if verb == "evaluate" else None
        with self._files.command(verb, goal, size, metrics, resumable=resumable):
            shown = self.progress.shown(verb, about, goal, self._files.at_end)
            with self._tracing.within(shown, verb, lambda: self.progress.results):
                yield
            self.progress.results.missing.check(scores=verb != "serve")

    def _model_and_place(self) -> str:
        urls = sorted({printed(url) for server in self.server.servers if (url := address_of(server))})
        return f"{self._model_name() or '?'} at {', '.join(urls)}"

    def _provider_and_url(self, kind: str) -> tuple[str, str]:
        if type(self).model_for is not AgentEnv.model_for:
            return "", ""
        urls = {url for server in self.server.servers if (url := address_of(server))}
        return kind, urls.pop() if len(urls) == 1 else ""

    def _model_name(self) -> str:
        servers = self.server.servers if type(self).model_for is AgentEnv.model_for else []
        return str(getattr(servers[0].config, "model_name", "")) if servers else ""

    async def _expect_model(self, wait_s: float = 0.0) -> None:
        if type(self).model_for is AgentEnv.model_for:
            await expect_servers(self.server.servers, wait_s=wait_s)

    async def _probe_model(self, catalog: ToolCatalog) -> None:
        """A chat completion with tools is what rollouts send to an OpenAI-style server; others have servers of their
        own kind. Raises: ConfigError."""
        if type(self).model_for is AgentEnv.model_for and not self._models.exact:
            await probe(self.server.servers, catalog.openai_tools(), self.config.agent_settings().sampling())

    async def _rehearse(self, what: str, *, draws: bool = True) -> None:
        """``--dry-run``: everything that comes before the first rollout, and one item if the command ``draws`` items.
        Raises: as the command; TaskError for a hook."""
        async with closed_at_end(self.close):
            await self._expect_model()
            await self.setup()
            tools = ", ".join(tool["function"]["name"] for tool in self._opened().tools) or "none"
            tools = tools if self.program is None else f"those of {self.program.title}"
            rows = [("would", what), ("model", self._model_and_place()), ("tools", tools)]
            rows.append(("slots", self.config.tool_pool_mode))
            if draws:
                rows += await first_item(self, await self.get_next_item(), self._opened().root_of)
            rows += places(self.config, groups_in_run=not self._files.groups_given)
        print_rows(rows, as_json=self.as_json)

    async def env_manager(self) -> None:
        """``serve``: atropos' loop, with everything closed however it ends. Raises: InfraError when the trainer's
        API, or at the start the model's server, does not answer for ``trainer_wait_s``; at the end when a record or
        group could not be written."""
        with self._command("serve", f"groups of {self.config.group_size}", None, self.config.group_size):
            async with closed_at_end(self.close):
                await self._expect_model(self.config.trainer_wait_s)
                await super().env_manager()

    async def _run_evaluate(self) -> None:
        """``evaluate``. Raises: InfraError (TaskError when all the faults are the task's) when an item has no score, or
        something could not be written; TaskError when there was no item."""
        own = type(self).evaluate is not AgentEnv.evaluate
        if self.config.eval_items == 0 and not own:
            raise ConfigError("eval_items", "is 0: nothing to evaluate", next_step="set it, or write evaluate()")
        goal = None if own else self.config.eval_items
        epochs = f", {self.config.eval_epochs} attempts each" if self.config.eval_epochs > 1 else ""
        what = "its own evaluation" if own else f"{counted(self.config.eval_items, 'item')}{epochs}"
        if self.dry_run:
            await self._rehearse(f"evaluate {what}", draws=not own)
            return
        with self._command("evaluate", what, goal, self.config.eval_epochs, resumable=not own):
            if self._files.nothing_left:
                return
            async with closed_at_end(self.close):
                await self._expect_model()
                await self.setup()
                results = self.progress.results
                results.returned = {} if own else None
                with outside_rollouts("evaluate"):
                    returned: Any = await self.evaluate()
                if own and isinstance(returned, Mapping):
                    results.returned = {str(name): n for name, n in returned.items() if isinstance(n, (int, float))}
            if not own and not results.rollouts:
                raise no_items()
            if results.rollouts and not results.scored:
                what = f"none of {results.rollouts} rollouts has a score"
                raise nothing_scored(what, results.faults, self._files.log)

    async def process_manager(self) -> None:
        """``process``: ``total_steps`` groups into ``data_path_to_save_groups``.

        atropos' own implementation runs one group at a time, forgets items to retry and never gives up; this one
        keeps ``max_num_workers`` groups running, and raises InfraError (TaskError when all the faults are the task's)
        after ``give_up_after_failed_groups`` failed groups in a row, and at the end when an item was dropped, or
        something could not be written.
        """
        config, wanted = self.config, self.n_groups_to_process
        if wanted < 1:
            raise ConfigError("total_steps", "-1 is a trainer's number, and process has none", next_step="set it")
        config.group_size = self.group_size_to_process
        what = f"{counted(wanted, 'group')} of {config.group_size}"
        self.curr_step = 0
        self.max_token_len = config.max_token_length  # only used in warnings here: nothing is skipped
        if self.dry_run:
            await self._rehearse(f"process {what}")
            return
        with self._command("process", what, wanted, config.group_size):
            if self._files.nothing_left:
                return
            async with closed_at_end(self.close):
                self.start_wandb()
                await self._expect_model()
                await self.setup()
                await self._keep_unwritten()
                give_up_after = config.give_up_after_failed_groups
                await ProcessRun(self, wanted, self.max_num_workers, give_up_after, self._files.log).run()
            await self._files.write_page()

    async def _keep_unwritten(self) -> None:
        """Write the groups that were recorded and not written when this run ended before."""
        self.curr_step = self._files.kept.groups
        for name, transcripts in self._files.kept.unwritten.items():
            PLACE.set(Place(group=name))
            group = await self._group_of(transcripts)
            await self.keep_group(group, {"id": transcripts[0].item_id})

    def to_play(self, position: int, item: Any) -> bool:
        """Whether ``process`` rolls out this item, the one at this position of ``get_next_item``; not if it did so
        before it was resumed."""
        if item is not None and (failures := self._files.kept.failures.get(position, 0)):
            self._retries.resumed(item, failures)
        return self._files.to_play(position, item)

    async def keep_group(self, group: dict[str, Any], item: Any) -> None:
        """Write a group of ``process`` to its file; nothing is sent to a trainer."""
        await self.handle_send_to_api(
            await self.postprocess_histories(group), item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
        )
        if (place := PLACE.get()) is not None:
            await self._files.group_ended(place.group)
        await self.wandb_log()

    @classmethod
    def cli(cls) -> NoReturn:
        """``serve``, ``process``, ``evaluate``. An AgentEnvError ends it with one line and status 2 (config) or 1; a
        hook's bug also with the frames of the author's code."""
        run_command(cls, super().cli)

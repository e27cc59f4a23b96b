"""The fields an :class:`agentenv.AgentEnvConfig` adds to atropos' own: flat, as its CLI needs them.

Separate from ``environment.py`` so that it does not depend on atroposlib. The meaning of the fields is documented
in the frozen models of :mod:`agentenv.config`, which the methods at the end build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from agentenv.agent.parsers import PARSERS, parser_named
from agentenv.agent.settings import AgentSettings
from agentenv.config import (
    ContainerSettings,
    Driver,
    ExecutorSettings,
    NomadSettings,
    PoolSettings,
    explain,
    parse_bind,
)
from agentenv.deadlines import CALL_TIMEOUT_S
from agentenv.env.farm_fields import (
    CONTAINER,
    LIMITS,
    ContainerFields,
    FarmFields,
    JsonObject,
    Names,
    TextObject,
    refuse_farm_contradictions,
    taken_from,
)
from agentenv.env.invocation import named_as_secret, without_user
from agentenv.env.older_names import as_set, in_step, take_aliases, with_names_of_here
from agentenv.env.programs import ProgramFields
from agentenv.errors import ConfigError
from agentenv.tools.distributions import distribution
from agentenv.tools.toolsets import TOOL_ALIASES, refuse_absent
from agentenv.wire.spec import SlotLimits

TOOL_CALL_PARSERS = tuple(PARSERS)

_NOMAD_NAMES = {
    "nomad_address": "address",
    "sandbox_job_id": "job_id",
    "sandbox_image": "image",
    "driver": "driver",
    "container_memory_mib": "memory_mib",
    "container_memory_oversubscription": "memory_oversubscription",
    "container_cpu_mhz": "cpu_mhz",
    "sandbox_job_variables": "variables",
    "purge_job_on_start": "purge_job_on_start",
    "purge_job_on_shutdown": "purge_job_on_shutdown",
}
"""Fields here → fields of NomadSettings."""

SECRETS = frozenset({"tool_server_token", "farm_token"})
_PLACES_OF_RESULTS = frozenset(
    {"rollouts_path", "data_path_to_save_groups", "data_dir_to_save_evals", "runs_dir", "run_name"}
)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items() if not named_as_secret(name)}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return without_user(value) if isinstance(value, str) else value


class AgentFields(ContainerFields, FarmFields, ProgramFields, PoolSettings):
    """Settings of an agent environment. Raises ConfigError naming the field of the first contradiction."""

    model_config = ConfigDict(frozen=False)
    temperature_there: ClassVar[float] = 0.7
    """The default of ``agent_temperature`` in the harness of which this is the config."""
    last_turn_scored_there: ClassVar[bool] = False
    """Whether a rollout that reaches its last turn is scored in that harness, as it is here."""

    # Where tools run
    tool_pool_mode: Literal["local", "nomad", "farm", "fake"] = Field(
        default="local",
        description="local: processes here; nomad: a cluster's; farm: a farm service's; fake: no isolation, for tests",
    )
    require_sandbox: bool | None = Field(
        default=None,
        description="Refuse to run if isolation is weaker than promised; by default true, except with fake",
    )
    require_stateful_sandbox: bool = Field(
        default=False, description="Refuse to run if the processes of sessions are not isolated (fake)"
    )
    hook_slots: int = Field(default=0, ge=0, description="Slots reserved for agents that hooks run (run_agent)")
    # With tool_pool_mode="nomad"; token, namespace, region and TLS come from Nomad's own NOMAD_* variables
    nomad_address: str | None = Field(default=None, description="http(s)://host:port; NOMAD_ADDR by default")
    sandbox_job_id: str = Field(default="agentenv-sandbox", description="Nomad job of the farm; one farm per job")
    sandbox_image: str = Field(
        default="agentenv-sandbox:local",
        min_length=1,
        description="Image of the containers; a tag `local` is built",
    )
    driver: Driver = Field(default="docker", description="How Nomad runs containers; all but docker: no Docker")
    container_memory_mib: int | None = Field(
        default=None, ge=64, description="Memory limit of a container with its slots; by default enough for all of them"
    )
    container_memory_oversubscription: bool = Field(
        default=False, description="Allow container_memory_mib to be less than its slots may use together"
    )
    container_cpu_mhz: int = Field(default=500, ge=1, description="CPU reserved for a container by the scheduler")
    sandbox_job_variables: TextObject = Field(
        default_factory=dict, description="Additional job file variables: HCL expressions by name (JSON)"
    )
    purge_job_on_start: bool = Field(default=False, description="Replace a farm left running under this job")
    purge_job_on_shutdown: bool = Field(default=True, description="End the farm with the environment that started it")
    # Tool calls
    tool_batch_window_ms: float = Field(
        default=20.0, ge=0, description="How long a call may wait to be batched with others"
    )
    tool_max_batch_size: int = Field(default=200, ge=1, le=1000, description="Most calls sent to a container at once")
    tool_timeout_s: float = Field(default=CALL_TIMEOUT_S, gt=0, description="Time limit of one tool call")
    enabled_toolsets: Names | None = Field(default=None, description="Toolsets or tool names; all by default")
    disabled_toolsets: Names | None = Field(default=None, description="Toolsets or tool names that are left out")
    distribution: str | None = Field(
        default=None,
        description="Distribution the toolsets of a group are drawn from: a name, or JSON of probabilities",
    )
    distribution_seed: int = Field(default=0, description="Seed of the draws: the same seed draws the same tools")
    accept_tool_aliases: bool = Field(
        default=False,
        description="Run calls of terminal_stateful and bash_stateful, which are not offered, as terminal",
    )
    tool_server_url: str | None = Field(default=None, description="External tools: a URL, or inprocess")
    tool_server_token: str | None = Field(
        default=None, repr=False, description="Bearer token of the tool server, or file:PATH"
    )
    tool_server_config: str | None = Field(default=None, description="With inprocess: the TOML file of the tool server")
    tool_call_parser: str | None = Field(
        default=None, description="Format of a vllm or sglang server's text: hermes, qwen, ... (docs/models.md)"
    )
    # Metrics
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Serve Prometheus metrics on this port (0: any free one)"
    )
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="Address to serve metrics on")
    # The agent
    agent_max_steps: int = Field(default=AgentSettings.max_steps, ge=1, description="Most model turns of a rollout")
    agent_max_s: float | None = Field(
        default=5400.0,
        gt=0,
        description="Time limit of a rollout: no turn or call starts later, and it is verified as it is. "
        "Must be below worker_timeout",
    )
    agent_temperature: float | None = Field(default=None, ge=0, description="By default the server's")
    agent_max_tokens: int | None = Field(default=None, ge=1, description="Maximum tokens per model turn")
    agent_tool_delay_s: float = Field(default=AgentSettings.tool_delay_s, ge=0, description="Pause between tool calls")
    agent_context_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of prompt and answer of a turn together"
    )
    agent_keep_tool_outputs: int | None = Field(
        default=None,
        ge=0,
        description="Recent tool outputs kept whole when older ones are shortened to fit agent_context_tokens",
    )
    agent_send_reasoning: bool = Field(
        default=False, description="Send earlier reasoning back to the model (OpenAI-type servers)"
    )
    agent_shown_bytes: int = Field(
        default=AgentSettings.shown_bytes, ge=256, description="Maximum bytes of a tool output shown to the model"
    )
    system_prompt: str | None = Field(
        default=None, description="By default one that describes the offered tools; an empty one is not sent"
    )
    extra_body: JsonObject | None = Field(default=None, description="Additional fields of each model request (JSON)")
    model_timeout_s: float = Field(
        default=1200.0, gt=0, description="Timeout of a model turn, including the server's queue"
    )
    send_trajectory_id: bool = Field(
        default=False, description="Send the trajectory's name as `user` in model requests"
    )
    prepare: Literal["each", "once"] = Field(
        default="each",
        description="once: prepare() runs in one slot of those with the same prepare_key(); others fork it",
    )
    # Failures
    verification: Literal["live", "sealed"] = Field(
        default="live", description="sealed: every process of the policy is killed before the verifier runs"
    )
    infra_retries: int = Field(
        default=2, ge=0, le=100, description="Attempts on a new slot after an infrastructure failure"
    )
    infra_retry_delay_s: float = Field(
        default=1.0, ge=0, description="Delay before the second attempt, doubled for each further one"
    )
    item_retries: int = Field(
        default=2, ge=0, le=100, description="How often an item is retried after its whole group failed"
    )
    give_up_after_failed_groups: int = Field(
        default=10, ge=1, description="Consecutive failed groups after which `process` stops"
    )
    trainer_wait_s: float = Field(
        default=1800.0,
        ge=0,
        description="How long `serve` waits for the trainer's API, and at its start for the model's server",
    )
    # Items and records
    dataset_name: str | None = Field(default=None, description="A .jsonl file, or a dataset for `datasets`")
    dataset_split: str = Field(default="train", description="Split of a dataset for `datasets`")
    prompt_field: str = Field(
        default="prompt", description="Field of an item that holds its task, if there is no build_task()"
    )
    eval_items: int = Field(default=0, ge=0, description="Number of items evaluate() runs; 0: none")
    eval_epochs: int = Field(default=1, ge=1, le=1000, description="Attempts per item of evaluate(): pass@k")
    runs_dir: str = Field(default="runs", description="Commands make a directory per run in it; empty: none")
    run_name: str | None = Field(default=None, min_length=1, description="The run's name; the environment's by default")
    rollouts_path: str | None = Field(
        default=None, description="Append each group's transcripts to this .jsonl instead of the run's own"
    )
    terminal_lifetime: float | None = Field(
        default=None,
        gt=0,
        description="A slot is given up after this long without a tool call (of an agent program: a turn); no limit by "
        "default",
    )
    # Names of other harnesses
    max_agent_turns: int | None = Field(default=None, ge=1, description="Same as agent_max_steps")
    terminal_timeout: float | None = Field(default=None, gt=0, description="Same as tool_timeout_s")
    _aliases_set: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(self, **values: Any) -> None:
        """Raises: ConfigError naming the field, what it got and what is allowed."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self)) from error

    def __setattr__(self, name: str, value: Any) -> None:
        """A setting that has two names is changed under both."""
        for each, new in in_step({name: value}).items():
            super().__setattr__(each, new)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's. Raises: ConfigError when a setting that has two names would have two values."""
        return super().model_copy(update=in_step(update or {}), deep=deep)

    @model_validator(mode="before")
    @classmethod
    def _from_other_harnesses(cls, given: Any) -> Any:
        return with_names_of_here(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _consistent(self) -> AgentFields:
        self._aliases_set = take_aliases(self, self.model_fields_set)
        _refuse_contradictions(self)
        for build in (self.container_settings, self.pool_settings, self.executor_settings):
            build()
        return self

    @model_serializer(mode="wrap")
    def _as_set(self, dump: SerializerFunctionWrapHandler, how: SerializationInfo) -> dict[str, Any]:
        return as_set(self, dump(self), self._aliases_set, only_set=how.exclude_unset)

    @classmethod
    def secrets(cls) -> frozenset[str]:
        """The settings whose values are never written down: ours, and what is hidden in a ``repr`` or named so."""
        hidden = {name for name, field in cls.model_fields.items() if not field.repr}
        return SECRETS | hidden | {name for name in cls.model_fields if named_as_secret(name)}

    def compared(self) -> dict[str, Any]:
        """The settings that make runs alike: without secrets, and without the places of results."""
        shown = self.model_dump(mode="json", exclude=set(self.secrets() | _PLACES_OF_RESULTS), fallback=repr)
        return {name: _without_secrets(value) for name, value in shown.items()}

    def digest(self) -> str:
        """Equal for equal settings, whatever their secrets and where results are written."""
        settings = self.compared()
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()[:12]

    def container_settings(self) -> ContainerSettings:
        """Settings of every container."""
        given = taken_from(self, CONTAINER)
        given["binds"] = tuple(_bind(text) for text in given["binds"])
        with _named_here(CONTAINER):
            checked = self.require_sandbox is not False
            return ContainerSettings.made_of({**given, "limits": self._slot_limits(), "require_sandbox": checked})

    def _slot_limits(self) -> SlotLimits:
        try:
            return SlotLimits(**taken_from(self, LIMITS))
        except ConfigError as error:
            raise ConfigError(
                "slot_memory_mib",
                error.message,
                next_step="raise it, or lower slot_workspace_mib, slot_tmp_mib or slot_shm_mib",
            ) from error

    def pool_settings(self) -> PoolSettings:
        """Number of containers, and how slots are leased."""
        return PoolSettings.made_of({name: getattr(self, name) for name in PoolSettings.model_fields})

    def nomad_settings(self) -> NomadSettings:
        """The Nomad cluster and the farm's job. Raises ConfigError naming the field."""
        named = {name: getattr(self, field) for field, name in _NOMAD_NAMES.items()}
        with _named_here(_NOMAD_NAMES):
            return NomadSettings.from_environment(**named, run_name=getattr(self, "wandb_name", None))

    def executor_settings(self) -> ExecutorSettings:
        """How calls are batched and bounded."""
        names = ("tool_batch_window_ms", "tool_max_batch_size")
        given = {name: getattr(self, name) for name in names}
        return ExecutorSettings.made_of({**given, "default_timeout_s": self.tool_timeout_s})

    def agent_settings(self) -> AgentSettings:
        """Limits and sampling of the agent."""
        return AgentSettings(
            max_steps=self.agent_max_steps,
            max_s=self.agent_max_s,
            temperature=self.agent_temperature,
            max_tokens=self.agent_max_tokens,
            extra_body=self.extra_body or {},
            max_idle_s=self.terminal_lifetime,
            tool_aliases=TOOL_ALIASES if self.accept_tool_aliases else {},
            tool_delay_s=self.agent_tool_delay_s,
            shown_bytes=self.agent_shown_bytes,
            system_prompt=self.system_prompt,
            context_tokens=self.agent_context_tokens,
            keep_tool_outputs=self.agent_keep_tool_outputs,
            send_reasoning=self.agent_send_reasoning,
        )


@contextmanager
def explained(env: object, config: AgentFields) -> Iterator[None]:
    """The ConfigError for a failure of atropos' constructor; names the setting, judged by how far the constructor
    got."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if hasattr(env, "server") and not hasattr(env, "tokenizer"):
            raise ConfigError(
                "tokenizer_name",
                f"{getattr(config, 'tokenizer_name', None)!r} cannot be loaded: {reason}",
                next_step="allowed: a Hugging Face name that can be downloaded here, or a local directory; "
                "server_type openai needs none",
            ) from error
        if hasattr(env, "tokenizer") and isinstance(error, OSError):
            raise ConfigError(
                "data_path_to_save_groups", reason, next_step="name a file in a directory you can write to"
            ) from error
        raise
    except Exception as error:
        if type(error).__name__ != "OpenAIError":  # the openai client's for a missing key; not imported for its class
            raise
        raise ConfigError(
            "openai.api_key",
            "is not set",
            next_step="pass --openai.api_key, or set OPENAI_API_KEY; any value if the server checks none",
        ) from error


@contextmanager
def _named_here(names: Mapping[str, str]) -> Iterator[None]:
    """ConfigErrors name the field here. ``names``: fields here → fields of the settings that are built."""
    try:
        yield
    except ConfigError as error:
        there = error.field.partition(".")[0]
        name = {there: here for here, there in names.items()}.get(there, error.field)
        raise ConfigError(name, error.message.removeprefix(f"{error.field}: "), next_step=error.next_step) from error


def _bind(text: str) -> Any:
    try:
        return parse_bind(text)
    except ValueError as error:
        raise ConfigError("sandbox_binds", f"got {text!r}", next_step=f"{error}, separated by commas") from None


def _refuse_tool_contradictions(config: AgentFields) -> None:
    url, token = config.tool_server_url, config.tool_server_token
    if url not in (None, "inprocess") and not url.startswith(("http://", "https://")):
        raise ConfigError("tool_server_url", f"got {url!r}", next_step="allowed: http(s)://host:port, or inprocess")
    if token is not None and url in (None, "inprocess"):
        raise ConfigError("tool_server_token", "is set without tool_server_url of a server", next_step="unset it")
    if token is None and url not in (None, "inprocess"):
        raise ConfigError("tool_server_token", "is missing", next_step="give file:PATH of the server's token file")
    if config.tool_server_config is not None and url != "inprocess":
        raise ConfigError("tool_server_config", "is for tool_server_url='inprocess'", next_step="unset it")
    refuse_absent("enabled_toolsets", config.enabled_toolsets or ())
    if config.distribution is not None:
        distribution(config.distribution)
        if config.enabled_toolsets is not None:
            raise ConfigError("distribution", "cannot be combined with enabled_toolsets", next_step="set one of them")


def _refuse_contradictions(config: AgentFields) -> None:
    slots = config.max_containers * config.slots_per_container
    if config.hook_slots >= slots:
        problem = f"{config.hook_slots} of {slots} slots leaves none for rollouts"
        raise ConfigError("hook_slots", problem, next_step=f"allowed: 0 to {slots - 1} (max_containers times slots)")
    _refuse_tool_contradictions(config)
    for field in ("require_sandbox", "require_stateful_sandbox"):
        if getattr(config, field) and config.tool_pool_mode == "fake":
            problem = "is set, but tool_pool_mode='fake' has no isolation"
            raise ConfigError(field, problem, next_step="use tool_pool_mode local or nomad, or unset it")
    if config.require_sandbox is False and config.isolation == "full":
        raise ConfigError(
            "require_sandbox", "false contradicts isolation='full'", next_step="allowed: isolation auto or user"
        )
    if both := set(config.enabled_toolsets or ()) & set(config.disabled_toolsets or ()):
        raise ConfigError("disabled_toolsets", f"{min(both)!r} is also in enabled_toolsets", next_step="name it once")
    if config.tool_call_parser is not None:
        parser_named(config.tool_call_parser)
    if config.agent_keep_tool_outputs is not None and config.agent_context_tokens is None:
        raise ConfigError(
            "agent_keep_tool_outputs", "has no effect without agent_context_tokens", next_step="set both, or neither"
        )
    _refuse_nomad_contradictions(config)
    refuse_farm_contradictions(config, config.tool_pool_mode)


def _refuse_nomad_contradictions(config: AgentFields) -> None:
    nomad = config.nomad_settings()
    address = urlsplit(nomad.address)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError("nomad_address", f"got {nomad.address!r}", next_step="allowed: http(s)://host:port")
    if config.driver == "raw_exec" and config.sandbox_image != type(config).model_fields["sandbox_image"].default:
        raise ConfigError(
            "sandbox_image", "is set with driver='raw_exec', which runs no image", next_step="unset it, or use docker"
        )

"""Settings, frozen and validated. Environment variables are read here and nowhere else."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import socket
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from agentenv import deadlines
from agentenv.deadlines import ACQUIRE_TIMEOUT_S, CALL_TIMEOUT_S, START_TIMEOUT_S, scaled
from agentenv.errors import ConfigError
from agentenv.wire.base import MAX_TIMEOUT_S
from agentenv.wire.spec import Bind, Capability, ContainerSpec, ImageFormat, Isolation, SlotLimits

Driver = Literal["docker", "raw_exec", "apptainer", "vm"]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class Settings(BaseModel):
    """Base of every settings model: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def made_of(cls, fields: Mapping[str, Any]) -> Self:
        """Settings with these fields. Raises ConfigError naming the first that is wrong."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise explain(error, cls) from error


def stated(kind: type, name: str, unit: int = 1) -> Any:
    """The pydantic field of a setting that a dataclass states (:func:`agentenv.wire.spec.means`): its default, range
    and meaning; in units of ``unit`` bytes."""
    one = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    made = {"default_factory": one.default_factory} if one.default is MISSING else {"default": one.default}
    bounds = {"ge": one.metadata["least"], "le": one.metadata["most"]}
    if unit != 1:
        made = {"default": one.default // unit}
        bounds = {key: bound and -(-bound // unit) for key, bound in bounds.items()}
    return Field(**made, **bounds, description=one.metadata["about"])


def parse_bind(given: Any) -> Any:
    """A bind from ``"/source:/target"``; anything else is returned as it is. Raises ValueError."""
    if not isinstance(given, str):
        return given
    source, colon, target = given.partition(":")
    if not colon or not source.startswith("/") or not target.startswith("/"):
        raise ValueError("allowed: /source:/target, absolute paths here and in the slot")
    return Bind(source, target)


class ContainerFields(TypedDict, total=False):
    """:class:`ContainerSettings` as keyword arguments."""

    slots_per_container: int
    isolation: Isolation
    require_sandbox: bool
    allow_network: bool
    closed_networks: Sequence[str]
    limits: SlotLimits | Mapping[str, int]
    binds: Sequence[Bind | str]
    env: Mapping[str, str]
    output_bytes: int
    spare_shells: bool
    image_format: ImageFormat
    checkpoint_bytes: int
    allowed_capabilities: Sequence[Capability]
    allow_nested_namespaces: bool


class ContainerSettings(Settings):
    """Settings of every container of a farm (see :class:`agentenv.wire.spec.ContainerSpec` for their meaning), and
    how strictly containers are checked."""

    slots_per_container: int = stated(ContainerSpec, "slots")
    isolation: Isolation = stated(ContainerSpec, "isolation")
    require_sandbox: bool = Field(
        default=True,
        description="Refuse to start where isolation is weaker than full promises, unless isolation=user asked for "
        "less by name. False: fall back to user where full is not possible",
    )
    allow_network: bool = stated(ContainerSpec, "allow_network")
    closed_networks: tuple[str, ...] = stated(ContainerSpec, "closed_networks")
    limits: SlotLimits = stated(ContainerSpec, "limits")
    binds: tuple[Annotated[Bind, BeforeValidator(parse_bind)], ...] = stated(ContainerSpec, "binds")
    env: dict[str, str] = stated(ContainerSpec, "env")
    output_bytes: int = stated(ContainerSpec, "output_bytes")
    spare_shells: bool = stated(ContainerSpec, "spare_shells")
    image_format: ImageFormat = stated(ContainerSpec, "image_format")
    checkpoint_bytes: int = stated(ContainerSpec, "checkpoint_bytes")
    allowed_capabilities: tuple[Capability, ...] = stated(ContainerSpec, "allowed_capabilities")
    allow_nested_namespaces: bool = stated(ContainerSpec, "allow_nested_namespaces")

    @model_validator(mode="after")
    def _possible(self) -> ContainerSettings:
        self.spec()
        return self

    @classmethod
    def made(cls, base: ContainerSettings | None, fields: ContainerFields) -> ContainerSettings:
        """``base`` with these fields changed. Raises ConfigError naming the field."""
        if base is not None and not isinstance(base, ContainerSettings):
            raise ConfigError("settings", f"must be ContainerSettings (got {base!r})", next_step=_SETTINGS_CURE)
        return cls.made_of({**dict(base or {}), **fields})

    def spec(self) -> ContainerSpec:
        """The same as a plain dataclass. Raises ConfigError naming the field."""
        given = dict(self)
        del given["require_sandbox"]
        return ContainerSpec(slots=given.pop("slots_per_container"), **given)


_SETTINGS_CURE = "give its fields as arguments instead, such as isolation='user'"


class PoolSettings(Settings):
    """Number of containers, and how slots are leased."""

    min_containers: int = Field(default=1, ge=0, le=10_000, description="Containers kept running without demand")
    max_containers: int = Field(default=10, ge=1, le=10_000, description="Most containers, whatever the demand")
    acquire_timeout_s: Seconds = Field(default=ACQUIRE_TIMEOUT_S, description="Maximum wait for a slot of the pool")
    lease_ttl_s: Seconds = Field(
        default=scaled(30.0),
        description="A lease without a heartbeat for this long is ended by its container, so that a farm recovers by "
        "itself after its trainer was killed",
    )
    idle_containers_after_s: Seconds = Field(
        default=60.0,
        description="A container without a lease for this long may be removed, down to min_containers",
    )
    suspect_after_s: Seconds = Field(
        default=scaled(5.0), description="A container that has not responded for this long takes no new leases"
    )
    gone_after_s: Seconds = Field(
        default=scaled(12.0),
        description="A container that has not responded for this long is given up and its leases end with a typed "
        "error. Detection is up to half of suspect_after_s late: with 12 s every lease behind a cut connection ends "
        "within 15 s",
    )
    reset_timeout_s: Seconds = Field(
        default=scaled(30.0),
        description="A released lease waits at most this long for its slot's reset. A container in which a reset takes "
        "longer, or whose supervisor has not answered for as long, takes no new leases and is replaced when its last "
        "lease has ended",
    )
    start_timeout_s: Seconds = Field(default=START_TIMEOUT_S, description="Maximum time for a container to start")
    target_idle_slots: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Spare slots kept free beyond the current demand, so that a burst finds them ready",
    )
    scale_cooldown_s: Seconds = Field(
        default=5.0,
        description="After the number of containers changed, it is not reduced for this long (or for half of "
        "idle_containers_after_s, if that is less)",
    )

    @model_validator(mode="after")
    def _ordered(self) -> PoolSettings:
        if self.min_containers > self.max_containers:
            problem = f"{self.min_containers} is more than max_containers={self.max_containers}"
            raise ConfigError("min_containers", problem, next_step="allowed: 0 to max_containers")
        if self.suspect_after_s > self.gone_after_s:
            problem = f"{self.suspect_after_s:g} is more than gone_after_s={self.gone_after_s:g}"
            raise ConfigError("suspect_after_s", problem, next_step="lower it, or raise gone_after_s")
        return self


class NomadSettings(Settings):
    """Address of a Nomad cluster, credentials for it, and the job that the farm's containers belong to.

    :meth:`from_environment` fills missing fields from Nomad's own ``NOMAD_*`` variables.
    """

    address: str = "http://127.0.0.1:4646"
    token: str | None = Field(default=None, repr=False)
    """The ACL token (``NOMAD_TOKEN``)."""
    namespace: str = "default"
    region: str | None = None
    ca_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    tls_server_name: str | None = None
    skip_verify: bool = False
    """``NOMAD_SKIP_VERIFY``: accept any server certificate."""
    job_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = "agentenv-sandbox"
    job_file: Path | None = None
    """Path of a job file to use instead of the shipped one (``nomad/sandbox.nomad.hcl``)."""
    image: Annotated[str, Field(min_length=1)] = "agentenv-sandbox:local"
    driver: Driver = "docker"
    """Task driver on the cluster's clients (the job file's variable ``driver``)."""
    datacenters: tuple[str, ...] = ("*",)
    cpu_mhz: Annotated[int, Field(ge=1)] = 500
    """Reserved for each container by the scheduler; not a ceiling."""
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    """Memory reserved for each container, and its hard limit. The slots' file systems are in memory and count.
    None: enough for all slots to use the most that each can have (``limits.memory_bytes``, or
    ``limits.max_memory_bytes``) at once. Less is refused unless ``memory_oversubscription``."""
    memory_oversubscription: bool = False
    """Allow ``memory_mib`` to be less than the slots may use together: a slot can then be killed for what others
    use. Its default is then enough for slots of ``limits.memory_bytes``, though some may request more."""
    build_image: bool = True
    """Build a missing image on first use if its tag is ``local`` and the Docker engine runs on this machine."""
    purge_job_on_start: bool = False
    """Start a new job instead of adopting existing containers."""
    purge_job_on_shutdown: bool = True
    """Purge the job when the pool closes. False: containers keep running and are adopted by the next run that opens
    this job."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Additional HCL variables for the job file, by name; the values are HCL expressions."""
    run_name: str = ""
    """How the owner of the job is described to others who want it; by default the program's name."""

    @classmethod
    def from_environment(cls, **given: Any) -> NomadSettings:
        """Settings from, in this order: ``given``, ``NOMAD_ADDR, NOMAD_TOKEN, NOMAD_NAMESPACE, NOMAD_REGION,
        NOMAD_CACERT, NOMAD_CLIENT_CERT, NOMAD_CLIENT_KEY, NOMAD_TLS_SERVER_NAME, NOMAD_SKIP_VERIFY``, then the
        defaults.

        Raises ConfigError naming the field.
        """
        found = {field: os.environ[name] for name, field in _NOMAD_VARIABLES.items() if os.environ.get(name)}
        return cls.made_of({**found, **{name: value for name, value in given.items() if value is not None}})


_NOMAD_VARIABLES = {
    "NOMAD_ADDR": "address",
    "NOMAD_TOKEN": "token",
    "NOMAD_NAMESPACE": "namespace",
    "NOMAD_REGION": "region",
    "NOMAD_CACERT": "ca_cert",
    "NOMAD_CLIENT_CERT": "client_cert",
    "NOMAD_CLIENT_KEY": "client_key",
    "NOMAD_TLS_SERVER_NAME": "tls_server_name",
    "NOMAD_SKIP_VERIFY": "skip_verify",
}


class ExecutorSettings(Settings):
    """How tool calls are batched, bounded and resubmitted."""

    tool_batch_window_ms: Annotated[float, Field(ge=0, le=10_000)] = 20.0
    """Longest time a call may wait for others to share its batch; a lone call never waits."""
    tool_max_batch_size: Annotated[int, Field(ge=1, le=1_000)] = 200
    default_timeout_s: Seconds = CALL_TIMEOUT_S
    reconnect_deadline_s: Seconds = scaled(15.0)
    """How long to try to restore a lost connection before its calls end with ConnectionLostError."""


def named_registries() -> frozenset[str]:
    """Registries that tasks may name although they are not public: ``$AGENTENV_REGISTRIES``, separated by commas
    (``registry.example:5000``)."""
    return frozenset(filter(None, map(str.strip, os.environ.get("AGENTENV_REGISTRIES", "").split(","))))


def cache_dir() -> Path:
    """Directory for what is costly to make and kept between runs (programs, images): ``$AGENTENV_CACHE_DIR``, else
    ``$XDG_CACHE_HOME/agentenv``, else ``~/.cache/agentenv``; for a user without a home, in the state directory."""
    if named := os.environ.get("AGENTENV_CACHE_DIR"):
        return Path(named)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "agentenv"
    try:
        return Path.home() / ".cache" / "agentenv"
    except RuntimeError:
        return state_dir() / "cache"


def isolation_here(asked: Isolation) -> Isolation:
    """Isolation of a container on this machine: as requested; for ``auto``, ``$AGENTENV_ISOLATION``.

    Raises ConfigError when the variable has another value than ``auto``, ``full`` or ``user``.
    """
    named = os.environ.get("AGENTENV_ISOLATION") or "auto"
    if named not in (allowed := get_args(Isolation)):
        raise ConfigError("AGENTENV_ISOLATION", f"got {named!r}", next_step=f"allowed: {', '.join(allowed)}")
    return cast("Isolation", named) if asked == "auto" else asked


def docker_host() -> str:
    """Address of the Docker engine: ``$DOCKER_HOST``, else this machine's socket."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def nomad_releases() -> str:
    """Base URL of Nomad's official releases: ``$AGENTENV_NOMAD_RELEASES`` (a mirror), else HashiCorp's."""
    return os.environ.get("AGENTENV_NOMAD_RELEASES") or "https://releases.hashicorp.com/nomad"


def state_dir() -> Path:
    """Directory of the state of running containers: ``$AGENTENV_STATE_DIR``, else ``/run/agentenv`` for root, else
    ``$XDG_RUNTIME_DIR/agentenv`` or ``/tmp/agentenv-UID``. Created if missing, accessible to this user only.

    Raises ConfigError when another user could have written there: its content is trusted, down to the process
    that `agentenv down` ends.
    """
    if named := os.environ.get("AGENTENV_STATE_DIR"):
        return _ours(Path(named))
    if os.geteuid() == 0:
        return _ours(Path("/run/agentenv"))
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return _ours(Path(runtime) / "agentenv" if runtime else Path(f"/tmp/agentenv-{os.geteuid()}"))  # noqa: S108


def _ours(state: Path) -> Path:
    try:
        with contextlib.suppress(FileExistsError):
            state.mkdir(mode=0o700, parents=True)
        owners = {state.lstat().st_uid, (found := state.stat()).st_uid}
    except OSError:
        return state  # it does not exist, so nobody wrote there; creating it will report why it cannot be created
    if foreign := owners - {os.geteuid()}:
        problem, cure = (
            f"belongs to user {foreign.pop()}",
            "remove it, or set AGENTENV_STATE_DIR to a directory of your own",
        )
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022:
        problem, cure = "may be written to by others", f"if no other user has written there: chmod 700 {state}"
    else:
        return state
    raise ConfigError("AGENTENV_STATE_DIR", f"the state directory {state} {problem}", next_step=cure)


def launch_environment() -> dict[str, str]:
    """Environment that a container process inherits: where programs are found, nothing that could be a secret."""
    kept = ("PATH", "TMPDIR", "XDG_RUNTIME_DIR", "PYTHONPATH", "PYTHONDEVMODE", "LD_LIBRARY_PATH", deadlines.VARIABLE)
    return {"LANG": "C.UTF-8", **{name: os.environ[name] for name in kept if name in os.environ}}


def environment_value(name: str) -> str | None:
    """Value of an environment variable named by a setting (a secret's); None when it is not set."""
    return os.environ.get(name)


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> ConfigError:
    """The first problem pydantic found, as a ConfigError that names the field and the allowed values. ``model``: whose
    fields are suggested for one that it does not have."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "settings"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
        return no_such_setting(where, [*setting_names(model)] if model else ())
    return ConfigError(where, f"{first['msg']} (got {first['input']!r})")


def no_such_setting(name: str, fields: Collection[str]) -> ConfigError:
    """ConfigError for a setting that does not exist, with the one that was probably meant: of the same section, if
    that has any."""
    section, _, last = name.rpartition(".")
    inside = {field.rpartition(".")[2]: field for field in fields if section and field.rpartition(".")[0] == section}
    if inside:
        close = [inside[found] for found in difflib.get_close_matches(last, inside, n=1, cutoff=0.45)]
    else:
        close = difflib.get_close_matches(name, fields, n=1)
    return ConfigError(name, "unknown setting", next_step=f"did you mean {close[0]}?" if close else "")


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Names of all fields, with those of the sections (``limits.open_files``)."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(kind := field.annotation, type) and issubclass(kind, BaseModel):
            yield from setting_names(kind, f"{prefix}{name}.")
        elif isinstance(kind, type) and is_dataclass(kind):
            yield from (f"{prefix}{name}.{one.name}" for one in dataclass_fields(kind))


def cannot_listen(error: OSError, host: str, port: int, *, prefix: str = "") -> ConfigError:
    """ConfigError for an address that cannot be listened on; names the setting (``<prefix>host`` or
    ``<prefix>port``)."""
    # Since Python 3.13 asyncio passes over addresses that are another machine's; what it raises then has only words.
    unbound = error.errno is None and "could not bind on any address" in str(error)
    wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL or unbound
    return ConfigError(
        prefix + ("host" if wrong_host else "port"),
        f"cannot listen on {host}:{port}: {error.strerror or error}",
        next_step="name an address of this machine" if wrong_host else "choose another port, or 0 for any free one",
    )


def debug() -> bool:
    """Whether the command line shows tracebacks instead of messages (``$AGENTENV_DEBUG`` is set and not 0)."""
    return os.environ.get("AGENTENV_DEBUG", "0") not in ("", "0")


@dataclass(frozen=True)
class TraceVariables:
    """What OpenTelemetry's own environment variables say about spans; its packages read the rest of them."""

    exporters: tuple[str, ...] = ()
    """Entry points of the group ``opentelemetry_traces_exporter``; none: no spans."""
    content: str = ""
    """``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT``, in lower case."""
    named: bool = False
    """Whether the service has a name."""

    @classmethod
    def from_environment(cls) -> TraceVariables:
        """Spans are made if an exporter or an endpoint is named, and ``OTEL_SDK_DISABLED`` is not true."""
        given = {name: value.strip() for name, value in os.environ.items() if name.startswith("OTEL_")}
        endpoint = given.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or given.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        names = given.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
        if given.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return cls()
        protocol = given.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        otlp = f"otlp_proto_{'http' if not protocol else protocol.partition('/')[0]}"
        if protocol == "http/json":
            otlp = "otlp_json_http"
        exporters = [otlp if name == "otlp" else name for name in map(str.strip, names.split(",")) if name]
        return cls(
            exporters=tuple(name for name in exporters if name != "none"),
            content=given.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower(),
            named=bool(given.get("OTEL_SERVICE_NAME")) or "service.name=" in given.get("OTEL_RESOURCE_ATTRIBUTES", ""),
        )

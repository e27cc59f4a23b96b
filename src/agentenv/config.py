"""Settings, frozen and validated. Environment variables are read here and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentenv.errors import ConfigError
from agentenv.wire.base import MAX_TIMEOUT_S
from agentenv.wire.spec import Bind, ContainerSpec, Isolation, SlotLimits

Driver = Literal["docker", "raw_exec", "apptainer"]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class Settings(BaseModel):
    """Base of every settings model: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _bounds(setting: str) -> Any:
    """The range :class:`ContainerSpec` states for a number, as pydantic has it."""
    stated = ContainerSpec.__dataclass_fields__[setting].metadata
    return Field(ge=stated["least"], le=stated["most"])


class ContainerSettings(Settings):
    """What each container of a farm is (:class:`agentenv.wire.spec.ContainerSpec`, which says what each setting means),
    and what is accepted of it."""

    slots_per_container: Annotated[int, _bounds("slots")] = ContainerSpec.slots
    isolation: Isolation = ContainerSpec.isolation
    require_sandbox: bool = True
    """True: refuse to start where per-slot isolation is weaker than ``full`` promises, unless
    ``isolation="user"`` asked for less by name. False: accept ``user`` when ``full`` cannot be had."""
    allow_network: bool = ContainerSpec.allow_network
    closed_networks: tuple[str, ...] = ContainerSpec.closed_networks
    limits: SlotLimits = ContainerSpec.limits
    binds: tuple[Bind, ...] = ContainerSpec.binds
    env: dict[str, str] = Field(default_factory=dict)
    output_bytes: Annotated[int, _bounds("output_bytes")] = ContainerSpec.output_bytes
    spare_shells: bool = ContainerSpec.spare_shells

    @model_validator(mode="after")
    def _possible(self) -> ContainerSettings:
        self.spec()
        return self

    def spec(self) -> ContainerSpec:
        """The same without types of pydantic. Raises ConfigError naming the field."""
        given = dict(self)
        del given["require_sandbox"]
        return ContainerSpec(slots=given.pop("slots_per_container"), **given)


class PoolSettings(Settings):
    """How many containers there are, and how slots are leased."""

    min_containers: Annotated[int, Field(ge=0, le=10_000)] = 1
    max_containers: Annotated[int, Field(ge=1, le=10_000)] = 10
    acquire_timeout_s: Seconds = 30.0
    lease_ttl_s: Seconds = 30.0
    """A lease without a heartbeat for this long ends in the container: a farm whose trainer was killed
    is whole again after it."""
    idle_containers_after_s: Seconds = 60.0
    """A container with no lease for this long may be scaled away, down to ``min_containers``."""
    suspect_after_s: Seconds = 5.0
    """A container that has not responded for this long takes no new leases."""
    gone_after_s: Seconds = 12.0
    """A container that has not responded for this long is given up: its leases end typed. That is noticed
    up to half of ``suspect_after_s`` late, so at 12 s a cut ends every lease behind it within 15 s."""
    reset_timeout_s: Seconds = 30.0
    """For this long a released lease waits for its slot's reset. A container in which one takes longer, or whose
    supervisor has not answered for as long, takes no new leases and is replaced when its last lease has ended."""
    start_timeout_s: Seconds = 60.0
    target_idle_slots: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Spare slots kept free beyond the current demand, so that a burst finds them ready."""
    scale_cooldown_s: Seconds = 5.0
    """After the number of containers moved, it does not go down for this long (or for half of
    ``idle_containers_after_s``, if that is less)."""

    @model_validator(mode="after")
    def _ordered(self) -> PoolSettings:
        if self.min_containers > self.max_containers:
            raise ValueError(
                f"min_containers ({self.min_containers}) must be at most max_containers ({self.max_containers})"
            )
        if self.suspect_after_s > self.gone_after_s:
            raise ValueError("suspect_after_s must be at most gone_after_s")
        return self


class NomadSettings(Settings):
    """Where the cluster is, who we are there, and what job the farm's containers are.

    :meth:`from_environment` fills what is not given from Nomad's own ``NOMAD_*`` variables.
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
    """Another job file than the one shipped (``nomad/sandbox.nomad.hcl``)."""
    image: Annotated[str, Field(min_length=1)] = "agentenv-sandbox:local"
    driver: Driver = "docker"
    """What starts containers on the cluster's clients (the job file's variable ``driver``)."""
    datacenters: tuple[str, ...] = ("*",)
    cpu_mhz: Annotated[int, Field(ge=1)] = 500
    """Reserved for each container by the scheduler; not a ceiling."""
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    """Memory reserved for each container, and its hard limit; slots' file systems are memory and count. None: enough
    for all slots to use what each is allowed at once. Less is refused unless ``memory_oversubscription``."""
    memory_oversubscription: bool = False
    """``memory_mib`` may be less than the slots may use together: one slot can then be killed for what others use."""
    build_image: bool = True
    """Build a missing image whose tag is ``local`` on first use, when the Docker engine is this machine's."""
    purge_job_on_start: bool = False
    """Begin with a new job instead of adopting the containers that are there."""
    purge_job_on_shutdown: bool = True
    """Leave nothing behind. False: containers keep running for the next one who opens this job."""
    variables: dict[str, str] = Field(default_factory=dict)
    """More HCL variables for the job file, by name; values are HCL expressions."""
    run_name: str = ""
    """What others who want this job are told of who owns it; the program's name by default."""

    @classmethod
    def from_environment(cls, **given: Any) -> NomadSettings:
        """``given`` first, then ``NOMAD_ADDR, NOMAD_TOKEN, NOMAD_NAMESPACE, NOMAD_REGION, NOMAD_CACERT,
        NOMAD_CLIENT_CERT, NOMAD_CLIENT_KEY, NOMAD_TLS_SERVER_NAME, NOMAD_SKIP_VERIFY``, then the defaults.

        Raises ConfigError naming the field.
        """
        found = {field: os.environ[name] for name, field in _NOMAD_VARIABLES.items() if os.environ.get(name)}
        try:
            return cls.model_validate({**found, **{name: value for name, value in given.items() if value is not None}})
        except ValidationError as error:
            raise explain(error) from error


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
    """How tool calls are batched, bounded and asked for again."""

    tool_batch_window_ms: Annotated[float, Field(ge=0, le=10_000)] = 20.0
    """The longest a call may wait for company; a lone call never waits."""
    tool_max_batch_size: Annotated[int, Field(ge=1, le=1_000)] = 200
    default_timeout_s: Seconds = 60.0
    reconnect_deadline_s: Seconds = 15.0
    """How long a cut connection is retried before its calls end with ConnectionLostError."""


def cache_dir() -> Path:
    """Where what is costly to make is kept between runs (programs, images): ``$AGENTENV_CACHE_DIR``, else
    ``$XDG_CACHE_HOME/agentenv``, else ``~/.cache/agentenv``."""
    if named := os.environ.get("AGENTENV_CACHE_DIR"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "agentenv"


def docker_host() -> str:
    """Where the Docker engine listens: ``$DOCKER_HOST``, else the socket of this machine's."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def nomad_releases() -> str:
    """Below which address Nomad's official releases lie: ``$AGENTENV_NOMAD_RELEASES`` (a mirror), else the maker's."""
    return os.environ.get("AGENTENV_NOMAD_RELEASES") or "https://releases.hashicorp.com/nomad"


def state_dir() -> Path:
    """Where running containers keep their state: ``$AGENTENV_STATE_DIR``, else ``/run/agentenv``
    for root, else ``$XDG_RUNTIME_DIR/agentenv`` or ``/tmp/agentenv-UID``. Made when it is not there, for us alone.

    Raises ConfigError when somebody else could have written there: what it says is believed, down to the process that
    `agentenv down` ends.
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
        return state  # there is none, so nobody has written there; who wants to write will say why it cannot
    if foreign := owners - {os.geteuid()}:
        problem, cure = f"belongs to user {foreign.pop()}", "remove it, or name a directory of your own"
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022:
        problem, cure = "may be written to by others", f"if nobody has done so: chmod 700 {state}"
    else:
        return state
    raise ConfigError("AGENTENV_STATE_DIR", f"the state directory {state} {problem}", next_step=cure)


def launch_environment() -> dict[str, str]:
    """What a container process inherits of ours: where programs are found, nothing that could be a secret."""
    kept = ("PATH", "TMPDIR", "XDG_RUNTIME_DIR", "PYTHONPATH", "PYTHONDEVMODE", "LD_LIBRARY_PATH")
    return {"LANG": "C.UTF-8", **{name: os.environ[name] for name in kept if name in os.environ}}


def environment_value(name: str) -> str | None:
    """An environment variable that a setting names (a secret's); None when it is not set."""
    return os.environ.get(name)


def explain(error: ValidationError) -> ConfigError:
    """The first problem pydantic found, as a ConfigError naming the field and what is allowed."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "settings"
    return ConfigError(where, f"{first['msg']} (got {first['input']!r})")


def cannot_listen(error: OSError, host: str, port: int, *, prefix: str = "") -> ConfigError:
    """Why nobody can listen there, as a ConfigError naming the setting (``<prefix>host`` or ``<prefix>port``)."""
    wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return ConfigError(
        prefix + ("host" if wrong_host else "port"),
        f"cannot listen on {host}:{port}: {error.strerror or error}",
        next_step="name an address of this machine" if wrong_host else "take another port, or 0 for any free one",
    )


def debug() -> bool:
    """Whether the command line shows tracebacks instead of messages: ``$AGENTENV_DEBUG`` is set and not 0."""
    return os.environ.get("AGENTENV_DEBUG", "0") not in ("", "0")

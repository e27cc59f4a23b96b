"""Settings, frozen and validated. Environment variables are read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentenv.errors import ConfigError
from agentenv.wire.base import MAX_TIMEOUT_S
from agentenv.wire.spec import Bind, SlotLimits

Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class Settings(BaseModel):
    """Base of every settings model: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ContainerSettings(Settings):
    """What each container of a farm is: becomes a :class:`agentenv.wire.spec.SandboxSpec`."""

    slots_per_container: Annotated[int, Field(ge=1, le=1000)] = 10
    isolation: Literal["auto", "full", "user"] = "auto"
    require_sandbox: bool = True
    """True: refuse to start where per-slot isolation is weaker than ``full`` promises, unless
    ``isolation="user"`` asked for less by name. False: accept ``user`` when ``full`` cannot be had."""
    allow_network: bool = False
    limits: SlotLimits = SlotLimits()
    binds: tuple[Bind, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    output_bytes: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024)] = 1024 * 1024
    spare_shells: bool = True


class PoolSettings(Settings):
    """How many containers there are, and how slots are leased."""

    min_containers: Annotated[int, Field(ge=0, le=10_000)] = 1
    max_containers: Annotated[int, Field(ge=1, le=10_000)] = 10
    acquire_timeout_s: Seconds = 30.0
    lease_ttl_s: Seconds = 60.0
    """A lease without a heartbeat for this long ends in the container; the pool renews at a third."""
    idle_containers_after_s: Seconds = 60.0
    """A container with no lease for this long may be scaled away, down to ``min_containers``."""
    suspect_after_s: Seconds = 5.0
    """A container that has not answered for this long takes no new leases."""
    gone_after_s: Seconds = 15.0
    """A container that has not answered for this long is given up: its leases end typed."""
    start_timeout_s: Seconds = 60.0

    @model_validator(mode="after")
    def _ordered(self) -> PoolSettings:
        if self.min_containers > self.max_containers:
            raise ValueError(
                f"min_containers ({self.min_containers}) must be at most max_containers ({self.max_containers})"
            )
        if self.suspect_after_s > self.gone_after_s:
            raise ValueError("suspect_after_s must be at most gone_after_s")
        return self


class ExecutorSettings(Settings):
    """How tool calls are batched, bounded and asked for again."""

    tool_batch_window_ms: Annotated[float, Field(ge=0, le=10_000)] = 20.0
    """The longest a call may wait for company; a lone call never waits."""
    tool_max_batch_size: Annotated[int, Field(ge=1, le=1_000)] = 200
    default_timeout_s: Seconds = 60.0
    reconnect_deadline_s: Seconds = 15.0
    """How long a cut connection is retried before its calls end with ConnectionLostError."""


def state_dir() -> Path:
    """Where running containers keep their state: ``$AGENTENV_STATE_DIR``, else ``/run/agentenv``
    for root, else ``$XDG_RUNTIME_DIR/agentenv`` or ``/tmp/agentenv-UID``."""
    if named := os.environ.get("AGENTENV_STATE_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/run/agentenv")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "agentenv" if runtime else Path(f"/tmp/agentenv-{os.geteuid()}")  # noqa: S108


def launch_environment() -> dict[str, str]:
    """What a container process inherits of ours: where programs are found, nothing that could be a secret."""
    kept = ("PATH", "TMPDIR", "XDG_RUNTIME_DIR", "PYTHONPATH", "PYTHONDEVMODE", "LD_LIBRARY_PATH")
    return {"LANG": "C.UTF-8", **{name: os.environ[name] for name in kept if name in os.environ}}


def explain(error: ValidationError) -> ConfigError:
    """The first problem pydantic found, as a ConfigError naming the field and what is allowed."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "settings"
    return ConfigError(where, f"{first['msg']} (got {first['input']!r})")


def debug() -> bool:
    """Whether the command line shows tracebacks instead of messages: ``$AGENTENV_DEBUG`` is set and not 0."""
    return os.environ.get("AGENTENV_DEBUG", "0") not in ("", "0")

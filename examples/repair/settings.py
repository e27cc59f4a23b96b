"""The demo's options and what is wrong with them, separate from its implementation, whose imports take seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from agentenv.cli.output import err
from agentenv.errors import ConfigError
from agentenv.subordinate_ids import refusal
from examples.repair.packages import package_names


@dataclass(frozen=True)
class DemoSettings:
    """The demo's options."""

    groups: int
    group_size: int
    slots: int
    seed: int
    isolation: str
    model: str
    base_url: str
    max_steps: int
    out: Path
    backend: str = "local"
    job: str = "agentenv-demo"
    """With Nomad: the job whose allocations are the containers."""
    packages: tuple[str, ...] = ()
    """Only tasks of these packages; all by default."""

    @property
    def scripted(self) -> bool:
        """Whether no model is used."""
        return not self.model

    @property
    def isolation_in_use(self) -> str:
        """What ``auto`` means here: ``full`` for root, ``user`` for a user who has one id. For a user with subordinate
        ids it stays ``auto``: each slot has an id of its own, and the limits that the user's cgroups allow."""
        if self.isolation != "auto":
            return self.isolation
        if self.backend == "nomad":
            return "full"  # the supervisor in the container is root, whoever asks
        if os.geteuid() == 0:
            return "full"
        return "user" if refusal() else "auto"


def check(settings: DemoSettings) -> None:
    """Make ``out``, and note what may surprise. Raises: ConfigError for an option that cannot be followed."""
    if settings.model and not settings.base_url:
        raise ConfigError("OPENAI_BASE_URL", "is not set, and a model is named", next_step="set both, or neither")
    if settings.base_url and not settings.model:
        err().print("[yellow]note[/] OPENAI_BASE_URL is set, but no model is named (--model): a scripted policy plays")
    if settings.isolation_in_use == "user":
        err().print("[yellow]note[/] isolation is user: weaker than full, see agentenv doctor")
    if settings.isolation == "full" and settings.backend == "local" and os.geteuid() != 0 and (why := refusal()):
        raise ConfigError(
            "isolation",
            f"full needs root or subordinate ids: {why.problem}",
            next_step="run as root, or use --isolation user",
        )
    known = package_names()
    if unknown := sorted(set(settings.packages) - set(known)):
        raise ConfigError("package", f"there is no {unknown[0]!r}", next_step=f"known: {', '.join(known)}")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"cannot make {settings.out}: {error.strerror}"
        raise ConfigError("out", said, next_step="name a directory you can write to") from error

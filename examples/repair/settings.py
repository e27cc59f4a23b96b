"""The demo's options, separate from its implementation, whose imports take seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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

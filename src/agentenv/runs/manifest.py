"""``run.json``: what a run is, and how far it came. One directory per run, ``runs/NAME-DATE/``:

- ``run.json``: this file, replaced as a whole at every change
- ``lock``: locked by the process that plays the run
- ``rollouts.jsonl``: a GroupRecord per line, for every group that has ended
- ``members.jsonl``: the rollouts that have ended of groups that have not (:mod:`agentenv.runs.members`)
- ``groups.jsonl``: the groups of `process` for a trainer; ``groups.html`` is atropos' page of them
- ``log.txt``: warnings and errors
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

FILE: Final = "run.json"
LOCK: Final = "lock"
ROLLOUTS: Final = "rollouts.jsonl"
MEMBERS: Final = "members.jsonl"
GROUPS: Final = "groups.jsonl"
LOG: Final = "log.txt"

State = Literal["running", "finished", "failed", "interrupted"]
"""``running`` in a file whose ``lock`` nobody holds: killed, with no time to write more."""
Verb = Literal["process", "evaluate", "serve"]


class RunManifest(BaseModel):
    """A run. Fields that a reader does not know are ignored: a newer version's run is readable."""

    model_config = ConfigDict(extra="ignore")

    format: int = 1
    id: str
    """Sortable by time, different for every run; the same as in its records (``RunRecord.id``)."""
    name: str
    """Of the environment, unless the caller has given another."""
    verb: Verb
    command: list[str]
    """The words that started it, without secrets: program, verb and flags. ``resume`` runs them again."""
    omitted: list[str] = Field(default_factory=list)
    """Flags with secrets, which are not in ``command``; ``resume`` has to be given them again."""
    directory: str
    """The working directory of the command."""
    files: dict[str, str] = Field(default_factory=dict)
    """Results that the caller wanted elsewhere: ``records``, ``groups``, ``metrics``; absolute paths."""
    model: str
    """Name of the model at its server; empty if the environment has models of its own."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Every setting of the environment, without secrets."""
    settings_digest: str
    """As ``RunRecord.settings``."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of agentenv, atroposlib and python."""
    began_unix_s: float
    ended_unix_s: float | None = None
    resumed_unix_s: list[float] = Field(default_factory=list)
    state: State = "running"
    error: str = ""
    """What ended it; empty if it was finished, or killed."""
    goal_groups: int | None = None
    """Groups that it is to have; None with `serve`, which has no end."""
    resumable: bool = True
    """Not with `serve`, nor with an ``evaluate()`` of one's own."""
    group_size: int = 1
    """Rollouts per group: ``group_size`` of `process`, ``epochs`` of `evaluate`."""
    results: dict[str, Any] = Field(default_factory=dict)
    """What `--json` prints, once it has ended."""


def read_manifest(run: Path) -> RunManifest:
    """Of a run's directory. Raises: OSError; ValueError when the file is not one of a run."""
    return RunManifest.model_validate_json((run / FILE).read_bytes())

"""What a run that was killed has come to. Its manifest has what was last written there, which may be nothing: a full
disk, or the seconds before it was killed. The records are what is true."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentenv.agent.results import Results
from agentenv.runs.directory import FoundRun
from agentenv.runs.manifest import FILE, MEMBERS
from agentenv.runs.members import read_members
from agentenv.runs.records import Source, read


@dataclass(frozen=True)
class Recorded:
    """A run's results, as far as they can be known."""

    results: dict[str, Any]
    """As in a manifest; of a run that was killed they are counted from its records."""
    note: str = ""
    """Where the results are from, if that is not the manifest; and what they are without."""
    heard_unix_s: float | None = None
    """When a run that was killed last wrote anything."""


def recorded(run: FoundRun) -> Recorded:
    """The results of a run. Reads all its records if it was killed."""
    if run.state != "killed":
        return Recorded(run.manifest.results)
    source = Source.at(run.path)
    try:
        [found] = read(source)
    except (OSError, ValueError) as error:
        note = f"the results are those last written: its records cannot be read: {str(error).splitlines()[0]}"
        return Recorded(run.manifest.results, note)
    results = Results.of(run.manifest.verb)
    for group in found.groups:
        results.add(group.trajectories)
    written = [path.stat().st_mtime for path in (run.path / FILE, run.path / MEMBERS, source.rollouts) if path.exists()]
    note = "; ".join(["the results are counted from its records", *(f"without {each}" for each in found.problems)])
    return Recorded(results.document(), note, max(written, default=None))


def open_rollouts(run: FoundRun) -> int:
    """How many rollouts have ended of groups that have not; 0 too if that cannot be read."""
    with suppress(OSError, ValueError):
        return sum(1 for _ in read_members(run.path / MEMBERS))
    return 0

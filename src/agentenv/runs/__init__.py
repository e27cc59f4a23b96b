"""The directory of a run: what was asked for, what came of it, and every rollout (docs/runs.md).

:func:`load` makes rows for a data frame of the rollouts of any number of runs, :func:`load_calls` and
:func:`load_messages` of what is in them (docs/reading-runs.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentenv.exports import exported

if TYPE_CHECKING:
    from agentenv.runs.frame import Rows, load, load_calls, load_messages
    from agentenv.runs.manifest import RunManifest, read_manifest
    from agentenv.runs.statistics import estimate_pass_at_k, mean_and_standard_error, paired_difference, pass_at_k

__all__ = [
    "Rows",
    "RunManifest",
    "estimate_pass_at_k",
    "load",
    "load_calls",
    "load_messages",
    "mean_and_standard_error",
    "paired_difference",
    "pass_at_k",
    "read_manifest",
]

ROOT: Final = "runs"
"""Where the directories of runs are by default, below the working directory."""
LAST: Final = "last"
"""Names the newest run."""
_HOMES: Final = {
    "Rows": "agentenv.runs.frame",
    "RunManifest": "agentenv.runs.manifest",
    "estimate_pass_at_k": "agentenv.runs.statistics",
    "load": "agentenv.runs.frame",
    "load_calls": "agentenv.runs.frame",
    "load_messages": "agentenv.runs.frame",
    "mean_and_standard_error": "agentenv.runs.statistics",
    "paired_difference": "agentenv.runs.statistics",
    "pass_at_k": "agentenv.runs.statistics",
    "read_manifest": "agentenv.runs.manifest",
}
if not TYPE_CHECKING:  # a type checker would take any name for one of the package's
    __getattr__, __dir__ = exported(__name__, _HOMES)

"""What a run writes to files: its rollouts, the groups of ``process`` and their page. Whatever cannot be written is
counted and ends the command with status 1; it never ends a rollout."""

from __future__ import annotations

import asyncio
import io
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from atroposlib.frontend.jsonl2html import generate_html

from agentenv._version import __version__
from agentenv.agent.rollout_log import GroupsFile, RolloutLog
from agentenv.agent.transcript import RunRecord, Transcript
from agentenv.config import debug
from agentenv.env.config import AgentFields
from agentenv.env.progress import RunProgress

logger = logging.getLogger(__name__)


class RunFiles:
    """The files of one environment object, which is one run. ``counts`` gets ``records_lost``, ``groups_lost``, ...;
    ``progress`` what and why."""

    def __init__(
        self, config: AgentFields, environment: str, model: str, counts: Counter[str], progress: RunProgress
    ) -> None:
        began = time.time()
        self.run = RunRecord(
            id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(began))}-{uuid.uuid4().hex[:6]}",
            environment=environment,
            model=model,
            settings=config.digest(),
            agentenv=__version__,
            began_unix_s=began,
        )
        self._path = config.rollouts_path
        self._rollouts = RolloutLog(config.rollouts_path, self.run)
        self._counts = counts
        self._progress = progress

    @property
    def run_to_name(self) -> str:
        """The run's id if its records are appended to those of others, otherwise empty. Call it before the first
        group is recorded."""
        return self.run.id if self._rollouts.has_content else ""

    async def add(self, group: str, item: Any, size: int, transcripts: Sequence[Transcript]) -> None:
        """Record a group."""
        if why := await self._rollouts.add(group, item, size, transcripts):
            self.lost("record", self._path, why)

    def groups_file(self, path: str) -> GroupsFile:
        """The file of scored groups, in place of the writer that atropos has opened."""
        return GroupsFile(path, lambda why: self.lost("group", path, why))

    async def write_page(self, groups: str, page: str) -> None:
        """atropos' page of the groups that were written, if there are any."""
        if not await asyncio.to_thread(_page_written, Path(groups), Path(page)):
            self.lost("page", page, "atropos could not write it, and has printed why")

    def lost(self, what: str, path: str | None, why: str) -> None:
        """Count something that could not be written; the first of its kind is logged."""
        self._counts[f"{what}s_lost"] += 1
        if self._counts[f"{what}s_lost"] == 1:
            logger.error("a %s cannot be written to %s: %s; further ones are only counted", what, path, why)
        self._progress.results.missing.lost.add(what, why, "")


def _page_written(groups: Path, page: Path) -> bool:
    if not groups.exists():
        return True
    try:
        with nullcontext() if debug() else redirect_stdout(io.StringIO()):  # it prints that it was successful
            generate_html(str(groups), str(page))
    except SystemExit:
        page.unlink(missing_ok=True)
        return False
    return True

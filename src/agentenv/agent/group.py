"""Runs the rollouts of one item concurrently: each has its own result, and none can affect another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.agent.estimates import Attempts
from agentenv.agent.jsonable import clean_text, item_id
from agentenv.agent.results import Results, faults_text
from agentenv.agent.transcript import Transcript

logger = logging.getLogger(__name__)

Outcome = Literal["complete", "partial", "retry"]


@dataclass
class Place:
    """Where a group belongs in its run: what a command sets for the task that rolls it out."""

    position: int | None = None
    """The item's number in the sequence of ``get_next_item``."""
    group: str = ""
    """The name of the last group that was rolled out there."""


PLACE: ContextVar[Place | None] = ContextVar("PLACE", default=None)


async def run_group(
    members: Sequence[str], run: Callable[[str], Coroutine[Any, Any, Transcript]], item_id: str
) -> list[Transcript]:
    """Run every member (named by trajectory) and return one transcript each, in order.

    A member that raises, whatever it raises, becomes an unscored transcript. When the caller is cancelled, every
    member is cancelled and has released its slot before the cancellation propagates.
    """
    tasks = [asyncio.create_task(run(member), name=member) for member in members]
    try:
        await asyncio.wait(tasks)
    finally:
        await end_all(tasks)
    return [_transcript_of(task, item_id) for task in tasks]


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks and wait until all have ended, however often the caller is cancelled (the
    cancellation propagates afterwards)."""
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            pending = {task for task in pending if not task.done()}
    if cancelled is not None:
        raise cancelled


def _transcript_of(task: asyncio.Task[Transcript], item_id: str) -> Transcript:
    error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return task.result()
    logger.error("%s ended with %r; it is not scored", task.get_name(), error, exc_info=error)
    return Transcript(
        trajectory=task.get_name(),
        item_id=item_id,
        began_unix_s=time.time(),
        finish_reason="fault",
        fault="infra",
        error=clean_text(f"{type(error).__name__}: {error}"),
        doubtful=True,
    )


def outcome_of(transcripts: Sequence[Transcript]) -> Outcome:
    """Outcome of a group: all members scored, some, or none."""
    scored = sum(transcript.score is not None for transcript in transcripts)
    if scored == 0:
        return "retry"
    return "complete" if scored == len(transcripts) else "partial"


class ItemRetries:
    """Counts the groups per item without a scored member. An item that failed ``1 + limit`` times is dropped, with
    a log message."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failures: Counter[str] = Counter()

    def again(self, item: Any, transcripts: Sequence[Transcript]) -> list[Any]:
        """``[item]`` to retry it, or nothing when it is dropped."""
        key = item_id(item)
        self._failures[key] += 1
        faults = faults_text(Counter(t.fault for t in transcripts if t.fault != "none"))
        if self._failures[key] <= self._limit:
            logger.info("item %s: no member of its group has a score (faults: %s); it will be retried", key, faults)
            return [item]
        del self._failures[key]
        logger.error("item %s dropped: %d groups failed (faults: %s)", key, self._limit + 1, faults)
        return []

    def resumed(self, item: Any, failures: int) -> None:
        """The item's groups had failed so often before this process began."""
        if failures:
            self._failures[item_id(item)] = failures

    def succeeded(self, item: Any) -> None:
        """Forget the item's failures."""
        self._failures.pop(item_id(item), None)


SAMPLE_FIELDS = {"trajectory", "item_id", "score", "fault", "error", "finish_reason", "final_response"}
"""Transcript fields included in evaluation samples."""


def summary(groups: Iterable[Sequence[Transcript]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return (metrics, samples) of the attempts at each item. Unscored rollouts are counted, but are in no mean."""
    results, samples = Results(attempts=Attempts()), []
    for transcripts in groups:
        results.add(transcripts)
        samples += [transcript.model_dump(mode="json", include=SAMPLE_FIELDS) for transcript in transcripts]
    return results.metrics(), samples

"""Summary of an evaluation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.agent.transcript import Transcript

SAMPLE_FIELDS = {"trajectory", "item_id", "score", "fault", "error", "finish_reason", "final_response"}
"""Transcript fields included in evaluation samples."""


def summary(transcripts: Sequence[Transcript]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return (metrics, samples). Unscored rollouts are counted, but are in no mean."""
    scores = [transcript.score for transcript in transcripts if transcript.score is not None]
    metrics = {"items": float(len(transcripts)), "scored": float(len(scores))}
    if scores:
        metrics["mean_score"] = sum(scores) / len(scores)
    return metrics, [transcript.model_dump(mode="json", include=SAMPLE_FIELDS) for transcript in transcripts]

"""AgentEnv's own Weights & Biases reporting: partial groups, our counts, errors with a cure."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import wandb

from agentenv.agent.rollout_metrics import ROLLOUT_COLUMNS, RolloutMetrics, rollout_row
from agentenv.agent.transcript import Transcript
from agentenv.errors import ConfigError


class WandbReporting:
    """Mixin for AgentEnv, placed before atropos' class."""

    name: str | None
    config: Any
    tokenizer: Any
    counts: Counter[str]
    rollouts_for_wandb: list[Any]
    wandb_project: str | None
    wandb_group: str | None
    rollout_metrics: RolloutMetrics
    readable_rollouts: deque[list[Any]]

    def prepare_reports(self) -> None:
        """Called once by the constructor."""
        self.rollout_metrics = RolloutMetrics()
        self.readable_rollouts = deque(maxlen=max(1, self.config.num_rollouts_to_keep))

    def report_group(self, size: int, transcripts: Sequence[Transcript]) -> None:
        """Include a finished group in the next report, also one without a score."""
        self.rollout_metrics.add(size, transcripts)
        wanted = self.config.num_rollouts_per_group_for_logging
        chosen = transcripts if wanted == -1 else transcripts[: max(0, wanted)]
        self.readable_rollouts.extend(rollout_row(transcript) for transcript in chosen)

    async def setup_wandb(self) -> None:
        """As in atropos, for ``serve``. Raises: ConfigError when wandb cannot be used."""
        with _usable():
            await super().setup_wandb()  # type: ignore[misc]

    def start_wandb(self) -> None:
        """For ``process``. Raises: ConfigError when wandb cannot be used."""
        if not self.config.use_wandb:
            return
        with _usable():
            wandb.init(
                project=self.wandb_project,
                name=f"{self.name}-{time.strftime('%Y-%m-%d-%H%M%S')}",
                group=self.wandb_group,
                config=self.config.model_dump(exclude={"tool_server_token"}),
            )

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:  # noqa: ARG002
        """As in atropos, also for groups with fewer members than ``group_size``."""
        wanted = self.config.num_rollouts_per_group_for_logging
        number = len(scored_data["tokens"]) if wanted == -1 else min(wanted, len(scored_data["tokens"]))
        rows = [(self.tokenizer.decode(scored_data["tokens"][n]), scored_data["scores"][n]) for n in range(number)]
        self.rollouts_for_wandb = [*self.rollouts_for_wandb, rows][-self.config.num_rollouts_to_keep :]

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log also the counts of rollouts, retries and faults since the start, and the rates since the last report."""
        ours = {**self.counts, **self.rollout_metrics.drain()}
        named = {f"agentenv/{name}": number for name, number in ours.items()}
        await super().wandb_log({**(wandb_metrics or {}), **named})  # type: ignore[misc]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """atropos' ``train/rollouts`` (text, score), and ``agentenv/rollout_table`` for reading."""
        metrics: dict[str, Any] = await super().create_rollout_table(wandb_metrics)  # type: ignore[misc]
        rows, self.readable_rollouts = list(self.readable_rollouts), deque(maxlen=self.readable_rollouts.maxlen)
        if rows and self.config.use_wandb:
            metrics["agentenv/rollout_table"] = wandb.Table(columns=list(ROLLOUT_COLUMNS), data=rows)
        return metrics


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except wandb.errors.UsageError as error:
        cure = "log in with `wandb login`, or pass --env.use_wandb false"
        raise ConfigError("use_wandb", f"wandb cannot be used: {error}", next_step=cure) from error

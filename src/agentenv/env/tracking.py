"""AgentEnv's own Weights & Biases reporting: partial groups, our counts, errors with a cure."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import wandb

from agentenv.agent.protocols import Message
from agentenv.agent.rollout_metrics import ROLLOUT_COLUMNS, RolloutMetrics, ToolErrors, conversation, rollout_row
from agentenv.agent.transcript import Transcript
from agentenv.env.config import SECRETS
from agentenv.errors import ConfigError

logger = logging.getLogger(__name__)


class WandbReporting:
    """Mixin for AgentEnv, placed before atropos' class."""

    name: str | None
    config: Any
    counts: Counter[str]
    wandb_project: str | None
    wandb_group: str | None
    rollout_metrics: RolloutMetrics
    readable_rollouts: deque[list[Any]]
    tool_errors: ToolErrors
    text_of: Callable[[list[Message]], str]
    rollouts_for_wandb: list[Any]

    def prepare_reports(self) -> None:
        """Called once by the constructor."""
        self.rollout_metrics = RolloutMetrics()
        self.tool_errors = ToolErrors()
        self.text_of = conversation
        self.readable_rollouts = deque(maxlen=max(1, self.config.num_rollouts_to_keep))

    def report_group(self, size: int, transcripts: Sequence[Transcript]) -> None:
        """Include a finished group in the next report, also one without a score."""
        self.rollout_metrics.add(size, transcripts)
        self.tool_errors.add(transcripts)
        wanted = self.config.num_rollouts_per_group_for_logging
        chosen = transcripts if wanted == -1 else transcripts[: max(0, wanted)]
        self.readable_rollouts.extend(self._row(transcript) for transcript in chosen)

    def _row(self, transcript: Transcript) -> list[object]:
        try:
            return rollout_row(transcript, self.text_of)
        except Exception:
            if self.text_of is conversation:
                raise
            logger.exception("an environment's own format of conversations failed, and is not used any more")
            self.text_of = conversation
            return rollout_row(transcript, conversation)

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
                config=self.config.model_dump(exclude=set(SECRETS)),
            )

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Nothing: :meth:`report_group` has kept the rollouts as conversations; atropos would keep their tokens."""

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log also the counts of rollouts, retries and faults since the start, and the rates and the errors of tool
        calls since the last report."""
        ours = {**self.counts, **self.rollout_metrics.drain()}
        named = {f"{_section(name)}/{name}": number for name, number in ours.items()}
        errors = {f"train/{name}": value for name, value in self.tool_errors.drain().items()}
        await super().wandb_log({**(wandb_metrics or {}), **named, **errors})  # type: ignore[misc]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """``train/rollouts``: the newest rollouts, as conversations; as in atropos if the environment's own
        ``add_rollouts_for_wandb`` has kept some."""
        rows, self.readable_rollouts = list(self.readable_rollouts), deque(maxlen=self.readable_rollouts.maxlen)
        if self.rollouts_for_wandb and self.config.use_wandb:
            return await super().create_rollout_table(wandb_metrics)  # type: ignore[misc,no-any-return]
        if rows and self.config.use_wandb:
            wandb_metrics["train/rollouts"] = wandb.Table(columns=list(ROLLOUT_COLUMNS), data=rows)
        return wandb_metrics


def _section(name: str) -> str:
    return "train" if name.startswith("prepared_") else "agentenv"


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except wandb.errors.UsageError as error:
        cure = "log in with `wandb login`, or pass --env.use_wandb false"
        raise ConfigError("use_wandb", f"wandb cannot be used: {error}", next_step=cure) from error

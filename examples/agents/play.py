"""Plays groups with each program, and checks that every token that is trained on is found as it was sampled."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from rich.table import Table

from agentenv.agent.transcript import GroupRecord
from agentenv.agents import RECIPES
from agentenv.cli.output import err, out
from agentenv.cli.progress import Bars
from agentenv.report import read_records, write_report
from agentenv.testing import ScriptedPolicy, TokenSpeaker, build_tokenizer
from examples.agents import policy
from examples.agents.env import AgentRepairConfig, AgentRepairEnv
from examples.repair.demo import log_errors_only
from examples.repair.packages import Catalogue, fetch
from examples.repair.tasks import Task, make_tasks

CONTEXT_TOKENS: Final = 1_000_000
"""The scripted policy's tokenizer has a token for every byte, several times as many as a real one."""


@dataclass(frozen=True)
class Settings:
    """What is played: every program in every dialect of its, with each kind of model."""

    programs: Sequence[str]
    modes: Sequence[str]
    groups: int
    group_size: int
    image: str | None
    model: str
    base_url: str
    out: Path
    package: str = "inflection"
    """Whose bugs are repaired."""


@dataclass(frozen=True)
class Played:
    """The groups of one program. ``exact`` of ``trained`` answers are found as they were sampled, with the prompt that
    they were sampled from; None: there are no tokens."""

    program: str
    dialect: str
    mode: str
    groups: Sequence[GroupRecord]
    sequences: int
    trained: int | None
    exact: int | None
    took_s: float

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be with a policy that repairs everything."""
        members = [member for group in self.groups for member in group.trajectories]
        found = [f"{one.trajectory}: {one.error}" for one in members if one.error]
        found += [f"{one.trajectory} scored {one.score}" for one in members if not one.error and one.score != 1.0]
        ended = [one for one in members if not one.error and one.finish_reason != "stop"]
        found += [f"{one.trajectory} ended by {one.finish_reason}" for one in ended]
        if self.exact != self.trained:
            found.append(f"{self.exact} of {self.trained} answers are found as they were sampled")
        return [f"{self.program}, {self.dialect}, {self.mode}: {text}" for text in found]


def tasks_of(settings: Settings) -> tuple[Catalogue, list[Task]]:
    """The packages, and the tasks to play; minutes the first time. Raises: DownloadError."""
    catalogue = fetch()
    tasks = make_tasks(catalogue, seed=1)
    return catalogue, [task for task in tasks if task.package == settings.package][: settings.groups]


async def play_all(settings: Settings) -> list[str]:
    """Play everything, print a table and write a page. Returns what was not as it has to be. Raises: what the
    environment's setup raises."""
    log_errors_only()
    with Bars() as bars:
        bar = bars.add_task("packages and tasks (minutes the first time)", total=None)
        catalogue, chosen = await asyncio.to_thread(tasks_of, settings)
        runs = [
            (name, dialect, mode)
            for name in settings.programs
            for dialect in RECIPES[name].programs
            for mode in settings.modes
        ]
        bars.update(bar, total=len(runs), completed=0)
        found = []
        for name, dialect, mode in runs:
            bars.update(bar, description=f"{name}, {dialect}, {mode}")
            found.append(await played(settings, catalogue, chosen, name, dialect, mode))
            bars.advance(bar)
    _show(found)
    page = settings.out / "report.html"
    write_report([group for one in found for group in one.groups], page, title="Packages repaired by agent programs")
    out().print(f"page  {page}")
    return [fault for one in found for fault in one.faults] if not settings.model else []


async def played(
    settings: Settings, catalogue: Catalogue, tasks: Sequence[Task], name: str, dialect: str, mode: str
) -> Played:
    """A group of each task with this program, in a dialect and with a kind of model (exact, openai)."""
    records = settings.out / f"{name}-{dialect}-{mode}.jsonl"
    records.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentenv-agents-") as directory:
        tokenizer = build_tokenizer(directory)
        config = _config(settings, tokenizer, records, name, dialect)
        async with _server(settings, catalogue, tasks, name, mode, tokenizer) as (server, speaker):
            groups: list[dict[str, Any]] = []
            async with AgentRepairEnv(config, [server], catalogue=catalogue, tasks=tasks) as env:
                for _ in tasks:
                    group, _left = await env.collect_trajectories(await env.get_next_item())
                    groups += [group] if group is not None else []
    trained = exact = None
    if speaker is not None:
        sampled = [_sampled(speaker, one) for one in groups]
        trained, exact = sum(one[0] for one in sampled), sum(one[1] for one in sampled)
    sequences = sum(len(group["tokens"]) for group in groups)
    recorded = list(read_records(records))
    return Played(name, dialect, mode, recorded, sequences, trained, exact, time.monotonic() - began)


def _config(settings: Settings, tokenizer: Path, records: Path, name: str, dialect: str) -> AgentRepairConfig:
    chosen: dict[str, Any] = {
        "agent": name,
        "agent_api": dialect,
        "agent_image": settings.image,
        "tokenizer_name": str(tokenizer),
        "group_size": settings.group_size,
        "max_containers": 1,
        "slots_per_container": settings.group_size,
        "use_wandb": False,
        "runs_dir": "",
        "rollouts_path": str(records),
        "tool_call_parser": "hermes",
        "infra_retries": 0 if not settings.model else 2,
    }
    if not settings.model:
        chosen |= {"agent_max_tokens": 8000, "max_token_length": CONTEXT_TOKENS, "agent_context_tokens": CONTEXT_TOKENS}
    return AgentRepairConfig(**chosen)


@asynccontextmanager
async def _server(
    settings: Settings, catalogue: Catalogue, tasks: Sequence[Task], name: str, mode: str, tokenizer: Path
) -> AsyncIterator[tuple[APIServerConfig, TokenSpeaker | None]]:
    """The model's server: the scripted policy, with token ids where tokens are to be exact, or the given one."""
    kind = "vllm" if mode == "exact" else "openai"
    if settings.model:
        key = os.environ.get("OPENAI_API_KEY", "unused")
        yield (
            APIServerConfig(base_url=settings.base_url, model_name=settings.model, api_key=key, server_type=kind),
            None,
        )
        return
    speaker = None
    if mode == "exact":
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(str(tokenizer))
        speaker = TokenSpeaker(loaded)
    script = policy.script(RECIPES[name], tasks, catalogue.by_name)
    async with ScriptedPolicy(script, speaker=speaker) as player:
        yield (
            APIServerConfig(base_url=player.base_url, model_name="scripted", api_key="unused", server_type=kind),
            speaker,
        )


def _sampled(speaker: TokenSpeaker, group: dict[str, Any]) -> tuple[int, int]:
    """How many answers are trained on in a group, and how many of them the policy gave: with these tokens and logprobs,
    to exactly the prompt before them."""
    said = {(tuple(one.prompt), tuple(one.tokens), tuple(one.logprobs)) for one in speaker.said}
    trained = exact = 0
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        begin = None
        for at, mask in enumerate([*masks, -100]):
            if mask != -100 and begin is None:
                begin = at
            elif mask == -100 and begin is not None:
                trained += 1
                answer = tuple(tokens[:begin]), tuple(tokens[begin:at]), tuple(logprobs[begin:at])
                exact += answer in said and tokens[begin:at] == masks[begin:at]
                begin = None
    return trained, exact


def _show(played: Sequence[Played]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("program", "dialect", "mode", "scores", "turns", "sequences", "exact answers", "seconds"):
        table.add_column(heading, justify="right" if heading in ("turns", "sequences", "seconds") else "left")
    for one in played:
        members = [member for group in one.groups for member in group.trajectories]
        scores = "  ".join("–" if member.score is None else f"{member.score:g}" for member in members)
        turns = str(sum(len(member.steps) for member in members))
        exact = "no tokens" if one.trained is None else f"{one.exact} of {one.trained}"
        sequences = "–" if one.trained is None else str(one.sequences)
        table.add_row(one.program, one.dialect, one.mode, scores, turns, sequences, exact, f"{one.took_s:.1f}")
    out().print(table)
    for fault in (fault for one in played for fault in one.faults):
        err().print(fault, soft_wrap=True, markup=False)

"""Implementation of ``make demo``: tasks, rollouts, records, the page, a summary."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from rich.table import Table

from agentenv.agent.results import Results, counted, one_line
from agentenv.agent.rollout_metrics import is_timeout
from agentenv.agent.transcript import GroupRecord, ToolRecord
from agentenv.cli.output import err, out
from agentenv.cli.progress import Bars
from agentenv.config import debug
from agentenv.deadlines import scaled
from agentenv.errors import InfraError
from agentenv.report import read_records, write_report
from agentenv.sessions.asciicast import recordings
from agentenv.testing import ScriptedPolicy, build_tokenizer
from examples.repair import policy, tasks
from examples.repair.env import RepairConfig, RepairEnv
from examples.repair.packages import Catalogue, artifact_count, fetch
from examples.repair.settings import DemoSettings
from examples.repair.tasks import Task

MODEL_LATENCY_S = 0.15
"""Pause of the scripted policy before each answer, so that its turns are visible on the page."""
SCRIPTED_TOOL_TIMEOUT_S = scaled(15.0)
MODEL_TOOL_TIMEOUT_S = 120.0
SCRIPTED_SLOT_PROCESSES = 128
MIN_TASKS = 30


class _DemoEnv(RepairEnv):
    """Reports when a rollout has been scored."""

    on_scored: Callable[[], object] = staticmethod(lambda: None)

    async def verify_and_score_trajectory(self, *args: Any, **kwargs: Any) -> tuple[float, dict[str, Any]]:
        """As in the environment, plus one step of the progress bar."""
        scored = await super().verify_and_score_trajectory(*args, **kwargs)
        self.on_scored()
        return scored


async def run_demo(settings: DemoSettings) -> str:
    """The whole demo, with settings that were checked. Returns why it failed, in one line; empty if it did not (see
    :func:`failure`). Raises: what the environment's setup raises; InfraError when no task could be verified."""
    log_errors_only()
    began = time.monotonic()
    catalogue, chosen, made = await _tasks(settings)
    records = settings.out / "rollouts.jsonl"
    records.unlink(missing_ok=True)
    rolled = time.monotonic()
    results = await _roll_out(settings, catalogue, chosen, records)
    groups = list(read_records(records)) if records.exists() else []
    run = _facts(settings, chosen, made, time.monotonic() - rolled)
    page = write_report(groups, settings.out / "report.html", title="Repairing real packages", run=run)
    screens = _write_recordings(groups, settings.out / "recordings")
    _show(groups, page, records, screens, time.monotonic() - began)
    return failure(groups, results, scripted=settings.scripted)


def failure(groups: Sequence[GroupRecord], results: Results, *, scripted: bool) -> str:
    """Why the demo failed, in one line: a task was dropped, or a record lost. With scripted players also: a rollout has
    no score, or the first player, who repairs everything, does not score 1. Empty if it did not fail."""
    found = [text] if (text := results.missing.text()) else []
    if scripted and results.partial:
        errors = "".join(f" ({each.count} × {one_line(each.text)})" for each in results.errors.most_frequent()[:1])
        found.append(f"{counted(results.partial, 'rollout')} without a score{errors}")
    if scripted:
        solvers = [(group.item_id, group.trajectories[0].score) for group in groups]
        wrong = [f"{item} was repaired, and scored {score:g}" for item, score in solvers if score not in (1.0, None)]
        found += wrong
    return "; ".join(found)


def log_errors_only() -> None:
    """Of this project, atropos and its libraries: what else is important is in the records."""
    if not debug():
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.disable(logging.WARNING)


# -- tasks ------------------------------------------------------------------------------------------


async def _tasks(settings: DemoSettings) -> tuple[Catalogue, list[Task], str]:
    """The packages, the tasks to play, and how many were made in which time."""
    began = time.monotonic()
    with Bars() as bars:
        catalogue = _only(await _in_thread(lambda stop: _fetch(bars, stop)), settings.packages)
        made = await _in_thread(lambda stop: _make(bars, catalogue, settings.seed, stop))
    if len(made) < MIN_TASKS and not settings.packages:
        err().print(f"[yellow]note[/] only {len(made)} tasks could be verified with seed {settings.seed}")
    seconds = time.monotonic() - began
    said = f"{len(made)} verified tasks from {len(catalogue.packages)} packages in {seconds:.1f} s"
    err().print(said)
    return catalogue, _chosen(made, settings), said


def _chosen(made: Sequence[Task], settings: DemoSettings) -> list[Task]:
    """Mostly tasks with two bugs if the players are scripted: only those can be half solved."""
    if not made:
        raise InfraError("no task could be verified", next_step="try another --seed")
    pairs, singles = ([task for task in made if (len(task.bugs) > 1) is many] for many in (True, False))
    wanted = max(1, settings.groups * 3 // 4)
    ordered = [*pairs[:wanted], *singles, *pairs[wanted:]] if settings.scripted else list(made)
    return ordered[: settings.groups]


def _only(catalogue: Catalogue, names: Sequence[str]) -> Catalogue:
    return replace(catalogue, packages=tuple(p for p in catalogue.packages if not names or p.name in names))


class _StoppedError(Exception):
    """The demo was asked to end while a thread worked for it."""


async def _in_thread(work: Callable[[Callable[[], None]], Any]) -> Any:
    """Run ``work(check)`` in a thread; when cancelled, its next ``check()`` ends it, and this waits for that."""
    ending = False

    def check() -> None:
        if ending:
            raise _StoppedError

    thread = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        ending = True
        await asyncio.wait([thread])
        thread.exception()
        raise


def _fetch(bars: Bars, check: Callable[[], None]) -> Catalogue:
    bar = bars.add_task("packages", total=artifact_count())

    def step(_name: str) -> None:
        check()
        bars.advance(bar)

    return fetch(progress=step)


def _make(bars: Bars, catalogue: Catalogue, seed: int, check: Callable[[], None]) -> list[Task]:
    bar = bars.add_task("verifying tasks", total=None)

    def step(progress: tasks.Progress) -> None:
        check()
        bars.update(bar, completed=progress.done, total=progress.total, description=f"verifying tasks: {progress.kept}")

    made = tasks.make_tasks(catalogue, seed=seed, report=step)
    bars.update(bar, total=1, completed=1, description=f"verified tasks: {len(made)}")
    return made


# -- rollouts ---------------------------------------------------------------------------------------


async def _roll_out(settings: DemoSettings, catalogue: Catalogue, chosen: Sequence[Task], records: Path) -> Results:
    """All groups, each recorded as it ends. A group without a scored member is retried by its item."""
    with tempfile.TemporaryDirectory(prefix="agentenv-demo-") as directory, Bars() as bars:
        config = _config(settings, build_tokenizer(directory), records)
        async with _server(settings, catalogue, chosen) as server:
            env = _DemoEnv(config, [server], catalogue=catalogue, tasks=chosen)
            bar = bars.add_task("starting slots", total=settings.groups * settings.group_size)
            async with env:
                bars.update(bar, description="rollouts")
                env.on_scored = lambda: bars.advance(bar)
                items = [await env.get_next_item() for _ in range(settings.groups)]
                async with asyncio.TaskGroup() as running:
                    for item in items:
                        running.create_task(_group(env, item))
            return env.progress.results


async def _group(env: RepairEnv, item: dict[str, Any]) -> None:
    left: list[Any] = [item]
    while left:
        _, left = await env.collect_trajectories(left[0])


def _config(settings: DemoSettings, tokenizer: Path, records: Path) -> RepairConfig:
    chosen: dict[str, Any] = {
        "tokenizer_name": str(tokenizer),
        "group_size": settings.group_size,
        "use_wandb": False,
        "rollouts_path": str(records),
        "isolation": settings.isolation_in_use,
        "tool_pool_mode": settings.backend,
        "sandbox_job_id": settings.job,
        "min_containers": 1,
        "max_containers": 1,
        "slots_per_container": settings.slots,
        "slot_processes": SCRIPTED_SLOT_PROCESSES if settings.scripted else 400,
        "tool_timeout_s": SCRIPTED_TOOL_TIMEOUT_S if settings.scripted else MODEL_TOOL_TIMEOUT_S,
        "agent_max_steps": settings.max_steps,
        "send_trajectory_id": settings.scripted,
        "task_seed": settings.seed,
    }
    return RepairConfig(**chosen)


@asynccontextmanager
async def _server(
    settings: DemoSettings, catalogue: Catalogue, chosen: Sequence[Task]
) -> AsyncIterator[APIServerConfig]:
    """The model's server: the scripted policy, or the given one."""
    if not settings.scripted:
        key = os.environ.get("OPENAI_API_KEY", "unused")
        yield APIServerConfig(base_url=settings.base_url, model_name=settings.model, api_key=key)
        return
    script = policy.script(chosen, catalogue.by_name)
    async with ScriptedPolicy(script, latency_s=MODEL_LATENCY_S) as player:
        yield APIServerConfig(base_url=player.base_url, model_name="scripted", api_key="unused")


# -- records and summary ---------------------------------------------------------------------------------------


def _facts(settings: DemoSettings, chosen: Sequence[Task], made: str, seconds: float) -> dict[str, object]:
    played = f"Each of its turns takes {MODEL_LATENCY_S * 1000:.0f} ms on purpose, so that it can be seen."
    return {
        "scripted": played if settings.scripted else None,
        "Policy": "scripted players" if settings.scripted else settings.model,
        "Tasks": f"{len(chosen)} of {made} (seed {settings.seed})",
        "Farm": f"{settings.backend}, {settings.slots} slots in one container, isolation {settings.isolation_in_use}",
        "Rollouts took": f"{seconds:.1f} s",
        "Machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        "Written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _calls(group: GroupRecord) -> list[ToolRecord]:
    return [call for t in group.trajectories for step in t.steps for call in step.tool_calls]


def _tools_used(groups: Sequence[GroupRecord]) -> str:
    """Every tool that was called with its number of calls, the most used first."""
    used = Counter(call.tool for group in groups for call in _calls(group))
    return ", ".join(f"{tool} {count}" for tool, count in used.most_common()) or "none"


def _write_recordings(groups: Sequence[GroupRecord], directory: Path) -> list[Path]:
    """Write the tmux screens as asciicasts, one file per session; those of an earlier demo are removed."""
    for old in directory.glob("*.cast"):
        old.unlink()
    written = []
    for transcript in (t for group in groups for t in group.trajectories):
        results = [call.result for step in transcript.steps for call in step.tool_calls if call.result is not None]
        for session, cast in recordings(result.content for result in results).items():
            directory.mkdir(parents=True, exist_ok=True)
            written.append(directory / f"{transcript.trajectory.replace('/', '_')}-{session}.cast")
            written[-1].write_text(cast)
    return written


def _show(groups: Sequence[GroupRecord], page: Path, records: Path, screens: Sequence[Path], seconds: float) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("task", "bugs", "scores", "mean", "calls", "timed out", "faults"):
        table.add_column(heading, justify="left" if heading in ("task", "scores") else "right", no_wrap=True)
    for group in groups:
        table.add_row(*_row(group))
    console = out()
    console.print(table)
    count = sum(len(group.trajectories) for group in groups)
    console.print(f"{count} rollouts in {len(groups)} groups; everything took {seconds:.1f} s")
    console.print(f"tools    {_tools_used(groups)}\npage     {page}\nrecords  {records}", soft_wrap=True)
    if screens:
        console.print(f"screens  {screens[0].parent}/*.cast (asciinema play FILE)", soft_wrap=True)


def _row(group: GroupRecord) -> tuple[str, ...]:
    scores = [t.score for t in group.trajectories]
    known = [score for score in scores if score is not None]
    calls = _calls(group)
    return (
        group.item_id,
        str(group.item.get("bugs", "")),
        "  ".join("   –" if score is None else f"{score:.2f}" for score in scores),
        f"{sum(known) / len(known):.2f}" if known else "–",
        str(len(calls)),
        str(sum(map(is_timeout, calls))),
        str(sum(t.fault != "none" for t in group.trajectories)),
    )

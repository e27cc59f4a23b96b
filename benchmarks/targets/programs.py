"""A4 to A6: what agent programs cost the trainer's process, and whether what they send back is found as sampled."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from agentenv.agents import RECIPES, binds
from agentenv.errors import ConfigError
from benchmarks.gateway import many, one_long
from benchmarks.measure import Outcome, at_most, beside
from benchmarks.targets.effort import Effort
from examples.agents.play import Settings, played, tasks_of

_TURNS = 50
"""Of a long conversation; its requests around this one are measured."""
_ROLLOUTS = 200
_LATENCY_S = 1.8
"""Of the model, so that so many rollouts ask about 100 times a second."""


async def a_programs(effort: Effort) -> list[Outcome]:
    """A long conversation with a model that costs nothing, and many at once with models that keep tokens. Programs and
    the model's server are other processes."""
    full = effort.rounds > 1
    long = [await one_long(_TURNS + 6) for _ in range(effort.rounds)]
    load = [await many(_ROLLOUTS if full else 20, 12 if full else 4, _LATENCY_S) for _ in range(effort.rounds)]
    around = [sorted(costs.cpu_ms[_TURNS - 6 : _TURNS + 5]) for costs in long]
    cpu = at_most("A4", f"CPU of a request at {_TURNS} turns, without the model", "core-ms", 2.0)
    cores = at_most("A5", f"{_ROLLOUTS} programs at once: CPU of the trainer's process", "cores", 0.5)
    memory = at_most("A5.memory", f"{_ROLLOUTS} programs at once: memory of the trainer's process", "MiB", 500)
    return [
        cpu.outcome([each[len(each) // 2] for each in around], p50_ms=[costs.p50_ms for costs in long]),
        cores.outcome([costs.cpu_cores for costs in load], beside("requests/s", [costs.rate for costs in load])),
        memory.outcome([costs.memory_mib for costs in load]),
    ]


async def a_exact(_: Effort) -> list[Outcome]:
    """Groups with the agent programs of this machine, and the scripted policy: by program and dialect, how many
    of its answers are not found as they were sampled. One round: it is the same each time."""
    goal = at_most("A6", "answers of agent programs that are not found as they were sampled", "answers", 0)
    differing: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-") as out:
        here = [name for name in RECIPES if _is_here(name)]
        settings = Settings(here, ["exact"], 1, 2, None, "", "", Path(out))
        catalogue, tasks = await asyncio.to_thread(tasks_of, settings)
        for name in here:
            for dialect in RECIPES[name].programs:
                group = await played(settings, catalogue, tasks, name, dialect, "exact")
                found = (group.trained or 0) - (group.exact or 0)
                differing[f"{name}, {dialect}"] = found if group.trained else -1
    if not differing:
        raise ConfigError("A6", "no agent program is on this machine", next_step="run scripts/agent-programs")
    return [goal.outcome([float(max(abs(each) for each in differing.values()))], answers=differing)]


def _is_here(name: str) -> bool:
    try:
        binds(name)
    except ConfigError:
        return False
    return True

"""Directories of runs as commands write them, without playing anything: manifests, records, cut lines, groups files."""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.agent.group import outcome_of
from agentenv.agent.rollout_log import append_record
from agentenv.agent.transcript import GroupRecord, RunRecord, Transcript
from agentenv.runs.manifest import FILE, GROUPS, LOCK, ROLLOUTS, RunManifest, State
from tests.browser import synthetic

BEGAN_UNIX_S = 1_772_000_000.0
COMMANDS = ["ls", "python3 -m pytest -q", "sed -n 1,40p boltons/mathutils.py", "patch -p1 < fix.diff"]
SETTINGS: dict[str, Any] = {"agent_max_steps": 20, "temperature": 1.0, "group_size": 4, "tool_pool_mode": "local"}
ERRORS = {
    "infra": "ContainerLostError: container {n} ended while the call ran",
    "task": "TaskError: verify_and_score_trajectory raised ValueError: no line {n}",
}


@dataclass
class Played:
    """A run to be written. ``skill`` is the probability that an attempt at an item of middling difficulty succeeds."""

    name: str
    model: str = "small-1"
    items: int = 20
    attempts: int = 4
    skill: float = 0.5
    gain: float = 0.0
    """Added to ``skill`` over the run, as training does."""
    faults: float = 0.03
    state: State = "finished"
    verb: str = "evaluate"
    seed: int = 0
    began_unix_s: float = BEGAN_UNIX_S
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """As :class:`agentenv.env.records.RunFiles` makes them."""
        at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self.began_unix_s))
        return f"{at}-{random.Random(f'{self.name}{self.seed}').getrandbits(24):06x}"

    @property
    def record(self) -> RunRecord:
        """What its records say of it."""
        return RunRecord(
            id=self.id,
            environment="repair",
            model=self.model,
            settings=f"digest-{len(self.settings)}",
            agentenv="0.1.0",
            began_unix_s=self.began_unix_s,
        )

    def manifest(self) -> RunManifest:
        """Its ``run.json``."""
        record, ended = self.record, self.began_unix_s + 40.0 * self.items
        return RunManifest.model_validate(
            {
                "id": self.id,
                "name": self.name,
                "verb": self.verb,
                "command": ["python", "-m", "examples.repair", self.verb],
                "directory": "/tmp/team",
                "model": self.model,
                "settings": SETTINGS | self.settings,
                "settings_digest": record.settings,
                "versions": {"agentenv": "0.1.0", "atroposlib": "0.4.0", "python": "3.11.2"},
                "began_unix_s": self.began_unix_s,
                "ended_unix_s": None if self.state == "running" else ended,
                "state": self.state,
                "goal_groups": self.items,
                "group_size": self.attempts,
            }
        )

    def groups(self) -> Iterator[GroupRecord]:
        """A group of ``attempts`` per item, one after the other."""
        draw = random.Random(f"{self.model}{self.name}{self.seed}")
        for number in range(self.items):
            at = self.began_unix_s + 30.0 * number
            hard = random.Random(number).uniform(-0.45, 0.45)  # the same in every run
            chance = min(0.98, max(0.02, self.skill + hard + self.gain * number / self.items))
            members = [self._member(number, member, chance, at, draw) for member in range(self.attempts)]
            yield GroupRecord(
                run=self.record,
                group=f"g{number}",
                item_id=f"boltons-{number:03d}",
                item={"package": "boltons 26.2.0", "bug": number},
                group_size=self.attempts,
                outcome=outcome_of(members),
                trajectories=members,
            )

    def _member(self, number: int, member: int, chance: float, at: float, draw: random.Random) -> Transcript:
        score: float | None = 1.0 if draw.random() < chance else draw.choice([0.0, 0.0, 0.0, 0.25, 0.5])
        fields: dict[str, Any] = {}
        if draw.random() < self.faults:
            fault = draw.choice(["infra", "task"])
            fields = {"fault": fault, "error": ERRORS[fault].format(n=draw.randrange(99)), "finish_reason": "fault"}
            score = None
        played = synthetic.transcript(
            f"g{number}-{member}",
            score=score,
            commands=COMMANDS[: draw.randint(1, 4)],
            seed=number,
            item_id=f"boltons-{number:03d}",
            began_unix_s=at + draw.random(),
            **fields,
        )
        played.totals |= {"total_s": played.totals["total_s"] + draw.uniform(2, 25), "slot_wait_s": 0.1}
        prompt = 900
        for step in played.steps:
            written = draw.randint(20, 400)
            step.usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
            prompt += written + 300
        return played


def write(below: Path, played: Played, *, groups: int | None = None) -> Path:
    """Write the run's directory, with its first ``groups`` groups, and return it."""
    directory = below / f"{played.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(played.began_unix_s))}"
    directory.mkdir(parents=True)
    (directory / FILE).write_text(played.manifest().model_dump_json(indent=1))
    (directory / LOCK).touch()
    for number, group in enumerate(played.groups()):
        if groups is None or number < groups:
            append_record(directory / ROLLOUTS, group)
    if played.verb == "process":
        scored = {"tokens": [[1]], "masks": [[-100]], "scores": [1.0], "messages": []}
        (directory / GROUPS).write_text(json.dumps(scored) + "\n")
    return directory


def several(below: Path, items: int = 20) -> list[Path]:
    """Three evaluations of two models, a training run that was interrupted, and one that was killed."""
    runs = [
        Played("repair-small", "small-1", items, skill=0.35),
        Played("repair-large", "large-2", items, skill=0.6, began_unix_s=BEGAN_UNIX_S + 4000),
        Played(
            "repair-long",
            "large-2",
            items,
            skill=0.7,
            began_unix_s=BEGAN_UNIX_S + 8000,
            settings={"agent_max_steps": 60},
        ),
        Played(
            "repair-train",
            "small-1",
            items,
            skill=0.2,
            gain=0.6,
            verb="process",
            state="interrupted",
            began_unix_s=BEGAN_UNIX_S + 12000,
        ),
        Played("repair-killed", "small-1", items, state="running", began_unix_s=BEGAN_UNIX_S + 16000),
    ]
    return [write(below, run, groups=None if run.state == "finished" else items // 2) for run in runs]


@contextmanager
def played_now(directory: Path) -> Iterator[None]:
    """Its lock is held in the body, as by the process that plays it."""
    descriptor = os.open(directory / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

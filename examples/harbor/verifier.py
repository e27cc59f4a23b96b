"""Runs a task's ``tests/test.sh`` in the slot that the policy leaves, and reads the reward it writes.

As in Harbor the verifier shares the slot with what the policy left: its files, programs and, unless the slot is
sealed, its processes. What goes wrong there leads to reward 0 with the reason, because the policy may have caused it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv import ToolContext
from agentenv.errors import PolicyRefusalError, TaskError, ToolCallError
from examples.harbor.task_file import HarborTask

TESTS: Final = "/tests"
LOGS: Final = "/logs/verifier"
REWARD: Final = "reward"
"""The reward that is the score, where there are several."""
PREPARE_TIMEOUT_S: Final = 120.0
MAX_REWARD_CHARS: Final = 64 * 1024
_SHOWN_CHARS: Final = 2000


class NoRewardError(Exception):
    """What the verifier did is no reward."""


@dataclass(frozen=True)
class Judged:
    """What the verifier found. ``rewards`` is empty with a reason if it wrote none."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    exit_code: int | None = None
    output: str = ""
    """The end of what it printed."""

    @property
    def score(self) -> float:
        """The reward called ``reward``, or the only one; 0 without any. Raises TaskError when it cannot be told."""
        if not self.rewards:
            return 0.0
        if REWARD in self.rewards:
            return self.rewards[REWARD]
        if len(self.rewards) > 1:
            raise TaskError(f"the verifier wrote {', '.join(self.rewards)}", next_step=f"call one of them {REWARD!r}")
        return next(iter(self.rewards.values()))

    def told(self) -> dict[str, Any]:
        """The data kept in the transcript."""
        kept = {
            "rewards": dict(self.rewards),
            "reason": self.reason,
            "exit code": self.exit_code,
            "output": self.output,
        }
        return {name: value for name, value in kept.items() if value not in ("", {}, None)}


async def judged(exec_tool: ToolContext, task: HarborTask) -> Judged:
    """Upload the tests, run them, and read the reward. Raises InfraError, SlotDestroyedError."""
    try:
        await _prepare(exec_tool, task)
        user = task.verifier.user or task.other_user
        ran = await exec_tool.terminal(
            f"bash {TESTS}/test.sh", task.verifier.timeout_s, env=task.verifier_env, user=user
        )
    except (OSError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
        return Judged(reason=f"the verifier could not be run: {error}")
    output = (ran.stdout + ran.stderr)[-_SHOWN_CHARS:]
    if ran.timed_out:
        return Judged({}, f"the verifier took more than {task.verifier.timeout_s:g} s", ran.exit_code, output)
    try:
        return Judged(await _rewards(exec_tool), "", ran.exit_code, output)
    except (OSError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
        return Judged({}, f"no reward: {error}", ran.exit_code, output)


async def _prepare(exec_tool: ToolContext, task: HarborTask) -> None:
    """Nothing that the policy may have put there stays. Files are uploaded as the agent's user, and are then root's."""
    await _as_root(exec_tool, f"rm -rf {TESTS} {LOGS} && mkdir -p {TESTS} {LOGS} && chmod 777 {TESTS} {LOGS}")
    await exec_tool.upload(task.tests, TESTS)
    await _as_root(exec_tool, f"chown -R root:root {TESTS} && chmod -R go-w {TESTS}")


async def _as_root(exec_tool: ToolContext, command: str) -> None:
    done = await exec_tool.terminal(command, PREPARE_TIMEOUT_S, cwd="/", user="root")
    if done.exit_code or done.timed_out:
        raise NoRewardError(f"{command}: {done.stderr.strip()[:300]}")


async def _rewards(exec_tool: ToolContext) -> dict[str, float]:
    """Of ``reward.txt``, else of ``reward.json``."""
    try:
        return parse_text(await exec_tool.read_file(f"{LOGS}/reward.txt"))
    except FileNotFoundError:
        return parse_json(await exec_tool.read_file(f"{LOGS}/reward.json"))


def parse_text(text: str) -> dict[str, float]:
    """One number. Raises NoRewardError."""
    try:
        return {REWARD: _number(float(text[:MAX_REWARD_CHARS]))}
    except ValueError as error:
        raise NoRewardError(f"reward.txt is no number: {text.strip()[:100]!r}") from error


def parse_json(text: str) -> dict[str, float]:
    """An object of numbers by name. Raises NoRewardError."""
    try:
        found = json.loads(text[:MAX_REWARD_CHARS])
    except (ValueError, RecursionError) as error:
        raise NoRewardError(f"reward.json is no JSON: {text.strip()[:100]!r}") from error
    if not isinstance(found, dict) or not found:
        raise NoRewardError("reward.json is no object of numbers")
    return {str(name): _number(value) for name, value in found.items()}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise NoRewardError(f"{value!r} is no finite number")
    return float(value)

"""Runs a task's tests in the slot that the policy leaves, and reads the reward.

As in Harbor the verifier shares the slot with what the policy left: its files, programs and, unless the slot is
sealed, its processes. What goes wrong there leads to reward 0 with the reason, because the policy may have caused it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv import ToolContext
from agentenv.errors import PolicyRefusalError, TaskError, ToolCallError
from examples.harbor.rewards import REWARD, NoRewardError, parse_json, parse_printed, parse_text
from examples.harbor.task import TESTS, HarborTask

LOGS: Final = "/logs/verifier"
PRINTED: Final = f"{LOGS}/output.txt"
"""All that the verifier prints, where that has its results: it may be more than a call returns."""
PREPARE_TIMEOUT_S: Final = 120.0
_SHOWN_CHARS: Final = 2000


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
    prints = task.results != "reward"
    command = f"bash {TESTS}/{task.script}"
    try:
        await _prepare(exec_tool, task)
        ran = await exec_tool.terminal(
            f"{command} > {PRINTED} 2>&1" if prints else command,
            task.verifier.timeout_s,
            env=task.verifier_env,
            user=task.verifier.user or task.other_user,
        )
        printed = ran.stdout + ran.stderr
        if prints:
            printed = (await exec_tool.read_file(PRINTED, binary=True)).decode(errors="replace")
    except (OSError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
        return Judged(reason=f"the verifier could not be run: {error}")
    output = printed[-_SHOWN_CHARS:]
    if ran.timed_out:
        return Judged({}, f"the verifier took more than {task.verifier.timeout_s:g} s", ran.exit_code, output)
    try:
        rewards = parse_printed(task.results, printed) if prints else await _rewards(exec_tool)
        return Judged(rewards, "", ran.exit_code, output)
    except (OSError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
        return Judged({}, f"no reward: {error}", ran.exit_code, output)


async def _prepare(exec_tool: ToolContext, task: HarborTask) -> None:
    """Nothing that the policy may have put there stays. Files are uploaded as the agent's user, and are then root's."""
    await _as_root(exec_tool, f"rm -rf {TESTS} {LOGS} && mkdir -p {TESTS} {LOGS} && chmod 777 {TESTS} {LOGS}")
    for place in task.tests:
        await exec_tool.upload(place, TESTS if place.is_dir() else f"{TESTS}/{place.name}")
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

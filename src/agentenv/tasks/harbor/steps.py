"""Steps of a task: what is done in the slot before each, and what their rewards come to.

As in Harbor a step has a verifier of its own, which runs before the next step begins, and files that the slot gets
first. The model has one conversation over all of them; Harbor calls that ``resume_trajectory``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentenv.sdk.slot_tools import SlotTools
from agentenv.tasks.harbor.rewards import NoRewardError
from agentenv.tasks.harbor.task import TESTS, HarborTask
from agentenv.tasks.harbor.verifier import LOGS, Judged, as_root, lay

DONE: Final = "steps"
"""In a rollout's ``workspace_meta``: what the verifiers of the steps have found so far."""
ENDED: Final = "ended"
"""There too: why no further step begins."""
SETUP: Final = "setup.sh"
SETUP_TIMEOUT_S: Final = 600.0
_STAGED: Final = "/logs/.agentenv-step"


async def begin(slot: SlotTools, step: HarborTask, workdir: str) -> None:
    """Give the slot what the step begins with, and run its ``setup.sh`` as the agent's user. What the verifier of the
    step before had is removed first, so that the agent never sees it. Raises NoRewardError when a command fails, and
    what an upload raises."""
    await as_root(slot, f"rm -rf {TESTS} {LOGS} && mkdir -p {LOGS} && chmod 777 {LOGS}")
    if step.workdir_files is None:
        return
    await lay(slot, _STAGED, (step.workdir_files,))
    at = shlex.quote(workdir)
    copy = f'set -- {_STAGED}/*; [ $# = 0 ] || cp -a -- "$@" {at}/'
    await as_root(slot, f"shopt -s dotglob nullglob; {copy} && rm -rf {_STAGED}")
    if not (step.workdir_files / SETUP).exists():
        return
    script = f"{workdir.rstrip('/')}/{SETUP}"
    done = await slot.exec(["bash", script], timeout_s=SETUP_TIMEOUT_S, cwd=workdir)
    if done.timed_out or not done.success:
        how = f"took more than {SETUP_TIMEOUT_S:g} s" if done.timed_out else f"exit code {done.exit_code}"
        raise NoRewardError(f"{script}: {how}: {(done.stderr or done.stdout).strip()[-300:]}")


def record(step: HarborTask, judged: Judged) -> dict[str, Any]:
    """What a transcript keeps of a step."""
    return {"step": step.step, **judged.details()}


def shortfall(step: HarborTask, rewards: Mapping[str, float]) -> str:
    """Why no step may follow: the verifier left no reward, or one below ``min_reward``. Empty: one may. Pure."""
    if not rewards:
        return f"step {step.step} has no reward"
    for name, least in step.min_reward.items():
        if name not in rewards or rewards[name] < least:
            has = f"{rewards[name]:g}" if name in rewards else "not there"
            return f"step {step.step}: {name} is {has}, min_reward {least:g}"
    return ""


def all_together(task: HarborTask, records: Sequence[Mapping[str, Any]]) -> Judged:
    """What the steps that were played come to. One without a reward counts as 0 in the mean, since the policy may have
    caused that; Harbor leaves it out. Pure."""
    rewards = [record.get("rewards", {}) for record in records]
    reasons = [f"step {record['step']}: {record['reason']}" for record in records if record.get("reason")]
    if task.reward_of_steps == "final":
        found = dict(rewards[-1]) if rewards else {}
    else:
        names = dict.fromkeys(name for each in rewards for name in each)
        found = {name: sum(each.get(name, 0.0) for each in rewards) / len(rewards) for name in names}
    output = "\n".join(str(record["output"]) for record in records if record.get("output"))
    return Judged(found, "; ".join(reasons), output=output)

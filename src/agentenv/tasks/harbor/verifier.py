"""Runs a task's tests in the slot that the policy leaves, and reads the reward.

As in Harbor the verifier shares the slot with what the policy left (its files, programs and, unless the slot is sealed,
its processes), or has a slot of its own, with the artifacts of the policy's. What goes wrong there leads to reward 0
with the reason, because the policy may have caused it.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from agentenv.errors import PolicyRefusalError, TaskError, ToolCallError
from agentenv.sdk.slot_tools import SlotTools
from agentenv.tasks.harbor.rewards import REWARD, NoRewardError, parse_json, parse_printed, parse_text
from agentenv.tasks.harbor.task import TESTS, HarborTask, Mount, Separate

LOGS: Final = "/logs/verifier"
PRINTED: Final = f"{LOGS}/output.txt"
"""All that the verifier prints, where that has its results: it may be more than a call returns."""
STAGED: Final = "/logs/.agentenv-mounted"
"""Where a file is, until it is moved to where it is mounted."""
PREPARE_TIMEOUT_S: Final = 120.0
MAX_ARTIFACT_BYTES: Final = 1024**3
"""Of each artifact of a verifier on another machine."""
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
        """The reward called ``reward``, or the only one; 0 without any. Raises TaskError when it is unclear."""
        if not self.rewards:
            return 0.0
        if REWARD in self.rewards:
            return self.rewards[REWARD]
        if len(self.rewards) > 1:
            raise TaskError(f"the verifier wrote {', '.join(self.rewards)}", next_step=f"call one of them {REWARD!r}")
        return next(iter(self.rewards.values()))

    def details(self) -> dict[str, Any]:
        """The data kept in the transcript."""
        kept = {
            "rewards": dict(self.rewards),
            "reason": self.reason,
            "exit code": self.exit_code,
            "output": self.output,
        }
        return {name: value for name, value in kept.items() if value not in ("", {}, None)}


async def judged(slot: SlotTools, task: HarborTask) -> Judged:
    """Upload the tests, run them, and read the reward. ``slot``: the agent's, or the verifier's own, which has got the
    artifacts. Raises InfraError, SlotDestroyedError."""
    prints = task.results != "reward"
    script = f"{TESTS}/{task.script}"
    try:
        await _prepare(slot, task)
        ran = await slot.exec(
            ["bash", "-c", f"bash {script} > {PRINTED} 2>&1" if prints else script],  # by its own first line
            timeout_s=task.verifier.timeout_s,
            env=task.verifier_env,
            user=task.verifier.user or (None if task.separate else task.other_user),
        )
        printed = ran.stdout + ran.stderr
        if prints:
            printed = (await slot.read_file(PRINTED, binary=True)).decode(errors="replace")
    except (OSError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
        return Judged(reason=f"the verifier could not be run: {error}")
    output = printed[-_SHOWN_CHARS:]
    if ran.timed_out:
        return Judged({}, f"the verifier took more than {task.verifier.timeout_s:g} s", ran.exit_code, output)
    try:
        rewards = parse_printed(task.results, printed) if prints else await _rewards(slot)
        return Judged(rewards, "", ran.exit_code, output)
    except (OSError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
        return Judged({}, f"no reward: {error}", ran.exit_code, output)


async def handed_over(agents: SlotTools, verifiers: SlotTools, separate: Separate) -> str:
    """Copy the artifacts from one slot to another, under the same paths. Returns why one cannot be copied; empty if all
    are that are there. Raises InfraError, SlotDestroyedError."""
    with tempfile.TemporaryDirectory(prefix="agentenv-artifacts-") as directory:
        for number, path in enumerate(separate.artifacts):
            local = Path(directory) / str(number)
            try:
                await agents.download(path, local, max_bytes=MAX_ARTIFACT_BYTES)
            except FileNotFoundError:
                continue
            except (OSError, ToolCallError, PolicyRefusalError) as error:
                return f"{path} cannot be copied: {error}"
            await as_root(verifiers, f"mkdir -p {shlex.quote(str(PurePosixPath(path).parent))}")
            await verifiers.upload(local, path)
    return ""


async def lay(slot: SlotTools, target: str, places: Iterable[Path], script: str = "") -> None:
    """Upload files, and what directories have in them, to a directory. All of it is root's then, and ``script`` can be
    run, as Harbor does it. Raises NoRewardError when a command fails there, and what an upload raises."""
    at = shlex.quote(target)
    await as_root(slot, f"mkdir -p {at} && chmod 777 {at}")  # files are uploaded as the agent's user
    for place in places:
        await slot.upload(place, target if place.is_dir() else f"{target}/{place.name}")
    runnable = f" && chmod +x {at}/{shlex.quote(script)}" if script else ""
    await as_root(slot, f"chown -R root:root {at} && chmod -R go-w {at}{runnable}")


async def lay_mount(slot: SlotTools, mount: Mount) -> None:
    """Copy what a task's compose file mounts. A directory stays the one that it was, since shells may be in it. Raises
    as :func:`lay`."""
    target = shlex.quote(mount.target)
    if any(name or place.is_dir() for name, place in mount.entries):
        await as_root(slot, f"shopt -s dotglob nullglob; mkdir -p {target} && rm -rf -- {target}/*")
    for name, place in mount.entries:
        path = f"{mount.target}/{name}" if name else mount.target
        if place.is_dir():
            await lay(slot, path, (place,))
            continue
        await lay(slot, STAGED, (place,))  # its directory may be no one's to write to
        at, parent = shlex.quote(path), shlex.quote(str(PurePosixPath(path).parent))
        staged = shlex.quote(f"{STAGED}/{place.name}")
        await as_root(slot, f"mkdir -p {parent} && rm -rf -- {at} && mv {staged} {at} && rm -rf {STAGED}")


async def _prepare(slot: SlotTools, task: HarborTask) -> None:
    """Nothing that the policy may have put there stays."""
    has_tests = task.separate is not None and task.separate.has_tests
    gone = LOGS if has_tests else f"{TESTS} {LOGS}"
    await as_root(slot, f"rm -rf {gone} && mkdir -p {LOGS} && chmod 777 {LOGS}")
    if has_tests:
        await as_root(slot, f"chmod +x {TESTS}/{task.script}")
    else:
        await lay(slot, TESTS, task.tests, task.script)
    for mount in task.separate.mounts if task.separate else ():
        await lay_mount(slot, mount)


async def as_root(slot: SlotTools, command: str) -> None:
    """Run a command of ours. Raises NoRewardError when it fails: the policy may have removed what it uses."""
    done = await slot.exec(["bash", "-c", command], timeout_s=PREPARE_TIMEOUT_S, cwd="/", user="root")
    if not done.success:
        raise NoRewardError(f"{command}: {done.stderr.strip()[:300]}")


async def _rewards(slot: SlotTools) -> dict[str, float]:
    """Of ``reward.json``, else of ``reward.txt``: Harbor's order."""
    try:
        return parse_json(await slot.read_file(f"{LOGS}/reward.json", errors="replace"))
    except FileNotFoundError:
        return parse_text(await slot.read_file(f"{LOGS}/reward.txt", errors="replace"))

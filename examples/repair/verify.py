"""The verifier: takes the policy's version of the source files out of the slot, and judges it in a clean workspace.

Everything but the mutable files comes from the released package again: tests, settings, conftest files. Everything
else the policy left in the workspace is removed first, so that it cannot be imported.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv import ToolContext
from agentenv.deadlines import scaled
from agentenv.errors import PolicyRefusalError, ToolCallError
from agentenv.tasks.judging import (
    JUDGE,
    MAX_NAMED_TESTS,
    Canary,
    Verdict,
    VoidVerdictError,
    answer,
    clear,
    packed,
    plain,
    source,
)
from agentenv.tasks.pinned import SLOT_PYTHON
from examples.repair import mutate
from examples.repair.packages import Package
from examples.repair.tasks import Task, injected, request

SUITE_TIMEOUT_S = scaled(90.0)
"""The suites take 1 to 3 s; a busy machine may be much slower, and must not cost a score."""
MAX_DIFFED_BYTES = 256 * 1024
MAX_DIFFED_LINES = 4000


@dataclass(frozen=True)
class Found:
    """The outcome of the suite over the policy's files; ``verdict`` None with a reason if there is none."""

    verdict: Verdict | None
    reason: str
    changed: str
    """The policy's changes as a diff against the files it was given."""

    def details(self, task: Task) -> dict[str, Any]:
        """The data kept in the transcript."""
        passed = self.verdict.passed if self.verdict else frozenset()
        newly = sorted(set(task.passing) - passed) if self.verdict else []
        still = sorted(set(task.broken) - passed)
        kept: dict[str, Any] = {
            "repaired": f"{len(task.broken) - len(still)} of {len(task.broken)} broken tests",
            "reason": self.reason or _reason(len(still), len(newly)),
            "still broken": still[:MAX_NAMED_TESTS],
            "newly broken": newly[:MAX_NAMED_TESTS],
            "changed": self.changed or "nothing",
            "suite": f"{len(self.verdict.outcomes)} tests in {self.verdict.duration_s:.2f} s" if self.verdict else "",
        }
        return {name: value for name, value in kept.items() if value}


def _reason(still: int, newly: int) -> str:
    if newly:
        return f"score 0: tests that passed before do not pass any more: {newly}"
    return f"tests still broken: {still}" if still else ""


def repaired_share(task: Task, verdict: Verdict | None) -> float:
    """The share of the broken tests that pass; 0 without a verdict, or if a test that passed before fails."""
    if verdict is None or not set(task.passing) <= verdict.passed:
        return 0.0
    return len(verdict.passed & set(task.broken)) / len(task.broken)


async def suite_in_slot(exec_tool: ToolContext, task: Task, package: Package, runner: str) -> Found:
    """Run the released tests over the policy's version of ``package.mutable``, in its (sealed) slot.

    Anything the policy did leads to a Found. Raises: InfraError only.
    """
    given = injected(package, task.bugs)
    taken: dict[str, bytes] = {}
    try:
        for path in package.mutable:
            taken[path] = await source(exec_tool, path)
        await clear(exec_tool)
        verdict = await _judged(exec_tool, package, {**package.files, **taken}, runner)
    except (VoidVerdictError, OSError, ToolCallError, PolicyRefusalError) as error:
        return Found(None, f"score 0: {plain(error)}", changes(given, taken))
    return Found(verdict, "", changes(given, taken))


async def _judged(exec_tool: ToolContext, package: Package, files: Mapping[str, bytes], runner: str) -> Verdict:
    canary, nonce, place = Canary.draw(), secrets.token_hex(16), f"judge-{secrets.token_hex(8)}"
    tree = {f"tree/{path}": content for path, content in files.items()}
    tree["judge.py"] = JUDGE.read_bytes()
    tree[f"tree/{canary.file}"] = canary.source.encode()
    await exec_tool.extract(packed(tree), place)
    question = request(package, f"/workspace/{place}/tree", runner, nonce, SUITE_TIMEOUT_S, canary)
    # exec: no shell is left whose descriptors the code under test could open. The judge closes its own.
    command = f"exec {SLOT_PYTHON} -I -S -B {shlex.quote(f'/workspace/{place}/judge.py')}"
    return await answer(exec_tool, command, question, nonce, canary, SUITE_TIMEOUT_S)


def changes(given: Mapping[str, bytes], taken: Mapping[str, bytes]) -> str:
    """The changes of the files that could be read, as one diff."""
    return "".join(_change(path, given[path], now) for path, now in taken.items() if given[path] != now)


def _change(path: str, before: bytes, now: bytes) -> str:
    if len(now) > MAX_DIFFED_BYTES or now.count(b"\n") > MAX_DIFFED_LINES:  # a diff's cost is quadratic
        return f"{path}: replaced by {len(now)} bytes\n"
    return mutate.diff(path, before.decode("utf-8", "replace"), now.decode("utf-8", "replace"))

"""The verifier: takes the policy's changes out of its slot, and runs the named tests over them in a clean
workspace.

:func:`judged` alone decides which of a policy's changes count, without I/O. The test run itself, with its nonce and
its control tests, is that of :mod:`agentenv.tasks.judging` (``docs/repair.md``).
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv import ToolContext
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
    question,
    source,
)
from agentenv.tasks.pinned import SLOT_PYTHON
from agentenv.tasks.swe import scan
from agentenv.tasks.swe.records import SweRecord
from agentenv.tasks.swe.repositories import Checkout, manifest

HERE = Path(__file__).parent
SCAN_TIMEOUT_S = 120.0
MAX_TAKEN_BYTES = 16 * 1024 * 1024
"""Limit of all changed files together; each may have 2 MiB."""
SOURCE_ROOTS = ("src", "lib")
"""Directories of a repository added to sys.path if they exist, after its top."""
TEST_DIRECTORIES = frozenset({"test", "tests"})
RUNNER_FILES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "sitecustomize.py", "usercustomize.py"}
)
MAX_NAMED_FILES = 50


@dataclass(frozen=True)
class Changes:
    """A policy's changes of its workspace."""

    taken: Mapping[str, bytes] = field(default_factory=dict)
    removed: Sequence[str] = ()
    odd: Sequence[str] = ()
    """Links, pipes and unreadable files, which are not used."""


@dataclass(frozen=True)
class Overlay:
    """Files laid over the repository at its base commit before the tests run."""

    files: Mapping[str, bytes]
    removed: tuple[str, ...]
    put_back: tuple[str, ...]
    """Test files and similar that the policy changed: they are restored to the state of the repository and the test
    patch."""


@dataclass(frozen=True)
class Found:
    """The outcome of the tests; ``verdict`` None with a reason if there is none."""

    verdict: Verdict | None
    reason: str = ""
    changed: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()

    def details(self, record: SweRecord) -> dict[str, Any]:
        """The data kept in the transcript."""
        passed = self.verdict.as_expected if self.verdict else frozenset()
        failing = [test for test in record.fail_to_pass if test not in passed]
        broken = [test for test in record.pass_to_pass if test not in passed] if self.verdict else []
        ran = self.verdict.outcomes if self.verdict else failing  # of none it is known whether it would have run
        suite = f"{len(self.verdict.outcomes)} tests in {self.verdict.duration_s:.2f} s" if self.verdict else ""
        solved = len(record.fail_to_pass) - len(failing)
        return {
            "resolved": self.verdict is not None and not failing and not broken,
            "FAIL_TO_PASS": f"{solved} of {len(record.fail_to_pass)} pass",
            "reason": self.reason,
            "not run": [test for test in (*failing, *broken) if test not in ran][:MAX_NAMED_TESTS],
            "still failing": failing[:MAX_NAMED_TESTS],
            "newly broken": broken[:MAX_NAMED_TESTS],
            "changed": list(self.changed[:MAX_NAMED_FILES]),
            "put back": list(self.put_back[:MAX_NAMED_FILES]),
            "suite": suite,
        }


def is_protected(path: str, checkout: Checkout) -> bool:
    """Whether a policy's version of this file is ignored: always for files of the test patch; for tests and files
    that control pytest, unless the gold patch changes them too."""
    if path in checkout.tests:
        return True
    return path not in checkout.gold and controls_tests(path)


def controls_tests(path: str) -> bool:
    """Whether a file is a test, or controls how pytest runs them."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    is_test = name.startswith("test_") or name.endswith("_test.py") or bool(TEST_DIRECTORIES & set(parts[:-1]))
    return is_test or name in RUNNER_FILES or name.endswith(".pth")


def judged(record: SweRecord, checkout: Checkout, changes: Changes) -> Overlay:
    """The policy's changes that count, with the test patch's files on top."""
    tests = {*checkout.tests, *record.test_files}
    touched = [*changes.taken, *changes.removed]
    put_back = tuple(sorted(path for path in touched if path in tests or is_protected(path, checkout)))
    files = {path: content for path, content in changes.taken.items() if path not in put_back}
    files |= {path: content for path, content in checkout.tests.items() if content is not None}
    removed = [path for path in changes.removed if path not in put_back]
    removed += [path for path, content in checkout.tests.items() if content is None]
    return Overlay(files, tuple(sorted(removed)), put_back)


def resolved(record: SweRecord, verdict: Verdict | None) -> float:
    """1 when every FAIL_TO_PASS and every PASS_TO_PASS test passes, else 0."""
    return float(share(record, verdict) == 1.0)


def share(record: SweRecord, verdict: Verdict | None) -> float:
    """The share of FAIL_TO_PASS that passes; 0 without a verdict, or when a PASS_TO_PASS test does not pass. As in
    SWE-bench, a test that fails as expected has passed."""
    if verdict is None or not set(record.pass_to_pass) <= verdict.as_expected:
        return 0.0
    return len(verdict.as_expected & set(record.fail_to_pass)) / len(record.fail_to_pass)


@dataclass(frozen=True)
class Ground:
    """Paths for running tests: the test runner and the record's dependencies, as seen by the slot."""

    runner: str
    dependencies: tuple[str, ...] = ()
    timeout_s: float = 300.0


async def tested(exec_tool: ToolContext, record: SweRecord, checkout: Checkout, ground: Ground) -> Found:
    """Run the record's tests over the policy's changes in its (sealed) slot.

    Anything the policy did leads to a Found. Raises: InfraError only.
    """
    changed: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    try:
        changes = await _find_changes(exec_tool, checkout)
        changed = tuple(sorted({*changes.taken, *changes.removed, *changes.odd}))
        overlay = judged(record, checkout, changes)
        put_back = overlay.put_back
        await clear(exec_tool)
        verdict = await _run(exec_tool, record, checkout, overlay, ground)
    except (VoidVerdictError, OSError, ToolCallError, PolicyRefusalError) as error:
        return Found(None, f"score 0: {plain(error)}", changed, put_back)
    return Found(verdict, "", changed, put_back)


async def _find_changes(exec_tool: ToolContext, checkout: Checkout) -> Changes:
    """The differences in the workspace. Raises VoidVerdictError when they are not plausible changes."""
    place = f"scan-{secrets.token_hex(8)}"
    script = (HERE / "scan.py").read_bytes()
    await exec_tool.terminal("chmod u+rwx .")
    await exec_tool.extract(packed({"scan.py": script, "known.json": manifest(checkout)}), place)
    command = f"chmod -R u+rwX . 2>/dev/null; exec {SLOT_PYTHON} -I -S -B {place}/scan.py {place}/known.json"
    done = await exec_tool.terminal(command, SCAN_TIMEOUT_S)
    if done.exit_code or done.timed_out:
        raise VoidVerdictError(f"the workspace cannot be scanned: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout)
    if found["more"]:
        raise VoidVerdictError(f"more than {scan.MAX_CHANGED} files of the workspace have changed")
    return Changes(await _contents(exec_tool, found["changed"], checkout), found["removed"], found["odd"])


async def _contents(exec_tool: ToolContext, paths: Sequence[str], checkout: Checkout) -> dict[str, bytes]:
    """Contents of these files; of ignored ones only that they changed."""
    taken: dict[str, bytes] = {}
    left = MAX_TAKEN_BYTES
    for path in paths:
        taken[path] = b"" if is_protected(path, checkout) else await source(exec_tool, path)
        left -= len(taken[path])
        if left < 0:
            raise VoidVerdictError(f"the changed files have more than {MAX_TAKEN_BYTES} bytes")
    return taken


async def _run(
    exec_tool: ToolContext, record: SweRecord, checkout: Checkout, overlay: Overlay, ground: Ground
) -> Verdict:
    canary, nonce, place = Canary.draw(), secrets.token_hex(16), f"judge-{secrets.token_hex(8)}"
    top = (await exec_tool.terminal("pwd -P")).stdout.strip()
    tree = f"{top}/{place}/tree"
    await exec_tool.upload(checkout.tree, f"{place}/tree")
    await _remove(exec_tool, overlay.removed, f"{place}/tree")
    laid = {f"tree/{path}": content for path, content in overlay.files.items()}
    judge = JUDGE.read_bytes()
    laid |= {"judge.py": judge, f"tree/{canary.file}": canary.source.encode()}
    await exec_tool.extract(packed(laid, {f"tree/{path}" for path in checkout.executable}), place)
    request = question(
        pytest_arguments(record, tree), _paths(checkout, tree, ground), tree, ground.runner, nonce,
        ground.timeout_s, canary,
    )  # fmt: skip
    command = f"exec {SLOT_PYTHON} -I -S -B {shlex.quote(f'{top}/{place}/judge.py')}"
    return await answer(exec_tool, command, request, nonce, canary, ground.timeout_s)


def pytest_arguments(record: SweRecord, tree: str) -> list[str]:
    """The files of the named tests, under the names in the record. The repository's own ``addopts`` may require
    missing plugins; its other settings apply."""
    return ["--rootdir", tree, "-o", "addopts=", "-o", "required_plugins=", *record.test_files]


def _paths(checkout: Checkout, tree: str, ground: Ground) -> list[str]:
    roots = [f"{tree}/{root}" for root in SOURCE_ROOTS if (checkout.tree / root).is_dir()]
    return [tree, *roots, *ground.dependencies]


async def _remove(exec_tool: ToolContext, paths: Sequence[str], below: str) -> None:
    if not paths:
        return
    command = 'while IFS= read -r path; do rm -f -- "$path" || exit; done; find . -type d -empty -delete'
    done = await exec_tool.terminal(command, SCAN_TIMEOUT_S, cwd=below, stdin="".join(f"{path}\n" for path in paths))
    if done.exit_code or done.timed_out:
        raise VoidVerdictError(f"removed files cannot be removed: {done.stderr.strip()[:300]}")

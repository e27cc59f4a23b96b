"""The verifier of records with images: the policy's change as a patch, and its tests in a root that no policy has seen.

What the policy did to its machine (another python, other packages, running programs) stays behind: before the tests,
the slot gets the files it began with.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentenv import Checkpoint, ToolContext
from agentenv.errors import PolicyRefusalError, TaskError, ToolCallError
from examples.swe.outcomes import outcomes
from examples.swe.records import SweRecord, TestLog
from examples.swe.scoring import MAX_NAMED_FILES, MAX_TAKEN_BYTES, controls_tests

GIT: Final = "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c safe.directory=*"
LOG: Final = "/tmp/agentenv-tests.log"
"""What the tests print, in the slot: it may be more than a call returns."""
GIT_TIMEOUT_S: Final = 300.0
_PATHS: Final = re.compile(r"^diff --git a/(.*) b/(.*)$", re.MULTILINE)
_MAX_NAMED_TESTS: Final = 20
_SHOWN_CHARS: Final = 2000

_INDEX: Final = {"GIT_INDEX_FILE": "/tmp/agentenv.index"}
"""An index of our own: what a policy has staged, or told git to leave alone, does not matter."""
_TREE: Final = f"rm -f /tmp/agentenv.index && {GIT} read-tree HEAD && {GIT} add --all"

COMMANDS: Final[Mapping[str, tuple[str, TestLog]]] = {
    "django/django": ("PYTHONPATH=. python3 tests/runtests.py --verbosity 2 --parallel 1 {labels}", "unittest"),
    "sympy/sympy": ("python3 -m pytest -rA -p no:cacheprovider {files}", "pytest"),
}
"""Test commands of repositories whose records name none; of all others it is pytest's."""
PYTEST: Final = "python3 -m pytest -rA -p no:cacheprovider {files}"


@dataclass(frozen=True)
class Tried:
    """What the tests found over the policy's patch. ``passed`` is None with a reason if they could not be run."""

    passed: frozenset[str] | None
    reason: str = ""
    changed: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    output: str = ""

    def score(self, record: SweRecord, *, share: bool = False) -> float:
        """1 when every FAIL_TO_PASS and every PASS_TO_PASS test passes, else 0; ``share``: that of FAIL_TO_PASS."""
        passed = self.passed or frozenset()
        if not set(record.pass_to_pass) <= passed:
            return 0.0
        found = len(passed & set(record.fail_to_pass)) / len(record.fail_to_pass)
        return found if share else float(found == 1.0)

    def told(self, record: SweRecord) -> dict[str, Any]:
        """The data kept in the transcript."""
        passed = self.passed or frozenset()
        failing = [test for test in record.fail_to_pass if test not in passed]
        broken = [test for test in record.pass_to_pass if test not in passed] if self.passed is not None else []
        kept = {
            "reason": self.reason,
            "still failing": failing[:_MAX_NAMED_TESTS],
            "newly broken": broken[:_MAX_NAMED_TESTS],
            "changed": list(self.changed[:MAX_NAMED_FILES]),
            "put back": list(self.put_back[:MAX_NAMED_FILES]),
            "output": self.output if failing or broken else "",
        }
        solved = len(record.fail_to_pass) - len(failing)
        head = {"FAIL_TO_PASS": f"{solved} of {len(record.fail_to_pass)} pass"}
        return {**head, **{name: value for name, value in kept.items() if value not in ("", [])}}


@dataclass(frozen=True)
class Beginning:
    """What a slot began with: all its files as a checkpoint, and the repository's as a tree of git's."""

    checkpoint: Checkpoint
    tree: str


async def begun(exec_tool: ToolContext, record: SweRecord) -> Beginning:
    """Check that the image is the record's, and keep its files. Raises TaskError, InfraError."""
    command = f"{GIT} cat-file -e {record.base_commit}^{{commit}} && {_TREE} && {GIT} write-tree"
    found = await exec_tool.terminal(command, GIT_TIMEOUT_S, cwd=record.workdir, env=_INDEX)
    if found.exit_code or found.timed_out:
        said = found.stderr.strip()[-300:]
        raise TaskError(f"{record.instance_id}: {record.workdir} of its image has no {record.base_commit}: {said}")
    return Beginning(await exec_tool.checkpoint(), found.stdout.strip())


async def tried(exec_tool: ToolContext, record: SweRecord, beginning: Beginning, timeout_s: float) -> Tried:
    """Run the record's tests over the policy's change, in the files that :func:`begun` kept.

    Anything the policy did leads to a Tried. Raises: InfraError, SlotDestroyedError; TaskError when the test patch does
    not apply to the image's own files.
    """
    try:
        patch = await _change(exec_tool, record, beginning.tree)
    except (OSError, ToolCallError, PolicyRefusalError, ValueError) as error:
        return Tried(None, f"its change cannot be read: {error}")
    await exec_tool.restore(beginning.checkpoint)
    changed = tuple(dict.fromkeys(name for pair in _PATHS.findall(patch) for name in pair))
    put_back = tuple(path for path in changed if controls_tests(path))
    if patch and not await _apply(exec_tool, record, patch, put_back):
        return Tried(None, "its change does not apply to the files it was made from", changed, put_back)
    await _lay_tests(exec_tool, record)
    command, log = command_for(record)
    ran = await exec_tool.terminal(f"{{ {command}; }} > {LOG} 2>&1", timeout_s, cwd=record.workdir)
    try:
        output = (await exec_tool.read_file(LOG, binary=True)).decode(errors="replace")
    except (OSError, ToolCallError) as error:
        return Tried(None, f"what the tests printed cannot be read: {error}", changed, put_back)
    if ran.timed_out:
        return Tried(None, f"the tests took more than {timeout_s:g} s", changed, put_back, output[-_SHOWN_CHARS:])
    passed = frozenset(name for name, good in outcomes(log, output).items() if good)
    return Tried(passed, "", changed, put_back, output[-_SHOWN_CHARS:])


def command_for(record: SweRecord) -> tuple[str, TestLog]:
    """What runs the tests of the test patch, and what it prints. Pure."""
    if record.test_command:
        return record.test_command, record.test_log
    command, log = COMMANDS.get(record.repo, (PYTEST, "pytest"))
    files = [path for path in paths_of_tests(record) if path.endswith(".py")]
    labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
    return command.format(files=shlex.join(files), labels=shlex.join(labels)), log


def paths_of_tests(record: SweRecord) -> tuple[str, ...]:
    """The files of the test patch."""
    return tuple(dict.fromkeys(after for _, after in _PATHS.findall(record.test_patch)))


async def _change(exec_tool: ToolContext, record: SweRecord, tree: str) -> str:
    """The policy's change as a patch. Raises ValueError when it is none, or too much."""
    diff = f"{GIT} diff --cached --binary --no-renames --no-ext-diff --no-textconv --no-color {tree}"
    place = "/tmp/agentenv-change.patch"
    command = f"rm -rf {place} && {_TREE} && {diff} > {place}"
    done = await exec_tool.terminal(command, GIT_TIMEOUT_S, cwd=record.workdir, env=_INDEX)
    if done.exit_code or done.timed_out:
        raise ValueError(done.stderr.strip()[:300] or "git failed")
    patch = await exec_tool.read_file(place, binary=True)
    if len(patch) > MAX_TAKEN_BYTES:
        raise ValueError(f"it has more than {MAX_TAKEN_BYTES} bytes")
    return patch.decode("utf-8", "surrogateescape")


async def _apply(exec_tool: ToolContext, record: SweRecord, patch: str, left_out: tuple[str, ...]) -> bool:
    place = "/tmp/agentenv.patch"
    await exec_tool.write_file(place, patch.encode("utf-8", "surrogateescape"))
    options = " ".join(f"--exclude={shlex.quote(path)}" for path in left_out)
    command = f"{GIT} apply --whitespace=nowarn {options} {place}"
    done = await exec_tool.terminal(command, GIT_TIMEOUT_S, cwd=record.workdir)
    return done.exit_code == 0


async def _lay_tests(exec_tool: ToolContext, record: SweRecord) -> None:
    if record.test_patch and not await _apply(exec_tool, record, record.test_patch, ()):
        raise TaskError(f"{record.instance_id}: its test_patch does not apply to {record.workdir} of its image")

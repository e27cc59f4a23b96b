"""The verifier of records with images: the policy's change as a patch, and its tests in a root that no policy has seen.

What the policy did to its machine (another python, other packages, running programs) stays behind: before the tests,
the slot gets the files it began with.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentenv import Checkpoint, ToolContext
from agentenv.errors import ConfigError, PolicyRefusalError, TaskError, ToolCallError
from agentenv.tasks.swe.outcomes import can_decide, is_cut, met, read, runs_pytest
from agentenv.tasks.swe.records import SweRecord, TestLog, shown
from agentenv.tasks.swe.scoring import MAX_NAMED_FILES, MAX_TAKEN_BYTES, controls_tests
from agentenv.tasks.swe.swebench_logs import GYM_LOGS, LOGS

GIT: Final = "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c safe.directory=*"
LOG: Final = "/tmp/agentenv-tests.log"
"""What the tests print, in the slot: it may be more than a call returns."""
GIT_TIMEOUT_S: Final = 300.0
_PATHS: Final = re.compile(r"^diff --git a/(.*) b/(.*)$", re.MULTILINE)
_MAX_NAMED_TESTS: Final = 20
_SHOWN_CHARS: Final = 2000

_INDEX: Final = {"GIT_INDEX_FILE": "/tmp/agentenv.index"}
"""A separate index, so that what a policy has staged, or made git ignore, does not matter."""
_TREE: Final = f"rm -f /tmp/agentenv.index && {GIT} read-tree HEAD && {GIT} add --all"

_PATCH: Final = "/tmp/agentenv.patch"
_WITH_BUG: Final = f"""\
set -e; unset GIT_INDEX_FILE
{GIT} update-index -q --refresh || true  # an image's files have other inodes than those it was made with
{GIT} apply --reverse --check {_PATCH} 2> /dev/null || {GIT} apply --index --whitespace=nowarn {_PATCH}
rm {_PATCH}"""
"""The bug may be in the image's files already."""
_ONE_COMMIT: Final = f"""\
set -e; unset GIT_INDEX_FILE
git=$({GIT} rev-parse --absolute-git-dir)
mkdir -p "$git/info"
{GIT} -c core.quotePath=false ls-files --others --exclude-standard --directory | sed 's,^,/,' >> "$git/info/exclude"
{GIT} add --update
who='-c user.name=agentenv -c user.email=agentenv@localhost'
commit=$({GIT} $who commit-tree "$({GIT} write-tree)" -m 'The repository before the task')
pack=$(mktemp -d)
{GIT} pack-objects -q --revs "$pack/pack" <<< "$commit" > /dev/null
cd "$git" && rm -rf objects refs packed-refs logs ORIG_HEAD FETCH_HEAD MERGE_HEAD shallow worktrees
mkdir -p objects/pack objects/info refs/heads && mv "$pack"/* objects/pack && rmdir "$pack"
{GIT} --git-dir=. symbolic-ref HEAD refs/heads/main
{GIT} --git-dir=. update-ref refs/heads/main "$commit"
"""
"""A history would have the solution, or the state before the bug. Files outside the commit are no change of it."""

IN_TESTBED: Final = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
"""The environment in which the images of SWE-bench and its like have what tests need."""
PYTEST: Final = "python3 -m pytest -rA -p no:cacheprovider {files}"
SMITH: Final = "pytest --disable-warnings --color=no --tb=no --verbose -p no:cacheprovider {files}"
COMMANDS: Final[Mapping[TestLog, str]] = {
    "swebench-django": "PYTHONPATH=. python3 tests/runtests.py --verbosity 2 --parallel 1 {labels}",
    "swebench-sympy": "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning python3 bin/test -C --verbose {files}",
    "smith-pytest": SMITH,
}
"""Test commands of records that name none, by what they print; of all others it is pytest's."""


_INSTALL: Final = f"{IN_TESTBED}\npython3 -m pip install --no-build-isolation --no-deps --editable ."
_BUILT: Final = re.compile(r"(\.(c|cc|cpp|cxx|h|hpp|pyx|pxd|pxi|f|f90|in|toml|cfg)|(^|/)setup\.py)$")
"""Files of which an installed package is built: of all others an editable installation has the change already."""
_INSTALL_LOG: Final = "/tmp/agentenv-install.log"


@dataclass(frozen=True)
class Tried:
    """What the tests found over the policy's patch. ``passed``: the record's tests that are as they must be; None with
    a reason if they could not be run."""

    passed: frozenset[str] | None
    reason: str = ""
    changed: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    output: str = ""
    install: str = ""
    """The end of what a failed install_command printed."""

    def score(self, record: SweRecord, *, share: bool = False) -> float:
        """1 when every FAIL_TO_PASS and every PASS_TO_PASS test passes, else 0; ``share``: that of FAIL_TO_PASS."""
        passed = self.passed or frozenset()
        if not set(record.pass_to_pass) <= passed:
            return 0.0
        found = len(passed & set(record.fail_to_pass)) / len(record.fail_to_pass)
        return found if share else float(found == 1.0)

    def details(self, record: SweRecord) -> dict[str, Any]:
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
            "install": self.install,
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
    """Make the image's files what the record begins with (with its bug, in one commit unless it names one), and keep
    them. What is hidden is then removed: the verifier gets it back. Raises TaskError, InfraError."""
    if record.base_commit:
        has = f"{GIT} cat-file -e {record.base_commit}^{{commit}}"
        await _git(exec_tool, record, has, f"its image has no {record.base_commit}")
    if record.patch_is == "bug":
        await exec_tool.write_file(_PATCH, record.patch.encode("utf-8", "surrogateescape"))
        await _git(exec_tool, record, _WITH_BUG, "its bug does not apply to the image's files")
    if record.patch_is == "bug" or not record.base_commit:
        await _git(exec_tool, record, _ONE_COMMIT, "its image has no repository")
    checkpoint = await exec_tool.checkpoint()
    if record.patch_is != "bug" and record.base_commit:  # the verifier's tests may come out of the history
        await _git(exec_tool, record, _ONE_COMMIT, "its repository cannot be read")
    hide = f"rm -rf {shlex.join(record.hidden)}" if record.hidden else "true"
    tree = await _git(exec_tool, record, f"{hide} && {_TREE} && {GIT} write-tree", "its repository cannot be read")
    return Beginning(checkpoint, tree.strip())


async def _git(exec_tool: ToolContext, record: SweRecord, command: str, otherwise: str) -> str:
    found = await exec_tool.terminal(command, GIT_TIMEOUT_S, cwd=record.workdir, env=_INDEX)
    if found.exit_code or found.timed_out:
        raise TaskError(f"{record.instance_id}: {otherwise} ({record.workdir}): {found.stderr.strip()[-300:]}")
    return found.stdout


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
    tests = set(paths_of_tests(record)) if record.test_patch else set()
    put_back = tuple(path for path in changed if path in tests or controls_tests(path))
    if patch and not await _apply(exec_tool, record, patch, put_back):
        return Tried(None, "its change does not apply to the files it was made from", changed, put_back)
    await _lay_tests(exec_tool, record)
    install = await _installed(exec_tool, record, changed, timeout_s)
    command, log = command_for(record)
    ran = await exec_tool.terminal(f"{{ {command}\n}} > {LOG} 2>&1", timeout_s, cwd=record.workdir)
    try:
        output = (await exec_tool.read_file(LOG, binary=True)).decode(errors="replace")
    except (OSError, ToolCallError) as error:
        return Tried(None, f"what the tests printed cannot be read: {error}", changed, put_back)
    shown_output = output[-_SHOWN_CHARS:]
    if ran.timed_out:
        return Tried(None, f"the tests took more than {timeout_s:g} s", changed, put_back, shown_output, install)
    statuses = await asyncio.to_thread(read, record, log, output)
    if statuses is None:
        return Tried(None, "what the tests printed shows no run of them", changed, put_back, shown_output, install)
    return Tried(met(record, statuses), "", changed, put_back, shown_output, install)


async def _installed(exec_tool: ToolContext, record: SweRecord, changed: Sequence[str], timeout_s: float) -> str:
    """Run the record's install_command; without one, of SWE-bench's repositories, pip's when a file changed of which
    their packages are built. Returns what it printed if it failed."""
    usual = record.repo in LOGS and not record.test_command and any(map(_BUILT.search, changed))
    command = record.install_command or (_INSTALL if usual else "")
    if not command:
        return ""
    done = await exec_tool.terminal(f"{{ {command}\n}} > {_INSTALL_LOG} 2>&1", timeout_s, cwd=record.workdir)
    if not done.exit_code and not done.timed_out:
        return ""
    end = await exec_tool.terminal(f"tail -c {_SHOWN_CHARS} {_INSTALL_LOG}", GIT_TIMEOUT_S)
    return f"exit code {done.exit_code}: {end.stdout.strip()}"


def command_for(record: SweRecord) -> tuple[str, TestLog]:
    """What runs the record's tests, and what it prints. Pure."""
    log = record.test_log or _usual_log(record)
    command = record.test_command or f"{IN_TESTBED}\n{COMMANDS.get(log, PYTEST)}"
    files = [path for path in paths_of_tests(record) if path.endswith(".py")]
    files = files or [path for path in record.test_files if runs_pytest(log)]
    labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
    return command.replace("{files}", shlex.join(files)).replace("{labels}", shlex.join(labels)), log


def _usual_log(record: SweRecord) -> TestLog:
    """How the tests of a record without ``test_log`` are read: the first of these ways in which all of them can pass.
    As SWE-bench reads its repository; as it reads most, if names end at their first blank; else by whole names."""
    names = (*record.fail_to_pass, *record.pass_to_pass)
    known = {**GYM_LOGS, **LOGS}.get(record.repo)
    ways: list[TestLog] = [known] if known else []
    if any(is_cut(name) for name in names):
        ways.append("swebench-pytest")
    ways.append("pytest")
    return next((log for log in ways if all(can_decide(log, name) for name in names)), ways[0])


def check_names(record: SweRecord) -> None:
    """Raises ConfigError when a test has a name under which its log names none: nothing could score 1."""
    _, log = command_for(record)
    for field, names in (("FAIL_TO_PASS", record.fail_to_pass), ("PASS_TO_PASS", record.pass_to_pass)):
        never = next((name for name in names if name not in record.expected and not can_decide(log, name)), None)
        if never is not None:
            raise ConfigError(
                field,
                f"record {record.instance_id}: output of {log} never names a test {shown(never)}",
                next_step="set test_command and test_log to those of its tests, or leave it out "
                "(only_repos, only_instances)",
            )


def paths_of_tests(record: SweRecord) -> tuple[str, ...]:
    """The files of the test patch; without one, those that the tests are named by."""
    if not record.test_patch:
        return record.test_files
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
    await exec_tool.write_file(_PATCH, patch.encode("utf-8", "surrogateescape"))
    options = " ".join(f"--exclude={shlex.quote(path)}" for path in left_out)
    command = f"{GIT} apply --whitespace=nowarn {options} {_PATCH}"
    done = await exec_tool.terminal(command, GIT_TIMEOUT_S, cwd=record.workdir)
    return done.exit_code == 0


async def _lay_tests(exec_tool: ToolContext, record: SweRecord) -> None:
    for path, text in record.verifier_files.items():
        await exec_tool.write_file(path, text.encode("utf-8", "surrogateescape"))
    if record.test_patch and not record.lays_tests and not await _apply(exec_tool, record, record.test_patch, ()):
        raise TaskError(f"{record.instance_id}: its test_patch does not apply to {record.workdir} of its image")

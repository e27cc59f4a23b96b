"""The verifier's side of the judge (``judge.py``, which runs pytest in a slot): its request and the parsing of its
answer, and what is done to the workspace before it runs."""

from __future__ import annotations

import io
import json
import math
import secrets
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv import ToolContext
from agentenv.deadlines import scaled
from agentenv.wire.tools import ReadFileReply

JUDGE: Final = Path(__file__).with_name("judge.py")
MAX_SOURCE_BYTES = 2 * 1024 * 1024
"""A larger source file is not a repair."""
CLEAR_TIMEOUT_S = scaled(60.0)
MAX_NAMED_TESTS = 20
RLIMITS = {"RLIMIT_CPU": 60, "RLIMIT_FSIZE": 16 * 1024 * 1024, "RLIMIT_CORE": 0, "RLIMIT_AS": 2 * 1024**3}
"""For the child that runs the tests. Inside a slot the slot's own limits come on top."""

CANARY_FILE = "test_canary_{token}.py"


class VoidVerdictError(ValueError):
    """The judge's answer is missing, cut short or forged: it counts as a failure."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of every test of a suite: ``passed``, ``xfailed`` (it failed as expected), ``failed``, ``error`` or
    ``skipped`` by test id."""

    outcomes: dict[str, str]
    duration_s: float

    @property
    def broken(self) -> frozenset[str]:
        """Tests that failed or could not run."""
        return frozenset(test for test, outcome in self.outcomes.items() if outcome in ("failed", "error"))

    @property
    def passed(self) -> frozenset[str]:
        """Tests that passed."""
        return frozenset(test for test, outcome in self.outcomes.items() if outcome == "passed")

    @property
    def as_expected(self) -> frozenset[str]:
        """Tests that passed, or failed as expected."""
        return frozenset(test for test, outcome in self.outcomes.items() if outcome in ("passed", "xfailed"))


@dataclass(frozen=True)
class Canary:
    """The verifier's own test file, whose outcomes only the verifier knows beforehand.

    A package under test that turns failures into passes turns these too, and is detected.
    """

    file: str
    source: str
    expected: dict[str, str]

    @classmethod
    def draw(cls) -> Canary:
        """A new one: eight tests, about half of which fail."""
        file = CANARY_FILE.format(token=secrets.token_hex(8))
        passing = [True, False, *(secrets.randbelow(2) == 1 for _ in range(6))]
        secrets.SystemRandom().shuffle(passing)
        names = [f"test_{secrets.token_hex(4)}" for _ in passing]
        pairs = list(zip(names, passing, strict=True))
        source = "\n\n".join(f"def {name}():\n    assert {good}" for name, good in pairs) + "\n"
        return cls(file, source, {f"{file}::{name}": "passed" if good else "failed" for name, good in pairs})


def question(
    arguments: Sequence[str],
    paths: Sequence[str],
    tree: str,
    runner: str,
    nonce: str,
    timeout_s: float,
    canary: Canary | None,
) -> str:
    """The judge's standard input. ``tree`` and ``runner`` are absolute paths where the judge runs; pytest gets these
    ``arguments``, and ``paths`` are added to sys.path.

    A run with more than 90 s gets as many seconds of CPU; others get 60.
    """
    rlimits = {**RLIMITS, "RLIMIT_CPU": max(RLIMITS["RLIMIT_CPU"], math.ceil(timeout_s))} if timeout_s > 90 else RLIMITS
    return json.dumps(
        {
            "nonce": nonce,
            "tree": tree,
            "runner": runner,
            "paths": list(paths),
            "tests": [*arguments, *([canary.file] if canary else [])],
            "timeout_s": timeout_s,
            "rlimits": rlimits,
        }
    )


def read(stdout: str, nonce: str, canary: Canary | None = None) -> Verdict:
    """The verdict in the judge's standard output.

    Raises:
        VoidVerdictError: no line carries the nonce, the run did not finish, or a canary is wrong.
    """
    lines = [line for line in stdout.splitlines() if line.startswith(f"{nonce} ")]
    if len(lines) != 1:
        raise VoidVerdictError("the judge gave no verdict")
    try:
        found: dict[str, Any] = json.loads(lines[0].partition(" ")[2])
    except ValueError as error:  # only an answer far beyond a real suite's size is cut
        raise VoidVerdictError("the judge's answer was too long to be a real one") from error
    if found["timed_out"]:
        raise VoidVerdictError("the tests did not end in time")
    if not found["finished"]:
        raise VoidVerdictError(f"the test run was cut short (exit code {found['exit_code']})")
    outcomes: dict[str, str] = found["outcomes"]
    _check_canary(outcomes, canary.expected if canary else {})
    return Verdict(
        {test: o for test, o in outcomes.items() if not canary or test not in canary.expected}, found["duration_s"]
    )


def _check_canary(outcomes: Mapping[str, str], expected: Mapping[str, str]) -> None:
    wrong = [test for test, outcome in expected.items() if outcomes.get(test) != outcome]
    if wrong:
        raise VoidVerdictError(f"the outcome of {len(wrong)} of {len(expected)} control tests is wrong")


async def answer(
    exec_tool: ToolContext, command: str, question: str, nonce: str, canary: Canary, timeout_s: float
) -> Verdict:
    """The answer of the judge started by ``command``; ``timeout_s`` is the tests' time limit in the request.

    Raises: VoidVerdictError when it is unusable; InfraError.
    """
    done = await exec_tool.terminal(command, timeout_s + 30, stdin=question)
    if done.oom_killed:
        raise VoidVerdictError("the tests needed more memory than a slot has")
    return read(done.stdout, nonce, canary)


def packed(files: Mapping[str, bytes], executable: Collection[str] = ()) -> bytes:
    """A tar of these files, those named ``executable`` with that bit set."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = 0o755 if path in executable else 0o644
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


async def source(exec_tool: ToolContext, path: str) -> bytes:
    """One source file of the workspace. Raises VoidVerdictError when it is too large; OSError and
    PolicyRefusalError when it is no longer a file."""
    reply = await exec_tool.call_tool("read_file", {"path": path, "binary": True, "limit": MAX_SOURCE_BYTES + 1})
    if reply.exit_code:
        raise OSError(reply.exit_code, reply.stderr.strip() or "cannot be read", path)
    content = ReadFileReply.model_validate(reply.content).data or b""
    if len(content) > MAX_SOURCE_BYTES:
        raise VoidVerdictError(f"{path} has more than {MAX_SOURCE_BYTES} bytes")
    return content


async def clear(exec_tool: ToolContext) -> None:
    """Remove everything from the workspace. ``chmod`` first: a policy can lock its own directories."""
    command = "chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -delete"
    done = await exec_tool.terminal(command, CLEAR_TIMEOUT_S)
    if done.exit_code or done.timed_out:
        raise VoidVerdictError(f"the workspace cannot be cleared: {done.stderr.strip()[:300]}")


def plain(error: Exception) -> str:
    """Why there is no verdict, as a sentence."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} {error.strerror or error}"
    return str(error)

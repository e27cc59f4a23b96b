"""The verifier's side of the judge: its request, the parsing of its answer, and running it on this machine."""

from __future__ import annotations

import json
import math
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.repair.packages import HERE, Package, slot_python

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


def request(package: Package, tree: str, runner: str, nonce: str, timeout_s: float, canary: Canary | None) -> str:
    """The judge's standard input. ``tree`` and ``runner`` are absolute paths where the judge runs."""
    root = tree if package.root == "." else f"{tree}/{package.root}"
    return question(package.tests, [root, tree], tree, runner, nonce, timeout_s, canary)


def question(
    arguments: Sequence[str],
    paths: Sequence[str],
    tree: str,
    runner: str,
    nonce: str,
    timeout_s: float,
    canary: Canary | None,
) -> str:
    """Like :func:`request`, for any tree: pytest gets these ``arguments``, and ``paths`` are added to sys.path.

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
        raise VoidVerdictError(f"the outcome of {len(wrong)} of {len(expected)} control tests is not the true one")


def judge_here(package: Package, tree: Path, runner: Path, timeout_s: float) -> Verdict:
    """Run ``package``'s tests over the files in ``tree``, on this machine, with the judge's own limits.

    For making tasks only: the code is the package's own with one word changed.

    Raises:
        VoidVerdictError: the tests did not end in ``timeout_s``, or ended the run.
    """
    nonce = secrets.token_hex(16)
    question = request(package, str(tree), str(runner), nonce, timeout_s, None)
    with subprocess.Popen(
        [slot_python(), "-I", "-S", "-B", str(HERE / "judge.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        start_new_session=True,
    ) as judge:
        try:
            answer, _ = judge.communicate(question, timeout=timeout_s + 10)
        except subprocess.TimeoutExpired as error:
            judge.send_signal(signal.SIGKILL)
            raise VoidVerdictError("the judge did not end in time") from error
    return read(answer, nonce)

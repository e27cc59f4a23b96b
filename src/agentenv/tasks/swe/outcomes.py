"""Which tests passed, by what a test command printed. Pure.

Of a test that is named more than once the worst status counts; where SWE-bench's own parser is followed, the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agentenv.tasks.swe import swebench_logs
from agentenv.tasks.swe.records import SweRecord, TestLog

PASSED: Final = frozenset({"PASSED", "XFAIL"})
"""Statuses of a test that did what its repository expects, as SWE-bench counts them."""
KEPT: Final = PASSED | {"SKIPPED"}
"""Those of a test of PASS_TO_PASS that nothing broke, as SWE-bench counts them since its version 5."""
_WORSE: Final = ("PASSED", "XFAIL", "SKIPPED", "FAILED", "ERROR")
_PYTEST: Final = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+)$", re.MULTILINE)
_UNITTEST: Final = re.compile(
    r"^(\w+ \([\w.<>]+\))(?:\n[^\n]*?)?? \.\.\. "
    r"(ok|FAIL|ERROR|skipped|expected failure|unexpected success)\b",
    re.MULTILINE,
)
_SAID_BY_UNITTEST: Final = {"ok": "PASSED", "expected failure": "XFAIL", "skipped": "SKIPPED", "ERROR": "ERROR"}
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_PROGRESS: Final = re.compile(r"\[\d+%\]")


def outcomes(log: TestLog, output: str) -> Mapping[str, str]:
    """The status of each test that is named in the output: PASSED, FAILED, ERROR, SKIPPED or XFAIL."""
    return _PARSERS[log](_COLOURS.sub("", output).replace("\r\n", "\n"))


def met(record: SweRecord, statuses: Mapping[str, str]) -> frozenset[str]:
    """The tests of a record that are as they must be: those of FAIL_TO_PASS pass, those of PASS_TO_PASS pass or are
    skipped."""
    solved = (name for name in record.fail_to_pass if status_of(name, statuses) in PASSED)
    unbroken = (name for name in record.pass_to_pass if status_of(name, statuses) in KEPT)
    return frozenset((*solved, *unbroken))


def status_of(name: str, statuses: Mapping[str, str]) -> str | None:
    """The status of a test by a record's name for it. One that was cut within its parameters is that of all tests that
    begin with it, if they agree whether they pass. None: no such test was named, or they do not agree."""
    if name in statuses or not is_cut(name):
        return statuses.get(name)
    found = [status for test, status in statuses.items() if test.startswith(name)]
    return found[0] if len({status in PASSED for status in found}) == 1 else None


def is_cut(name: str) -> bool:
    """Whether a name ends within its parameters, as those do that SWE-bench cut at a blank."""
    return name.count("[") > name.count("]")


def can_pass(log: TestLog, name: str) -> bool:
    """Whether a test of this name could ever be read as passed: tries the line of its pass."""
    runs_pytest = log == "pytest" or log.startswith(("swebench-pytest", "swebench-matplotlib", "swebench-seaborn"))
    if runs_pytest and "::" not in name and not _PROGRESS.fullmatch(name):  # SWE-bench took a progress for a name
        return False
    return outcomes(log, _PASSES[log].format(name)).get(name) == "PASSED"


def _pytest(text: str) -> dict[str, str]:
    return _worst(_summary(text))


def _summary(text: str) -> Iterable[tuple[str, str]]:
    for word, rest in _PYTEST.findall(text):
        if "::" in rest:  # only " - " separates a name with blanks from the reason after it
            passed = word in ("PASSED", "XPASS")
            yield (rest if passed else rest.partition(" - ")[0]), "PASSED" if passed else word


def _unittest(text: str) -> dict[str, str]:
    return _worst((name, _SAID_BY_UNITTEST.get(word, "FAILED")) for name, word in _UNITTEST.findall(text))


def _r2e(text: str) -> dict[str, str]:
    """R2E-Gym does not count expected failures."""
    return _worst(
        (".".join(name.split("::")[1:]).partition(" - ")[0], status if status == "PASSED" else "FAILED")
        for name, status in _summary(text)
    )


def _worst(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    statuses: dict[str, str] = {}
    for name, status in found:
        statuses[name] = max(status, statuses.get(name, "PASSED"), key=_WORSE.index)
    return statuses


_PARSERS: Final[Mapping[TestLog, Callable[[str], dict[str, str]]]] = {
    "pytest": _pytest,
    "unittest": _unittest,
    "r2e": _r2e,
    "swebench-pytest": swebench_logs.pytest_words,
    "swebench-pytest-options": swebench_logs.pytest_options,
    "swebench-pytest-v2": swebench_logs.pytest_v2,
    "swebench-matplotlib": swebench_logs.matplotlib,
    "swebench-seaborn": swebench_logs.seaborn,
    "swebench-django": swebench_logs.django,
    "swebench-sympy": swebench_logs.sympy,
}
_PASSES: Final[Mapping[TestLog, str]] = {
    **dict.fromkeys(_PARSERS, "PASSED {}"),
    "unittest": "{} ... ok",
    "r2e": "PASSED test.py::{}",
    "swebench-django": "{} ... ok",
    "swebench-sympy": "{} ok",
}
"""The line of a test that passes."""

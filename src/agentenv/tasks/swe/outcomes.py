"""Which tests passed, by what a test command printed. Pure.

Of a test that is named more than once the worst status counts; where SWE-bench's own parser is followed, the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agentenv.tasks.swe import language_logs, swebench_logs
from agentenv.tasks.swe.records import Grading, SweRecord, TestLog

PASSED: Final = frozenset({"PASSED", "XFAIL"})
"""Statuses of a test that did what its repository expects, as SWE-bench counts them."""
_ALL: Final = frozenset({"PASSED", "XFAIL", "SKIPPED", "ERROR", "FAILED", None})
GRADES: Final[Mapping[Grading, tuple[frozenset[str | None], frozenset[str | None]]]] = {
    "swebench": (PASSED, PASSED | {"SKIPPED"}),
    "passed": (frozenset({"PASSED"}), frozenset({"PASSED"})),
    "live": (frozenset({"PASSED"}), frozenset({"PASSED", "SKIPPED", None})),
    "fail-only": (_ALL - {"FAILED"}, _ALL - {"FAILED"}),
}
"""What a test of FAIL_TO_PASS, and one of PASS_TO_PASS, may come to. None: it was not named. In their order: SWE-bench
since its version 5; SWE-bench Pro; Live, which does not miss a test of PASS_TO_PASS; those of SWE-bench whose runner
names failures only."""
TESTS_BEGIN: Final = ">>>>> Start Test Output"
TESTS_END: Final = ">>>>> End Test Output"
EXIT_CODE: Final = ">>>>> Test Exit Code:"
"""What SWE-bench's scripts print before and after the tests."""
_CODE: Final = re.compile(rf"^{EXIT_CODE} (\d+)$", re.MULTILINE)
_RAN: Final = re.compile(
    r"Executed [1-9]\d* of \d|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)|[1-9]\d* passing|Tests:\s+[1-9]"
    r"|Test Suites:[^\n]* [1-9]\d* total|^# tests [1-9]|[1-9]\d* specs?, \d+ failure|': ok$",
    re.MULTILINE,
)
"""A runner's own count of the tests that it ran: of those that name failures only, the one sign that they began."""
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
    return _PARSERS[log](_COLOURS.sub("", output).replace("\r\n", "\n").replace("\r", "\n"))


def read(record: SweRecord, log: TestLog, output: str) -> Mapping[str, str] | None:
    """The status of each test of a record's run, with the rules of its dataset for the whole of a run. None: the tests
    did not run, or what they printed does not fit how they ended."""
    if TESTS_BEGIN in output and TESTS_END in output:
        statuses = outcomes(log, output.split(TESTS_BEGIN)[1].split(TESTS_END)[0]) or outcomes(log, output)
        code = _CODE.search(output)
        if statuses and code and code[1] != "0" and not {"FAILED", "ERROR"} & set(statuses.values()):
            return None
    elif any(TESTS_BEGIN in script for script in record.verifier_files.values()):
        return None
    else:
        statuses = outcomes(log, output)
    return statuses if statuses or (record.grading == "fail-only" and _RAN.search(output)) else None


def met(record: SweRecord, statuses: Mapping[str, str]) -> frozenset[str]:
    """The tests of a record that are as they must be, as its dataset counts them (:data:`GRADES`); ``exact``: those
    that have the status of the record's ``expected``, or pass, and none if another test was run (R2E-Gym)."""
    named = (*record.fail_to_pass, *record.pass_to_pass)
    if record.grading == "exact":
        asked = {name: record.expected.get(name, "PASSED") for name in named}
        good = () if statuses.keys() - asked.keys() else named
        return frozenset(name for name in good if statuses.get(name) == asked[name])
    for_new, for_old = GRADES[record.grading]
    solved = (name for name in record.fail_to_pass if status_of(name, statuses) in for_new)
    unbroken = (name for name in record.pass_to_pass if status_of(name, statuses) in for_old)
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


def runs_pytest(log: TestLog) -> bool:
    """Whether a log is pytest's, so that its tests are named by their files."""
    return log in ("pytest", "smith-pytest") or log.startswith(_RUN_PYTEST)


def can_decide(log: TestLog, name: str) -> bool:
    """Whether a test of this name could ever be read: tries the line of its pass, or of its failure where failures only
    are named. Runners that print trees are not tried."""
    if runs_pytest(log) and "::" not in name and not _PROGRESS.fullmatch(name):  # SWE-bench took a progress for a name
        return False
    if log not in _SAYS:
        return name.isprintable() and bool(name.strip())
    return name in outcomes(log, _SAYS[log].format(name))


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
    """The summary only, without skipped tests and expected failures."""
    found = {}
    for line in text.partition("short test summary info")[2].partition("short test summary info")[0].split("\n"):
        word = line.partition(" ")[0]
        if word in ("PASSED", "FAILED", "ERROR"):
            found[".".join(line.split("::")[1:]).partition(" - ")[0]] = word
    return found


def _json(text: str) -> dict[str, str]:
    """What SWE-bench Pro's parsers write. What is no such text names no test."""
    try:
        return {str(test["name"]): str(test["status"]) for test in json.loads(text)["tests"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _smith(text: str) -> dict[str, str]:
    """pytest's progress (``--verbose``), of each name what is before its first blank."""
    found = {}
    for line in text.split("\n"):
        words = line.split(None, 2)
        status = next((each for each in _WORSE if words[1:] and words[1].startswith(each)), None)
        if status and not line[0].isspace():
            found[words[0]] = status
    return found


def _worst(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    statuses: dict[str, str] = {}
    for name, status in found:
        statuses[name] = max(status, statuses.get(name, "PASSED"), key=_WORSE.index)
    return statuses


_PARSERS: Final[Mapping[TestLog, Callable[[str], dict[str, str]]]] = {
    "pytest": _pytest,
    "unittest": _unittest,
    "r2e": _r2e,
    "json": _json,
    "smith-pytest": _smith,
    **swebench_logs.READERS,
    **language_logs.READERS,
}
_RUN_PYTEST: Final = ("swebench-py", "swebench-matplotlib", "swebench-seaborn")
_SAYS: Final[Mapping[TestLog, str]] = {
    "pytest": "PASSED {}",
    "unittest": "{} ... ok",
    "r2e": "short test summary info\nPASSED test.py::{}",
    "smith-pytest": "{} PASSED",
    **dict.fromkeys(swebench_logs.READERS, "PASSED {}"),
    "swebench-django": "{} ... ok",
    "swebench-sympy": "{} ok",
    **language_logs.SAYS,
}
"""The line of a test that passes."""

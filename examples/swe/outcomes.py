"""Which tests passed, by what a test command printed. Pure.

A test that is named more than once has passed only if it did every time; one that is skipped has not passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from examples.swe.records import TestLog

_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+)$", re.MULTILINE)
_UNITTEST = re.compile(
    r"^(\w+ \([\w.<>]+\))(?:\n[^\n]*?)?? \.\.\. "
    r"(ok|FAIL|ERROR|skipped|expected failure|unexpected success)\b",
    re.MULTILINE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def outcomes(log: TestLog, output: str) -> Mapping[str, bool]:
    """Whether each test that is named in the output has passed."""
    text = _COLOURS.sub("", output).replace("\r\n", "\n")
    found: dict[str, bool] = {}
    for name, passed in _PARSERS[log](text):
        found[name] = passed and found.get(name, True)
    return found


def _pytest(text: str) -> Iterable[tuple[str, bool]]:
    for word, rest in _PYTEST.findall(text):
        if "::" in rest:  # a name with blanks can only be told from the reason behind it by what precedes " - "
            yield (rest if word in ("PASSED", "XPASS") else rest.partition(" - ")[0]), word in ("PASSED", "XPASS")


def _unittest(text: str) -> Iterable[tuple[str, bool]]:
    for name, word in _UNITTEST.findall(text):
        yield name, word in ("ok", "expected failure")


def _r2e(text: str) -> Iterable[tuple[str, bool]]:
    for name, passed in _pytest(text):
        yield ".".join(name.split("::")[1:]).partition(" - ")[0], passed


_PARSERS: Mapping[TestLog, Callable[[str], Iterable[tuple[str, bool]]]] = {
    "pytest": _pytest,
    "unittest": _unittest,
    "r2e": _r2e,
}

"""What reads a stranger's text takes time linear in it: a task's files, and what a policy's tests print."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import pytest

from agentenv.builder.parser import parse
from agentenv.builder.patterns import Ignore, match
from agentenv.builder.substitution import Lexer
from agentenv.errors import DockerfileError
from agentenv.tasks.harbor.rewards import NoRewardError, parse_printed
from agentenv.tasks.harbor.task_file import instruction_of
from agentenv.tasks.swe import language_logs
from agentenv.tasks.swe.outcomes import outcomes
from agentenv.tasks.swe.records import TestLog
from tests.growth import TIMES, growth

_DJANGO: Final = "test_a (b.C) ... Testing against Django installed in x\n"


def substituted(word: str) -> Callable[[int], object]:
    return lambda size: Lexer().word(word, {"x": "a" * size})


def parsed(text: Callable[[int], str]) -> Callable[[int], object]:
    def run(size: int) -> None:
        with contextlib.suppress(DockerfileError):
            parse(text(size))

    return run


def rewarded(results: str, text: str) -> Callable[[int], object]:
    def run(size: int) -> None:
        with contextlib.suppress(NoRewardError):
            parse_printed(results, text * size)  # type: ignore[arg-type]

    return run


READERS: Final[Mapping[str, tuple[Callable[[int], object], int]]] = {
    "wildcards": (lambda size: match("*a" * size + "b", "a" * 250), 100),
    "a name": (lambda size: match("*a" * 12 + "b", "a" * size), 4000),
    "rules": (lambda size: Ignore("**/x/" * size + "y").excludes("x/" * 500 + "x"), 100),
    "a path": (lambda size: Ignore("**/x/" * 14 + "y").excludes("x/" * size + "x"), 2000),
    "many rules": (lambda size: Ignore("**/*a*a*b\n" * size).excludes("a" * 500), 100),
    "a prefix": (substituted("${x##*a*a*a*a*a*b}"), 4000),
    "a suffix": (substituted("${x%%b*a*a*a*a*a*}"), 4000),
    "a replacement": (substituted("${x//*a*a*a*a*a*b/y}"), 4000),
    "many replacements": (substituted("${x//?/y}"), 4000),
    "a long word": (lambda size: Lexer().words("a" * size, {}), 5000),
    "heredoc": (parsed(lambda size: f'FROM a\nCOPY ["<<{" " * size}<", "/"]'), 20000),
    "directive": (parsed(lambda size: f"# escape=x{' ' * size}y\nFROM a"), 20000),
    "long line": (parsed(lambda size: "FROM a\nRUN <<EOF " + "a" * size), 5000),
    "canaries": (lambda size: instruction_of("<!--" + "canary" * size + "\nDo it."), 4000),
    "summary": (rewarded("pytest", "="), 40000),
    "marks": (rewarded("swebench", "SWEBench results starts here"), 4000),
    "options": (lambda size: outcomes("swebench-pytest-options", "PASSED " + "[" * size), 4000),
    "headings": (lambda size: outcomes("swebench-sympy", " " * size), 20000),
    "a test of Django's": (lambda size: outcomes("swebench-django", _DJANGO * size), 2000),
    "an error of Django's": (lambda size: outcomes("swebench-django", " ... Internal Server Error: /" * size), 4000),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", READERS)
def test_it_is_read_in_linear_time(name: str) -> None:
    read, size = READERS[name]
    assert any(growth(read, size) < 2.5 * TIMES for _ in range(8))


_REPEATED: Final = (
    "1 failed (1) [ OK ] x: . - passed = .F", " (", "1) Error", "  1) ", "Chrome 1 (", "[ OK ] ", "-Dtest=", "\n  1) x",
    " ... ", "\nChrome Headless 1 (Linux x) ", "\n    a\n  b", "<doctest><TestCase name=''><SubCase name='a'>",
    "\n-Dtest=a", "(1ms) ",
)  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("log", sorted(language_logs.READERS))
def test_a_log_of_any_runner_is_read_in_linear_time(log: TestLog) -> None:
    for text in _REPEATED:
        read = partial(_read_log, log, text)
        assert any(growth(read, 2000) < 2.5 * TIMES for _ in range(8)), text


def _read_log(log: TestLog, text: str, size: int) -> object:
    return outcomes(log, text * size)

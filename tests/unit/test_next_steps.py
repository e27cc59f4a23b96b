"""Whoever brings up a cluster, an image or a farm on Nomad is told what to do next, whatever fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentenv

PACKAGE = Path(agentenv.__file__).parent
PLACES = ("dev/*.py", "image/*.py", "slots/backends/nomad/*.py", "cli/*nomad*.py")
FILES = sorted(path for place in PLACES for path in PACKAGE.glob(place))
FAILURES = {"SandboxUnavailableError": 9, "ConfigError": 9, "StartFailed": 2}
"""Classes, and how many arguments by position make one with a next step."""


def without_next_step(source: str) -> Iterator[str]:
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in FAILURES:
            named = any(keyword.arg == "next_step" for keyword in call.keywords)
            if not named and len(call.args) < FAILURES[call.func.id]:
                yield f"line {call.lineno}: {ast.unparse(call)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_failure_has_a_next_step(path: Path) -> None:
    assert list(without_next_step(path.read_text())) == []


@pytest.mark.parametrize("place", PLACES)
def test_every_place_has_files(place: str) -> None:
    assert list(PACKAGE.glob(place))


def test_one_without_is_noticed() -> None:
    assert list(without_next_step("raise ConfigError('a', 'b')")) == ["line 1: ConfigError('a', 'b')"]
    assert list(without_next_step("ConfigError('a', 'b', next_step='c'); StartFailed('a', 'b')")) == []

"""From what a verifier leaves to rewards. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

Results = Literal["reward", "pytest", "swebench"]
"""Where a verifier's results are: in a file of rewards (Harbor), or in what it prints (parsers of Terminal-Bench 1)."""
REWARD: Final = "reward"
"""The reward that is the score, where there are several."""
MAX_REWARD_CHARS: Final = 64 * 1024
_SUMMARY: Final = re.compile(r"(?<!=)=++\s*+short test summary info\s*+=++", re.IGNORECASE)
"""It never backtracks: what a verifier prints may be the policy's."""
_GOOD: Final[Mapping[str, bool]] = {
    "PASSED": True, "XFAIL": True, "SKIPPED": True, "FAILED": False, "XPASS": False, "ERROR": False,
}  # fmt: skip
"""Pytest's word for a result, and whether Terminal-Bench counts it as passed."""
_SWEBENCH: Final = ("SWEBench results starts here", "SWEBench results ends here")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class NoRewardError(Exception):
    """The verifier left no valid reward."""


def parse_text(text: str) -> dict[str, float]:
    """One number. Raises NoRewardError."""
    _check_length("reward.txt", text)
    try:
        return {REWARD: _number(float(text))}
    except ValueError as error:
        raise NoRewardError(f"reward.txt is not a number: {text.strip()[:100]!r}") from error


def parse_json(text: str) -> dict[str, float]:
    """An object of numbers by name; true and false are 1 and 0. Raises NoRewardError."""
    _check_length("reward.json", text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoRewardError(f"reward.json is not JSON: {text.strip()[:100]!r}") from error
    if not isinstance(found, dict) or not found:
        raise NoRewardError("reward.json is not an object of numbers")
    return {str(name): _number(value) for name, value in found.items()}


def parse_pytest(text: str) -> dict[str, float]:
    """1 when every test that pytest's summary (``-rA``) names has passed, was skipped, or failed as expected; the share
    of these as ``passed``. All that follows the first summary counts, as in Terminal-Bench. Raises NoRewardError
    without a summary, or when it names no test."""
    _, *after = _SUMMARY.split(text, maxsplit=1)
    if not after:
        raise NoRewardError("pytest's summary (-rA) is missing: the tests did not run")
    words = [line.partition(" ") for line in after[0].splitlines()]
    found = [_GOOD[word.rstrip(":")] for word, _, test in words if word.rstrip(":") in _GOOD and test.strip()]
    if not found:
        raise NoRewardError("pytest's summary names no test")
    return {REWARD: float(all(found)), "passed": sum(found) / len(found)}


def parse_swebench(text: str) -> dict[str, float]:
    """1 when PASSED is between the marks of SWE-bench's tasks of Terminal-Bench. Raises NoRewardError without
    them."""
    first, last = _SWEBENCH
    found, ends, _ = text.partition(first)[2].rpartition(last)
    if not ends:
        raise NoRewardError("the marks of SWE-bench's results are missing: the tests did not run")
    return {REWARD: float(found.strip() == "PASSED")}


PRINTED: Final[Mapping[str, Callable[[str], dict[str, float]]]] = {"pytest": parse_pytest, "swebench": parse_swebench}
"""What reads results that are printed."""


def parse_printed(results: Results, output: str) -> dict[str, float]:
    """The rewards of a verifier that prints its results. Raises NoRewardError."""
    return PRINTED[results](_COLOURS.sub("", output).replace("\r\n", "\n"))


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_REWARD_CHARS:
        raise NoRewardError(f"{name} has more than {MAX_REWARD_CHARS} characters")


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoRewardError(f"{str(value)[:100]!r} is not a finite number")
    return number

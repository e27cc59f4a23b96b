"""A package small enough to read, for tests of the repair example's pure parts."""

from __future__ import annotations

from examples.repair import mutate
from examples.repair.packages import Package
from examples.repair.tasks import Bug, Task

SOURCE = """\
def clamp(value, low, high):
    if value < low:
        return low
    return min(value, high)


def count(items):
    return len(items) + 0


def doubled(text):
    \"\"\"é: not ASCII, so that bytes and characters differ.\"\"\"
    return not text == "" and text * 2
"""
PATH = "sample/__init__.py"


def package() -> Package:
    files = {PATH: SOURCE.encode(), "test_sample.py": b"", "pytest.ini": b"[pytest]\n"}
    return Package("sample", "1.0", ".", files, (PATH,), ("test_sample.py",), "0" * 64)


def bug(function: str) -> Bug:
    """The first mutation found in a function."""
    found = next(mutation for mutation in mutate.candidates(SOURCE, "seed") if mutation.function == function)
    return Bug(PATH, found)


def task(*functions: str) -> Task:
    bugs = tuple(bug(function) for function in functions)
    broken = tuple(f"test_sample.py::test_{function}" for function in functions)
    return Task("sample-1", "sample", "1.0", bugs, "", broken, ("test_sample.py::test_other",), 1 / len(functions))

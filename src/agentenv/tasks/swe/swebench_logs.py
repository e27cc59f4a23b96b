"""The status of each test in what the test runs of SWE-bench print, by the names that its records have. Pure.

A record names a test as SWE-bench's own log parsers did when the record was made, with all that these cut and merge.
So the same is read here: the rules are those of ``swebench`` 5.0.2 (``harness/log_parsers/python.py``), and
``tests/unit/examples/test_swe_against_swebench.py`` compares the two. A test that is printed twice has its last status.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from agentenv.tasks.swe.records import TestLog

_STATUSES: Final = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
_COUNT: Final = re.compile(r"\[\d+\]")
_COLOUR: Final = re.compile(r"\[\d+m")
_CONTROLS: Final = dict.fromkeys(range(1, 32))
_DJANGO_OK: Final = (" ... ok", " ... OK", " ...  OK")
_DJANGO_VERSION: Final = "--version is equivalent to version"
"""The docstring of a test that prints between its name and its result."""
_DJANGO_MIGRATION: Final = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_DJANGO_BETWEEN: Final = tuple(
    (end, re.compile(rf"^{ahead}(.*?)\s\.\.\.\s{noise}\nok$", re.MULTILINE))
    for end, ahead, noise in (
        (" silenced).\nok", "", r"Testing against Django installed in (?s:.*?) silenced\)\."),
        ("/\nok", r"(?=(?:.*\n)?.*/\nok$)", r"Internal Server Error: /.*/"),
        ("\nok", "", r"System check identified no issues \(0 silenced\)"),
    )
)
"""What Django prints between a test and its result, and how that ends. Where the end is missing, all that is before it
would be tried again and again: nothing is looked for behind the last one."""
_SYMPY_ENDS: Final = {" E": "ERROR", " F": "FAILED", " ok": "PASSED"}

LOGS: Final[Mapping[str, TestLog]] = {
    "astropy/astropy": "swebench-pytest-v2",
    "django/django": "swebench-django",
    "matplotlib/matplotlib": "swebench-matplotlib",
    "mwaskom/seaborn": "swebench-seaborn",
    "pallets/flask": "swebench-pytest",
    "psf/requests": "swebench-pytest-options",
    "pydata/xarray": "swebench-pytest",
    "pylint-dev/pylint": "swebench-pytest-options",
    "pytest-dev/pytest": "swebench-pytest",
    "scikit-learn/scikit-learn": "swebench-pytest-v2",
    "sphinx-doc/sphinx": "swebench-pytest-v2",
    "sympy/sympy": "swebench-sympy",
}
"""How SWE-bench reads what the tests of its repositories print."""
GYM_LOGS: Final[Mapping[str, TestLog]] = {
    **dict.fromkeys(
        (
            "Project-MONAI/MONAI", "bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra",
            "getmoto/moto", "iterative/dvc", "modin-project/modin", "pandas-dev/pandas", "python/mypy",
        ),
        "swebench-pytest",
    ),
    "pydantic/pydantic": "swebench-pydantic",
}  # fmt: skip
"""How SWE-Gym reads its own."""


def pytest_words(text: str) -> dict[str, str]:
    """pytest's summary, of each name what is before its first blank."""
    return dict(_words(text))


def pytest_options(text: str) -> dict[str, str]:
    """As :func:`pytest_words`; of a parameter that is a path only its last part."""
    return {_without_directories(name): status for name, status in _words(text)}


def matplotlib(text: str) -> dict[str, str]:
    """As :func:`pytest_words`, with mouse buttons by their numbers, as older Pythons print them."""
    return dict(_words(text.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")))


def pytest_v2(text: str) -> dict[str, str]:
    """pytest's summary, or lines that end with the status, with whole names."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        clean = _COLOUR.sub("", line).translate(_CONTROLS)
        if clean.startswith(_STATUSES):
            words = (clean.split(" - ", 1)[0] if clean.startswith("FAILED") else clean).split()
            if len(words) > 1 and not _is_count(*words[:2]):
                found[" ".join(words[1:])] = words[0]
        elif clean.endswith(_STATUSES):
            words = clean.split()
            if len(words) > 1:
                found[" ".join(words[:-1])] = words[-1]
    return found


def pytest_v2_cut(text: str) -> dict[str, str]:
    """As :func:`pytest_v2` was before version 5 of SWE-bench: of each name what is before its first blank."""
    return _cut(_COLOUR.sub("", text))


def pydantic(text: str) -> dict[str, str]:
    """As :func:`pytest_v2_cut`, without what is in brackets after FAILED (SWE-Gym)."""
    return _cut(re.sub(r"FAILED[^\S\n]*\[[^\n\]]*\]", "FAILED", _COLOUR.sub("", text)))


def _cut(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.split("\n"):
        clean = line.translate(_CONTROLS)
        words = clean.split()
        if clean.startswith("FAILED"):
            words = clean.replace(" - ", " ").split()
        if len(words) > 1 and clean.startswith(_STATUSES):
            found[words[1]] = words[0]
        elif len(words) > 1 and clean.endswith(_STATUSES):
            found[words[0]] = words[1]
    return found


def seaborn(text: str) -> dict[str, str]:
    """pytest's summary or its lines of progress, of which only passed and failed tests count."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            found[words[1]] = "FAILED"
        elif " PASSED " in line:
            if words[1] == "PASSED":
                found[words[0]] = "PASSED"
        elif line.startswith("PASSED"):
            found[words[1]] = "PASSED"
    return found


def django(text: str) -> dict[str, str]:
    """unittest's lines (``-v 2``): a test's name is what is before `` ... ``, so its docstring's first line if it has
    one."""
    found: dict[str, str] = {}
    before = None
    for line in map(str.strip, text.split("\n")):
        if _DJANGO_VERSION in line:
            found[_DJANGO_VERSION] = "PASSED"
        if " ... " in line:
            before = line.split(" ... ")[0]
        found |= _django_line(line)
        if line.startswith("ok") and before is not None:
            found[before] = "PASSED"
    for end, pattern in _DJANGO_BETWEEN:
        until = f"{text}\n".rfind(f"{end}\n") + len(end)
        found |= {between[1]: "PASSED" for between in pattern.finditer(text[:until])} if until >= len(end) else {}
    return found


def _django_line(line: str) -> Iterator[tuple[str, str]]:
    end = next((end for end in _DJANGO_OK if line.endswith(end)), "")
    if end:
        if line.startswith(_DJANGO_MIGRATION):
            line = line.split("...", 1)[1].strip()
        yield line.rsplit(end, 1)[0], "PASSED"
    if " ... skipped" in line:
        yield line.split(" ... skipped")[0], "SKIPPED"
    for word, status in (("FAIL", "FAILED"), ("ERROR", "ERROR")):
        if line.endswith(f" ... {word}"):
            yield line.split(f" ... {word}")[0], status
        if line.startswith(f"{word}:") and len(line.split()) > 1:
            yield line.split()[1], status


def sympy(text: str) -> dict[str, str]:
    """The lines of SymPy's ``bin/test --verbose``: tests by the names of their functions, without files."""
    found = {heading: "FAILED" for heading in map(_sympy_heading, text.split("\n")) if heading}
    for line in map(str.strip, text.split("\n")):
        if line.startswith("test_"):
            found |= {line.split()[0]: status for end, status in _SYMPY_ENDS.items() if line.endswith(end)}
    return found


def _sympy_heading(line: str) -> str:
    """The failed test that a line names: between its first and its last blank is ``FILE.py:TEST``; else empty."""
    begin, end = line.find(" ") + 1, line.rfind(" ")
    return line[begin:end] if 0 < begin <= line.find(".py:", begin, end) else ""


def _words(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        if line.startswith(_STATUSES):
            words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
            if len(words) > 1 and not _is_count(*words[:2]):
                yield words[1], words[0]


def _is_count(status: str, name: str) -> bool:
    """Whether a line counts skipped tests, and names none: ``SKIPPED [2] tests/test_a.py:7: reason``."""
    return status == "SKIPPED" and _COUNT.fullmatch(name) is not None


def _without_directories(name: str) -> str:
    test, _, rest = name.partition("[")
    option, bracket, _ = rest.rpartition("]")
    if not bracket:
        return name
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = f"/{option.rpartition('/')[2]}"
    return f"{test}[{option}]"


READERS: Final[Mapping[TestLog, Callable[[str], dict[str, str]]]] = {
    "swebench-pytest": pytest_words,
    "swebench-pytest-options": pytest_options,
    "swebench-pytest-v2": pytest_v2,
    "swebench-pytest-v2-cut": pytest_v2_cut,
    "swebench-pydantic": pydantic,
    "swebench-matplotlib": matplotlib,
    "swebench-seaborn": seaborn,
    "swebench-django": django,
    "swebench-sympy": sympy,
}

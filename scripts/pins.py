"""The versions everybody installs (constraints.txt) and the lower bounds of pyproject.toml.

    python scripts/pins.py check     say what is wrong with them; needs no network
    python scripts/pins.py freeze    write both from what is installed, after the tests passed with it

A lower bound is the pinned version: no other was tested. Every pin must admit the lowest Python of requires-python,
or `make setup` fails where that is the system's.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# What every install is held to (pip install -c constraints.txt). Remade by scripts/pins.py freeze."


@dataclass(frozen=True)
class Installed:
    """One distribution. ``requires_python`` is empty where it takes any."""

    name: str
    version: str
    requires_python: str = ""


def asked(project: Mapping[str, Any]) -> list[Requirement]:
    """What pyproject.toml's ``[project]`` asks for, every extra included (but not itself, in an extra of extras)."""
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [one for one in found if one.name != project["name"]]


def lowest_python(project: Mapping[str, Any]) -> str:
    """The oldest version of Python it promises to run on."""
    return str(project["requires-python"]).removeprefix(">=")


def needed(requirements: Iterable[Requirement]) -> dict[str, Installed]:
    """What is installed of these and of what they need, by canonical name. Raises PackageNotFoundError."""
    seen: set[tuple[str, str]] = set()
    found: dict[str, Installed] = {}
    ask = list(requirements)
    while ask:
        wanted = ask.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            here = metadata.distribution(name)
            found[name] = Installed(here.name, here.version, here.metadata["Requires-Python"] or "")
            further = [Requirement(text) for text in here.requires or ()]
            ask += [one for one in further if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def refusals(installed: Iterable[Installed], python: str) -> list[str]:
    """Those that do not run on that Python, each in words."""
    return [
        f"{one.name}=={one.version} needs Python {one.requires_python}, and pyproject.toml promises {python}"
        for one in installed
        if not SpecifierSet(one.requires_python).contains(python)
    ]


def mistakes(project: Mapping[str, Any], pins: Mapping[str, str], installed: Mapping[str, Installed]) -> list[str]:
    """What is wrong, in words: nothing when everybody installs what is installed here. ``pins``: by canonical name."""
    wrong = refusals(installed.values(), lowest_python(project))
    for name, one in installed.items():
        if pins.get(name) != one.version:
            wrong.append(f"{one.name} {one.version} is installed, constraints.txt says {pins.get(name, 'nothing')}")
    wrong += [f"constraints.txt pins {name}, which nothing needs" for name in pins if name not in installed]
    for wanted in asked(project):
        pinned = pins.get(canonicalize_name(wanted.name), "")
        if str(wanted.specifier) not in (f">={pinned}", f"=={pinned}"):
            wrong.append(f"pyproject.toml asks for {wanted}, tested is {pinned}")
    return wrong


def frozen(installed: Mapping[str, Installed]) -> str:
    """The text of constraints.txt."""
    lines = [f"{one.name}=={one.version}" for one in installed.values()]
    return "\n".join([HEADER, *sorted(lines, key=lambda line: line.partition("==")[0].lower())]) + "\n"


def with_bounds(pyproject: str, installed: Mapping[str, Installed]) -> str:
    """The text of pyproject.toml with lower bounds as installed."""

    def raised(found: re.Match[str]) -> str:
        one = installed.get(canonicalize_name(found[1]))
        return f'"{found[1]}>={one.version}"' if one else found[0]

    return re.sub(r'"([A-Za-z0-9._-]+)>=[^",]+"', raised, pyproject)


def pins_in(constraints: str) -> dict[str, str]:
    """name==version lines, by canonical name."""
    lines = [line.partition("==") for line in constraints.splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, _, version in lines}


def main(verb: str) -> int:
    """Exit code."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(pyproject)["project"]
    lowest = lowest_python(project)
    try:
        installed = needed(asked(project))
    except metadata.PackageNotFoundError as error:
        sys.exit(f"{error}: make setup")
    if verb == "check":
        wrong = mistakes(project, pins_in((ROOT / "constraints.txt").read_text()), installed)
    else:
        wrong = refusals(installed.values(), lowest)
        if sys.version_info[:2] != tuple(int(part) for part in lowest.split(".")[:2]):
            wrong.append(f"a newer Python needs other packages: freeze with {lowest} (make clean setup PYTHON=…)")
        if not wrong:
            (ROOT / "constraints.txt").write_text(frozen(installed))
            (ROOT / "pyproject.toml").write_text(with_bounds(pyproject, installed))
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["check"], ["freeze"]):
        sys.exit(str(__doc__))
    sys.exit(main(sys.argv[1]))

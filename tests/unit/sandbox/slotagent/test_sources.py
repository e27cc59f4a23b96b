"""The C files of a program lie in layers: each includes, and so calls, only those below it, and shares no variables."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import agentenv
from agentenv.image.context import package_entries
from agentenv.sandbox.slotagent import build

REPOSITORY = Path(__file__).resolve().parents[4]
PACKAGE = Path(agentenv.__file__).parent
SOURCES = PACKAGE / "sandbox/slotagent"
FOLDERS = ("agent", "as", "dial", "files", "guard", "launch", "listen", "root", "steps", "tar")
PROGRAMS = {name: [SOURCES / folder for folder in folders] for name, folders in build._PROGRAMS.items()}
_COMMENTS_AND_STRINGS = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_PROTOTYPE = re.compile(r"^(?!_Static_assert\b|typedef\b)(?![^(;]*\bstatic\b)\w[\w *]*\([^{};]*\)\s*;", re.MULTILINE)


def c_files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix in {".c", ".h"})
    assert found, folder
    return found


def code_of(path: Path) -> str:
    return _COMMENTS_AND_STRINGS.sub(lambda found: " " if found[0].startswith("/") else '""', path.read_text())


def units(*folders: Path) -> dict[str, set[str]]:
    """What each unit, a .c file and the header of its name, includes of the others in these folders."""
    files = [path for folder in folders for path in c_files(folder)]
    names = {path.name for path in files}
    assert len(names) == len(files), "a name is in one folder of a program only"
    found: dict[str, set[str]] = {}
    for path in files:
        included = set(_INCLUDE.findall(path.read_text()))
        assert included <= names, f"{path} includes what is not in these folders: {included - names}"
        found.setdefault(path.stem, set()).update({Path(name).stem for name in included} - {path.stem})
    return found


def shared_variables(folder: Path) -> Iterator[str]:
    for path in c_files(folder):
        yield from (
            f"{path.name}: {line.strip()}" for line in code_of(path).splitlines() if re.search(r"\bextern\b", line)
        )


def own_prototypes(folder: Path) -> Iterator[str]:
    """Declarations in a .c file of functions that are not its own: calls that no #include shows."""
    for path in c_files(folder):
        if path.suffix == ".c":
            yield from (f"{path.name}: {found[0]}" for found in _PROTOTYPE.finditer(code_of(path)))


def test_every_program_is_looked_at() -> None:
    folders = {path.parent.name for pattern in ("*.c", "*.h") for path in SOURCES.rglob(pattern)}
    assert folders == set(FOLDERS) == {folder for given in build._PROGRAMS.values() for folder in given}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_circle_among_the_units(program: str) -> None:
    found = units(*PROGRAMS[program])
    assert "main" in [*TopologicalSorter(found).static_order()]
    assert not any("main" in included for included in found.values()), "main is above all others"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_c_file_has_its_own_header_and_every_header_its_c_file(folder: str) -> None:
    names = {path.name for path in c_files(SOURCES / folder)}
    assert {f"{Path(name).stem}.c" for name in names} == {name for name in names if name.endswith(".c")}
    assert names >= {f"{Path(name).stem}.h" for name in names if name != "main.c"}
    for name in names - {"main.c"}:
        if name.endswith(".c"):
            first, *_ = _INCLUDE.findall((SOURCES / folder / name).read_text())
            assert Path(first).stem == Path(name).stem, "so that a header stands by itself"


@pytest.mark.parametrize("folder", FOLDERS)
def test_units_share_functions_and_no_variables(folder: str) -> None:
    assert list(shared_variables(SOURCES / folder)) == []
    assert list(own_prototypes(SOURCES / folder)) == []


@pytest.mark.parametrize(("folder", "program"), [("agent", "slotagent"), ("files", "slotfiles")])
def test_the_documented_levels_are_those_of_the_sources(folder: str, program: str) -> None:
    page = (REPOSITORY / "docs/slot-agent.md").read_text()
    [text] = re.findall(rf"^- `{folder}/`: (.*?)(?=\n- |\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    levels = [re.findall(r"`(\w+)`", level) for level in text.split(" · ")]
    level_of = {name: number for number, names in enumerate(levels) for name in names}
    guard = units(SOURCES / "guard").keys()
    found = {name: included for name, included in units(*PROGRAMS[program]).items() if name not in guard}
    assert level_of.keys() - guard == found.keys()
    for name, included in found.items():
        assert all(level_of[other] < level_of[name] for other in included), name


def test_what_is_forbidden_is_found(tmp_path: Path) -> None:
    (tmp_path / "high.h").write_text("#ifndef HIGH_H\n/* not extern */\nvoid high(void);\n#endif\n")
    (tmp_path / "high.c").write_text('#include "high.h"\n#include "low.h"\nvoid high(void) { low("extern"); }\n')
    (tmp_path / "low.h").write_text("void low(const char *);\n")
    (tmp_path / "low.c").write_text('#include "low.h"\nstatic int f(int);\nvoid low(const char *of) { (void)of; }\n')
    assert units(tmp_path) == {"high": {"low"}, "low": set()}
    assert [*shared_variables(tmp_path), *own_prototypes(tmp_path)] == []

    (tmp_path / "low.c").write_text('#include "low.h"\nextern int state;\nvoid high(\n    void);\n')
    assert list(shared_variables(tmp_path)) == ["low.c: extern int state;"]
    assert list(own_prototypes(tmp_path)) == ["low.c: void high(\n    void);"]
    (tmp_path / "low.h").write_text('#  include "high.h"\n')
    with pytest.raises(CycleError):
        TopologicalSorter(units(tmp_path)).prepare()


def test_a_binary_is_named_by_the_sources_and_headers_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("bin", "__pycache__"))
    monkeypatch.setattr(build, "_HERE", sources)

    first = build.build_sanitized(tmp_path / "bin")
    for changed in ("runs.c", "runs.h"):
        with (sources / "agent" / changed).open("a") as file:
            file.write("\n")
        after = build.build_sanitized(tmp_path / "bin")
        assert after.agent != first.agent, changed
        assert (after.files, after.launch) == (first.files, first.launch)
        first = after


def test_what_names_a_binary_ships_with_it() -> None:
    """In an image or a wheel whose sources were not all there, the name would be another, and a compiler needed."""
    wanted = {path.relative_to(PACKAGE) for folder in FOLDERS for path in c_files(SOURCES / folder)}
    image = {entry.name for entry in package_entries(PACKAGE, build.ensure_built())}
    assert {f"site/agentenv/{path}" for path in wanted} <= image

    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["agentenv"]
    assert wanted <= {path.relative_to(PACKAGE) for pattern in patterns for path in PACKAGE.glob(pattern)}

"""The tests of a package lie in the folder of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

UNIT = Path(__file__).parent
SOURCES = UNIT.parents[1] / "src" / "agentenv"
OF_NO_PACKAGE = {"docs", "examples"}
DATA = {"slots/backends/nomad/tls", "sandbox/server/patch_reference"}


def folders() -> list[str]:
    """Folders of unit tests, relative."""
    found = {str(path.parent.relative_to(UNIT)) for path in UNIT.rglob("*.py")} - {"."}
    return sorted(found - OF_NO_PACKAGE - DATA)


@pytest.mark.parametrize("folder", folders())
def test_a_folder_of_unit_tests_mirrors_a_package(folder: str) -> None:
    assert (SOURCES / folder / "__init__.py").is_file()


def test_every_package_with_logic_of_its_own_has_a_folder_or_is_named() -> None:
    elsewhere = {
        "mcp",  # by its protocol's own client, in tests/integration
        "shipped",  # by the tests of the image and the jobs
        "testing",  # by those of env and agent
    }
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert packages - {folder.split("/")[0] for folder in folders()} == elsewhere

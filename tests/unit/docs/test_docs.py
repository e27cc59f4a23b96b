"""What the documentation points at exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").glob("**/*.md")]
    assert [str(page) for page in pages if page.name != "README.md" and f"({page})" not in index] == []


def test_make_without_a_target_lists_every_target() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)).split()
    assert len(phony) > 10
    hidden = {"system", "testing", "containers", "as-root"}  # parts of others
    assert [name for name in phony if name not in hidden and f"make {name} " not in listed] == []


def test_constraints_pin_packages_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    assert [line for line in lines if line.lower().startswith(("torch", "agentenv"))] == []

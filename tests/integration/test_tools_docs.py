"""docs/tools.md is what the code and its examples say today, on the fake backend and in a real slot."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from agentenv.api.assembly import tool_server
from agentenv.config import ContainerSettings
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.tools.catalog import ToolCatalog
from scripts import tools_page

CONTAINER = ContainerSettings(slots_per_container=1, require_sandbox=False)


@pytest.mark.parametrize("kind", ["fake", "local"])
async def test_every_example_answers_what_the_page_says(kind: str, tmp_path: Path) -> None:
    backend = FakeBackend(CONTAINER) if kind == "fake" else LocalBackend(CONTAINER, state_dir=tmp_path)
    now = await tools_page.rendered(backend)
    assert now == tools_page.PAGE.read_text(encoding="utf-8"), "run: python scripts/tools_page.py"


def test_a_tool_or_an_action_without_an_example_is_refused() -> None:
    whole = tools_page.written()
    external = [name for name in whole["tool"] if name not in ToolCatalog.builtin()]
    tools_page.check(whole, external)
    with pytest.raises(ValueError, match="there are"):
        tools_page.check(whole, [*external, "another"])
    without = copy.deepcopy(whole)
    examples = without["tool"]["tmux"]["example"]
    without["tool"]["tmux"]["example"] = [each for each in examples if each["call"]["action"] != "resize"]
    with pytest.raises(ValueError, match="tmux: no example of resize"):
        tools_page.check(without, external)


async def test_the_page_has_every_tool_the_shipped_server_has() -> None:
    async with tool_server() as server:
        external = [each.name for each in server.describe().tools]
    headings = re.findall(r"^### (\S+)$", tools_page.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [*ToolCatalog.builtin().names, *external]
    assert len(external) >= 5


def test_its_links_lead_somewhere() -> None:
    text = tools_page.PAGE.read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)", text))
    assert {"terminal.md", "files.md", "tool-server.md"} <= linked
    assert [name for name in linked if not (tools_page.PAGE.parent / name).exists()] == []

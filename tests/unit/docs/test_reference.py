"""docs/reference.md lists the public names, and every name of a hook's signature is one."""

from __future__ import annotations

import importlib
import inspect
import re

import agentenv
from agentenv.agent.hooks import HOOK_KEYWORDS
from agentenv.env.environment import AgentEnv
from scripts import reference_page


def test_the_page_is_current() -> None:
    assert reference_page.page() == reference_page.PAGE.read_text(), "run: python scripts/reference_page.py"


def test_every_import_that_the_pages_show_is_listed() -> None:
    pages = [*reference_page.PAGE.parent.glob("*.md"), reference_page.PAGE.parents[1] / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    shown = {
        (package, name.split()[0])
        for package, names in re.findall(r"^\s*from (agentenv[\w.]*) import (\([^)]*\)|.+)", text, re.MULTILINE)
        for name in names.strip("()").split(",")
        if name.strip()
    }
    assert len(shown) > 20
    assert {found for found in shown if not listed(*found)} == set()


def test_every_name_to_port_to_is_listed() -> None:
    porting = reference_page.PAGE.with_name("porting.md").read_text()
    named = re.findall(r"`(agentenv[\w.]*)\.(\w+)`", porting)
    assert len(named) > 15
    assert [found for found in named if not listed(*found)] == []


def listed(package: str, name: str) -> bool:
    return f"{package}.{name}" in reference_page.PACKAGES or _has(package, name)


def _has(package: str, name: str) -> bool:
    return package in reference_page.PACKAGES and name in importlib.import_module(package).__all__


def test_types_of_hooks_are_public() -> None:
    hooks = [getattr(AgentEnv, name) for name in HOOK_KEYWORDS]
    named = {name for hook in hooks for name in re.findall(r"\b[A-Z]\w+", str(inspect.signature(hook)))}
    assert named - {"Any", "Awaitable", "None"} <= set(agentenv.__all__)

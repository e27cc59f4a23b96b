"""Writes docs/reference.md, the public names of every package, from the code.

``python scripts/reference_page.py`` writes the page; a test compares it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/reference.md"
PACKAGES = {
    "agentenv": "Environments, sandboxes, the farm below them, and every error that documented code may have to catch.",
    "agentenv.agents": "Agent programs of others, as the agents of environments.",
    "agentenv.slots": "The pool and its backends.",
    "agentenv.executor": "From a tool call to its result.",
    "agentenv.api": "The tool server and tools of your own; needs `agentenv[farm]`.",
    "agentenv.api.assembly": "The tool server that its settings describe.",
    "agentenv.agent.result": "What verifiers and `run_agent` get.",
    "agentenv.agent.transcript": "The records in `rollouts_path`.",
    "agentenv.agent.tmux_recordings": "Asciicasts from these records.",
    "agentenv.agent.parsers": "Tool calls in the text of managed servers.",
    "agentenv.runs": "Rollouts of runs as rows, and estimates of their scores ([how to](reading-runs.md)).",
    "agentenv.report": "The page about a run.",
    "agentenv.runs.atif": "Rollouts in Harbor's format ([tracing.md](tracing.md)).",
    "agentenv.mirrors": "Mirrors of git repositories, to bind into slots.",
    "agentenv.store": "Images of a node: pulled once, verified, mounted without being unpacked.",
    "agentenv.testing": "Environments tested without a model.",
    "agentenv.env.hermes": "For [porting](porting.md) environments of hermes-agent.",
}
HEAD = """\
# Public names

What code may import; everything else may change without notice. This page is made by `scripts/reference_page.py`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for package in PACKAGES for line in section(package))])


def section(package: str) -> Iterator[str]:
    """A package's names in a table."""
    yield from (f"## {package}", "", PACKAGES[package], "", "| name | |", "|---|---|")
    module = importlib.import_module(package)
    for name in sorted(module.__all__):
        if not name.startswith("__"):
            yield f"| `{name}` | {summary(getattr(module, name))} |"
    yield ""


def summary(value: object) -> str:
    """The first sentence of a docstring, as Markdown in a table; of a mapping its keys."""
    if isinstance(value, Mapping):
        return ", ".join(f"`{key}`" for key in value)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return "a type"
    text = re.sub(r"\s+", " ", (inspect.getdoc(value) or "").split("\n\n")[0])
    first = re.split(r"(?<=\.) ", text)[0]
    return re.sub(r"(:\w+:)?`+~?([^`]+)`+", r"`\2`", first).replace("|", "\\|").rstrip(":")


if __name__ == "__main__":
    PAGE.write_text(page())

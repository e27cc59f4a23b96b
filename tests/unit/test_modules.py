"""A short module that one other module uses is a part of it, unless there is a reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

SOURCES = Path(__file__).resolve().parents[2] / "src"
SHORT_LINES = 80
APART: Final[Mapping[str, str]] = {
    "agentenv.agent.single_run": "environment.py, which uses it, has 600 lines",
    "agentenv.agent.context_budget": "pure, and tested without a loop",
    "agentenv.agent.parsers.hermes": "each format of tool calls is a module",
    "agentenv.agent.shutdown": "environment.py, which uses it, has 600 lines",
    "agentenv.api.tool_server.inprocess": "its imports are in [farm]: imported when it is used",
    "agentenv.api.farm_server.paused": "each subject of the service is a module",
    "agentenv.cli.nomad_up": "its imports are in [nomad]: imported when it is used",
    "agentenv.containers.slot_reports": "slot_tools.py, which uses it, has 600 lines",
    "agentenv.env.blocking": "greenlets, which are no subject of what uses them",
    "agentenv.env.images": "environment.py, which uses it, has 600 lines",
    "agentenv.farm.gc_leases": "a farm's leases, not a command's options; imported when it is used",
    "agentenv.mcp.server": "its imports are in [mcp]: imported when it is used",
    "agentenv.runs.recorded": "counts records, which is no matter of how a command prints them",
    "agentenv.sandbox.server.image_route": "each resource of the server's routes is a module",
    "agentenv.sandbox.server.slot_metrics_route": "each resource of the server's routes is a module",
    "agentenv.slots.backends.attached": "each backend is a module",
    "agentenv.slots.eta": "pure, and simulated by benchmarks/farmsim",
    "agentenv.tasks.harbor.directories": "tasks of either format are read without an environment",
    "agentenv.testing.tokenizer": "what users' tests import; `python -m agentenv.testing` writes its files",
}


def test_a_short_module_with_one_user_has_a_reason() -> None:
    lines, users = _modules()
    short = {name for name, of in users.items() if len(of) == 1 and lines[name] < SHORT_LINES}
    assert short - set(APART) == set(), "join what uses them, or say why not in APART"
    assert set(APART) - short == set(), "need no reason any more"


def _modules() -> tuple[dict[str, int], dict[str, set[str]]]:
    """The lines of every module, and the modules that import it."""
    files = {_name(path): path for path in (SOURCES / "agentenv").rglob("*.py") if path.name != "__init__.py"}
    users: dict[str, set[str]] = defaultdict(set)
    for name, path in files.items():
        for imported in _imported(ast.parse(path.read_text())):
            if imported in files and imported != name:
                users[imported].add(name)
    return {name: len(path.read_text().splitlines()) for name, path in files.items()}, users


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)

"""``agentenv demo``: the whole path with real code (the same as ``make demo``)."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from agentenv.cli.options import BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.output import print_json, verb
from agentenv.cli.source_checkout import directory_named, run_module
from agentenv.errors import ConfigError
from agentenv.slots.backends.registry import Backend

_CLOCK_SLACK_S = 0.1
"""Tolerance for file systems whose clock is coarser than ours."""


@verb
def demo(
    context: typer.Context, backend: BackendOption = None, job: JobOption = None, as_json: JsonOption = False
) -> None:
    """Repair real programs in a farm, on this machine or on a Nomad cluster, and write a page about it.

    An environment leases slots, a scripted policy (no GPU, no model) repairs mutated PyPI packages through batched
    tool calls, verifiers score in the slot. Writes out/demo/rollouts.jsonl and out/demo/report.html. Further
    arguments are passed to the demo (agentenv demo -- --help).

    \b
    Examples:
      agentenv demo
      make nomad-dev && agentenv demo --backend nomad
      OPENAI_BASE_URL=http://localhost:8000/v1 agentenv demo -- --model my-model
    """
    chosen = backend_of(backend)
    if chosen is Backend.fake:
        raise ConfigError("--backend", "fake runs no real tests", next_step="allowed: local, nomad")
    where = ["--backend", chosen.value, *(["--job", job] if job is not None else [])]
    began = time.time()
    code = run_module("examples.repair", [*where, *context.args], quiet_stdout=as_json)
    if as_json:
        directory = directory_named(context.args, Path("out/demo"))
        written = {name: _written_since(began, directory / name) for name in ("rollouts.jsonl", "report.html")}
        print_json({"rollouts": written["rollouts.jsonl"], "report": written["report.html"], "exit_code": code})
    raise typer.Exit(code)


def _written_since(began: float, path: Path) -> Path | None:
    """None if this run wrote none: a file of an earlier run is not its result."""
    return path if path.exists() and path.stat().st_mtime >= began - _CLOCK_SLACK_S else None

"""``agentenv demo``: the whole path on real code (the same as ``make demo``)."""

from __future__ import annotations

import typer

from agentenv.cli.checkout import checkout_root, run_module
from agentenv.cli.options import Backend, BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.present import print_json, verb
from agentenv.errors import ConfigError


@verb
def demo(
    context: typer.Context, backend: BackendOption = None, job: JobOption = None, as_json: JsonOption = False
) -> None:
    """Repair real programs in a farm, on this machine or on a Nomad cluster, and write a page about it.

    An environment leases slots, a scripted policy (no GPU, no model) repairs mutated PyPI packages through batched
    tool calls, verifiers score in the slot. Writes out/demo/rollouts.jsonl and out/demo/report.html.
    Further arguments are the demo's own (agentenv demo -- --help).

    [bold]Examples[/bold]

      agentenv demo

      make nomad-dev && agentenv demo --backend nomad

      OPENAI_BASE_URL=http://localhost:8000/v1 agentenv demo -- --model my-model
    """
    chosen = backend_of(backend)
    if chosen is Backend.fake:
        raise ConfigError("--backend", "fake runs no real tests", next_step="allowed: local, nomad")
    where = ["--backend", chosen.value, *(["--job", job] if job is not None else [])]
    code = run_module("examples.repair", [*where, *context.args], quiet_stdout=as_json)
    if as_json:
        directory = checkout_root("examples") / "out" / "demo"
        print_json({"rollouts": directory / "rollouts.jsonl", "report": directory / "report.html", "exit_code": code})
    raise typer.Exit(code)

"""``agentenv demo``: the whole path on real code (the same as ``make demo``)."""

from __future__ import annotations

import typer

from agentenv.cli.checkout import checkout_root, run_module
from agentenv.cli.options import JsonOption
from agentenv.cli.present import print_json, verb


@verb
def demo(context: typer.Context, as_json: JsonOption = False) -> None:
    """Repair real programs in a farm on this machine, and write a page about it.

    An environment leases slots, a scripted policy (no GPU, no model) repairs mutated PyPI packages through batched
    tool calls, verifiers score in the slot. Writes out/demo/rollouts.jsonl and out/demo/report.html.
    Further arguments are the demo's own (agentenv demo -- --help).

    [bold]Examples[/bold]

      agentenv demo

      OPENAI_BASE_URL=http://localhost:8000/v1 agentenv demo -- --model my-model
    """
    code = run_module("examples.repair", context.args, quiet_stdout=as_json)
    if as_json:
        directory = checkout_root("examples") / "out" / "demo"
        print_json({"rollouts": directory / "rollouts.jsonl", "report": directory / "report.html", "exit_code": code})
    raise typer.Exit(code)

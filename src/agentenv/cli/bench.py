"""``agentenv bench``: measure the targets on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import print_json, verb
from agentenv.cli.source_checkout import directory_named, run_module


@verb
def bench(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Short rounds: minutes faster, less precise.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", "-b", help="local, nomad, or farm (a farm service); local,farm measures both in one run."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Directory to write results.json to.")] = Path("out/bench"),
    as_json: JsonOption = False,
) -> None:
    """Measure throughput, latency and isolation against their baselines, in one run.

    Takes minutes, and the machine to itself. The table says what each target (T1, T2, …) is; docs/performance.md has
    the method. Further arguments are passed to the benchmarks (agentenv bench -- --help).

    \b
    Examples:
      agentenv bench --quick
      agentenv bench --backend local,nomad
      agentenv bench --backend local,farm -- --only T1,T2,T4
      agentenv bench --out /tmp/figures -- --only T1,T2 --rounds 5
    """
    directory = out.resolve()
    where = ["--backend", backend] if backend is not None else []
    arguments = [*(["--quick"] if quick else []), *where, "--out", str(directory), *context.args]
    code = run_module("benchmarks", arguments, quiet_stdout=as_json)
    if as_json:
        results = directory_named(context.args, directory) / "results.json"
        print_json(json.loads(results.read_text()) if code == 0 else {"exit_code": code})
    raise typer.Exit(code)

"""``python -m examples.repair`` (``make demo``): the repair environment in a farm on this machine, and a page about
it.

Without a model a scripted policy plays, as the page states. With OPENAI_BASE_URL set and --model NAME (or
OPENAI_MODEL), that model repairs the packages; OPENAI_API_KEY is its key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentenv.cli.output import EXIT_NOT_ALL_WELL, err, escape, run_to_end, verb
from examples.repair.settings import DemoSettings, check

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

Isolation = Literal["auto", "full", "user"]


@app.command(help=__doc__)
@verb
def main(
    groups: Annotated[
        int, typer.Option(min=1, max=10_000, help="Groups to roll out; tasks repeat if there are too few.")
    ] = 8,
    group_size: Annotated[int, typer.Option(min=1, max=64, help="Rollouts of each task.")] = 4,
    slots: Annotated[int, typer.Option(min=1, max=1000, help="Slots of the one container.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the injected bugs and of the choice of tasks.")] = 1,
    isolation: Annotated[
        Isolation, typer.Option(help="auto: full for root; user for others (weaker, see agentenv doctor).")
    ] = "auto",
    backend: Annotated[
        Literal["local", "nomad"],
        typer.Option(help="Where the container runs: on this machine, or on the cluster of NOMAD_ADDR."),
    ] = "local",
    job: Annotated[str, typer.Option(help="nomad: the job's id; it is purged at the end.")] = "agentenv-demo",
    model: Annotated[
        str, typer.Option(envvar="OPENAI_MODEL", help="A model at OPENAI_BASE_URL, instead of the scripted policy.")
    ] = "",
    base_url: Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="An OpenAI-style server.")] = "",
    max_steps: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of model turns per rollout.")] = 30,
    package: Annotated[list[str], typer.Option(help="Only tasks of this package. May be repeated.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Where rollouts.jsonl and report.html are written.")] = Path("out/demo"),
) -> None:
    """See the module."""
    settings = DemoSettings(
        groups, group_size, slots, seed, isolation, model, base_url, max_steps, out, backend, job, tuple(package)
    )
    check(settings)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which we do not need
    from examples.repair.demo import run_demo  # late: atropos takes seconds to import, and a typo should not

    try:
        failed = run_to_end(run_demo(settings))
    except OSError as error:  # what it writes at its end: the disk is full, say
        failed = str(error)
    if failed:
        err().print(f"[bold red]failed[/] {escape(failed)}", soft_wrap=True)
        raise typer.Exit(EXIT_NOT_ALL_WELL)


if __name__ == "__main__":
    app()

"""``python -m examples.agents`` (``make agents``): agent programs that others have written repair real packages, in
slots without network.

Each program plays groups with both kinds of model: exact (the model's tokens are kept, and trained on as they were
sampled) and openai (a chat server, without tokens). Without a model a scripted policy plays, and every token is
checked. With OPENAI_BASE_URL set and --model NAME, that model plays.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agentenv.agents import RECIPES, binds
from agentenv.cli.output import EXIT_NOT_ALL_WELL, err, escape, run_to_end, verb
from agentenv.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
PROVED = [recipe.name for recipe in RECIPES.values() if recipe.status == "proved"]


@app.command(help=__doc__)
@verb
def main(
    program: Annotated[list[str], typer.Option(help=f"One of {', '.join(RECIPES)}. May be repeated.")] = PROVED,
    mode: Annotated[list[str], typer.Option(help="exact, openai, or both.")] = ["exact", "openai"],  # noqa: B006
    groups: Annotated[int, typer.Option(min=1, max=100, help="Tasks that each program plays.")] = 1,
    group_size: Annotated[int, typer.Option(min=1, max=64, help="Rollouts of each task.")] = 2,
    image: Annotated[str, typer.Option(help="Image with the programs, instead of plain slots that see them.")] = "",
    model: Annotated[str, typer.Option(envvar="OPENAI_MODEL", help="A model at OPENAI_BASE_URL.")] = "",
    base_url: Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="A model's server.")] = "",
    out: Annotated[Path, typer.Option(help="Where records and report.html are written.")] = Path("out/agents"),
) -> None:
    """See the module."""
    for what, given, known in (("program", program, RECIPES), ("mode", mode, ("exact", "openai"))):
        if unknown := set(given) - set(known):
            raise ConfigError(what, f"there is no {min(unknown)!r}", next_step=f"there are {', '.join(known)}")
    if model and not base_url:
        raise ConfigError("OPENAI_BASE_URL", "is not set, and a model is named", next_step="set both, or neither")
    if not image:
        binds(*program)  # before anything that takes long
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which we do not need
    from examples.agents.play import Settings, play_all  # late: atropos takes seconds to import

    settings = Settings(program, mode, groups, group_size, image or None, model, base_url, out)
    if faults := run_to_end(play_all(settings)):
        err().print(f"[bold red]failed[/] {escape(faults[0])}", soft_wrap=True)
        raise typer.Exit(EXIT_NOT_ALL_WELL)


if __name__ == "__main__":
    app()

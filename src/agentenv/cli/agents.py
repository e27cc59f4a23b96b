"""``agentenv agents list | check``: recipes of agent programs that others have written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.options import JsonOption, group
from agentenv.cli.output import err, escape, out, print_json, run_to_end, verb
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.agents.check import Checked
    from agentenv.agents.facts import Recipe

agents = group("Agent programs of others, as the agents of environments: list their recipes, and try one in a slot.")


@agents.command("list")
@verb
def list_(as_json: JsonOption = False) -> None:
    """List the recipes: which version was run, how that went, and whether the program is on this machine.

    Proved: it has solved a task in a slot without a network by each dialect that it speaks, and its own log has as many
    turns as its model was asked for. Unstable: it has run, but nothing tries it again, or not always so. Not run:
    written by its documentation.
    """
    from rich.table import Table

    from agentenv.agents.facts import RECIPES
    from agentenv.agents.trees import tree

    here = {name: recipe.packaged and tree(name, recipe.version).is_dir() for name, recipe in RECIPES.items()}
    if as_json:
        print_json([_described(recipe, here[recipe.name]) for recipe in RECIPES.values()])
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("program", "version", "licence", "dialects", "status", "needs", "memory", "on this machine"):
        table.add_column(heading)
    for recipe in RECIPES.values():
        memory, dialects = f"{recipe.memory_mib} MiB", ", ".join(recipe.programs)
        place = "yes" if here[recipe.name] else "no" if recipe.packaged else recipe.note
        words = (recipe.name, recipe.version, recipe.licence, dialects, recipe.status, recipe.needs, memory, place)
        table.add_row(*map(escape, words))
    out().print(table)


@agents.command()
@verb
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a recipe, as agents list shows it.")],
    dialect: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this one of its dialects; by default each of them.")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="REF", help="An image that has the program; by default a plain slot is shown its tree."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a program mend a bug in a slot without a network, by a scripted model, and see that all is as it has to be.

    That is: the bug is mended, no request was refused, the program ended well, and its own log has as many turns as
    its model was asked for. In a checkout, scripts/agent-programs makes the programs; with --image they may be
    anybody's.

    \b
    Examples:
      agentenv agents check codex
      agentenv agents check opencode --dialect messages
      agentenv agents check qwen-code --image localhost/agents:1
    """
    from agentenv.agents.facts import RECIPES

    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError("agent program", f"there is no recipe {name!r}", next_step=f"there are {', '.join(RECIPES)}")
    if dialect is not None and dialect not in recipe.programs:
        spoken = ", ".join(recipe.programs)
        raise ConfigError("--dialect", f"{name} does not speak {dialect!r}", next_step=f"use one of {spoken}")
    done = []
    for each in recipe.programs if dialect is None else [dialect]:
        found = run_to_end(_check(recipe, each, image))
        done.append({"dialect": each, **found})
        if not as_json:
            _show(recipe, each, found)
    if as_json:
        print_json({"program": name, "version": recipe.version, "checks": done})
    if any(found["faults"] for found in done):
        raise typer.Exit(1)


async def _check(recipe: Recipe, dialect: str, image: str | None) -> dict[str, Any]:
    from agentenv.agents.check import checked
    from agentenv.agents.trees import binds
    from agentenv.errors import TaskError
    from agentenv.sdk.async_sandbox import AsyncSandbox

    if image is None:
        sandbox = AsyncSandbox(binds=binds(recipe.name))
    else:
        sandbox = AsyncSandbox(image=image, memory_mib=recipe.memory_mib)
    async with sandbox as box:
        try:
            return _found(await checked(recipe, dialect, box))
        except TaskError as error:
            return {"faults": [str(error)]}


def _found(checked: Checked) -> dict[str, Any]:
    return {
        "faults": checked.faults,
        "turns": checked.turns,
        "own_turns": checked.own_turns,
        "duration_s": round(checked.duration_s, 3),
        "exit_code": checked.program.exit_code,
        "finish_reason": checked.finish_reason,
        "dropped": checked.program.dropped,
        "overruled": checked.program.overruled,
        "stdout": checked.program.stdout,
        "stderr": checked.program.stderr,
    }


def _show(recipe: Recipe, dialect: str, found: dict[str, Any]) -> None:
    faults, title = found["faults"], f"{recipe.name} {recipe.version}, {dialect}"
    if not faults:
        dropped = ", ".join(f"{path} ({count})" for path, count in found["dropped"].items())
        more = f"; not shown to the model: {escape(dropped)}" if dropped else ""
        out().print(f"[green]good[/] {escape(title)}: {found['turns']} turns in {found['duration_s']:.1f} s{more}")
        return
    out().print(f"[red]bad[/] {escape(title)}: {escape('; '.join(faults))}", soft_wrap=True)
    for name in ("stdout", "stderr"):
        if said := found.get(name, "").strip()[-2000:]:
            err().print(f"its {name}:\n{said}", markup=False, soft_wrap=True)


def _described(recipe: Recipe, here: bool) -> dict[str, Any]:
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    kept = ("name", "version", "licence", "status", "needs", "memory_mib", "note")
    return {**{name: fields[name] for name in kept}, "dialects": list(recipe.programs), "on_this_machine": here}

"""``agentenv sandboxes list | pause | resume | kill``: the sandboxes with names of a farm service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import FarmTokenOption, FarmUrlOption, JsonOption, group
from agentenv.cli.output import err, escape, out, print_json, run_to_end, verb

if TYPE_CHECKING:
    from agentenv.sdk.async_sandbox import AsyncFarm

RunOption = Annotated[
    str | None, typer.Option("--run", help="The run that they belong to; on this machine local by default.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the sandbox.")]

sandboxes = group("Sandboxes with names, of a farm service: list, pause, resume and kill them.")


@sandboxes.command("list")
@verb
def list_(
    run: RunOption = None, url: FarmUrlOption = None, bearer: FarmTokenOption = None, as_json: JsonOption = False
) -> None:
    """List the sandboxes of a run, running and paused."""
    run_to_end(_with_farm(run, url, bearer, lambda farm: _list(farm, as_json)))


@sandboxes.command()
@verb
def pause(name: NameArgument, run: RunOption = None, url: FarmUrlOption = None, bearer: FarmTokenOption = None) -> None:
    """Keep a sandbox's files, and no process, and give its slot back. Whoever is connected to it loses it."""
    run_to_end(_with_farm(run, url, bearer, lambda farm: farm.pause(name)))
    err().print(f"{name} is paused", markup=False, highlight=False)


@sandboxes.command()
@verb
def resume(
    name: NameArgument, run: RunOption = None, url: FarmUrlOption = None, bearer: FarmTokenOption = None
) -> None:
    """Give a paused sandbox a slot again, with its files. Its idle timeout begins."""
    run_to_end(_with_farm(run, url, bearer, lambda farm: _resume(farm, name)))
    err().print(f"{name} runs", markup=False, highlight=False)


@sandboxes.command()
@verb
def kill(name: NameArgument, run: RunOption = None, url: FarmUrlOption = None, bearer: FarmTokenOption = None) -> None:
    """End a sandbox, running or paused, with its files."""
    run_to_end(_with_farm(run, url, bearer, lambda farm: farm.kill(name)))
    err().print(f"{name} is gone", markup=False, highlight=False)


async def _with_farm(
    run: str | None, url: str | None, bearer: str | None, use: Callable[[AsyncFarm], Awaitable[None]]
) -> None:
    from agentenv.farm_client.access import farm_access
    from agentenv.sdk.async_sandbox import AsyncFarm

    async with AsyncFarm("farm", farm=farm_access(url, bearer, run)) as farm:
        await use(farm)


async def _resume(farm: AsyncFarm, name: str) -> None:
    async with farm.connect(name):
        pass


async def _list(farm: AsyncFarm, as_json: bool) -> None:
    from rich.table import Table

    listed = await farm.sandboxes()
    if as_json:
        print_json([asdict(one) for one in listed])
        return
    table = Table("name", "state", "idle timeout", "then", "paused for", "container")
    for one in listed:
        paused = f"{one.paused_s:.0f} s" if one.state == "paused" else ""
        then = {"kill": "killed", "pause": "paused"}[one.on_idle]
        table.add_row(escape(one.name), one.state, f"{one.idle_timeout_s:g} s", then, paused, escape(one.container))
    out().print(table)

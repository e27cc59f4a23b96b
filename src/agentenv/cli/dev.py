"""``agentenv dev up | nomad | down | status``: a Nomad cluster on this machine (``make nomad-dev``). In a source
checkout only: a wheel has no ``agentenv.dev``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Final

import typer

from agentenv.cli.options import JsonOption, group
from agentenv.cli.output import EXIT_NOT_ALL_WELL, escape, out, print_json, verb
from agentenv.cli.progress import shown
from agentenv.cli.source_checkout import checkout_root

if TYPE_CHECKING:  # it is not in a wheel, and the docker SDK is in [farm]: it is imported when a verb runs
    from agentenv.dev.cluster import ClusterStatus

_SOURCES: Final = "src/agentenv/dev"

dev = group("A Nomad cluster on this machine, for development.")


@dev.command()
@verb
def up(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Nomad's HTTP port; 0: a free one.")] = 4646,
    as_json: JsonOption = False,
) -> None:
    """Start what is missing (Docker engine, image, Nomad agent) and wait until a slot answers.

    Can be repeated at any time, also after an interruption. Needs root, because Nomad clients do.

    \b
    Examples:
      sudo agentenv dev up
      agentenv exec --backend nomad -- uname -a
    """
    checkout_root(_SOURCES)
    from agentenv.dev import cluster

    with shown(quiet=as_json) as report:
        found = cluster.up(http_port=port, report=report)
    assert found.check is not None
    if as_json:
        print_json({"address": found.address, "ui": f"{found.address}/ui/", "isolation": found.check.isolation})
        return
    console = out()
    held = sum(proof.holds for proof in found.check.proofs)
    console.print(
        f"[green]ready[/] a slot answered (isolation {found.check.isolation}, {held} of {len(found.check.proofs)} "
        "proofs hold)",
        soft_wrap=True,
    )
    console.print(
        f"  Nomad   {found.address}  (NOMAD_ADDR)\n  web UI  {found.address}/ui/\n  log     {found.place.log}"
    )


@dev.command()
@verb
def nomad(as_json: JsonOption = False) -> None:
    """Print the path of the nomad program that `up` starts. If none is installed, it is fetched or built (minutes)."""
    checkout_root(_SOURCES)
    from agentenv.dev.program import nomad_program

    with shown(quiet=as_json) as report:
        found = nomad_program(report)
    if as_json:
        print_json({"nomad": str(found)})
    else:
        out().print(f"nomad {escape(str(found))}", soft_wrap=True)


@dev.command()
@verb
def down(as_json: JsonOption = False) -> None:
    """Stop the cluster and remove everything it created: jobs, containers, files, and the engine if it was started
    here.

    Clusters left by killed test runs are removed too.
    """
    checkout_root(_SOURCES)
    from agentenv.dev import cluster

    with shown(quiet=as_json) as report:
        engine = cluster.down(report=report)
    if as_json:
        print_json({"engine": engine})
    else:
        out().print(f"[green]stopped[/] Docker engine {engine}")


@dev.command()
@verb
def status(as_json: JsonOption = False) -> None:
    """Show what is running. Exit code 1: the cluster is not up."""
    checkout_root(_SOURCES)
    from agentenv.dev import cluster

    found = cluster.status()
    if as_json:
        print_json({**dataclasses.asdict(found), "up": found.up})
    else:
        _show(found)
    if not found.up:
        raise typer.Exit(EXIT_NOT_ALL_WELL)


def _show(found: ClusterStatus) -> None:
    console = out()
    colour = "green" if found.up else "yellow"
    console.print(f"Nomad agent    [{colour}]{found.agent}[/]{f'  {found.address}/ui/' if found.up else ''}")
    console.print(f"Docker engine  {escape(found.engine)}")
    console.print(f"image          {escape(found.image) or 'unknown'}")
    for title, lines in (("jobs", found.jobs), ("containers", found.containers)):
        console.print(f"{title:<14} {len(lines)}")
        for line in lines:
            console.print(f"  {escape(line)}", soft_wrap=True)
    for line in found.abandoned:
        console.print(
            f"[yellow]left over from a dead run[/] {escape(line)} (`agentenv dev down` removes it)", soft_wrap=True
        )

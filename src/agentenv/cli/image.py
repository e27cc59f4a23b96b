"""``agentenv image build | status | machine``: the image of the farm's containers."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import JsonOption, group
from agentenv.cli.output import EXIT_NOT_ALL_WELL, escape, out, print_json, verb
from agentenv.cli.progress import shown
from agentenv.image import IMAGE

if TYPE_CHECKING:  # the docker SDK is in [farm]; it is imported when a verb runs
    from agentenv.image import ImageStatus

image = group("Manage the image that containers of a Nomad farm run.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Repository and tag.")]


@image.command()
@verb
def build(
    name: NameArgument = IMAGE,
    again: Annotated[bool, typer.Option("--again", help="Build even if an image of this source exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the image with this machine's Docker engine, unless it exists and is current.

    Starts from debian:bookworm-slim, or from the same image built with mmdebstrap if no registry answers. The base
    image and the packages are kept in the cache directory.

    \b
    Examples:
      agentenv image build
      agentenv image build registry.example.com/agentenv-sandbox:1
    """
    from agentenv.image import build_image, connect, ensure_image

    with contextlib.closing(connect()) as client, shown(quiet=as_json) as report:
        if again or not name.endswith(":local"):
            found = build_image(name, client=client, report=report)
        else:
            found = ensure_image(name, client=client, report=report)
    _show(found, as_json=as_json)


@image.command()
@verb
def status(name: NameArgument = IMAGE, as_json: JsonOption = False) -> None:
    """Show whether the image exists and was built from this source. Exit code 1: missing or stale."""
    from agentenv.image import connect, image_status

    with contextlib.closing(connect()) as client:
        found = image_status(client, name)
    _show(found, as_json=as_json)
    if not found.present or found.stale:
        raise typer.Exit(EXIT_NOT_ALL_WELL)


@image.command()
@verb
def machine(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the machine's files.")],
    name: Annotated[str, typer.Option("--image", metavar="NAME", help="Container image to make it from.")] = IMAGE,
    again: Annotated[bool, typer.Option("--again", help="Rebuild, with the newest kernel.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the files of containers that are virtual machines (driver vm), unless they are there and current.

    DIR gets kernel, first file system and root: some 450 MB, which every machine of a client reads and none writes.
    Every Nomad client needs it at the same path. As root, with this machine's Docker engine, on x86_64.

    \b
    Examples:
      agentenv image machine /var/lib/agentenv/machine
    """
    from agentenv.image import connect, make_machine

    with contextlib.closing(connect()) as client, shown(quiet=as_json) as report:
        made = make_machine(directory.absolute(), name, client=client, report=report, again=again)
    if as_json:
        print_json({"directory": str(directory.absolute()), "made": made})
    else:
        out().print(f"[green]{'made' if made else 'current'}[/] {escape(str(directory.absolute()))}", soft_wrap=True)


def _show(found: ImageStatus, *, as_json: bool) -> None:
    if as_json:
        print_json({**dataclasses.asdict(found), "present": found.present, "stale": found.stale})
        return
    console = out()
    if not found.present:
        console.print(f"[yellow]missing[/] {escape(found.name)}: agentenv image build")
        return
    word = "[yellow]stale[/]" if found.stale else "[green]current[/]" if found.wanted else "[green]there[/]"
    made = f", from {found.base}, content {found.content}" if found.content else ""
    console.print(f"{word} {escape(found.name)}: {found.size_bytes / 1e6:.0f} MB{made}", soft_wrap=True)

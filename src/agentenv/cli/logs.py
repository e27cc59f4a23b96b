"""``agentenv logs``: the containers' logs."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.options import BackendOption, JobOption, backend_of
from agentenv.cli.output import InterruptedBySignalError, print_json_line, run_to_end, verb
from agentenv.errors import ConfigError
from agentenv.slots.backends.registry import Backend

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal may obey, but for tabs. A container logs what programs in it said, and a machine its console."""


def _complete(incomplete: str) -> list[str]:
    """Containers of the local farm, for the shell's completion."""
    from agentenv.farm.access import access_to

    try:
        census = run_to_end(access_to(Backend.local, None).census())
    except Exception:  # a completion never prints a traceback into the user's prompt
        return []
    return [place.id for place in census.places if place.id.startswith(incomplete)]


@verb
def logs(
    container: Annotated[
        str | None,
        typer.Argument(
            help="Only this container: its number, or the beginning of its id.",
            metavar="[CONTAINER]",
            autocompletion=_complete,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, max=100_000, help="Start this many lines back.")] = 100,
    backend: BackendOption = None,
    job: JobOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write each line as a JSON document.")] = False,
) -> None:
    """Show what the farm's containers log: supervisor, sandbox server, reasons of failed starts.

    local: the log of `agentenv up`, also after its end, and those of the farm's containers.

    nomad: standard error of the allocations, wherever they run.

    \b
    Examples:
      agentenv logs
      agentenv logs 0 --follow
      agentenv logs 7f3c --backend nomad --tail 500
    """
    chosen = backend_of(backend)
    try:
        run_to_end(_print(_lines(chosen, job, container, tail=tail, follow=follow), as_json=as_json))
    except InterruptedBySignalError:
        if not follow:
            raise


def _lines(
    backend: Backend, job: str | None, container: str | None, *, tail: int, follow: bool
) -> AsyncIterator[tuple[str, str]]:
    from agentenv.farm.access import access_to

    if backend is Backend.nomad:
        from agentenv.farm.nomad import NomadFarm  # late: needs python-nomad

        return NomadFarm.from_options(job).logs(container, tail=tail, follow=follow)
    access_to(backend, job)  # refuses --job
    return _local_lines(backend, container, tail=tail, follow=follow)


async def _local_lines(
    backend: Backend, container: str | None, *, tail: int, follow: bool
) -> AsyncIterator[tuple[str, str]]:
    from agentenv.farm.local import detached_logs, log_file
    from agentenv.farm.log import lines_of

    named, known = ("", True) if container is None else await _named(backend, container)

    def of_containers() -> list[Path]:
        return [path for path in detached_logs(backend) if named in path.parent.name]

    async for path, line in lines_of(log_file(backend), more=of_containers, containing=named, tail=tail, follow=follow):
        known = True
        whose = named if path == log_file(backend) else path.parent.name
        yield whose, line if path == log_file(backend) else f"{whose}: {line}"
    if not known and tail:
        raise ConfigError(
            "CONTAINER", f"the log has no lines of {container!r}", next_step="see `agentenv status`, or `agentenv logs`"
        )


async def _named(backend: Backend, container: str) -> tuple[str, bool]:
    """The text that marks a container's lines, and whether it is running. A container that has ended is searched
    for literally."""
    from agentenv.farm.access import access_to
    from agentenv.farm.view import choose

    places = (await access_to(backend, None).census()).places
    if container.isdigit():
        number = int(container)
        found = next((place.id for place in places if place.index == number), None)
        return found or f"-{number}-", found is not None
    found = choose([(place.id, place.id) for place in places], container)
    return found or container, found is not None


async def _print(lines: AsyncIterator[tuple[str, str]], *, as_json: bool) -> None:
    async for container, line in lines:
        if as_json:
            print_json_line({"container": container or None, "line": line})
        else:
            printable = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", line)
            sys.stdout.write(f"{printable}\n")
            sys.stdout.flush()

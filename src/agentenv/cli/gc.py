"""``agentenv gc``: remove what dead runs left."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from agentenv.cli.options import BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.output import EXIT_NOT_ALL_WELL, err, escape, out, print_json, run_to_end, verb
from agentenv.errors import ConfigError
from agentenv.farm.orphans import KEPT, UNATTENDED_AFTER_S, Orphan
from agentenv.slots.backends.registry import Backend

_MAY_STAY = ("lease", KEPT)
"""Kinds that are in order as they are, and only removed on request."""


@verb
def gc(
    backend: BackendOption = None,
    job: JobOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    end_leases: Annotated[
        bool,
        typer.Option("--end-leases", help="End leases that are not renewed, instead of waiting until they expire."),
    ] = False,
    observe_s: Annotated[
        float,
        typer.Option("--observe", min=0, metavar="SECONDS", help="How long to watch leases for a renewal; 0: do not."),
    ] = 6.0,
    unattended_after_s: Annotated[
        float,
        typer.Option(
            "--unattended-after",
            min=10,
            metavar="SECONDS",
            help="Nomad: a run without heartbeats for this long is dead.",
        ),
    ] = UNATTENDED_AFTER_S,
    kept: Annotated[
        str | None,
        typer.Option(metavar="FARM", help="End the containers of this kept farm, if no process runs the farm."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove orphaned resources. Anything still in use is left alone.

    local: cgroups and directories of dead containers, announcements of dead farms and processes.
    Normally not needed: the next container to start does the same. Running containers of a kept farm that nobody
    runs are shown: the next process that opens the farm takes them over. --kept ends them.

    nomad: jobs of dead runs (no container has received a heartbeat for a while; farms left running by
    `agentenv up` are not removed), jobs without containers for a long time (only stopped: a live run
    submits its job again), stopped jobs, tokens without a job, and on this machine Docker containers of allocations
    that have ended.

    Leases that are not renewed expire by themselves; they are shown, and ended with --end-leases. Exit code 1:
    something could not be removed.

    \b
    Examples:
      agentenv gc
      agentenv gc --backend nomad --dry-run
      agentenv gc --end-leases --json
    """
    from agentenv.farm.access import access_to
    from agentenv.farm.gc_leases import orphaned_leases

    chosen = backend_of(backend)
    if kept is not None and chosen is not Backend.local:
        raise ConfigError("--kept", f"is not valid with {chosen}", next_step="leave out --backend")
    access = access_to(chosen, job)
    with err().status("looking"):
        if chosen is Backend.nomad:
            found = run_to_end(_on_nomad(job, unattended_after_s, dry_run=dry_run))
        else:
            found = _on_this_machine(dry_run=dry_run)
        if chosen is Backend.local:
            found += run_to_end(_kept_farms(kept, dry_run=dry_run))
        found += run_to_end(orphaned_leases(access, observe_s, end=end_leases and not dry_run))
    left = [orphan for orphan in found if orphan.problem and orphan.kind not in _MAY_STAY]
    if as_json:
        print_json(_document(chosen, found, dry_run=dry_run))
    else:
        _show(chosen, found, dry_run=dry_run)
    raise typer.Exit(EXIT_NOT_ALL_WELL if left else 0)


async def _on_nomad(job: str | None, unattended_after_s: float, *, dry_run: bool) -> list[Orphan]:
    from agentenv.config import NomadSettings
    from agentenv.farm.gc_nomad import collect  # late: needs python-nomad

    settings = NomadSettings.from_environment(job_id=job)
    return await collect(settings, only=job, unattended_after_s=unattended_after_s, dry_run=dry_run)


def _on_this_machine(*, dry_run: bool) -> list[Orphan]:
    from agentenv.config import state_dir
    from agentenv.doctor.facts import current_stale_containers, swept_directories
    from agentenv.sandbox.supervisor.sweep import sweep

    state = state_dir()
    why = "its process is dead"
    if dry_run:
        return [Orphan("container", name, why) for name in current_stale_containers(state)]
    return [
        Orphan("container", swept.container, why, removed=not swept.left, problem=", ".join(swept.left))
        for directory in swept_directories(state)
        for swept in sweep(directory)
    ]


async def _kept_farms(ending: str | None, *, dry_run: bool) -> list[Orphan]:
    from agentenv.config import state_dir
    from agentenv.farm.gc_kept import collect

    return await collect(state_dir(), ending, dry_run=dry_run)


def _document(backend: Backend, found: list[Orphan], *, dry_run: bool) -> dict[str, object]:
    return {
        "backend": backend.value,
        "dry_run": dry_run,
        "removed": [orphan.name for orphan in found if orphan.removed],
        "left": [orphan.name for orphan in found if orphan.problem],
        "orphans": [dataclasses.asdict(orphan) for orphan in found],
    }


def _show(backend: Backend, found: list[Orphan], *, dry_run: bool) -> None:
    console = out()
    for orphan in found:
        if orphan.removed:
            did = "[green]removed[/]"
        elif orphan.problem:
            did = "[yellow]left[/]"
        else:
            did = "would remove"
        problem = f" → {escape(orphan.problem)}" if orphan.problem else ""
        console.print(f"{did} {orphan.kind} {escape(orphan.name)}: {escape(orphan.why)}{problem}", soft_wrap=True)
    removed = sum(orphan.removed for orphan in found)
    if not found:
        console.print(f"{backend}: nothing to remove")
    elif not dry_run:
        console.print(f"{backend}: {len(found)} found, {removed} removed")
    else:
        console.print(f"{backend}: {len(found)} found, nothing removed (--dry-run)")

"""``agentenv status``: the whole farm at a glance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from agentenv.cli.options import BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.output import (
    EXIT_NOT_ALL_WELL,
    InterruptedBySignalError,
    count_of,
    escape,
    mib,
    out,
    print_json,
    print_json_line,
    run_to_end,
    short,
    verb,
)
from agentenv.durations import duration
from agentenv.errors import AgentEnvError
from agentenv.wire.states import SlotState

if TYPE_CHECKING:
    from agentenv.farm.view import ContainerView, FarmView, OperatorAccess, PoolView
    from agentenv.metrics.scrape import Samples


_STATE_COLOURS = {"running": "green", "pending": "yellow", "starting": "yellow", "draining": "yellow"}


@verb
def status(
    backend: BackendOption = None,
    job: JobOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, metavar="SECONDS", help="Time between two refreshes of --watch.")
    ] = 2.0,
    scrape: Annotated[
        list[str] | None, typer.Option("--scrape", metavar="URL", help="Also read a trainer's /metrics at this URL.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show containers, nodes, slots by state, the queue, recent failures, and what Nomad is waiting for.

    The queue is that of every process on this machine that serves metrics (--env.metrics_port), and of those named
    with --scrape. With --watch, --json writes one document per line. Exit code 0: healthy · 1: something is
    degraded, or no farm is running.

    \b
    Examples:
      agentenv status
      agentenv status --backend nomad --watch
      agentenv status --json | jq '.containers[] | select(.answers | not)'
      agentenv status --scrape http://trainer-7:9100/metrics
    """
    from agentenv.farm.access import access_to
    from agentenv.farm.look import look

    access = access_to(backend_of(backend), job)
    urls = tuple(scrape or ())
    if watch:
        try:
            run_to_end(_watch(access, urls, interval_s, lines=as_json))
        except InterruptedBySignalError:
            return
    sight = run_to_end(look(access, urls))
    if as_json:
        print_json(_document(sight))
    else:
        out().print(shown(sight))
    raise typer.Exit(0 if sight.well else EXIT_NOT_ALL_WELL)


def _document(sight: FarmView) -> dict[str, Any]:
    from agentenv.farm.view import as_json

    return as_json(sight)


async def _watch(access: OperatorAccess, urls: Sequence[str], interval_s: float, *, lines: bool) -> None:
    """Refresh until cancelled. A failed refresh is shown, and the next one is tried."""
    from agentenv.farm.look import look

    if lines:
        while True:
            print_json_line(await _looked_at(access, urls))
            await asyncio.sleep(interval_s)
    with Live(console=out(), screen=out().is_terminal, auto_refresh=False) as live:
        while True:
            try:
                live.update(shown(await look(access, urls)), refresh=True)
            except AgentEnvError as error:
                live.update(f"[red]{escape(error.message)}[/]\n{escape(error.next_step)}", refresh=True)
            await asyncio.sleep(interval_s)


async def _looked_at(access: OperatorAccess, urls: Sequence[str]) -> object:
    from agentenv.farm.look import look

    try:
        return _document(await look(access, urls))
    except AgentEnvError as error:
        return {"error": error.code, "message": error.message, "next_step": error.next_step}


def shown(sight: FarmView) -> RenderableType:
    """The whole output."""
    census = sight.census
    verdict = "[green]healthy[/]" if sight.well else "[yellow]something is degraded[/]"
    if not census.exists:
        page: list[RenderableType] = [f"[bold]{escape(census.where)}[/]: no farm is running"]
        if census.next_step:
            page.append(f"[bold]next[/]  {escape(census.next_step)}")
        return Group(*page, *_queue(sight.pools))
    slots = ", ".join(f"{count} {state}" for state, count in sorted(sight.slots.items())) or "none seen"
    page = [
        f"[bold]{escape(census.where)}[/]: {verdict}",
        f"containers  {sight.answering} of {census.goal} ready · slots  {slots}",
    ]
    if census.owner:
        page.append(f"owner       {escape(census.owner)}")
    if census.metrics_url:
        page.append(f"metrics     {census.metrics_url}")
    page += [f"[yellow]waiting for[/] {escape(reason)}" for reason in census.waiting_for]
    page += [f"[red]fault[/] {escape(fault)}" for fault in census.faults]
    if sight.containers:
        page += ["", _containers(sight.containers), *_problems(sight.containers)]
    return Group(*page, *_queue(sight.pools))


def _containers(containers: Sequence[ContainerView]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("#", "container", "state", "node", "age", "slots", "calls", "faults", "server"):
        table.add_column(heading, no_wrap=heading not in ("node", "slots", "calls"), overflow="fold")
    for container in containers:
        table.add_row(*_container_row(container))
    return table


def _problems(containers: Sequence[ContainerView]) -> list[RenderableType]:
    return [
        f"[yellow]→[/] container {short(container.place.id)}: {escape(container.problem)}"
        for container in containers
        if container.problem
    ]


def _container_row(container: ContainerView) -> tuple[str, ...]:
    place, counted = container.place, container.samples
    silent = place.handle is not None and not container.answers
    colour = "red" if silent else _STATE_COLOURS.get(place.state, "red")
    head = (
        str(place.index), short(place.id), f"[{colour}]{'silent' if silent else escape(place.state)}[/]",
        escape(place.node), duration(place.age_s),
    )  # fmt: skip
    if not container.answers:
        return (*head, "–", "–", "–", "–")
    slots = ", ".join(f"{count} {state}" for state in SlotState if (count := container.count(state)))
    return (
        *head,
        slots,
        _calls(counted),
        count_of(counted.one("agentenv_sandbox_calls_faulted_total")),
        mib(counted.one("agentenv_sandbox_server_resident_bytes")),
    )


def _calls(counted: Samples) -> str:
    running, queued = (counted.one(f"agentenv_sandbox_calls_{which}") for which in ("running", "queued"))
    parts = [count_of(counted.one("agentenv_sandbox_calls_total"))]
    parts += [f"{running:.0f} running"] if running else []
    parts += [f"{queued:.0f} waiting"] if queued else []
    return ", ".join(parts)


def _queue(pools: Sequence[PoolView]) -> list[RenderableType]:
    if not pools:
        return ["", "[dim]queue: no process on this machine serves metrics (--env.metrics_port, or --scrape URL)[/]"]
    table = Table(
        "process", "waiting", "sessions", "calls", "leases lost", "faults by code", box=None, pad_edge=False,
        header_style="bold",
    )  # fmt: skip
    for pool in pools:
        table.add_row(*_pool_row(pool))
    return ["", table]


def _pool_row(pool: PoolView) -> tuple[str, ...]:
    who = f"{pool.pid} {pool.url}" if pool.pid is not None else pool.url
    if pool.problem:
        return (escape(who), f"[red]{escape(pool.problem)}[/]")
    faults = pool.samples.by("agentenv_pool_faults_total", "code")
    return (
        escape(who),
        count_of(pool.samples.one("agentenv_pool_waiting")),
        count_of(pool.samples.one("agentenv_executor_sessions")),
        count_of(pool.samples.one("agentenv_executor_calls_running")),
        count_of(pool.samples.one("agentenv_pool_leases_lost_total")),
        escape(", ".join(f"{count:g} {code}" for code, count in faults.items()) or "none"),
    )

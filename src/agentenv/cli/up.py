"""``agentenv up``: run a farm that others lease slots of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.options import (
    BackendOption,
    Isolation,
    IsolationOption,
    JobOption,
    JsonOption,
    NetworkOption,
    SetOption,
    backend_of,
)
from agentenv.cli.output import InterruptedBySignalError, err, escape, print_json, run_to_end, verb
from agentenv.cli.progress import Arrival
from agentenv.errors import ConfigError
from agentenv.slots.backends.registry import Backend
from agentenv.wire.spec import MIB, ContainerSpec

if TYPE_CHECKING:
    from agentenv.config import ContainerSettings, PoolSettings
    from agentenv.metrics.readings import Reading


@verb
def up(
    backend: BackendOption = None,
    containers: Annotated[int, typer.Option("--containers", "-n", min=1, max=10_000, help="Number of containers.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Slots per container.")] = ContainerSpec.slots,
    isolation: IsolationOption = Isolation.auto,
    network: NetworkOption = False,
    slot_memory_mib: Annotated[
        int | None, typer.Option("--slot-memory", metavar="MIB", help="Memory limit of each slot.")
    ] = None,
    workspace_mib: Annotated[
        int | None, typer.Option("--workspace", metavar="MIB", help="Size limit of each slot's workspace.")
    ] = None,
    named: SetOption = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of the farm service, where trainers get slots; 0: any. Not with nomad."
        ),
    ] = 8700,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port to serve the farm's Prometheus metrics on (0: any free port). Not with nomad."
        ),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address to serve metrics on.")] = "127.0.0.1",
    job: JobOption = None,
    image: Annotated[str | None, typer.Option(help="Nomad: the image of the containers.")] = None,
    memory_mib: Annotated[
        int | None, typer.Option("--memory", metavar="MIB", help="Nomad: hard memory limit of each container.")
    ] = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe-memory", help="Nomad: allow --memory to be less than the slots may use together."
        ),
    ] = False,
    variables: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=HCL", help="Nomad: a variable of the job file. May be repeated."),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait until all containers are ready."),
    ] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Start a farm and wait until every container is ready.

    local: the same as `agentenv farm serve`, with options in place of a file. It runs until Ctrl-C; its containers
    and their leases stay for the next `agentenv up`, and `agentenv down` ends them. In another terminal, status,
    slots, exec, shell and logs find it by themselves, and so does a trainer with --env.tool_pool_mode farm.

    fake: the same, but the containers end with it.

    nomad: registers the job, or scales the existing one, and leaves it running.

    \b
    Examples:
      agentenv up --containers 2 --slots 16
      agentenv up --metrics-port 9100
      agentenv up --backend nomad --containers 10 --job my-farm
      agentenv up --backend nomad --var 'runtime="runsc"'
    """
    from agentenv.config import ContainerSettings, PoolSettings
    from agentenv.farm import open

    chosen = backend_of(backend)
    sizes = {"memory_bytes": slot_memory_mib, "workspace_bytes": workspace_mib}
    limits = {name: mib * MIB for name, mib in sizes.items() if mib is not None}
    given, of_pool = open.named_settings(named or ())
    asked = {"slots_per_container": slots, "isolation": isolation.value, "allow_network": network, **given}
    settings = ContainerSettings.made_of({**asked, "limits": {**limits, **given.get("limits", {})}})
    count = of_pool.get("min_containers", containers)
    bounds = {"min_containers": count, "max_containers": count, "start_timeout_s": timeout_s}
    pool = PoolSettings.made_of({**bounds, **of_pool})
    if chosen is Backend.nomad:
        from agentenv.cli.nomad_up import bring_up  # late: needs python-nomad

        if metrics_port is not None:
            raise ConfigError(
                "--metrics-port",
                "up does not keep running with nomad",
                next_step="`agentenv metrics --backend nomad` serves them",
            )
        if of_pool:
            raise ConfigError(
                next(iter(of_pool)), "is not of a job", next_step="set it where slots of the job are leased"
            )
        try:
            of_job = {
                "job_id": job, "image": image, "memory_mib": memory_mib, "variables": _named(variables or ()),
                "memory_oversubscription": oversubscribe,
            }  # fmt: skip
            summary = run_to_end(bring_up(settings, containers, timeout_s, of_job))
        except InterruptedBySignalError as ended:
            err().print(f"[yellow]interrupted by {ended}[/]: the Nomad job keeps running; `agentenv down` ends it")
            raise typer.Exit(128 + ended.number) from None
        _print_summary(summary, as_json=as_json, stays=False, job=job)
        return
    if oversubscribe or any(option is not None for option in (job, image, memory_mib, variables)):
        raise ConfigError(
            "--job, --image, --memory, --oversubscribe-memory, --var",
            f"are not valid with {chosen}",
            next_step="add --backend nomad",
        )
    try:
        run_to_end(_keep(chosen, settings, pool, timeout_s, port, metrics_port, metrics_host, as_json))
    except InterruptedBySignalError as ended:
        stay = "unless `agentenv down` ends them, containers and leases stay for the next `agentenv up`"
        left = stay if chosen is Backend.local else "every container is stopped"
        err().print(f"interrupted by {ended}; {left}", soft_wrap=True)


def _named(variables: Iterable[str]) -> dict[str, str]:
    """HCL expressions by variable name. Raises ConfigError."""
    parted = [text.partition("=") for text in variables]
    for name, equals, expression in parted:
        if not (name and equals and expression):
            raise ConfigError(
                "--var", f"got {name + equals + expression!r}", next_step='allowed: NAME=HCL, as in runtime="runsc"'
            )
    return {name: expression for name, _, expression in parted}


async def _keep(
    backend: Backend,
    settings: ContainerSettings,
    pool: PoolSettings,
    timeout_s: float,
    port: int,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
) -> None:
    """Run the farm until cancelled, or until another process has taken it."""
    from agentenv.api.farm_server.service import Listening, farm_service
    from agentenv.api.farm_server.settings import FarmSettings
    from agentenv.config import state_dir
    from agentenv.farm.local import NAME, LocalFarm, Watched, log_file, noticed
    from agentenv.farm.log import logging_to
    from agentenv.farm.look import look
    from agentenv.farm.view import as_json as sight_as_json

    count = pool.min_containers
    asked = FarmSettings(name=NAME, backend=backend.value, pool=pool, containers=settings).below(state_dir())
    with logging_to(log_file(backend)), noticed(backend, count) as notice:
        async with AsyncExitStack() as stack:
            with Arrival(count, "containers") as arrival:
                service = await stack.enter_async_context(
                    farm_service(
                        asked,
                        Listening(port=port),
                        around=lambda source: Watched(source, notice, arrival.handle),
                    )
                )
                await service.opening
                await arrival.complete(timeout_s)
            service.user.tell(lambda token: notice.publish(url=service.url, token=token))
            if metrics_port is not None:
                url = await stack.enter_async_context(_exporting(backend, metrics_host, metrics_port))
                notice.publish(metrics_url=url)
            _print_summary(sight_as_json(await look(LocalFarm(backend))), as_json=as_json, stays=True)
            await service.run()


@asynccontextmanager
async def _exporting(backend: Backend, host: str, port: int) -> AsyncIterator[str]:
    from agentenv.farm.local import LocalFarm
    from agentenv.farm.look import look
    from agentenv.farm.metrics import of_farm
    from agentenv.metrics.exporter import exporting

    async def read() -> Iterable[Reading]:
        return of_farm(await look(LocalFarm(backend)))

    async with exporting(read, host, port, announce=False) as url:
        yield url


def _print_summary(summary: dict[str, Any], *, as_json: bool, stays: bool, job: str | None = None) -> None:
    if as_json:
        print_json(summary)
        return
    slots, count = sum(summary["slots"].values()), summary["answering_containers"]
    farm_size = f"{count} container{'s' if count != 1 else ''}, {slots} slot{'s' if slots != 1 else ''}"
    backend = "" if summary["backend"] == "local" else f" --backend {summary['backend']}"
    flag = backend + (f" --job {job}" if job else "")
    console = err()
    console.print(
        f"[green]up[/] {farm_size} · {escape(summary['where'])}",
        soft_wrap=True,
    )
    if summary["metrics_url"]:
        console.print(f"metrics    {summary['metrics_url']}", soft_wrap=True)
    console.print(f"look       agentenv status{flag} --watch · agentenv slots{flag}", soft_wrap=True)
    console.print(f"try        agentenv exec{flag} -- uname -a · agentenv shell{flag}", soft_wrap=True)
    if stays:
        console.print("train      --env.tool_pool_mode farm, in another terminal", soft_wrap=True)
    console.print(f"end        agentenv down{flag}")

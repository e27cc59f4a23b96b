"""``agentenv metrics``: one address to scrape a whole farm at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.output import InterruptedBySignalError, err, print_json_line, run_to_end, verb

if TYPE_CHECKING:
    from agentenv.farm.view import OperatorAccess
    from agentenv.metrics.readings import Reading


@verb
def metrics(
    backend: BackendOption = None,
    job: JobOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 9100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    as_json: JsonOption = False,
) -> None:
    """Serve the Prometheus metrics of a farm's containers at one address, until Ctrl-C.

    Each scrape asks the backend for its containers, and every container for its metrics: Prometheus needs neither
    discovery nor a token. A missing farm counts as one without containers; if the backend does not answer, the
    scrape fails (503).

    \b
    Examples:
      agentenv metrics --backend nomad --host 0.0.0.0
      agentenv metrics --backend nomad --job my-farm --port 9101
    """
    from agentenv.farm.access import access_to

    access = access_to(backend_of(backend), job)
    try:
        run_to_end(_serve(access, host, port, as_json=as_json))
    except InterruptedBySignalError:
        return


async def _serve(access: OperatorAccess, host: str, port: int, *, as_json: bool) -> None:
    from agentenv.farm.look import containers_seen
    from agentenv.farm.metrics import of_farm
    from agentenv.farm.view import FarmView
    from agentenv.metrics.exporter import exporting

    async def read() -> Iterable[Reading]:
        census = await access.census()
        return of_farm(FarmView(census, await containers_seen(census)))

    await read()  # what is wrong with the backend is reported at once
    async with exporting(read, host, port, announce=False) as url:
        if as_json:
            print_json_line({"url": url})
        else:
            err().print(f"metrics are at {url}", soft_wrap=True)
        await asyncio.Event().wait()

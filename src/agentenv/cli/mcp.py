"""``agentenv mcp``: slots for clients of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.image_root import (
    AllowOption,
    CpusOption,
    DockerfileOption,
    ImageOption,
    MemoryOption,
    Place,
    RootOptions,
    StorageOption,
    UserOption,
    WorkdirOption,
    WritableOption,
    stored_here,
    stored_there,
)
from agentenv.cli.options import (
    BackendOption,
    FarmOption,
    GuestOption,
    Isolation,
    IsolationOption,
    JobOption,
    NetworkOption,
    OwnOption,
    SetOption,
    TimeoutOption,
    WaitOption,
    backend_of,
)
from agentenv.cli.output import announce, escape, run_to_end, verb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from mcp.server.lowlevel import Server

    from agentenv.executor.tool_executor import ToolExecutor
    from agentenv.mcp.slots import SessionSlot
    from agentenv.tools.catalog import ToolCatalog
    from agentenv.wire.roots import RootSpec


@verb
def mcp(
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Serve streamable HTTP there instead; port 0: any free one."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --http: requests need the token in this file, which is made if it does not exist. Required "
            "where other machines can connect.",
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="With --http: slots of a container that is started.")
    ] = 10,
    idle_timeout_s: Annotated[
        float,
        typer.Option(
            "--idle-timeout",
            min=1,
            metavar="SECONDS",
            help="With --http: end a session when its client has sent nothing and waited for nothing for so long.",
        ),
    ] = 1800.0,
    tools: Annotated[
        str | None, typer.Option(metavar="A,B", help="Offer these tools only, by their names in docs/tools.md.")
    ] = None,
    timeout_s: TimeoutOption = 600.0,
    image: ImageOption = None,
    dockerfile: DockerfileOption = None,
    user: UserOption = None,
    workdir: WorkdirOption = None,
    cpus: CpusOption = None,
    memory_mib: MemoryOption = None,
    storage_mib: StorageOption = None,
    writable: WritableOption = Place.memory,
    network: NetworkOption = False,
    allow: AllowOption = None,
    isolation: IsolationOption = Isolation.auto,
    settings: SetOption = None,
    backend: BackendOption = None,
    job: JobOption = None,
    own: OwnOption = False,
    farm: FarmOption = False,
    guest: GuestOption = False,
    wait_s: WaitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --http: say where it listens as JSON.")] = False,
) -> None:
    """Give clients of the Model Context Protocol a slot each: its shell, its files, its terminals.

    Over standard input and output it is one session, which the client starts and ends; with --http each session of
    a client has a slot of its own. A slot is leased with the session's first call, and wiped when the session ends.

    Where slots come from, and the options about them, are those of `agentenv exec`.

    \b
    Examples:
      agentenv mcp
      agentenv mcp --image python:3.13 --network
      agentenv mcp --dockerfile tasks/hello --tools bash,read_file
      agentenv mcp --http 127.0.0.1:8791 --slots 20
      agentenv mcp --http 0.0.0.0:8791 --token-file mcp.token
    """
    import mcp.server  # noqa: F401 - first of all, so that a missing package is what is said

    from agentenv.mcp.http import address, needed_token
    from agentenv.mcp.server import serve_stdio
    from agentenv.mcp.tools import offered

    where = None if http is None else address(http)
    token = None if where is None else needed_token(where[0], token_file)
    catalog = offered(tuple(tools.split(",")) if tools else ())
    asked = RootOptions(
        image, dockerfile, user, workdir, cpus, memory_mib, storage_mib, writable, network, tuple(allow or ()),
        tuple(settings or ()),
    )  # fmt: skip
    chosen = backend_of(backend)
    asked.check(chosen, farm=farm)
    count = 1 if where is None else slots
    opened = asked.farm(chosen, isolation, own=own, job=job, service=farm, guest=guest, wait_s=wait_s, slots=count)
    root = asked.root()
    spec = None if root is None or farm else stored_here(root, quiet=where is None)

    async def rooted(executor: ToolExecutor) -> RootSpec | None:
        return await stored_there(root, executor, quiet=where is None) if root is not None and farm else spec

    serve: Callable[[Server[SessionSlot]], Awaitable[None]] = serve_stdio
    if where is not None:
        serve = functools.partial(_http, where, token, token_file, idle_timeout_s, as_json)
    run_to_end(_run(opened, rooted, catalog, timeout_s, wait_s, serve))


async def _run(
    opened: AbstractAsyncContextManager[ToolExecutor],
    rooted: Callable[[ToolExecutor], Awaitable[RootSpec | None]],
    catalog: ToolCatalog,
    timeout_s: float,
    wait_s: float | None,
    serve: Callable[[Server[SessionSlot]], Awaitable[None]],
) -> None:
    from agentenv.mcp.server import made

    async with opened as executor:
        root = await rooted(executor)
        open_session = functools.partial(
            executor.open, "agentenv-mcp", acquire_timeout_s=wait_s, kind="interactive", root=root
        )
        await serve(made(open_session, catalog, timeout_s=timeout_s))


async def _http(
    where: tuple[str, int],
    token: str | None,
    token_file: Path | None,
    idle_timeout_s: float,
    as_json: bool,
    server: Server[SessionSlot],
) -> None:
    from agentenv.mcp.http import serving

    host, port = where
    async with serving(server, host, port, token=token, idle_timeout_s=idle_timeout_s) as url:
        needed = "" if token is None else f" · token in {escape(str(token_file))}"
        announce({"url": url}, f"[green]listening[/] on {url}{needed} · Ctrl-C stops it", as_json=as_json)
        await asyncio.Event().wait()

"""``agentenv images prefetch``: have images where slots will want them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from agentenv.cli.options import FarmTokenOption, JsonOption, StoreOption, opened_store
from agentenv.cli.output import EXIT_NOT_ALL_WELL, err, escape, out, print_json, run_to_end, verb
from agentenv.errors import AgentEnvError, ConfigError

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from rich.progress import Progress

    from agentenv.wire import images as wire

    Ask = Callable[[wire.ImagesRequest], Awaitable[wire.ImagesReply]]

_WAIT_S: Final = 1.0
"""How often a place that fetches is asked how far it is."""


@verb
def prefetch(
    references: Annotated[list[str], typer.Argument(metavar="REF...", help="NAME[:TAG][@DIGEST], oci:DIR and so on.")],
    farm: Annotated[
        str | None, typer.Option("--farm", metavar="URL", help="Address of a farm whose nodes fetch the images.")
    ] = None,
    bearer: FarmTokenOption = None,
    keeper: Annotated[
        list[str] | None, typer.Option("--keeper", metavar="URL", help="A node's image keeper; repeatable.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The token of the keepers, for --keeper.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have images fetched before slots need them: by a farm, by keepers, or into this machine's store.

    A farm fetches each to as many nodes as its setting images.copies_per_image says. What is there is not fetched
    again, and a tag is not resolved again (`images pull` does that). Exit code 1: some could not be fetched.

    \b
    Examples:
      agentenv images prefetch debian:trixie python:3.12
      agentenv images prefetch --farm http://10.0.0.5:8700 --token file:run.token $(cat images.txt)
      agentenv images prefetch --keeper http://10.0.0.7:8643 --token-file keeper.token debian:trixie
    """
    if farm and keeper:
        raise ConfigError("--keeper", "the farm service calls its keepers itself", next_step="leave out one of the two")
    if bool(keeper) != bool(token_file):
        raise ConfigError("--token-file", "belongs to --keeper", next_step="give both, or neither")
    if farm or keeper:
        states = run_to_end(_prefetch(references, farm, bearer, keeper or [], token_file, as_json))
    else:
        states = _into_store(references, store, as_json)
    if as_json:
        print_json({"images": states})
    if any(one["error"] for one in states):
        raise typer.Exit(EXIT_NOT_ALL_WELL)


def _into_store(references: list[str], store: Path | None, quiet: bool) -> list[dict[str, Any]]:
    """What became of each reference in this machine's store."""
    from agentenv.cli.progress import shown

    kept, states = opened_store(store), []
    for reference in references:
        digest, failed = "", None
        try:
            with shown(quiet=quiet) as report:
                digest = kept.ensure(reference, progress=report).digest
        except AgentEnvError as error:
            failed = error
        states.append(_described(str(kept.layout.directory), reference, digest, failed, quiet))
    return states


async def _prefetch(
    references: list[str],
    farm: str | None,
    bearer: str | None,
    keepers: list[str],
    token_file: Path | None,
    quiet: bool,
) -> list[dict[str, Any]]:
    """What became of each reference at the farm, or at each keeper."""
    from agentenv.farm_client.images import for_nodes

    wanted = [for_nodes(reference) for reference in dict.fromkeys(references)]
    async with AsyncExitStack() as stack:
        asks = await _asks(stack, farm, bearer, keepers, token_file)
        bars = stack.enter_context(_bars())
        followed = [_followed(place, ask, one, bars, quiet) for place, ask in asks.items() for one in wanted]
        return await asyncio.gather(*followed)


async def _asks(
    stack: AsyncExitStack, farm: str | None, bearer: str | None, keepers: list[str], token_file: Path | None
) -> dict[str, Ask]:
    """How to ask, by where."""
    from agentenv.api.tool_server.auth import read_token
    from agentenv.cli.farm_admin import client_of
    from agentenv.containers.connection import open_session

    if farm:
        client = await stack.enter_async_context(client_of(farm, bearer))
        return {farm: client.want_images}
    assert token_file is not None
    session, token = await stack.enter_async_context(open_session()), read_token(token_file)
    return {url: _of_keeper(session, url, token) for url in keepers}


def _of_keeper(session: ClientSession, url: str, token: str) -> Ask:
    from agentenv.image_placement.keepers import ask_keeper
    from agentenv.wire import images as wire

    async def ask(request: wire.ImagesRequest) -> wire.ImagesReply:
        return await ask_keeper(session, url, token, wire.ImagesReply, "POST", request, wait_s=request.wait_s)

    return ask


async def _followed(place: str, ask: Ask, reference: str, bars: Progress, quiet: bool) -> dict[str, Any]:
    """Repeat the request until the image is there, or has failed."""
    from agentenv.errors import from_wire
    from agentenv.wire import images as wire

    bar = bars.add_task(escape(reference), total=None, visible=not quiet)
    digest, failed = "", None
    try:
        while not digest:
            (state,) = (await ask(wire.ImagesRequest(references=(reference,), wait_s=_WAIT_S))).images
            if state.error is not None:
                raise from_wire(state.error.error, state.error.message, state.error.next_step)
            if state.image is not None:
                digest = state.image.digest
                await ask(wire.ImagesRequest(images=(state.image,)))  # a farm has its copies made
            line = f"{reference} {state.step}".strip()
            bars.update(bar, description=escape(line), completed=state.done_bytes or 0, total=state.total_bytes)
    except AgentEnvError as error:
        failed = error
    bars.remove_task(bar)
    return _described(place, reference, digest, failed, quiet)


def _described(place: str, reference: str, digest: str, error: AgentEnvError | None, quiet: bool) -> dict[str, Any]:
    """One line for people, and what programs read."""
    if not quiet:
        if error is None:
            out().print(f"{escape(reference)} {digest} {escape(place)}", soft_wrap=True)
        else:
            err().print(f"[red]✗[/] {escape(reference)} {escape(place)}: {escape(str(error))}", soft_wrap=True)
    failure = None if error is None else {"code": error.code, "message": error.message, "next_step": error.next_step}
    return {"reference": reference, "place": place, "digest": digest or None, "error": failure}


def _bars() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20)),
        *(DownloadColumn(), TimeElapsedColumn()),
    )
    return Progress(*columns, console=err(), transient=True)

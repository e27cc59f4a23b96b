"""``agentenv images serve``: the keeper of a node's image store."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import announce, debugging, escape, run_to_end, verb

if TYPE_CHECKING:
    from agentenv.api.image_keeper.keeper import KeeperSettings
    from agentenv.store import Store


@verb
def serve(
    token_file: Annotated[Path, typer.Option(help="File of the token that the farm and all its keepers share.")],
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="The store's directory; by default store in the cache directory."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8643,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="URL", help="Another node's keeper; repeatable.")
    ] = None,
    peers_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="URLs of other nodes' keepers, one a line; it may change.")
    ] = None,
    auth_file: Annotated[
        Path | None,
        typer.Option("--auth-file", metavar="FILE", help="Credentials, as docker login and skopeo login write them."),
    ] = None,
    tls_verify: Annotated[
        bool, typer.Option("--tls-verify/--no-tls-verify", help="Ask registries for a valid certificate.")
    ] = True,
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            "--mirror", metavar="PREFIX=OTHER", help="Ask OTHER for images whose name begins with PREFIX; repeatable."
        ),
    ] = None,
    registry: Annotated[
        list[str] | None,
        typer.Option(
            "--registry",
            metavar="HOST",
            help="Ask only this registry (docker.io for debian), which need not be public; repeatable.",
        ),
    ] = None,
    allow_path: Annotated[
        list[Path] | None,
        typer.Option("--allow-path", metavar="DIR", help="Let clients name layouts and archives in it; repeatable."),
    ] = None,
    pulls: Annotated[int, typer.Option(min=1, help="Images fetched at once.")] = 4,
    per_registry: Annotated[int, typer.Option(min=1, help="Images fetched at once from one registry.")] = 3,
    patience_s: Annotated[
        float, typer.Option("--patience", min=0, metavar="SECONDS", help="How long a busy registry is asked again.")
    ] = 900.0,
    budget_gib: Annotated[
        float | None,
        typer.Option("--budget", min=0, metavar="GIB", help="What the store may keep; by default everything."),
    ] = None,
    keep_s: Annotated[
        float,
        typer.Option("--keep", min=0, metavar="SECONDS", help="Keep what was used in this time, whatever the budget."),
    ] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Keep this node's image store: fetch images for the farm, and serve them to other nodes, until Ctrl-C.

    One per node, as an ordinary user. It alone needs the network and the registries' credentials; containers only
    mount what is in the store. An image is asked of the peers before its registry, and verified in any case.

    \b
    Examples:
      agentenv images serve --token-file keeper.token --host 10.0.0.7 --peer http://10.0.0.8:8643 --budget 200
    """
    from agentenv.api.image_keeper.keeper import KeeperSettings
    from agentenv.api.image_keeper.patience import PatienceSettings
    from agentenv.api.tool_server.auth import read_token
    from agentenv.cli.images import mirrors, opened
    from agentenv.store import RegistrySettings

    settings = KeeperSettings(
        pulls=pulls,
        patience=PatienceSettings(per_registry, patience_s),
        registries=frozenset(registry or []),
        paths=tuple(allow_path or []),
        budget_bytes=None if budget_gib is None else int(budget_gib * 2**30),
        keep_s=keep_s,
    )
    token = read_token(token_file)
    kept = opened(store, RegistrySettings(auth_file, tls_verify, mirrors(mirror or [])))
    if not debugging():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    run_to_end(_serve(kept, settings, token, (peer or [], peers_file), host, port, as_json))


async def _serve(
    store: Store,
    settings: KeeperSettings,
    token: str,
    peers: tuple[list[str], Path | None],
    host: str,
    port: int,
    as_json: bool,
) -> None:
    from agentenv.api.image_keeper.app import served
    from agentenv.api.image_keeper.keeper import Keeper
    from agentenv.api.image_keeper.peers import Peers, peers_of
    from agentenv.api.image_keeper.reach import Reach, guarded

    asked = Peers(peers_of(*peers), token)
    named = {*settings.registries, *(mirror.partition("/")[0] for mirror in store.mirrors)}
    async with (
        guarded(store, Reach(named)) as reaching,
        Keeper(reaching, settings, peers=asked) as keeper,
        served(keeper, token, host=host, port=port) as url,
    ):
        where = str(store.layout.directory)
        line = f"[green]listening[/] on {url} · {len(keeper.stored)} images in {escape(where)} · Ctrl-C stops it"
        announce({"url": url, "store": where}, line, as_json=as_json)
        await asyncio.Event().wait()

"""``agentenv images pull | build | tag | list | rm | prefetch | gc | serve``: the image store of this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.image_prefetch import prefetch
from agentenv.cli.options import (
    AuthFileOption,
    JsonOption,
    MirrorOption,
    StoreOption,
    TlsVerifyOption,
    group,
    opened_store,
)
from agentenv.cli.output import announce, debugging, err, escape, out, print_json, run_to_end, verb
from agentenv.cli.progress import shown
from agentenv.errors import ConfigError
from agentenv.store.reference import committed, parse

if TYPE_CHECKING:
    from agentenv.api.image_keeper.keeper import KeeperSettings
    from agentenv.store import Store, StoredImage

images = group("Manage this machine's store of images, which slots use as their root.")

images.command()(prefetch)


@images.command()
@verb
def pull(
    references: Annotated[
        list[str],
        typer.Argument(metavar="REF...", help="NAME[:TAG][@DIGEST], oci:, docker-archive: or docker-daemon:…"),
    ],
    store: StoreOption = None,
    auth_file: AuthFileOption = None,
    tls_verify: TlsVerifyOption = True,
    mirror: MirrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch images into the store, or see that they are there and what their tags mean now.

    A layer that the store has, of whatever image, is not fetched again. Registries are asked with skopeo; sources on
    this machine need nothing but their files or the Docker engine.

    \b
    Examples:
      agentenv images pull debian:trixie
      agentenv images pull oci:build/image docker-daemon:task-17:latest
      agentenv images pull --mirror docker.io=mirror.example/hub python:3.12
    """
    held = opened_store(store, auth_file, tls_verify, mirror)
    found = []
    for reference in references:
        with shown(quiet=as_json) as report:
            image = held.ensure(reference, refresh=True, progress=report)
        found.append({"reference": reference, **_described(image)})
        if not as_json:
            out().print(f"{escape(reference)} {image.digest} {_mb(image.size_bytes)}", soft_wrap=True)
    if as_json:
        print_json({"images": found})


@images.command()
@verb
def build(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The build context.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="The Dockerfile; by default DIR/Dockerfile.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--tag", "-t", metavar="NAME[:TAG]", help="Name the image localhost/NAME here; repeatable."),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", metavar="STAGE", help="The stage to build; by default the last.")
    ] = "",
    argument: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="Set an ARG; repeatable.")
    ] = None,
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Let the commands of the Dockerfile reach the network.")
    ] = True,
    memory_mib: Annotated[int, typer.Option("--memory", min=256, metavar="MIB", help="Memory of the build.")] = 8192,
    as_json: JsonOption = False,
) -> None:
    """Build an image from a Dockerfile, without Docker: its commands run in image slots of this machine.

    FROM, RUN, COPY, ADD (of files), WORKDIR, ENV, ARG, USER, SHELL, CMD and ENTRYPOINT are understood, several stages
    too. A step that was built before, from the same files, is not run again. The digest of the image is printed.

    \b
    Examples:
      agentenv images build -t base:1 images/base     # FROM localhost/base:1, --image localhost/base:1
      agentenv images build tasks/hello
      agentenv images build . -f docker/Dockerfile --build-arg VERSION=3
    """
    from agentenv.builder.plan import Options
    from agentenv.cli.image_build import Shown
    from agentenv.sdk.image_builds import BuildLimits, build_image
    from agentenv.wire.network import NetworkPolicy

    held, given = opened_store(), [_name(name) for name in names or ()]
    options = Options(target=target, arguments=_assignments(argument or []))
    limits = BuildLimits(memory_mib, memory_mib * 3 // 4, network=NetworkPolicy("public" if network else "none"))
    with Shown(quiet=as_json) as listeners:
        built = asyncio.run(
            build_image(directory, held, file=file, options=options, limits=limits, listeners=listeners)
        )
    with held.pin(built.image) as image:
        for name in given:
            held.name(name, image)
    if as_json:
        print_json({"digest": built.image, "names": given, "steps_run": built.ran, "steps_cached": built.cached})
    else:
        out().print(built.image, soft_wrap=True)


@images.command()
@verb
def tag(
    reference: Annotated[
        str, typer.Argument(metavar="IMAGE", help="A digest of the store (sha256:…), or any reference.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="What localhost/NAME means from now on.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give an image a name in this store. It never hides an image of a registry: it is used as localhost/NAME.

    \b
    Examples:
      agentenv images tag sha256:0123… base:1
      agentenv images tag debian:trixie base:1
    """
    held, named = opened_store(store), _name(name)
    with shown(quiet=as_json) as report:
        image = held.ensure(reference, progress=report)
    held.name(named, image)
    if as_json:
        print_json({"name": named, "digest": image.digest})
    else:
        out().print(f"{escape(parse(named).as_written)} {image.digest}", soft_wrap=True)


@images.command()
@verb
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME[:TAG]...")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove names that `images build -t`, `images tag` or `commit` gave. Their images stay until `images gc`, which
    removes them as any others then.

    \b
    Examples:
      agentenv images rm base:1
    """
    held, removed = opened_store(store), [_name(name) for name in names]
    for name in removed:
        if not held.unname(parse(name)):
            raise ConfigError(
                "NAME", f"no image in this store is named {parse(name).as_written}", next_step="agentenv images list"
            )
        if not as_json:
            out().print(f"[green]removed[/] {escape(parse(name).as_written)}", soft_wrap=True)
    if as_json:
        print_json({"names": removed})


@images.command("list")
@verb
def list_images(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the images of the store: digest, size, last use, and what means them: names, and the references they were
    fetched by.

    Sizes are of all layers of an image; the last line has what they take together, each layer once.

    \b
    Examples:
      agentenv images list
      agentenv images list --json
    """
    held = opened_store(store)
    names = held.references()
    usage = {image.digest: image for image in held.usage()}
    rows = [
        {
            **_described(image),
            "references": names.get(image.digest, []),
            "last_use_s": usage[image.digest].last_use_s,
            "pinned": usage[image.digest].pinned,
        }
        for image in held.images()
        if image.digest in usage
    ]
    total_bytes = held.size_bytes()
    if as_json:
        print_json({"store": str(held.layout.directory), "size_bytes": total_bytes, "images": rows})
        return
    _print_table(rows)
    out().print(f"{len(rows)} images, {_mb(total_bytes)} in {escape(str(held.layout.directory))}", soft_wrap=True)


@images.command()
@verb
def gc(
    budget_gib: Annotated[
        float,
        typer.Option("--budget", min=0, metavar="GIB", help="Target size of the store; images in use stay."),
    ],
    keep_s: Annotated[
        float,
        typer.Option("--keep", min=0, metavar="SECONDS", help="Keep images used within this time, over budget too."),
    ] = 3600.0,
    keep_committed_s: Annotated[
        float,
        typer.Option("--keep-committed", min=0, metavar="SECONDS", help="The same for images that `commit` has named."),
    ] = 7 * 86_400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the images that were not used for longest, until the rest fits into the budget.

    Images in use stay. A layer goes with the last image that has it. What interrupted pulls left
    goes in any case.

    \b
    Examples:
      agentenv images gc --budget 100
      agentenv images gc --budget 0 --keep 0 --dry-run
    """
    held = opened_store(store)
    with err().status("looking"):
        done = held.gc(
            budget_bytes=int(budget_gib * 2**30), keep_s=keep_s, keep_committed_s=keep_committed_s, dry_run=dry_run
        )
    if as_json:
        print_json({"dry_run": dry_run, **dataclasses.asdict(done)})
        return
    for digest in done.images:
        out().print(f"{'would remove' if dry_run else '[green]removed[/]'} {digest}", soft_wrap=True)
    would = "would be freed" if dry_run else "freed"
    out().print(f"{len(done.images)} images, {_mb(done.freed_bytes)} {would}; {_mb(done.kept_bytes)} stay")


@images.command()
@verb
def serve(
    token_file: Annotated[Path, typer.Option(help="File of the token that the farm and all its keepers share.")],
    store: StoreOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8643,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="URL", help="Another node's keeper; repeatable.")
    ] = None,
    peers_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="URLs of other nodes' keepers, one per line; may change.")
    ] = None,
    auth_file: AuthFileOption = None,
    tls_verify: TlsVerifyOption = True,
    mirror: MirrorOption = None,
    registry: Annotated[
        list[str] | None,
        typer.Option(
            "--registry",
            metavar="HOST",
            help="Allow this registry only (docker.io for debian), even if it is not public; repeatable.",
        ),
    ] = None,
    allow_path: Annotated[
        list[Path] | None,
        typer.Option("--allow-path", metavar="DIR", help="Let clients name layouts and archives in it; repeatable."),
    ] = None,
    pulls: Annotated[int, typer.Option(min=1, help="Images fetched at once.")] = 4,
    per_registry: Annotated[int, typer.Option(min=1, help="Images fetched at once from one registry.")] = 3,
    patience_s: Annotated[
        float, typer.Option("--patience", min=0, metavar="SECONDS", help="How long to retry a busy registry.")
    ] = 900.0,
    budget_gib: Annotated[
        float | None,
        typer.Option("--budget", min=0, metavar="GIB", help="Size limit of the store; by default none."),
    ] = None,
    keep_s: Annotated[
        float,
        typer.Option("--keep", min=0, metavar="SECONDS", help="Keep images used within this time, over budget too."),
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

    settings = KeeperSettings(
        pulls=pulls,
        patience=PatienceSettings(per_registry, patience_s),
        registries=frozenset(registry or []),
        paths=tuple(allow_path or []),
        budget_bytes=None if budget_gib is None else int(budget_gib * 2**30),
        keep_s=keep_s,
    )
    token = read_token(token_file)
    kept = opened_store(store, auth_file, tls_verify, mirror)
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


def _name(text: str) -> str:
    """A name given here, in full. Raises ConfigError."""
    return str(committed(text))


def _assignments(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError("--build-arg", f"got {text!r}", next_step="write NAME=VALUE")
        found[name] = value
    return found


def _described(image: StoredImage) -> dict[str, Any]:
    return {
        "digest": image.digest,
        "size_bytes": image.size_bytes,
        "architecture": image.architecture,
        "layers": list(image.diff_ids),
        "user": image.user,
        "workdir": image.workdir,
        "entrypoint": list(image.entrypoint),
        "cmd": list(image.cmd),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("digest", "size", "layers", "used", "references"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        used = "in use" if row["pinned"] else _ago(row["last_use_s"])
        references = "\n".join(map(escape, row["references"]))
        table.add_row(row["digest"][7:19], _mb(row["size_bytes"]), str(len(row["layers"])), used, references)
    if rows:
        out().print(table)


def _ago(moment_s: float) -> str:
    minutes = max(0.0, time.time() - moment_s) / 60
    return f"{minutes:.0f} min ago" if minutes < 120 else f"{minutes / 60:.0f} h ago"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"

"""``agentenv images pull | build | list | prefetch | gc | serve``: the image store of this machine."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.image_keeper import serve
from agentenv.cli.image_prefetch import prefetch
from agentenv.cli.options import JsonOption, group
from agentenv.cli.output import err, escape, out, print_json, verb
from agentenv.cli.progress import shown
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.store import RegistrySettings, Store, StoredImage

images = group("Images that slots have as their root: this machine's store of them.")

images.command()(serve)
images.command()(prefetch)

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="The store's directory; by default store in the cache directory."),
]


@images.command()
@verb
def pull(
    references: Annotated[
        list[str],
        typer.Argument(metavar="REF...", help="NAME[:TAG][@DIGEST], oci:, docker-archive: or docker-daemon:…"),
    ],
    store: StoreOption = None,
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
    from agentenv.store import RegistrySettings

    settings = RegistrySettings(auth_file, tls_verify, mirrors(mirror or []))
    held = opened(store, settings)
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
    too. A step that was built before, from the same files, is not run again. The image is named by its digest.

    \b
    Examples:
      agentenv images build tasks/hello
      agentenv images build . -f docker/Dockerfile --build-arg VERSION=3
    """
    import asyncio

    from agentenv.builder.plan import Options
    from agentenv.cli.image_build import Shown
    from agentenv.sdk.image_builds import BuildLimits, build_image
    from agentenv.wire.network import NetworkPolicy

    options = Options(target=target, arguments=_assignments(argument or []))
    limits = BuildLimits(memory_mib, memory_mib * 3 // 4, network=NetworkPolicy("public" if network else "none"))
    with Shown(quiet=as_json) as listeners:
        built = asyncio.run(
            build_image(directory, opened(None), file=file, options=options, limits=limits, listeners=listeners)
        )
    if as_json:
        print_json({"digest": built.image, "steps_run": built.ran, "steps_cached": built.cached})
    else:
        out().print(built.image, soft_wrap=True)


@images.command("list")
@verb
def list_images(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the images of the store: digest, size, last use, and the references they were fetched by.

    Sizes are of all layers of an image; the last line has what they take together, each layer once.

    \b
    Examples:
      agentenv images list
      agentenv images list --json
    """
    held = opened(store)
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
        typer.Option("--budget", min=0, metavar="GIB", help="What may stay in the store, if it can be chosen."),
    ],
    keep_s: Annotated[
        float,
        typer.Option("--keep", min=0, metavar="SECONDS", help="Keep what was used in this time, whatever the budget."),
    ] = 3600.0,
    keep_committed_s: Annotated[
        float,
        typer.Option("--keep-committed", min=0, metavar="SECONDS", help="The same for what `commit` has named."),
    ] = 7 * 86_400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the images that were not used for longest, until the rest fits into the budget.

    Images in use stay, whoever uses them. A layer goes with the last image that has it. What interrupted pulls left
    goes in any case.

    \b
    Examples:
      agentenv images gc --budget 100
      agentenv images gc --budget 0 --keep 0 --dry-run
    """
    held = opened(store)
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


def opened(directory: Path | None, registries: RegistrySettings | None = None) -> Store:
    """The store of a ``--store`` option."""
    from agentenv.config import cache_dir
    from agentenv.store import Store

    return Store.open(directory or cache_dir() / "store", registries=registries)


def mirrors(given: list[str]) -> dict[str, str]:
    """``--mirror`` options. Raises ConfigError."""
    found = {}
    for text in given:
        prefix, equals, other = text.partition("=")
        if not prefix or not equals or not other:
            raise ConfigError("--mirror", f"got {text!r}", next_step="write PREFIX=OTHER: docker.io=mirror.example/hub")
        found[prefix.rstrip("/")] = other.rstrip("/")
    return found


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

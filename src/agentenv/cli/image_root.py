"""The options of ``exec`` and ``shell`` that give a slot an image as its root, and what they mean together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.options import Isolation, opened_store
from agentenv.deadlines import START_TIMEOUT_S
from agentenv.errors import ConfigError
from agentenv.slots.backends.registry import Backend

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from agentenv.config import ContainerSettings
    from agentenv.executor.tool_executor import ToolExecutor
    from agentenv.sdk.roots import ImageRoot
    from agentenv.wire.roots import RootSpec

ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="REF",
        help="The slot's root, in which the command is root: debian:trixie, oci:DIR, docker-archive:FILE, "
        "docker-daemon:NAME, localhost/NAME (agentenv images build -t), or the digest of an image in the store.",
    ),
]
DockerfileOption = Annotated[
    Path | None,
    typer.Option(
        "--dockerfile",
        metavar="DIR",
        exists=True,
        readable=True,
        help="Build this Dockerfile (a file, or a directory that holds one) and use the image; Docker is not needed, "
        "finished steps are cached.",
    ),
]
UserOption = Annotated[
    str | None, typer.Option("--user", metavar="NAME[:GROUP]", help="With an image: run as this user of the image.")
]
WorkdirOption = Annotated[
    str | None, typer.Option("--workdir", metavar="DIR", help="With an image: working directory.")
]
CpusOption = Annotated[
    float | None, typer.Option("--cpus", min=0.01, metavar="CORES", help="With an image: limit of CPU cores.")
]
MemoryOption = Annotated[
    int | None, typer.Option("--memory", min=64, metavar="MIB", help="The slot's memory; 2048 by default.")
]
StorageOption = Annotated[
    int | None,
    typer.Option("--storage", min=1, metavar="MIB", help="Limit of the slot's files; 1024 by default."),
]


class Place(StrEnum):
    """Where a slot with an image keeps what it writes (:data:`agentenv.wire.roots.Writable`)."""

    memory = "memory"
    disk = "disk"


WritableOption = Annotated[
    Place,
    typer.Option(
        "--writable", help="With an image: store written files in the slot's memory, or in reserved disk space."
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="HOST",
        help="With an image: allow connections only to this host (example.org, *.example.org, 10.0.0.0/8; "
        ":PORT after it), through a proxy; repeatable.",
    ),
]


@dataclass(frozen=True)
class RootOptions:
    """The options for a slot's root."""

    image: str | None = None
    dockerfile: Path | None = None
    user: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    writable: Place = Place.memory
    network: bool = False
    allow: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def has_image(self) -> bool:
        """Whether the slot has an image as its root."""
        return self.image is not None or self.dockerfile is not None

    def takes_container(self, *, farm: bool) -> bool:
        """Whether it takes a container of its own: a running one has its own limits and network. A farm service has
        images."""
        if self.settings:
            return True
        if self.has_image:
            return not farm
        return self.network or self.memory_mib is not None or self.storage_mib is not None

    def check(self, backend: Backend, *, farm: bool) -> None:
        """Raise ConfigError for what does not go together."""
        if self.image is not None and self.dockerfile is not None:
            raise ConfigError("--image, --dockerfile", "exclude each other", next_step="use only one")
        if self.network and self.allow:
            raise ConfigError("--network, --allow", "exclude each other", next_step="use only one")
        if not self.has_image:
            for option, given in (
                ("--user", self.user), ("--workdir", self.workdir), ("--cpus", self.cpus), ("--allow", self.allow),
                ("--writable", self.writable is Place.disk),
            ):  # fmt: skip
                if given:
                    raise ConfigError(option, "is for slots with an image", next_step="add --image or --dockerfile")
        elif backend is not Backend.local:
            raise ConfigError(
                "--image, --dockerfile",
                f"are for slots of this machine, not for --backend {backend}",
                next_step="leave out --backend, or take a slot of a farm service that has images (--farm)",
            )
        if self.dockerfile is not None and self.dockerfile.is_dir() and not (self.dockerfile / "Dockerfile").is_file():
            raise ConfigError("--dockerfile", f"{self.dockerfile} has no Dockerfile", next_step="give the file itself")
        if farm and self.dockerfile is not None:
            raise ConfigError(
                "--dockerfile",
                "is built on this machine, but the farm's slots are on other machines",
                next_step="leave out --farm, or push the image to a registry that the farm may use, and give --image",
            )

    def root(self) -> ImageRoot | None:
        """The root; None without an image. Raises ConfigError."""
        from agentenv.sdk.roots import ImageRoot

        if not self.has_image:
            return None
        return ImageRoot(
            self.image or f"dockerfile:{self.dockerfile}",
            cpus=self.cpus,
            memory_mib=self.memory_mib,
            storage_mib=self.storage_mib,
            storage=self.writable.value,
            user=self.user or "",
            workdir=self.workdir or "",
            network="public" if self.network else list(self.allow),
        )

    def farm(
        self,
        backend: Backend,
        isolation: Isolation,
        *,
        own: bool,
        job: str | None,
        service: bool,
        guest: bool,
        wait_s: float | None,
        slots: int = 1,
    ) -> AbstractAsyncContextManager[ToolExecutor]:
        """Where the slot is leased, once it is entered: see :func:`agentenv.farm.open.open_farm`. A container that has
        to be started has ``wait_s`` for it, where that is longer than usual, and so many ``slots``. Raises
        ConfigError."""
        from agentenv.farm import open

        settings = self.container(isolation=isolation.value, slots_per_container=slots)
        alone = own or isolation is not Isolation.auto or self.takes_container(farm=service)
        start_timeout_s = max(START_TIMEOUT_S, wait_s or 0.0)
        return open.open_farm(
            settings, backend, own=alone, job=job, service=service, guest=guest, start_timeout_s=start_timeout_s
        )

    def container(self, **fields: Any) -> ContainerSettings:
        """The settings of a container of its own. Raises ConfigError."""
        from agentenv.config import ContainerSettings
        from agentenv.farm import open
        from agentenv.sdk.roots import RootFields, container_for, plain_container_for

        given, of_pool = open.named_settings(self.settings)
        if of_pool:
            raise ConfigError(next(iter(of_pool)), "is not of a container", next_step="give it to `agentenv up`")
        settings = ContainerSettings.made_of({"slots_per_container": 1, **fields, **given})
        root = self.root()
        if root is not None:
            return container_for(root, settings)
        asked = RootFields(memory_mib=self.memory_mib, storage_mib=self.storage_mib)
        return plain_container_for(asked | {"network": "public" if self.network else "none"}, settings)


def stored_here(root: ImageRoot, *, quiet: bool = False) -> RootSpec:
    """The root, its image fetched or built into this machine's store, which is shown meanwhile. Raises what
    :func:`agentenv.sdk.images.stored` raises."""
    from agentenv.cli.image_build import Shown
    from agentenv.cli.output import run_to_end
    from agentenv.cli.progress import shown
    from agentenv.store.reference import is_digest, parse

    if is_digest(root.image):
        return root.spec(root.image)
    wanted, store = parse(root.image), opened_store()
    if wanted.kind == "dockerfile":
        from agentenv.sdk.image_builds import build_image

        path = Path(wanted.name)
        directory, file = (path, None) if path.is_dir() else (path.parent, path)
        with Shown(quiet=quiet, cached=False) as listeners:
            build = build_image(directory, store, file=file, listeners=listeners)
            return root.spec(run_to_end(build).image)
    with shown(quiet=quiet) as report:
        return root.spec(store.ensure(wanted, progress=report).digest)


async def stored_there(root: ImageRoot, executor: ToolExecutor, *, quiet: bool = False) -> RootSpec:
    """The root, its image fetched by the farm whose slots these are, or into this machine's store if the farm is here.
    Raises as :func:`stored_here`."""
    from agentenv.cli.output import err, escape
    from agentenv.sdk.images import stored

    if quiet:
        return await stored(root, executor.pool)
    with err().status(f"the farm looks for {escape(root.image)}"):
        return await stored(root, executor.pool)

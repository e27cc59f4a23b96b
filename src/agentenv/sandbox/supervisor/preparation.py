"""What a container has before its slots are made: its settings and programs, its private directory, its images."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.deadlines import scaled
from agentenv.sandbox.slot_env import PATH
from agentenv.sandbox.supervisor import cgroups, image_probes, isolation, mounts, rootfs, static_bash
from agentenv.sandbox.supervisor.checkpoints import Checkpoints
from agentenv.sandbox.supervisor.disk_layers import DiskLayers
from agentenv.sandbox.supervisor.id_ranges import IdRanges, has_store, ids_of_trees
from agentenv.sandbox.supervisor.image_formats import NO_STORE, ImageSupport, decide, without_probes
from agentenv.sandbox.supervisor.image_mounts import ImageMounts, Images
from agentenv.sandbox.supervisor.image_trees import ImageTrees, Unpacker
from agentenv.sandbox.supervisor.isolation import Identity
from agentenv.sandbox.supervisor.limits import CgroupLayout, server_plan
from agentenv.sandbox.supervisor.ready_namespaces import ReadyNamespaces
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_process import SlotSetup
from agentenv.wire.spec import SandboxSpec

log = logging.getLogger(__name__)

_STORE_LOOK_S: Final = 0.5
_LOCALE: Final = Path("/usr/lib/locale/C.utf8/LC_CTYPE")
_LDD_S: Final = scaled(10.0)


@dataclass(frozen=True)
class Owner:
    """Who has started the container."""

    root: bool
    one_id: str = ""
    """Why it has no other id than his."""


@dataclass(frozen=True)
class Launch:
    """Everything determined and opened before the namespaces were entered."""

    spec: SandboxSpec
    token: str
    identity: Identity
    owner: Owner
    directory: Path
    listener: socket.socket
    layout: CgroupLayout | None
    weaker: tuple[str, ...]
    host_namespaces: Mapping[str, str]
    bwrap: str
    agent: Path
    files: Path
    launcher: Path
    root_launcher: Path
    tar_program: Path
    as_user: Path
    dial: Path
    listen: Path
    ripgrep: Path
    network_tool: str | None
    shell: Path | None
    disk: Path
    """Where layers on the disk are kept."""
    disk_refusal: str
    """Why there are none; empty if there are."""
    server_argv: Sequence[str]
    lifeline: bool

    @property
    def controllers(self) -> frozenset[str]:
        """Those by which slots can be limited here."""
        return self.layout.controllers if self.layout else frozenset()


def _images(launch: Launch, place: Path, reaper: Reaper, support: ImageSupport) -> Images | None:
    """The images of the node's store in the chosen format; None where there is no store."""
    store = launch.spec.store_dir
    if not store:
        return None
    if support.format in ("tree", "shifted"):
        return ImageTrees(Path(store), Unpacker(launch.identity, place, launch.root_launcher, reaper, support.ids))
    return ImageMounts(Path(store), place / "images")


def prepare_setup(launch: Launch, reaper: Reaper, support: ImageSupport) -> tuple[SlotSetup, Path]:
    """Create the container's cgroups, private directory and template tree."""
    spec, identity = launch.spec, launch.identity
    if launch.layout is not None:
        cgroups.make(server_plan(launch.layout, spec.container))
    place = launch.directory / "private"
    place.mkdir(exist_ok=True)
    if identity.mode != isolation.USER:  # everything of an unprivileged user is reached under one uid
        outside = (
            launch.agent,
            launch.files,
            launch.as_user,
            launch.dial,
            launch.listen,
            launch.ripgrep,
            launch.launcher,
            Path(launch.bwrap),
            Path(launch.network_tool or "/"),
        )
        needed = [*mounts.interpreter_directories(), launch.directory, launch.disk, *outside]
        place = mounts.private_place(place, [*needed, *(Path(bind.source) for bind in spec.binds)])
    mounts.mount_private(place, identity.own_uid)
    etc = isolation.etc_files(identity, spec.slots, allow_network=spec.allow_network)
    programs = {"slotagent": launch.agent, "slotfiles": launch.files}
    programs |= {
        "slottar": launch.tar_program,
        "slotas": launch.as_user,
        "slotdial": launch.dial,
        "slotlisten": launch.listen,
        "rg": launch.ripgrep,
    }
    if launch.shell is not None:
        programs["bash"] = launch.shell
    tmux = tmux_bundle() if spec.store_dir else []
    tree = rootfs.build(place, etc=etc, programs=programs, tmux=tmux, binds=spec.binds, slots=spec.slots)
    if identity.mode != isolation.USER:
        # As root's, which this id is in a slot: some programs trust no path below a directory of somebody else's.
        with contextlib.suppress(PermissionError):
            os.chown(tree.root, isolation.UNUSED_ID, isolation.UNUSED_ID)
    if spec.store_dir and identity.mode != isolation.USER:
        # Refused where the network is another user namespace's, as an ordinary user's is: nothing covers /sys there.
        with contextlib.suppress(PermissionError):
            mounts.mount_whole_sys(place / "sys")
    images = _images(launch, place, reaper, support)
    namespaces = None
    if spec.store_dir:
        shared = support.ids if support.format == "shifted" else None
        ranges = IdRanges(Path(spec.store_dir) / "ranges", shared=shared)
        namespaces = ReadyNamespaces(launch.root_launcher, ranges, reaper)
    setup = SlotSetup(
        spec,
        identity,
        tree,
        launch.layout,
        launch.bwrap,
        launch.launcher,
        launch.root_launcher,
        images=images,
        namespaces=namespaces,
        disk=DiskLayers(launch.disk),
        checkpoints=Checkpoints(place / "checkpoints", spec.checkpoint_bytes),
        bash_build=static_bash.build_of(launch.shell) if launch.shell is not None and spec.store_dir else "",
    )
    return setup, place


def tmux_bundle() -> list[tuple[str, Path]]:
    """The machine's tmux with all that it needs, to be shown to image slots whose image has none: the files, by their
    names in it (:func:`agentenv.sandbox.slot_paths.bundled_tmux`); none where the machine has no tmux, or one that is
    not linked as expected.

    Such an image has another C library, or none: the bundle has the dynamic linker and the libraries that tmux is
    linked with, and the UTF-8 locale without which it does not start. It takes 5 MB, once for a container.
    """
    program = shutil.which("tmux", path=PATH)
    if program is None or not _LOCALE.is_file():
        return []
    try:
        listing = subprocess.run(
            ["ldd", program], capture_output=True, text=True, timeout=_LDD_S, env={"PATH": PATH}, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    linked = list(_linked_paths(listing.stdout))
    linker = [path for path in linked if path.name.startswith("ld-")]
    if len(linker) != 1:
        return []
    libraries = [(f"lib/{path.name}", path) for path in linked if path not in linker]
    return [("tmux", Path(program)), ("ld.so", linker[0]), ("locale/C.UTF-8/LC_CTYPE", _LOCALE), *libraries]


def _linked_paths(listed: str) -> Iterator[Path]:
    """What ldd lists: ``NAME => PATH (ADDRESS)``, or ``PATH (ADDRESS)`` of the dynamic linker."""
    for line in listed.splitlines():
        named = line.rpartition("=>")[2].split()
        if named and named[0].startswith("/"):
            yield Path(named[0])


def _proc(name: str) -> str:
    return Path("/proc", name).read_text()


async def _store_made(store: Path, stop: asyncio.Event) -> None:
    """Wait until the node's keeper has made its store, or the container has to end: on a new node both begin at once,
    and whether images can be shown is tried in the store."""
    if not has_store(store):
        log.warning("the image store is empty: waiting for the node's image keeper to create it")
    while not has_store(store) and not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STORE_LOOK_S):
                await stop.wait()


async def image_support(launch: Launch, reaper: Reaper, stop: asyncio.Event) -> ImageSupport:
    """What the slots of this container get of images. Raises nothing that a slot without an image would not meet."""
    spec = launch.spec
    ids = ids_of_trees(_proc("self/uid_map"), _proc("self/gid_map"))
    if refused := without_probes(launch.owner.one_id, ids, _proc("version"), _proc("self/status")):
        return ImageSupport(None, refused=refused)
    if not spec.store_dir:
        return NO_STORE
    await _store_made(Path(spec.store_dir), stop)
    assert ids is not None, "it is not refused"
    found = await image_probes.probe(Path(spec.store_dir), launch.directory, launch.root_launcher, reaper, ids)
    support = decide(found, spec.image_format, ids)
    notes = [*support.weaker, *filter(None, [support.refused])]
    log.info("slots of images: %s. %s", support.format or "none", " ".join(notes))
    return support

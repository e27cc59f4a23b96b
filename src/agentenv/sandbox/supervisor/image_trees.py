"""The images of a node's store, unpacked by layers, for kernels that do not mount them as they are.

The supervisor reads nothing of an image: a program of the store's (``agentenv.store.unpacked``) unpacks it, as the root
of a user namespace of the ids that all unpacked layers of the node have, and with no right outside of it. At worst
an image makes that program change other unpacked images.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.background import report_failure
from agentenv.errors import ImageUnavailableError, SandboxUnavailableError
from agentenv.locks import hold
from agentenv.sandbox.supervisor import slot_process, syscalls
from agentenv.sandbox.supervisor.child import EXEC_FAILED, reset_signals, take_descriptors
from agentenv.sandbox.supervisor.image_mounts import ImageConfig, ImageLayer, config_of, held_manifest
from agentenv.sandbox.supervisor.isolation import Identity
from agentenv.sandbox.supervisor.reaper import Reaper, end_of
from agentenv.sandbox.supervisor.server_process import environment, take_own_view
from agentenv.sandbox.supervisor.user_namespace import ImageIds, make_user_namespace

log = logging.getLogger(__name__)

_STORE_FD: Final = 3
_NAMESPACE_FD: Final = 4
_NAME: Final = re.compile(r"sha256-[0-9a-f]{64}")
_ANSWER_BYTES: Final = 1024 * 1024
_ATTEMPTS: Final = 2
"""The store may remove a layer between its unpacking and our lock."""
_NICE: Final = 10
_CAPABILITIES: Final = (0, 1, 3, 4, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETFCAP: over the ids of unpacked layers."""


@dataclass
class _Unpacked:
    layers: tuple[ImageLayer, ...]
    config: ImageConfig
    locks: list[int]
    """Kept open: they keep the image and its layers in the store."""


@dataclass(frozen=True)
class Unpacker:
    """What starts the program. ``private`` is the container's private directory, ``root_program`` slotroot; ``ids`` are
    those of unpacked layers."""

    identity: Identity
    private: Path
    root_program: Path
    reaper: Reaper
    ids: ImageIds


class ImageTrees:
    """Implements :class:`agentenv.sandbox.supervisor.image_mounts.Images`."""

    def __init__(self, store: Path, unpacker: Unpacker) -> None:
        self._store = store
        self._unpacker = unpacker
        self._unpacked: dict[str, _Unpacked] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def require(self, digest: str) -> None:
        """See Images."""
        if digest not in self._unpacked:
            lock, _ = held_manifest(self._store, digest)
            os.close(lock)

    async def ready(self, digest: str) -> None:
        """See Images. Who no longer waits does not end it."""
        if digest in self._unpacked:
            return
        if digest not in self._tasks:
            task = self._tasks[digest] = asyncio.create_task(self._prepare(digest), name=f"unpack {digest}")
            task.add_done_callback(lambda _: self._tasks.pop(digest))
            task.add_done_callback(report_failure)
        await asyncio.shield(self._tasks[digest])

    def take(self, digest: str) -> tuple[tuple[ImageLayer, ...], ImageConfig]:
        """See Images."""
        found = self._unpacked.get(digest)
        if found is None:
            raise SandboxUnavailableError(f"image {digest} is not unpacked")
        return found.layers, found.config

    async def _prepare(self, digest: str) -> None:
        lock, manifest_json = held_manifest(self._store, digest)
        locks = [lock]
        try:
            for _ in range(_ATTEMPTS):
                names = await self._run(digest)
                if len(names) != len(manifest_json["layers"]):
                    raise ImageUnavailableError(f"image {digest} was unpacked to {len(names)} layers")
                with contextlib.suppress(FileNotFoundError):
                    for name in names:
                        locks.append(hold(self._store / "trees" / name, shared=True))
                    break
                _close(locks[1:])
                del locks[1:]
            roots = [self._checked(name) for name in reversed(names)]
            config = await asyncio.to_thread(config_of, manifest_json, roots)
        except OSError as error:
            _close(locks)
            raise _failed(digest, str(error)) from error
        except BaseException:
            _close(locks)
            raise
        layers = tuple(ImageLayer(root, self._unpacker.ids) for root in roots)
        self._unpacked[digest] = _Unpacked(layers, config, locks)

    def _checked(self, name: str) -> Path:
        """The root of an unpacked layer, which only the unpacker can have made: others may write beside it."""
        tree, ids = self._store / "trees" / name, self._unpacker.ids
        owner = tree.lstat().st_uid
        if owner != ids.first or not 0 <= (tree / "root").lstat().st_uid - owner < ids.count:
            raise ImageUnavailableError(
                f"{tree} belongs to another user than the unpacker of this store",
                next_step="use another store for containers with other maps of ids (userns-remap)",
            )
        return tree / "root"

    async def _run(self, digest: str) -> list[str]:
        """The names of the image's unpacked layers, the lowest first, once they are there."""
        unpacker = self._unpacker
        namespace = await make_user_namespace(unpacker.root_program, unpacker.ids, unpacker.reaper)
        read, write = os.pipe()
        try:
            store = os.open(self._store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                pid = os.fork()
                if pid == 0:
                    _become_unpacker(unpacker, digest, write, store, namespace)
                exited = unpacker.reaper.watch(pid)
            finally:
                os.close(store)
                os.close(namespace)
                os.close(write)
            log.info("image %s: looking for its layers, and unpacking what is missing", digest)
            answer = await asyncio.to_thread(_read_all, read)
            status = await asyncio.shield(exited)
        finally:
            os.close(read)
        if status != 0:
            raise _failed(digest, answer.decode(errors="replace").strip() or end_of(status))
        names = answer.decode("ascii", "replace").split()
        if not all(map(_NAME.fullmatch, names)):
            raise ImageUnavailableError(f"image {digest} was unpacked to directories of wrong names")
        return names


def _become_unpacker(unpacker: Unpacker, digest: str, answer: int, store: int, namespace: int) -> None:
    """In the forked child: become the root of the namespace, with what files need and nothing else. Never returns."""
    try:
        take_own_view(unpacker.identity, unpacker.private)
        take_descriptors({0: None, 1: answer, 2: 2, _STORE_FD: store, _NAMESPACE_FD: namespace})
        reset_signals()
        os.chdir("/")
        os.nice(_NICE)
        Path("/proc/self/oom_score_adj").write_text(str(slot_process.victim_score()))
        first = unpacker.ids.first
        os.setgroups([])
        os.setresgid(first, first, first)
        os.setresuid(first, first, first)
        syscalls.setns(_NAMESPACE_FD, syscalls.CLONE_NEWUSER)
        os.close(_NAMESPACE_FD)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        syscalls.unshare(syscalls.CLONE_NEWNET)
        syscalls.drop_bounding_capabilities(_CAPABILITIES)
        syscalls.set_no_new_privileges()
        program = [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-m", "agentenv.store.unpacked"]
        arguments = ["--store-fd", str(_STORE_FD), "--ids", str(unpacker.ids.users), digest]
        os.execve(program[0], [*program, *arguments], environment())  # noqa: S606
    except BaseException as error:
        os.write(answer, f"its program could not be started: {error}".encode())
    finally:
        os._exit(EXEC_FAILED)


def _failed(digest: str, reason: str) -> ImageUnavailableError:
    return ImageUnavailableError(
        f"image {digest} could not be unpacked: {reason}",
        next_step="check free bytes and inodes (agentenv images gc) and extended attributes of the store's disk",
    )


def _read_all(descriptor: int) -> bytes:
    found = b""
    while len(found) < _ANSWER_BYTES and (chunk := os.read(descriptor, _ANSWER_BYTES)):
        found += chunk
    return found


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

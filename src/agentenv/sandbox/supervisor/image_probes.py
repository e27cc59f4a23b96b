"""Tries what slots of images need of this kernel and of the store, in a process and a mount namespace that end then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentenv.deadlines import scaled
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import mounts, syscalls
from agentenv.sandbox.supervisor.image_formats import FEW_IDS, Format, Probes
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.user_namespace import ImageIds, LeanIds, make_user_namespace

PROBE: Final = "probe.idx"
"""An image without files, in every store."""

_ANSWER_BYTES: Final = 64 * 1024
_DEADLINE_S: Final = scaled(20.0)
_SCRATCH_BYTES: Final = 1024 * 1024
_LOWERS: Final = ("erofs", "tree", "plain")


async def probe(store: Path, scratch: Path, root_program: Path, reaper: Reaper, ids: ImageIds) -> Probes:
    """Try everything, with the ids of unpacked layers. ``root_program`` is slotroot; ``scratch`` a directory, which is
    left as it is. Raises nothing: what cannot be tried does not work."""
    try:
        namespace = await make_user_namespace(root_program, ids, reaper)
    except (OSError, SandboxUnavailableError) as error:
        return Probes(basics=f"a user namespace of {ids.count} ids cannot be created: {_text_of(error)}")
    try:
        answer = await _ask(store, scratch, ids, namespace, reaper)
    except (OSError, ValueError) as error:
        return Probes(basics=f"probing this kernel failed: {_text_of(error)}")
    finally:
        os.close(namespace)
    formats: dict[Format, str] = {
        "erofs": answer["erofs"],
        "tree": answer["trees"] or answer["tree"],
        "shifted": answer["trees"],
    }
    return Probes(answer["plain"], formats, answer["memory"])


async def _ask(store: Path, scratch: Path, ids: ImageIds, namespace: int, reaper: Reaper) -> dict[str, str]:
    """The results of a child process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(_try_all(store, scratch, ids, namespace)).encode())
        finally:
            os._exit(0)
    exited = reaper.watch(pid)
    os.close(write)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.shield(exited)
        answer: dict[str, str] = json.loads(os.read(read, _ANSWER_BYTES))
        if "failed" in answer:
            raise OSError(answer["failed"])
        return answer
    finally:
        os.close(read)


def _try_all(store: Path, scratch: Path, ids: ImageIds, namespace: int) -> dict[str, str]:
    """In a forked child."""
    try:
        found = {"trees": _try_trees(store / "trees")}
        _make_place(scratch, ids)
        found["memory"] = _reason(lambda: _set_attribute("rw/upper", ids))
        if isinstance(ids, LeanIds):
            found["erofs"] = found["tree"] = FEW_IDS
        else:
            found["erofs"] = _reason(lambda: _show_mapped(_mount_index(store), "erofs", namespace))
            found["tree"] = _reason(lambda: _show_mapped(str(store / "trees"), "tree", namespace))
        _enter(ids, namespace)
        for name in _LOWERS:
            found[name] = found.get(name, "") or _reason(lambda: _overlay(name))  # noqa: B023
        return found
    except OSError as error:
        return {"failed": _text_of(error)}


def _make_place(scratch: Path, ids: ImageIds) -> None:
    """Cover the scratch directory by a file system of root, with one of the range's root below it, and work there: its
    own path may be closed to that root."""
    mounts.enter_private_namespace()
    mounts.mount_tmpfs(scratch, size_bytes=_SCRATCH_BYTES, mode=0o755, uid=0)
    os.chdir(scratch)
    for name in (*_LOWERS, "index", "rw", "root"):
        Path(name).mkdir()
    mounts.mount_tmpfs(Path("rw"), size_bytes=_SCRATCH_BYTES, mode=0o755, uid=ids.first)
    with syscalls.file_access_as(ids.first):
        Path("rw/upper").mkdir()
        Path("rw/work").mkdir()


def _try_trees(trees: Path) -> str:
    if not trees.is_dir():
        return "the store has no place for unpacked images: let this version make it (agentenv images list)"
    if os.statvfs(trees).f_flag & os.ST_RDONLY:
        return "unpacked images need the store's trees, which are read-only here (unpack_images of the Nomad job)"
    return ""


def _set_attribute(directory: str, ids: ImageIds) -> None:
    with syscalls.file_access_as(ids.first):
        os.setxattr(directory, "user.overlay.opaque", b"y")
        os.removexattr(directory, "user.overlay.opaque")


def _mount_index(store: Path) -> str:
    """The store's own probe; any image's index where an older version has made the store."""
    place = Path(f"/proc/self/fd/{os.open(store, os.O_PATH)}")  # an option has 255 bytes at most
    index = place / PROBE
    if not index.exists():
        index = next((place / "images").glob("*.idx"), index)
    made = syscalls.make_mount("erofs", [("source", str(index))])
    try:
        syscalls.attach_mount(made, "index")
    finally:
        os.close(made)
    return "index"


def _show_mapped(source: str, target: str, namespace: int) -> None:
    copied = syscalls.copy_mount(source)
    try:
        syscalls.restrict_mount(copied, namespace)
        syscalls.attach_mount(copied, target)
    finally:
        os.close(copied)


def _enter(ids: ImageIds, namespace: int) -> None:
    """Become the root of the namespace, as slotroot does."""
    os.setgroups([])
    os.setresgid(ids.first, ids.first, ids.first)
    os.setresuid(ids.first, ids.first, ids.first)
    syscalls.setns(namespace, syscalls.CLONE_NEWUSER)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.unshare(syscalls.CLONE_NEWNS)


def _overlay(lower: str) -> None:
    syscalls.mount(
        "overlay", "root", "overlay", options=f"lowerdir={lower},upperdir=rw/upper,workdir=rw/work,userxattr"
    )
    syscalls.umount("root")


def _reason(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return _text_of(error)
    return ""


def _text_of(error: BaseException) -> str:
    with contextlib.suppress(AttributeError):
        return str(error.strerror or error)  # type: ignore[attr-defined]
    return str(error) or type(error).__name__

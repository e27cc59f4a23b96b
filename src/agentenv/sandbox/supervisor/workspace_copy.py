"""Copies the workspace of a plain slot into a tar, and out of one into another slot's.

By slottar, as the slot's user, outside of the slot: no process of it may be running.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from agentenv.deadlines import scaled
from agentenv.sandbox.supervisor import child, slot_process
from agentenv.sandbox.supervisor.isolation import USER
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.reaper import Reaper, end_of
from agentenv.sandbox.supervisor.slot_process import SlotSetup

_COPY_S: Final = scaled(40.0)
"""Less than a server waits for a checkpoint (``SEAL_S``): 2 GiB take about 2 s."""
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_WORDS_BYTES: Final = 4096


class WorkspaceCopyError(OSError):
    """slottar could not do it. ``strerror`` says why."""


async def pack(setup: SlotSetup, slot: int, reaper: Reaper, target: int) -> None:
    """Write the slot's workspace, whole, to a file. Its memory counts as the container's. Raises WorkspaceCopyError,
    OSError, TimeoutError."""
    await _run(setup, slot, None, reaper, "pack-whole", {_STDOUT: target})


async def unpack(setup: SlotSetup, slot: int, plan: CgroupPlan | None, reaper: Reaper, source: int) -> None:
    """Put what :func:`pack` wrote into the slot's workspace, which is empty. Its memory counts as the slot's. Raises as
    :func:`pack`."""
    await _run(setup, slot, plan, reaper, "unpack-whole", {_STDIN: source})


async def _run(
    setup: SlotSetup, slot: int, plan: CgroupPlan | None, reaper: Reaper, what: str, descriptors: dict[int, int]
) -> None:
    steps = slot_process.first_steps(setup.launcher, plan, {})
    if setup.identity.mode != USER:
        steps += ["-u", str(setup.identity.slot_uid(slot)), str(setup.identity.slot_gid(slot))]
    program = setup.tree.root / "run/agentenv/slottar"
    words, said = os.pipe()
    try:
        try:
            command = [*steps, "--", str(program), what, str(setup.tree.workspace(slot))]
            pid = child.spawn(command, descriptors, said)
            exited = reaper.watch(pid)
        finally:
            os.close(said)
        try:
            async with asyncio.timeout(_COPY_S):
                status = await asyncio.shield(exited)
        except BaseException as error:
            slot_process.kill_family(pid)
            if isinstance(error, TimeoutError):  # cancelled, the container ends, and nobody tells of exits any more
                await asyncio.wait((exited,), timeout=slot_process.KILL_DEADLINE_S)
            raise
        if status:
            raise WorkspaceCopyError(os.WEXITSTATUS(status), _reason(status, os.read(words, _WORDS_BYTES)))
    finally:
        os.close(words)


def _reason(status: int, words: bytes) -> str:
    """unpack says the path, and its exit code is the error's number."""
    text = words.decode(errors="replace").strip()
    if os.WIFEXITED(status) and (code := os.WEXITSTATUS(status)) != slot_process.FAILED:
        return f"{text}: {os.strerror(code)}"
    return text or end_of(status)

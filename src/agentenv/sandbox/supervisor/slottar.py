"""slottar (``slotagent/tar``), run by the supervisor: it copies files of a slot, outside of it, while no process of
the slot runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Final

from agentenv.deadlines import COPY_S, KILL_DEADLINE_S
from agentenv.sandbox.supervisor import child, slot_process
from agentenv.sandbox.supervisor.reaper import Reaper, end_of

_WORDS_BYTES: Final = 4096


class CopyError(OSError):
    """slottar could not do it. ``strerror`` says why."""


async def run_slottar(command: Sequence[str], descriptors: Mapping[int, int], reaper: Reaper) -> None:
    """Run this command, which starts slottar, to its end. Raises CopyError, OSError; TimeoutError after COPY_S."""
    read_end, write_end = os.pipe()
    try:
        try:
            pid = child.spawn(command, descriptors, write_end)
            exited = reaper.watch(pid)
        finally:
            os.close(write_end)
        try:
            async with asyncio.timeout(COPY_S):
                status = await asyncio.shield(exited)
        except BaseException as error:
            slot_process.kill_family(pid)
            if isinstance(error, TimeoutError):  # cancelled: the container ends, and the reaper reports no more exits
                await asyncio.wait((exited,), timeout=KILL_DEADLINE_S)
            raise
        if status:
            raise CopyError(os.WEXITSTATUS(status), _reason(status, os.read(read_end, _WORDS_BYTES)))
    finally:
        os.close(read_end)


def _reason(status: int, words: bytes) -> str:
    """unpack prints the path, and its exit code is the error's number."""
    text = words.decode(errors="replace").strip()
    if os.WIFEXITED(status) and (code := os.WEXITSTATUS(status)) != slot_process.FAILED:
        return f"{text}: {os.strerror(code)}"
    return text or end_of(status)

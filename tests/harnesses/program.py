"""A Python program that a check runs beside itself."""

from __future__ import annotations

import asyncio
import os
import sys


async def run(*words: str, env: dict[str, str]) -> tuple[int, str]:
    """Run it by this environment's Python, ``env`` added to the variables of this process. Returns: its exit code, and
    both of its outputs in one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        env=os.environ | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        stdin=asyncio.subprocess.DEVNULL,
    )
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()

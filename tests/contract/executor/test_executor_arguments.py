"""A program's arguments and environment are as large as Linux takes them; what execve refuses is data.

The yardstick is the same program started by this machine's own subprocess module.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence

import pytest

from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = 128 * 1024
"""MAX_ARG_STRLEN of Linux: an argument and its end."""
DIGEST = ["sh", "-c", 'printf "%s\\n" "$@" | sha256sum', "sh"]
ARGUMENTS = {
    "one of 64 KiB": ["x" * 65_536],
    "one of 70 kB, of two bytes each": ["é" * 35_000],
    "the longest": ["x" * (ONE - 1)],
    "one byte longer": ["x" * ONE],
    "more than a packet": ["y" * 1000] * 66,
    "nearly 2 MiB": [" '\"\\\n" * 20_000] * 18,
    "3 MiB": ["z" * 100_000] * 31,
    "20,000 small ones": ["a", ""] * 10_000,
}


def by_subprocess(argv: Sequence[str], env: Mapping[str, str]) -> bytes | None:
    """What it prints; None when the kernel refuses it."""
    try:
        return subprocess.run(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True).stdout
    except OSError:
        return None


async def test_more_than_any_program_could_have(session: ToolSession) -> None:
    """Its program is not started: a result of the typed methods, a refusal of what a model wrote."""
    done = await ToolContext(session).exec([*DIGEST, *["z" * 100_000] * 64])
    assert (done.exit_code, done.stderr) == (126, "sh: Argument list too long\n")
    refused = await session.call("bash", {"command": "true", "env": {f"V{n}": "é" * 50_000 for n in range(70)}})
    assert (refused.fault, refused.error) == ("model", "invalid_arguments")
    assert refused.message.startswith("env: ")


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_arguments(session: ToolSession, name: str) -> None:
    argv = [*DIGEST, *ARGUMENTS[name]]
    expected = by_subprocess(argv, {})
    done = await ToolContext(session).exec(argv)
    if expected is None:
        assert (done.exit_code, done.stdout_bytes) == (126, b"")
        assert done.stderr == "sh: Argument list too long\n"
    else:
        assert (done.exit_code, done.stdout_bytes, done.stderr) == (0, expected, "")


@pytest.mark.parametrize(("count", "size"), [(1, 65_536), (1, ONE - 3), (1, ONE), (18, 100_000), (40, 100_000)])
async def test_environments(session: ToolSession, count: int, size: int) -> None:
    """Of a shell, of a program, of a session's shell and of a background process."""
    env = {chr(ord("A") + n % 26) + str(n): "é" * (size // 2) for n in range(count)}
    text = f'printf %s "${next(iter(env))}" | sha256sum'
    expected = by_subprocess(["bash", "-c", text], env)
    shell = await session.call("bash", {"command": text, "env": env})
    program = await session.call("bash", {"command": text, "env": env, "argv": ["bash", "-c", text]})
    assert (shell.fault, program.fault) == ("none", "none")
    process = await ToolContext(session).start(text, env=env)
    ended = await process.wait(30)
    if expected is None:
        assert (shell.exit_code, program.exit_code, ended) == (126, 126, 126)
        assert "Argument list too long" in shell.stderr
        assert "Argument list too long" in program.stderr
    else:
        assert (shell.stdout.encode(), program.stdout.encode()) == (expected, expected)
        assert (ended, await process.read()) == (0, expected)
        assert expected.split()[0].decode() == hashlib.sha256(next(iter(env.values())).encode()).hexdigest()

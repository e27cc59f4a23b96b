"""Random content and commands through every call, against this machine's own bash and the bytes themselves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.config import ExecutorSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.tool_context import ToolContext
from tests.contract.executor.farm import ProxiedPool
from tests.faults.proxy import Proxy
from tests.sizes import around, byte_constants
from tests.sweeps import Sweep
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGEST_BYTES = 2_500_000
CHARACTERS = "ax \t\n\r\x00\x01\x7f\"'\\$`é\u0301\u2028\u4e16\U0001f600"
ENDS = ("", "\n", "\r", "\r\n", "\0", "\u4e16", "\n\n")
Road = Callable[[ToolContext, bytes], Awaitable[None]]


def some_size(random: Random) -> int:
    constant = random.choice(byte_constants())
    return min(LARGEST_BYTES, random.choice(around(constant)))


def some_content(random: Random) -> bytes:
    """Bytes that may be no text, or text of one character or of many, with an end of its own."""
    size = some_size(random)
    if random.random() < 0.3:
        return random.randbytes(size)
    unit = "".join(random.choices(CHARACTERS, k=random.choice([1, 1, 7, 64])))
    return (unit * (size // len(unit.encode()) + 1)).encode()[:size] + random.choice(ENDS).encode()


# -- roads by which content gets into the file `f` of the slot, or out of a program and back -------------------


async def by_write_file(slot: ToolContext, content: bytes) -> None:
    assert await slot.write_file("f", content) == len(content)


async def by_write_text(slot: ToolContext, content: bytes) -> None:
    with contextlib.suppress(UnicodeDecodeError):
        await slot.write_file("f", content.decode())
        return
    await by_write_file(slot, content)


async def by_a_model(slot: ToolContext, content: bytes) -> None:
    data = base64.b64encode(content).decode()
    result = await slot.call_tool("write_file", json.loads(json.dumps({"path": "f", "data": data})))
    assert result.exit_code == 0


async def by_stdin(slot: ToolContext, content: bytes) -> None:
    done = await slot.exec(["tee", "f"], stdin=content, output_bytes=2 * LARGEST_BYTES)
    assert (done.exit_code, done.stdout_bytes) == (0, content)


async def by_archive(slot: ToolContext, content: bytes) -> None:
    await slot.write_file("in/f", content)
    archive = (await slot.archive("in")).data
    assert archive is not None
    await slot.extract(archive, ".")


async def by_transfer(slot: ToolContext, content: bytes, place: Path) -> None:
    (place / "up").write_bytes(content)
    await slot.upload(place / "up", "f")
    await slot.download("f", place / "down")
    assert (place / "down").read_bytes() == content


async def by_process(slot: ToolContext, content: bytes) -> None:
    process = await slot.start("cat > f")
    await process.write(content)
    await process.close_input()
    assert await process.wait(60) == 0


async def by_patch(slot: ToolContext, content: bytes) -> None:
    """The content as lines that replace others, where it is such text."""
    lines = content.split(b"\n")
    text = b"".join(b"+" + line + b"\n" for line in lines).decode(errors="replace")
    if not content or "\ufffd" in text or "\0" in text or "\r" in text:
        await by_write_file(slot, content)
        return
    await slot.write_file("f", "old\n")
    end = "\\ No newline at end of file\n" if lines[-1] else ""
    body = text if end else text.removesuffix("+\n")
    count = body.count("\n")
    await slot.patch(f"--- a/f\n+++ b/f\n@@ -1 +1,{count} @@\n-old\n{body}{end}")


ROADS: tuple[Road, ...] = (*(by_write_file, by_write_text, by_a_model, by_stdin, by_archive, by_process, by_patch),)


async def check_content(slot: ToolContext, content: bytes) -> None:
    """Against the slot's own sha256sum, and read back by two calls."""
    summed = await slot.terminal("sha256sum < f")
    assert summed.stdout.split()[0] == hashlib.sha256(content).hexdigest(), (len(content), content[:40])
    assert await slot.read_file("f", binary=True) == content
    read = await slot.read_artifact("f")
    assert (read.data or b"", read.total_bytes) == (content, len(content))


async def test_content_takes_any_road(session: ToolSession, sweep: Sweep, tmp_path: Path) -> None:
    slot = ToolContext(session)

    async def transferred(slot: ToolContext, content: bytes) -> None:
        await by_transfer(slot, content, tmp_path)

    for random in sweep.cases():
        content = some_content(random)
        await random.choice((*ROADS, transferred))(slot, content)
        await check_content(slot, content)


# -- commands, against bash ------------------------------------------------------------------------------------

# Not a quote that nobody closes: a shell that evaluates its command ends with 2 then, and `bash -c` with the code of
# the lines before.
FRAGMENTS = (
    "echo {word}",
    "printf '%s' {word}",
    "printf {octal}",
    "echo {word} >&2",
    "cat",
    "head -c {count}",
    "wc -c",
    "for i in 1 2 3; do echo $i {word}; done",
    "seq {count} | tail -n 3",
    "false",
    "(exit {code})",
    "! true",
    ": {word}",
    'read -r line; echo "[$line]"',
    'x={word}; echo "${{#x}}"',
    "cat <<'END'\n{line}\nEND\n:",
    "set -- {word}; echo $#",
    'f() {{ echo "$1"; return {code}; }}; f {word}',
    "trap 'echo bye' EXIT",
    "echo $0 $#",
    "echo {word} | tr a-z A-Z",
    "printf '{octal}' | od -An -tx1",
    "{{ echo a; echo b >&2; }} 2>&1",
    "exit {code}",
    "if",
    "yes {word} | head -n {count}",
    "mkdir -p d && cd d && pwd | sed 's,.*/,,'",
    "ls nothing 2>/dev/null || echo no",
)


def some_command(random: Random) -> str:
    def fragment() -> str:
        return random.choice(FRAGMENTS).format(
            word=shlex.quote("".join(random.choices(CHARACTERS.replace("\0", ""), k=random.randrange(9)))),
            line="".join(random.choices("ab $'\"\\`é", k=random.randrange(30))),
            octal="".join(f"\\\\{random.randrange(1, 256):03o}" for _ in range(random.randrange(6))) or "x",
            count=random.choice([0, 1, 2, 5000, random.randrange(70_000)]),
            code=random.randrange(256),
        )

    separators = random.choices(["\n", "; ", " && ", " || ", " | ", " & wait\n"], k=4)
    text = "".join(part for separator in separators for part in (fragment(), separator)) + fragment()
    # At the end, when nothing runs beside it any more.
    return text if random.random() < 0.8 else f"{text}\nkill -{random.choice(['TERM', 'KILL', 'HUP', 'USR1'])} $$"


def by_bash(command: str, stdin: bytes, cwd: Path) -> tuple[int, bytes, bytes]:
    """Exit code (as a shell tells it), stdout and stderr of this machine's own bash, whose standard input is a file."""
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        done = subprocess.run(["bash", "-c", command], stdin=file, capture_output=True, cwd=cwd, env=env, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stdout, done.stderr


async def test_commands_end_and_print_as_under_bash(session: ToolSession, sweep: Sweep, tmp_path: Path) -> None:
    slot = ToolContext(session)
    for number, random in enumerate(sweep.cases()):
        command, stdin = some_command(random), some_content(random)[: random.choice([0, 10, 100_000])]
        here = tmp_path / str(number)
        here.mkdir()
        code, stdout, stderr = by_bash(command, stdin, here)
        await session.call("bash", {"command": "rm -rf w; mkdir w"})
        given: dict[str, Any] = {"command": command, "cwd": "w", "env": {"LC_ALL": "C"}}
        result = await slot.call_tool("bash", {**given, "stdin_data": stdin, "output_bytes": LARGEST_BYTES})
        assert (result.exit_code, result.stdout) == (code, stdout.decode(errors="replace")), command
        assert shell_lines(result.stderr) == shell_lines(stderr.decode(errors="replace")), command


def shell_lines(stderr: str) -> list[str]:
    """Without the prefix that tells in which line of which script bash found a fault: a command of ours is evaluated,
    and bash counts its lines from another one."""
    return sorted(line.rpartition(": line ")[2].partition(": ")[2] or line for line in stderr.splitlines())


# -- many at once, over connections that are cut ---------------------------------------------------------------


async def test_a_crowd_keeps_its_content_apart(executor: ToolExecutor, sweep: Sweep) -> None:
    """Twenty sessions on four slots, whose container's connections are cut again and again."""
    settings = ExecutorSettings(reconnect_deadline_s=60)
    pool: Any = executor.pool
    async with Proxy(0) as proxy, type(executor)(ProxiedPool(pool, proxy), executor.catalog, settings) as cut:
        for random in sweep.cases():
            cutting = asyncio.create_task(_cut_often(proxy, Random(random.random())))
            async with asyncio.TaskGroup() as group:
                for member in range(20):
                    group.create_task(_one_of_many(cut, Random(random.random()), f"m{member}"))
            cutting.cancel()
        assert proxy.cuts > 0


async def _cut_often(proxy: Proxy, random: Random) -> None:
    while True:
        await asyncio.sleep(random.uniform(0.05, 1))
        proxy.cut()


async def _one_of_many(executor: ToolExecutor, random: Random, name: str) -> None:
    async with executor.open(name, acquire_timeout_s=START_S) as session:
        slot = ToolContext(session)
        for _ in range(2):
            content = name.encode() + some_content(random)
            await random.choice(ROADS)(slot, content)
            await check_content(slot, content)

"""What a signal does while a command closes, and after that."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CLOSED_AT_END = """
import asyncio, sys
from agentenv.agent.shutdown import closed_at_end

async def close():
    print("closing", flush=True)

async def main():
    async with closed_at_end(close):
        print("up", flush=True)
        await asyncio.sleep(1000)

try:
    asyncio.run(main())
finally:
    print("closed", flush=True)
    sys.stdin.read()
    print("written", flush=True)
"""


@pytest.mark.parametrize("further", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("first", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_another_signal_does_not_interrupt_what_is_written_after_the_closing(
    first: signal.Signals, status: int, further: signal.Signals
) -> None:
    argv = [sys.executable, "-c", CLOSED_AT_END]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(first)
        assert [process.stdout.readline() for _ in range(2)] == [b"closing\n", b"closed\n"]
        process.send_signal(further)
        said, _ = process.communicate()
    assert (said, process.returncode) == (b"written\n", status)

"""Our ends of a program's streams (:mod:`agentenv.sessions.ends`), over the poller of the sandbox server."""

from __future__ import annotations

import asyncio
import socket

from agentenv.sandbox.server.poller import Lane, Poller
from agentenv.sessions.ends import ReadEnd, Watcher


async def test_whoever_waits_for_a_stream_does_not_keep_the_poller_going_round() -> None:
    looked = 0

    def clock() -> float:
        nonlocal looked
        looked += 1
        return looked * 1e-6  # a thousand looks are one turn

    poller = Poller(asyncio.get_running_loop(), clock)
    lane = Lane(poller)
    ours, theirs = socket.socketpair()
    end = ReadEnd(Watcher(lane.loop, lane.add, lane.remove), ours.detach())
    try:
        with theirs:
            for number in range(10):
                reading = asyncio.create_task(end.read(100))
                await asyncio.sleep(0)
                theirs.sendall(b"%d" % number)
                assert await reading == b"%d" % number
            assert looked <= 10 * 10
            reading = asyncio.create_task(end.read(100))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            theirs.sendall(b"not lost")
            assert await end.read(100) == b"not lost"
        assert await end.read(100) == b""
    finally:
        end.close()
        poller.close()

"""Whether a container can be reached directly, asked by a loop that has other things to do."""

from __future__ import annotations

import asyncio
import socket
import time

from agentenv.farm_client.client import reachable
from tests.waiting import loop_turns


async def test_a_loop_that_was_held_while_it_connected_has_reached_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = asyncio.create_task(reachable(f"http://127.0.0.1:{server.getsockname()[1]}", 0.4))
        await loop_turns(2)
        time.sleep(1.0)
        assert await asked


async def test_where_nothing_listens_it_is_not() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert not await reachable(f"http://127.0.0.1:{nobody.getsockname()[1]}", 60)

"""Requests to one container: how many leases of it are under way at a time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agentenv.config import PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ConnectionLostError
from agentenv.slots.commands import Grant
from agentenv.slots.container_link import ContainerLink, RequestLimits
from agentenv.wire.leases import LeaseGrant, LeaseKey, LeaseRequest
from agentenv.wire.roots import RootSpec

IMAGE = RootSpec(image="sha256:" + "0" * 64)


class Requests:
    """Leases that a container was asked for and has not granted."""

    def __init__(self) -> None:
        self.open: list[tuple[LeaseRequest, asyncio.Future[LeaseGrant]]] = []

    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> LeaseGrant:
        granted: asyncio.Future[LeaseGrant] = asyncio.get_running_loop().create_future()
        self.open.append((request, granted))
        async with asyncio.timeout(timeout_s):
            return await granted

    def grant(self) -> int:
        """The earliest; returns its slot."""
        request, granted = self.open.pop(0)
        key = LeaseKey(slot=request.slot, epoch=1, secret="s" * 16)
        granted.set_result(LeaseGrant(key=key, trajectory=request.trajectory, ttl_s=request.ttl_s))
        return request.slot


def link_with(requests: Requests, **settings: Any) -> ContainerLink:
    handle = ContainerHandle("c", 0, "http://127.0.0.1:1", "token", 10)
    link = ContainerLink(handle, None, PoolSettings(**settings), RequestLimits(), time.monotonic)
    link.control = requests  # type: ignore[assignment]
    return link


def asked(link: ContainerLink, *slots: int, root: RootSpec | None = None) -> list[asyncio.Task[int]]:
    deadline = time.monotonic() + 60
    return [asyncio.create_task(link.lease(Grant(slot, "c", slot, f"t{slot}", deadline, root=root))) for slot in slots]


async def under_way(requests: Requests) -> list[int]:
    """The slots of the leases that the container has been asked for, after everything else has run."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [request.slot for request, _ in requests.open]


async def test_a_container_is_asked_for_two_plain_leases_at_a_time_in_order() -> None:
    requests = Requests()
    leases = asked(link_with(requests), 0, 1, 2, 3)
    assert await under_way(requests) == [0, 1]
    assert requests.grant() == 0
    assert await under_way(requests) == [1, 2]
    for _ in range(3):
        requests.grant()
        await under_way(requests)
    assert await asyncio.gather(*leases) == [1, 1, 1, 1]


async def test_leases_with_a_root_wait_for_nobody() -> None:
    """One may take a minute: an image is mounted for it."""
    requests = Requests()
    link = link_with(requests)
    leases = asked(link, 0, 1, 2, root=IMAGE) + asked(link, 3, 4, 5)
    assert await under_way(requests) == [0, 1, 2, 3, 4]
    for _ in range(6):
        requests.grant()
        await under_way(requests)
    assert len(await asyncio.gather(*leases)) == 6


async def test_a_lease_that_waits_behind_unanswered_ones_is_lost_in_time() -> None:
    """Its container does not answer, whoever of them was asked first."""
    requests = Requests()
    leases = asked(link_with(requests, suspect_after_s=0.2, gone_after_s=1.0), 0, 1, 2)
    ended = await asyncio.gather(*leases, return_exceptions=True)
    assert [type(each) for each in ended] == [ConnectionLostError] * 3
    assert "did not answer a lease within 0.2 s" in str(ended[2])


async def test_a_lease_that_is_cancelled_leaves_its_place() -> None:
    requests = Requests()
    leases = asked(link_with(requests), 0, 1, 2, 3)
    assert await under_way(requests) == [0, 1]
    for each in leases[:3]:
        each.cancel()
    await asyncio.gather(*leases[:3], return_exceptions=True)
    assert await under_way(requests) == [0, 1, 3], "the container has been asked for 0 and 1, which are undone later"
    leases[3].cancel()

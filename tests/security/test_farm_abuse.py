"""What one run's token, or nobody's, can do to a farm that others use. The table has a row for each attempt: what is
sent, and what must be true of the farm afterwards; while it is made, a neighbour leases as before.

``python -m benchmarks.abuse`` makes the same kinds of attempts for longer, and measures the neighbour.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import pytest

from agentenv.api.farm_server import access as accesses
from agentenv.api.farm_server import request_queue
from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.settings import AskLimits, LeaseLimits
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import QuotaError
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.sharing import FairShare
from agentenv.wire import farm as wire
from tests.farm_service import KEYS, Served, served, token
from tests.waiting import DEADLINE_S

RATE: Final = 50
BAD: Final = 3
"""Malformed bodies that a token may send."""
TWO: Final = PoolSettings(min_containers=2, max_containers=2)
SLOTS: Final = 4
JSON: Final = {"Content-Type": "application/json"}


@pytest.fixture
async def farm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(accesses, "_MALFORMED", AskLimits(asks_per_s=BAD / 1000, burst=BAD))  # in 1000 s
    # All of a test is in one window of each limit, however long it takes.
    monkeypatch.setattr("limits.storage.memory.time", SimpleNamespace(time=lambda: 1_000_500.0))
    access = Access(KEYS, limits=AskLimits(asks_per_s=RATE, burst=RATE))
    backend = FakeBackend(ContainerSettings(slots_per_container=SLOTS))
    async with served(backend, TWO, access=access) as one:
        yield one


@pytest.fixture
async def attacker(farm: Served) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {token('attacker')}"}
    async with aiohttp.ClientSession(farm.url, headers=headers) as session:
        yield session


def ask(trajectories: int = 1, **more: Any) -> dict[str, Any]:
    names = [f"t{number}" for number in range(trajectories)]
    return {"request_id": secrets.token_hex(16), "trajectories": names, **more}


async def post(attacker: aiohttp.ClientSession, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with attacker.post(path, data=data, headers=JSON) as reply:
        return reply.status, await reply.json()


async def neighbour_leases(farm: Served) -> None:
    async with asyncio.timeout(DEADLINE_S), farm.pool("neighbour") as pool:
        lease = await pool.lease("n")
        await lease.release()


# -- the attempts ----------------------------------------------------------------------------------------


def _many_fields() -> bytes:
    return json.dumps({f"k{number}": 1 for number in range(50_000)}).encode()


async def _bad_bodies(_: Served, attacker: aiohttp.ClientSession, path: str, body: bytes) -> None:
    statuses: Counter[int] = Counter()
    for _number in range(BAD + 2):
        status, error = await post(attacker, path, body)
        statuses[status] += 1
        assert len(error["message"]) < 500, "the first error only"
    assert statuses == {400: BAD, 429: 2}


async def _bad_bodies_at_once(_: Served, attacker: aiohttp.ClientSession, path: str) -> None:
    answers = await asyncio.gather(*(post(attacker, path, _many_fields()) for _ in range(4 * BAD)))
    assert Counter(status for status, _ in answers) == {400: BAD, 429: 3 * BAD}


async def _unknown_cancelled(farm: Served, attacker: aiohttp.ClientSession) -> None:
    statuses: Counter[int] = Counter()
    for number in range(2 * RATE):
        async with attacker.delete(f"/v1/asks/{number:016d}") as reply:
            statuses[reply.status] += 1
    assert statuses == {200: RATE, 429: RATE}
    assert sum(map(len, farm.farm.queue._cancelled.values())) <= RATE


async def _long_names(farm: Served, attacker: aiohttp.ClientSession) -> None:
    for method in ("GET", "DELETE"):
        for name in ("x" * 101, "x" * 30_000, "x" * 15, "x%20y" * 5):
            async with attacker.request(method, f"/v1/asks/{name}") as reply:
                assert (reply.status, (await reply.json())["error"]) == (400, "protocol")
    assert not farm.farm.queue._cancelled


async def _cancelled_of_its_own(farm: Served, attacker: aiohttp.ClientSession) -> None:
    for _ in range(RATE // 2):
        asked = ask()
        assert (await post(attacker, "/v1/asks", {"asks": [asked]}))[0] == 200
        async with attacker.delete(f"/v1/asks/{asked['request_id']}") as reply:
            assert (await reply.json())["cancelled"] is True
    assert len(farm.farm.queue._cancelled["attacker"]) <= RATE // 2


async def _endless_leases(_: Served, attacker: aiohttp.ClientSession) -> None:
    status, error = await post(attacker, "/v1/asks", {"asks": [ask(ttl_s=86_400)]})
    assert (status, error["error"]) == (400, "quota")
    assert "lease_ttl_s" in error["message"]


async def _large_groups(_: Served, attacker: aiohttp.ClientSession) -> None:
    status, found = await post(attacker, "/v1/asks", {"asks": [ask(SLOTS + 1), ask(SLOTS)]})
    assert status == 200
    refused, fits = found["asks"]
    assert (refused["state"], refused["error"]["error"]) == ("refused", "quota")
    assert fits["state"] != "refused"


async def _groups_withdrawn(_: Served, attacker: aiohttp.ClientSession) -> None:
    for _number in range(RATE // 2):
        asked = ask(SLOTS)
        await post(attacker, "/v1/asks", {"asks": [asked]})
        async with attacker.delete(f"/v1/asks/{asked['request_id']}"):
            pass


Attempt = Callable[[Served, aiohttp.ClientSession], Awaitable[None]]
ATTEMPTS: Final[dict[str, Attempt]] = {
    "bodies of 50,000 unknown fields": lambda farm, one: _bad_bodies(farm, one, "/v1/asks", _many_fields()),
    "the same for a route of FastAPI": lambda farm, one: _bad_bodies(farm, one, "/execute", _many_fields()),
    "many of them at once": lambda farm, one: _bad_bodies_at_once(farm, one, "/v1/asks"),
    "many of them at once for a route of FastAPI": lambda farm, one: _bad_bodies_at_once(farm, one, "/execute"),
    "bodies that are no JSON": lambda farm, one: _bad_bodies(farm, one, "/v1/leases/release", b"[" * 100_000),
    "a field of a long name": lambda farm, one: _bad_bodies(farm, one, "/v1/asks", b'{"' + b"x" * 100_000 + b'": 1}'),
    "asks cancelled that never were": _unknown_cancelled,
    "asks of names that are none": _long_names,
    "asks cancelled at once": _cancelled_of_its_own,
    "leases for a day": _endless_leases,
    "groups above a quarter of the farm": _large_groups,
    "groups withdrawn at once": _groups_withdrawn,
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
async def test_an_attempt_costs_whoever_makes_it(farm: Served, attacker: aiohttp.ClientSession, attempt: str) -> None:
    await asyncio.gather(ATTEMPTS[attempt](farm, attacker), neighbour_leases(farm))
    await neighbour_leases(farm)


# -- what many share -------------------------------------------------------------------------------------


async def test_places_are_computed_once_for_all_who_ask_within_a_moment(
    farm: Served, attacker: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "_FORECAST_S", 3600.0)
    computed: list[int] = []
    upcoming = FairShare.upcoming

    def counted(line: FairShare, limit: int = 1000) -> dict[int, int]:
        computed.append(limit)
        return upcoming(line, limit)

    monkeypatch.setattr(FairShare, "upcoming", counted)
    asks = [ask() for _ in range(RATE // 2)]
    await post(attacker, "/v1/asks", {"asks": asks})
    for one in asks:
        async with attacker.get(f"/v1/asks/{one['request_id']}") as reply:
            assert reply.status == 200
            found = await reply.json()
            assert found["place"] is None or found["place"]["waited_s"] >= 0
    assert len(computed) <= 1


async def test_answers_held_back_until_the_same_moment_let_others_in_between(
    farm: Served, attacker: aiohttp.ClientSession
) -> None:
    """Each is made in a round of the event loop of its own."""
    queue, loop = farm.farm.queue, asyncio.get_running_loop()
    await post(attacker, "/v1/asks", {"asks": [ask(SLOTS), ask(SLOTS)]})  # the farm is full
    rounds = 0

    def count() -> None:
        nonlocal rounds
        rounds += 1
        loop.call_soon(count)

    polls = [
        asyncio.create_task(queue.ask(wire.AsksRequest(asks=(wire.Ask(**ask()),), wait_s=0.2), f"run-{i}"))
        for i in range(40)
    ]
    ended: list[int] = []
    for poll in polls:
        poll.add_done_callback(lambda _: ended.append(rounds))
    count()
    await asyncio.wait_for(asyncio.gather(*polls), DEADLINE_S)
    assert len(set(ended)) >= len(polls) // 2


async def test_a_pool_whose_leases_last_too_long_is_told_which_setting_to_change(farm: Served) -> None:
    farm.farm.queue.limits = LeaseLimits(max_ttl_s=20)
    settings = PoolSettings(lease_ttl_s=25)
    async with FarmPool(farm.access("trainer"), settings=settings) as pool:
        with pytest.raises(QuotaError, match="lease_ttl_s"):
            await pool.lease("t")

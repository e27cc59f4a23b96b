"""``python -m benchmarks.abuse``: what a farm's neighbours see while somebody abuses it. Each deed is done for some
seconds by a process of its own, with the token of a run of little weight, or with none; meanwhile a run of weight 1
leases and releases slots, and ``/health`` is asked. Prints a table; exits with 1 when a bound is broken.

Functional versions of the same, without times, are tests/security/test_farm_abuse.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from agentenv.farm_client.client import FarmClient
from agentenv.wire.farm import TokenRequest
from benchmarks.measure import MIB, percentile
from benchmarks.processes import descriptors, rss_bytes
from benchmarks.service import FarmService
from tests.farm_process import FarmProcess

SLOTS: Final = 20
AT_ONCE: Final = 2 * SLOTS
"""Leases that the neighbour wants at once: more than there are slots."""
HELD_S: Final = 0.5
OTHER_PEER: Final = ("127.0.0.2", 0)
"""Where the deeds come from: to the service another machine."""
SETTINGS: Final = f"""
backend = "fake"
[pool]
min_containers = 2
max_containers = 2
[containers]
slots_per_container = {SLOTS // 2}
[runs."deeds"]
weight = 0.001
"""


@dataclass(frozen=True)
class Seen:
    """By the neighbour, and of the service's process."""

    health_p99_ms: float
    health_max_ms: float
    leases_per_s: float
    rss_mib: float
    files: int
    """That the service's process has open."""


@dataclass(frozen=True)
class Bounds:
    """Against the same without a deed."""

    health: float = 3.0
    """How many times as long ``/health`` may take (p99), once it takes more than ``HEALTH_MS``."""
    leases: float = 0.7
    """The part of the leases that is left."""
    rss_mib: float = 64.0
    """What the service's memory may grow by."""


HEALTH_MS: Final = 250.0
BOUNDS: Final = Bounds()


# -- the deeds: each goes on until it is cancelled ---------------------------------------------------------

Deed = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


async def nothing(_: aiohttp.ClientSession, __: str) -> None:
    """What the others are measured against."""
    await asyncio.Event().wait()


async def silent_connections(_: aiohttp.ClientSession, url: str) -> None:
    """3,000 connections that ask nothing, opened again when they are closed."""
    where = urlsplit(url)

    async def one() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(where.hostname, where.port, local_addr=OTHER_PEER)
                writer.write(b"GET / HT")
                await reader.read()
                writer.close()
            except OSError:
                pass
            await asyncio.sleep(1)

    await asyncio.gather(*(one() for _ in range(3_000)))


async def endless_headers(_: aiohttp.ClientSession, url: str) -> None:
    """Headers without an end."""
    where = urlsplit(url)
    while True:
        try:
            _reader, writer = await asyncio.open_connection(where.hostname, where.port, local_addr=OTHER_PEER)
            writer.write(b"GET / HTTP/1.1\r\n")
            for number in range(4_000):
                writer.write(b"X-%d: " % number + b"x" * 100_000 + b"\r\n")
                await writer.drain()
        except OSError:
            await asyncio.sleep(0.05)


async def bad_bodies(http: aiohttp.ClientSession, _: str) -> None:
    """Four senders of bodies of 80,000 unknown fields."""
    body = json.dumps({f"k{number}": 1 for number in range(80_000)}).encode()

    async def one() -> None:
        while True:
            async with http.post("/v1/asks", data=body, headers={"Content-Type": "application/json"}) as reply:
                await reply.read()

    await asyncio.gather(*(one() for _ in range(4)))


async def unknown_cancelled(http: aiohttp.ClientSession, _: str) -> None:
    """Asks cancelled that never were, under long names and short ones."""

    async def one(size: int) -> None:
        while True:
            async with http.delete(f"/v1/asks/{secrets.token_hex(size)}") as reply:
                await reply.read()

    await asyncio.gather(*(one(size) for size in (16, 16, 3_000, 3_000)))


async def polls_that_end_together(http: aiohttp.ClientSession, _: str) -> None:
    """1,000 asks that wait, all for the same time."""

    async def one(name: str) -> None:
        asked = {"asks": [{"request_id": name, "trajectories": [name]}], "wait_s": 3}
        async with http.post("/v1/asks", json=asked) as reply:
            await reply.read()

    names = [secrets.token_hex(16) for _ in range(1_000)]
    while True:
        await asyncio.gather(*map(one, names))


async def groups_withdrawn(http: aiohttp.ClientSession, _: str) -> None:
    """A group as large as may be, withdrawn when half of its slots are idle, and asked for again."""
    while True:
        asked = {"request_id": secrets.token_hex(16), "trajectories": [f"g{number}" for number in range(SLOTS // 2)]}
        async with http.post("/v1/asks", json={"asks": [asked]}) as reply:
            state: dict[str, Any] = (await reply.json())["asks"][0]
        until = time.monotonic() + 5
        while state["state"] == "waiting" and state["place"]["free"] < SLOTS // 4 and time.monotonic() < until:
            await asyncio.sleep(0.05)
            async with http.get(f"/v1/asks/{asked['request_id']}") as reply:
                state = await reply.json()
        async with http.delete(f"/v1/asks/{asked['request_id']}") as reply:
            await reply.read()


async def leases_of_no_length(http: aiohttp.ClientSession, _: str) -> None:
    """Leases that are released as soon as they are had."""

    async def one(name: str) -> None:
        while True:
            request = {"request_id": secrets.token_hex(16), "trajectories": [name]}
            async with http.post("/v1/asks", json={"asks": [request], "wait_s": 2}) as reply:
                await reply.read()
            async with http.delete(f"/v1/asks/{request['request_id']}") as reply:
                await reply.read()

    await asyncio.gather(*(one(f"t{number}") for number in range(AT_ONCE)))


DEEDS: Final[Mapping[str, Deed]] = MappingProxyType(
    {
        deed.__name__: deed
        for deed in (
            nothing,
            silent_connections,
            endless_headers,
            bad_bodies,
            unknown_cancelled,
            polls_that_end_together,
            groups_withdrawn,
            leases_of_no_length,
        )
    }
)


async def _do(deed: str, url: str) -> None:
    """The process of a deed: the token comes first, and the end of its input ends it."""
    token = (await asyncio.to_thread(sys.stdin.readline)).strip()
    connector = aiohttp.TCPConnector(limit=0, local_addr=OTHER_PEER)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, connector=connector, headers=headers) as http:
        doing = asyncio.ensure_future(DEEDS[deed](http, url))
        await asyncio.to_thread(sys.stdin.read)
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


# -- what the neighbour sees ------------------------------------------------------------------------------


async def _seen(service: FarmService, deed: str, token: str, seconds: float) -> Seen:
    """What is seen while the deed is done."""
    command = (sys.executable, "-m", "benchmarks.abuse", "--do", deed, "--url", service.url)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"{token}\n".encode())
    waits: list[float] = []
    leases = 0
    try:
        await asyncio.sleep(1)  # it has begun
        until = time.monotonic() + seconds

        async def ask_health() -> None:
            async with aiohttp.ClientSession(service.url) as http:
                while time.monotonic() < until:
                    began = time.perf_counter()
                    async with http.get("/health") as reply:
                        await reply.read()
                    waits.append(time.perf_counter() - began)
                    await asyncio.sleep(0.02)

        async def lease(name: str) -> None:
            nonlocal leases
            while time.monotonic() < until:
                held = await pool.lease(name)
                leases += 1
                await asyncio.sleep(HELD_S)
                await held.release()

        async with service.pool("neighbour") as pool:
            await asyncio.gather(ask_health(), *(lease(f"n{number}") for number in range(AT_ONCE)))
        pid = service.process.pid
        rss_mib, files = rss_bytes(pid) / MIB, descriptors(pid)
    finally:
        process.stdin.close()
        await process.wait()
    return Seen(1e3 * percentile(waits, 0.99), 1e3 * max(waits), leases / seconds, rss_mib, files)


def broken(seen: Seen, usual: Seen, bounds: Bounds = BOUNDS) -> list[str]:
    """What is out of bounds."""
    found = {
        f"/health p99 {seen.health_p99_ms:.0f} ms": seen.health_p99_ms
        > max(HEALTH_MS, bounds.health * usual.health_p99_ms),
        f"{seen.leases_per_s:.1f} leases/s of {usual.leases_per_s:.1f}": seen.leases_per_s
        < bounds.leases * usual.leases_per_s,
        f"memory +{seen.rss_mib - usual.rss_mib:.0f} MiB": seen.rss_mib - usual.rss_mib > bounds.rss_mib,
    }
    return [what for what, is_broken in found.items() if is_broken]


@asynccontextmanager
async def _service() -> AsyncIterator[tuple[FarmService, str]]:
    """A farm, and the token of the run that does the deeds."""
    directory = Path(mkdtemp(prefix="agentenv-abuse-"))
    process = FarmProcess(directory, settings=SETTINGS)
    try:
        await process.start()
        service = FarmService(process.url, await process.token("*"), SLOTS, process)
        await service.settled()
        async with FarmClient(service.url, service.token) as client:
            minted = await client.mint(TokenRequest(run="deeds", scope="run", expires_s=3_600))
        yield service, minted.token
    finally:
        await process.end(kept=False)
        shutil.rmtree(directory, ignore_errors=True)


async def _measure(deeds: list[str], seconds: float) -> int:
    row = "{:<26}{:>12}{:>12}{:>12}{:>10}{:>8}  {}"
    print(row.format("deed", "health p99", "health max", "leases/s", "RSS MiB", "files", "out of bounds"))
    failed, usual = False, None
    async with _service() as (service, token):
        for deed in ("nothing", *(deed for deed in deeds if deed != "nothing")):
            seen = await _seen(service, deed, token, seconds)
            usual = usual or seen
            wrong = broken(seen, usual)
            failed |= bool(wrong)
            health = (f"{seen.health_p99_ms:.0f} ms", f"{seen.health_max_ms:.0f} ms")
            figures = (f"{seen.leases_per_s:.1f}", f"{seen.rss_mib:.0f}", seen.files)
            print(row.format(deed, *health, *figures, ", ".join(wrong) or "–"), flush=True)
    return 1 if failed else 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("--only", default=",".join(DEEDS), help="comma-separated deeds (default: all)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each deed (default: 15)")
    parser.add_argument("--do", choices=DEEDS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        asyncio.run(_do(given.do, given.url))
        return 0
    if unknown := set(given.only.split(",")) - set(DEEDS):
        parser.error(f"unknown deed {min(unknown)}; there are {', '.join(DEEDS)}")
    return asyncio.run(_measure(given.only.split(","), given.seconds))


if __name__ == "__main__":
    sys.exit(main())

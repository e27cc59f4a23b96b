"""Queries every container and every pool at once. A silent one delays the result only briefly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp

from agentenv.config import state_dir
from agentenv.containers.connection import open_session
from agentenv.containers.control import ContainerControl
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError
from agentenv.farm.view import Census, ContainerView, FarmView, OperatorAccess, Place, PoolView
from agentenv.metrics.scrape import KIND, Samples, scrape
from agentenv.run_files import running

ANSWER_TIMEOUT_S = scaled(3.0)


async def look(access: OperatorAccess, scrape_urls: Iterable[str] = ()) -> FarmView:
    """The whole farm, the pools of this machine, and those at ``scrape_urls``."""
    census, pools = await asyncio.gather(access.census(), pools_seen(scrape_urls))
    return FarmView(census, await containers_seen(census), pools)


async def containers_seen(census: Census) -> tuple[ContainerView, ...]:
    """Replies of the census' containers, in order of index."""
    async with open_session() as session:
        seen = await asyncio.gather(*(_container(place, session) for place in census.places))
    return tuple(sorted(seen, key=lambda sight: (sight.place.index, sight.place.id)))


async def _container(place: Place, session: aiohttp.ClientSession) -> ContainerView:
    if place.handle is None:
        return ContainerView(place, problem=place.detail or place.state)
    control = ContainerControl(place.handle, session)
    try:
        info, slots, samples = await asyncio.gather(
            control.info(timeout_s=ANSWER_TIMEOUT_S),
            control.slots(timeout_s=ANSWER_TIMEOUT_S),
            _samples(place.handle.base_url + "/metrics", place.handle.token),
        )
    except AgentEnvError as error:
        return ContainerView(place, problem=error.message)
    return ContainerView(place, info, slots.slots, samples)


async def _samples(url: str, token: str) -> Samples:
    try:
        return await scrape(url, timeout_s=ANSWER_TIMEOUT_S, token=token)
    except AgentEnvError:  # an older server, or a fake one, has no metrics
        return Samples()


async def pools_seen(scrape_urls: Iterable[str] = ()) -> tuple[PoolView, ...]:
    """Metrics of every process of this machine that serves them, and of those at other addresses."""
    known = {said["url"]: said["pid"] for said in running(state_dir(), KIND) if "url" in said}
    urls = {**known, **{url: known.get(url) for url in scrape_urls}}
    return tuple(await asyncio.gather(*(_pool(url, pid) for url, pid in urls.items())))


async def _pool(url: str, pid: int | None) -> PoolView:
    try:
        return PoolView(url, pid, await scrape(url, timeout_s=ANSWER_TIMEOUT_S))
    except AgentEnvError as error:
        return PoolView(url, pid, Samples(), error.message)

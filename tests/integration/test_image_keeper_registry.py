"""A keeper, by skopeo, over a registry that refuses, is slow, or cuts connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.api.image_keeper.keeper import Keeper, KeeperSettings, Pull
from agentenv.api.image_keeper.patience import PatienceSettings
from agentenv.api.image_keeper.reach import Reach, guarded
from agentenv.store import RegistrySettings, Store
from tests.image_sources import compressed, member, oci_layout, sha256, tar_of
from tests.integration.bad_registry import BadRegistry, bad_registry
from tests.waiting import until

LAYER = tar_of(member("file", bytes(range(256)) * 200))
BLOB = sha256(compressed(LAYER, "gzip"))
AWAY = "127.0.0.1:9"
PATIENCE = PatienceSettings(pulls=2, patience_s=60.0, first_s=0.05, longest_s=0.2)


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[BadRegistry]:
    async with bad_registry(oci_layout(tmp_path / "oci", LAYER)) as opened:
        yield opened


@pytest.fixture
async def keeper(tmp_path: Path, registry: BadRegistry) -> AsyncIterator[Keeper]:
    registries = RegistrySettings(tls_verify=False, retries=0, stall_s=20.0)
    named = frozenset((registry.address, AWAY))
    store = Store.open(tmp_path / "store", registries=registries)
    async with (
        guarded(store, Reach(named)) as reaching,
        Keeper(reaching, KeeperSettings(patience=PATIENCE, registries=named)) as opened,
    ):
        yield opened


async def _ended(pull: Pull) -> Pull:
    await pull.over.wait()
    return pull


async def _fetched(keeper: Keeper, registry: BadRegistry, name: str = "team/app:1") -> None:
    pull = await _ended(keeper.ensure(f"{registry.address}/{name}"))
    assert pull.image is not None, pull.error
    image = keeper.store.find(pull.image.digest)
    assert image is not None
    assert image.layers[0].read_bytes() == LAYER
    assert "@sha256:" in pull.image.reference, "the tag was resolved"


async def test_a_registry_that_has_too_many_requests_is_asked_again(keeper: Keeper, registry: BadRegistry) -> None:
    registry.refusals = [429] * 2
    await _fetched(keeper, registry)
    assert registry.refusals == []


async def test_a_registry_that_fails_is_asked_again(keeper: Keeper, registry: BadRegistry) -> None:
    registry.refusals = [503, 500, 502, 503]
    await _fetched(keeper, registry)
    assert registry.refusals == []


async def test_a_blob_that_is_cut_is_fetched_again(keeper: Keeper, registry: BadRegistry) -> None:
    registry.cuts = 3
    await _fetched(keeper, registry)
    assert registry.asked[BLOB] >= 2


async def test_a_slow_registry_is_waited_for_as_long_as_it_sends(tmp_path: Path, registry: BadRegistry) -> None:
    registry.drip_s = 1.5
    registries = RegistrySettings(tls_verify=False, retries=0, stall_s=10.0)
    settings = KeeperSettings(registries=frozenset((registry.address,)))
    async with Keeper(Store.open(tmp_path / "slow", registries=registries), settings) as keeper:
        await _fetched(keeper, registry)


async def test_a_storm_of_asks_is_one_pull_and_few_requests_at_once(keeper: Keeper, registry: BadRegistry) -> None:
    pulls = [keeper.ensure(f"{registry.address}/team/app:{n % 5}") for n in range(50)]
    digests = {(await _ended(pull)).image for pull in pulls}
    assert len(digests) == 1
    assert registry.asked[BLOB] == 1
    assert registry.most_at_once <= PATIENCE.pulls * 2, "two programs, each with a layer and a configuration"


async def test_a_name_that_is_not_there_is_told_at_once(keeper: Keeper, registry: BadRegistry) -> None:
    registry.refusals = [404]
    pull = await _ended(keeper.ensure(f"{registry.address}/team/none:1"))
    assert pull.error is not None
    assert pull.error.code == "image_unavailable"
    assert sum(registry.asked.values()) == 1


async def test_a_registry_that_stays_away_is_given_up(tmp_path: Path) -> None:
    patience = PatienceSettings(patience_s=0.3, first_s=0.05, longest_s=0.1)
    settings = KeeperSettings(patience=patience, registries=frozenset((AWAY,)))
    registries = RegistrySettings(tls_verify=False, retries=0)
    async with Keeper(Store.open(tmp_path / "s", registries=registries), settings) as keeper:
        pull = await _ended(keeper.ensure(f"{AWAY}/team/app:1"))
        assert pull.error is not None
        assert pull.error.code == "image_unavailable"


async def test_what_fails_is_told_while_it_is_tried_again(keeper: Keeper) -> None:
    pull = keeper.ensure(f"{AWAY}/team/app:1")
    await until(lambda: bool(pull.state().problem))
    state = pull.state()
    assert (state.state, "127.0.0.1:9" in state.problem, "refused" in state.problem) == ("fetching", True, True)


@pytest.fixture
async def named(registry: BadRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    """A keeper that reaches the registry by its name, so by the proxy."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def resolved(host: str, port: int, **given: object) -> object:
        return await resolve("127.0.0.1" if host == "registry.test" else host, port, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "getaddrinfo", resolved)
    registry.address = f"registry.test:{registry.address.rpartition(':')[2]}"
    hosts = frozenset((registry.address,))
    store = Store.open(tmp_path / "named", registries=RegistrySettings(tls_verify=False, retries=0, stall_s=20.0))
    settings = KeeperSettings(patience=PatienceSettings(patience_s=0.3, first_s=0.05, longest_s=0.1), registries=hosts)
    async with guarded(store, Reach(hosts)) as reaching, Keeper(reaching, settings) as opened:
        yield opened


async def test_skopeo_goes_through_the_proxy(named: Keeper, registry: BadRegistry) -> None:
    await _fetched(named, registry)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "elsewhere.test"])
async def test_a_registry_leads_skopeo_nowhere(host: str, named: Keeper, registry: BadRegistry) -> None:
    hits: list[str] = []

    async def hit(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append("hit")
        writer.close()

    async with await asyncio.start_server(hit, "127.0.0.1", 0) as server:
        registry.leads_to = f"http://{host}:{server.sockets[0].getsockname()[1]}/layer"
        pull = await _ended(named.ensure(f"{registry.address}/team/app:1"))
    assert pull.error is not None
    assert pull.error.code == "image_unavailable"
    assert registry.asked[BLOB] >= 1
    assert hits == []

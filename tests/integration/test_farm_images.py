"""Images on a farm: its service, the keepers of two nodes, and clients that lease slots with images. The containers'
slots are the fake backend's, which have no image: what is looked at is where they are, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from agentenv.api.farm_server.settings import PlainSettings
from agentenv.api.image_keeper.app import served as keeper_served
from agentenv.api.image_keeper.keeper import Keeper, KeeperSettings
from agentenv.api.image_keeper.peers import Peers
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AcquireTimeoutError, ConfigError, ImageUnavailableError
from agentenv.farm_client.pool import FarmPool
from agentenv.image_placement.keepers import Keepers
from agentenv.slots.backends.base import ContainerBackend, ContainerEvent, ContainerStarted
from agentenv.slots.backends.fake import FakeBackend
from agentenv.store import Store, StoredImage
from agentenv.store.addition import Runtime
from agentenv.wire import images as wire
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB
from tests.farm_service import Served, served, token
from tests.image_sources import OciLayout, member, oci_layout, tar_of
from tests.plain_http import plain_http
from tests.waiting import eventually, until

TOKEN = "keepers-token-0123456789"
NODES = ("a", "b")
ALL = PoolSettings(min_containers=2, max_containers=2)
TWO_SLOTS = ContainerSettings(slots_per_container=2, isolation="auto")


@dataclass
class Stores:
    """The nodes' keepers."""

    keepers: dict[str, Keeper]
    urls: dict[str, str]
    layout: OciLayout

    def having(self, digest: str) -> list[str]:
        return [node for node, keeper in self.keepers.items() if keeper.store.find(digest) is not None]


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Stores]:
    layout = oci_layout(tmp_path / "oci", tar_of(member("base", b"base" * 1000)))
    async with AsyncExitStack() as stack:
        found = Stores({}, {}, layout)
        settings = KeeperSettings(paths=(tmp_path,), registries=frozenset((AWAY.partition("/")[0],)))
        for node in NODES:
            peers = Peers(lambda: list(found.urls.values()), TOKEN)
            store = Store.open(tmp_path / node)
            keeper = await stack.enter_async_context(Keeper(store, settings, peers=peers))
            url = await stack.enter_async_context(keeper_served(keeper, TOKEN, host="127.0.0.1", port=0))
            found.keepers[node], found.urls[node] = keeper, url
        yield found


@pytest.fixture
async def farm(stores: Stores) -> AsyncIterator[Served]:
    async with _farm_of(stores) as opened:
        yield opened


@asynccontextmanager
async def _farm_of(stores: Stores, backend: ContainerBackend | None = None, **options: Any) -> AsyncIterator[Served]:
    """A farm service over the nodes; opened twice, it has restarted."""
    keepers = Keepers(TOKEN, lambda handle: stores.urls[handle.node])
    backend = backend or FakeBackend(TWO_SLOTS, nodes=NODES)
    async with served(backend, ALL, containers=TWO_SLOTS, keepers=keepers, **options) as opened:
        await until(lambda: len(list(opened.farm.manager.ledger.placement.nodes())) == len(NODES))
        yield opened


@pytest.fixture
async def pool(farm: Served) -> AsyncIterator[FarmPool]:
    async with farm.pool() as opened:
        yield opened


def _node_of(container: str) -> str:
    return NODES[int(container.split("-")[1])]


async def test_a_reference_is_resolved_once_and_slots_are_where_its_image_is(pool: FarmPool, stores: Stores) -> None:
    reference = f"oci:{stores.layout.directory}"
    first, again = await asyncio.gather(pool.images.resolve(reference), pool.images.resolve(reference))
    assert first == again
    (home,) = stores.having(first.digest)
    lease = await pool.lease("t", root=RootSpec(first.digest))
    assert _node_of(lease.container.id) == home
    await lease.release()


async def test_an_image_spreads_by_peers_when_the_slots_beside_it_are_taken(pool: FarmPool, stores: Stores) -> None:
    image = await pool.images.resolve(f"oci:{stores.layout.directory}")
    (stores.layout.directory / "index.json").unlink()  # only peers have it now
    leases = [await pool.lease(f"t{n}", root=RootSpec(image.digest)) for n in range(4)]
    assert sorted(_node_of(lease.container.id) for lease in leases) == ["a", "a", "b", "b"]
    assert stores.having(image.digest) == ["a", "b"]
    assert sum(keeper.counts["from_peers"] for keeper in stores.keepers.values()) == 1
    await asyncio.gather(*(lease.release() for lease in leases))


async def test_images_are_prefetched_and_the_farm_tells_where_they_are(
    farm: Served, pool: FarmPool, stores: Stores
) -> None:
    pool.images.prefetch([f"oci:{stores.layout.directory}"] * 3)
    await until(lambda: all(keeper.stored for keeper in stores.keepers.values()))
    (digest,) = stores.keepers["a"].stored
    await until(lambda: all(stored for _, stored, _ in farm.farm.manager.ledger.placement.nodes()))
    found = await pool._client.image_map()
    assert found == wire.ImageMap(
        nodes=tuple(wire.NodeImages(node=node, stored=(digest,), fetching=()) for node in NODES)
    )


async def test_an_image_that_no_node_can_have_is_told_and_others_go_on(pool: FarmPool) -> None:
    nowhere = "sha256:" + "0" * 64
    waiting = asyncio.create_task(pool.lease("t", root=RootSpec(nowhere)))
    plain = await pool.lease("plain")
    await plain.release()
    with pytest.raises(ImageUnavailableError, match="no reachable node has the image"):
        await waiting


async def test_a_farm_that_has_no_container_starts_one_to_fetch_an_image(stores: Stores) -> None:
    keepers = Keepers(TOKEN, lambda handle: stores.urls[handle.node])
    none = PoolSettings(min_containers=0, max_containers=1)
    backend = FakeBackend(TWO_SLOTS, nodes=NODES)
    async with served(backend, none, containers=TWO_SLOTS, keepers=keepers) as farm, farm.pool() as pool:
        image = await pool.images.resolve(f"oci:{stores.layout.directory}")
        async with await pool.lease("t", root=RootSpec(image.digest)):
            assert stores.having(image.digest) == ["a"]


async def test_a_keeper_that_is_restarted_is_waited_for(stores: Stores) -> None:
    keepers = Keepers(TOKEN, lambda _: "http://127.0.0.1:9")
    backend = FakeBackend(TWO_SLOTS, nodes=NODES)
    async with served(backend, ALL, containers=TWO_SLOTS, keepers=keepers) as farm, farm.pool() as pool:
        resolving = asyncio.create_task(pool.images.resolve(f"oci:{stores.layout.directory}"))
        await until(lambda: len(keepers._urls) == len(NODES))
        assert not resolving.done()
        keepers._urls.update(stores.urls)
        assert stores.having((await resolving).digest)


async def test_a_reference_that_means_nothing_is_told(pool: FarmPool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        await pool.images.resolve(f"oci:{tmp_path}/none")


async def test_without_keepers_the_client_sees_to_its_images(stores: Stores) -> None:
    async with served(FakeBackend(TWO_SLOTS), ALL, containers=TWO_SLOTS) as farm, farm.pool() as pool:
        assert pool.info is not None
        assert pool.info.images == "client"
        with pytest.raises(ConfigError, match="not fetched by this farm"):
            await pool.images.resolve("debian")


async def test_a_committed_name_is_good_on_other_nodes_and_after_the_farm_was_restarted(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "written.tar"
    written.write_bytes(tar_of(member("opt/state", b"prepared")))

    async def above(store: Store, base: StoredImage, *_: object) -> tuple[StoredImage, int]:
        return await asyncio.to_thread(store.add, base, [written], Runtime.of(base)), 1

    monkeypatch.setattr("agentenv.api.image_keeper.keeper.image_above", above)  # the fake's slots have no layers
    async with _farm_of(stores) as farm, farm.pool() as pool:
        base = await pool.images.resolve(f"oci:{stores.layout.directory}")
        first = await pool.lease("first", root=RootSpec(base.digest))
        home = _node_of(first.container.id)
        made = await pool.images.commit(first.container.id, "0" * 32, base.digest, "committed:prepared:1")
        assert made.reference == "committed:prepared:1"
        assert home in stores.having(made.digest)
        async with farm.pool("another") as other:
            assert await other.images.resolve("committed:prepared:1") == made
        leases = [await pool.lease(f"t{n}", root=RootSpec(made.digest)) for n in range(3)]
        assert {_node_of(lease.container.id) for lease in leases} == set(NODES)
    async with _farm_of(stores) as farm, farm.pool() as pool:
        assert await pool.images.resolve("committed:prepared:1") == made
        async with await pool.lease("t", root=RootSpec(made.digest)):
            pass
        with pytest.raises(ImageUnavailableError, match="has an image named committed:prepared:2") as told:
            await pool.images.resolve("committed:prepared:2")
        assert told.value.next_step.startswith("commit it again")


AWAY = "127.0.0.1:9/team/app"
"""Of a registry that nobody can reach: keepers ask it again for a long time."""


async def test_a_registry_that_fails_is_told_and_waited_for_only_so_long(
    pool: FarmPool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ImageUnavailableError, match=r"127\.0\.0\.1:9/team/app:1 was not fetched within .* refused"):
        await pool.images.resolve(f"{AWAY}:1", patience_s=0.5)
    (told,) = [record.message for record in caplog.records if record.name == "agentenv.farm_client.images"]
    assert "127.0.0.1:9/team/app:1 is waited for" in told


async def test_a_lease_says_what_keeps_its_image_away(pool: FarmPool, caplog: pytest.LogCaptureFixture) -> None:
    digest, manifest = (f"sha256:{digit * 64}" for digit in "12")
    pool.images._learn(f"{AWAY}:2", wire.ImageRef(reference=f"{AWAY}@{manifest}", digest=digest))
    waiting = asyncio.create_task(pool.lease("t", root=RootSpec(digest)))

    def told() -> bool:
        place = pool.place("t")
        return place is not None and (place.why, "refused" in place.detail) == ("image", True)

    await until(told)
    assert f"t waits for its image {AWAY}@{manifest}: node " in caplog.text
    waiting.cancel()
    with pytest.raises(AcquireTimeoutError, match=r"image: node .*refused"):
        await pool.lease("late", timeout_s=8, root=RootSpec(digest))


async def test_a_farm_that_was_restarted_has_an_image_fetched_again_that_no_node_has_any_more(stores: Stores) -> None:
    async with _farm_of(stores) as farm, farm.pool() as pool:
        image = await pool.images.resolve(f"oci:{stores.layout.directory}")
        farm.farm._keepers._sources.clear()  # type: ignore[union-attr]  # as a farm process that has just begun
        for keeper in stores.keepers.values():
            keeper.store.gc(budget_bytes=0, keep_s=0)
        await until(lambda: not any(stored for _, stored, _ in farm.farm.manager.ledger.placement.nodes()))
        async with await pool.lease("t", root=RootSpec(image.digest)):
            assert stores.having(image.digest)


# -- over plain HTTP -----------------------------------------------------------------------------

ROOT = {"writable_bytes": 64 * MIB, "user": "app", "network": {"kind": "allow", "hosts": ["example.org"]}}
NOWHERE = "sha256:" + "0" * 64


async def test_a_call_over_plain_http_names_what_its_slot_is_made_from(farm: Served, stores: Stores) -> None:
    reference = f"oci:{stores.layout.directory}"
    async with plain_http(farm.url, token()) as http:
        first = await http.bash("t", "true", image=reference, root=ROOT)
        assert first.status == 200, first.body
        ((_, opened),) = farm.farm.queue._asks.items()
        digest = next(digest for node in NODES for digest in stores.keepers[node].stored)
        assert opened.ask.root == RootSpec.parse({**ROOT, "image": digest})
        assert _node_of(first.body["lease"]) in stores.having(digest)
        for named in ({}, {"image": reference, "root": ROOT}):
            again = await http.bash("t", "true", **named)
            assert (again.status, again.body.get("lease")) == (200, first.body["lease"])
        assert (await http.post("/artifacts/list", trajectory_id="t")).status == 200
        (stores.layout.directory / "index.json").unlink()
        by_digest = await http.bash("other", "true", image=digest)
        assert by_digest.status == 200, by_digest.body
        assert (await http.bash("third", "true", image=reference)).status == 200, "it was resolved once for the run"


async def test_another_image_than_the_first_call_named_is_refused(farm: Served, stores: Stores) -> None:
    reference = f"oci:{stores.layout.directory}"
    async with plain_http(farm.url, token()) as http:
        await http.bash("t", "true", image=reference, root=ROOT)
        await http.bash("plain", "true")
        for trajectory, named in (
            ("t", {"image": NOWHERE}),
            ("t", {"image": reference}),
            ("t", {"image": reference, "root": {**ROOT, "user": "root"}}),
            ("plain", {"image": reference}),
        ):
            refused = await http.bash(trajectory, "true", **named)
            assert refused.refusal == (409, "protocol")
            assert "was not made from" in refused.body["message"]
        assert (await http.get("/status")).body["total_requests"] == 2, "none of them was called"
        assert await http.release("plain")
        assert (await http.bash("plain", "true", image=reference)).status == 200


async def test_what_no_slot_can_be_made_from_is_refused_and_may_be_corrected(farm: Served, stores: Stores) -> None:
    reference = f"oci:{stores.layout.directory}"
    async with plain_http(farm.url, token()) as http:
        for named, refusal, said in (
            ({"root": ROOT}, (400, "protocol"), "root needs an image"),
            ({"image": reference, "root": {"image": NOWHERE}}, (400, "config"), "root.image"),
            ({"image": reference, "root": {"checkpoint": "0" * 32}}, (400, "config"), "root.checkpoint"),
            ({"image": reference, "root": {"memory_bytes": -1}}, (400, "config"), "root.memory_bytes"),
            ({"image": reference, "root": {"memory": 1}}, (400, "config"), "memory"),
            ({"image": reference, "root": "all"}, (400, "config"), "root"),
            ({"image": "dockerfile:."}, (400, "config"), "of this machine only"),
            ({"image": f"oci:{stores.layout.directory}/none"}, (400, "config"), "does not exist"),
            ({"image": NOWHERE}, (502, "image_unavailable"), "no reachable node has the image"),
        ):
            refused = await http.bash("t", "true", **named)
            assert refused.refusal == refusal, refused.body
            assert said in refused.body["message"]
        assert (await http.bash("t", "true", image=reference)).status == 200


async def test_an_image_that_takes_long_is_waited_for_by_the_calls_that_follow(stores: Stores) -> None:
    patience = PlainSettings(acquire_timeout_s=0.5)
    async with _farm_of(stores, plain=patience) as farm, plain_http(farm.url, token()) as http:

        async def told() -> bool:
            refused = await http.bash("t", "true", image=f"{AWAY}:1")
            assert refused.refusal == (503, "acquire_timeout")
            return "refused" in refused.body["message"]

        await eventually(told)
        assert (await http.bash("t", "true")).refusal == (503, "acquire_timeout")
        assert await http.held() == {"t": "waiting"}
        assert await http.release("t")

        async def had() -> bool:
            return (await http.bash("t", "true")).status == 200

        await eventually(had)


class _Found:
    """The backend of a farm service that finds the containers of the one before it."""

    name, generation = "fake", 1

    def __init__(self, before: FakeBackend) -> None:
        self._containers = before.containers
        self.found = len(self._containers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def scale(self, count: int) -> None:
        pass

    async def replace(self, container_id: str, reason: str) -> None:
        pass

    async def events(self) -> AsyncIterator[ContainerEvent]:
        for handle in self._containers:
            yield ContainerStarted(handle)
        await asyncio.Event().wait()


async def test_a_farm_that_was_restarted_finds_an_image_slot_by_its_trajectory(stores: Stores) -> None:
    reference = f"oci:{stores.layout.directory}"
    async with _farm_of(stores) as farm:
        async with plain_http(farm.url, token()) as http:
            first = await http.bash("t", "true", image=reference, root=ROOT)
            assert first.status == 200, first.body
        farm.farm.leave()
        (stores.layout.directory / "index.json").unlink()  # nobody needs to fetch anything
        backend = farm.farm._backend
        assert isinstance(backend, FakeBackend)
        async with _farm_of(stores, _Found(backend)) as later, plain_http(later.url, token()) as http:
            assert (await http.bash("t", "true", image=NOWHERE)).refusal == (409, "protocol")
            for named in ({}, {"image": reference, "root": ROOT}):
                again = await http.bash("t", "true", **named)
                assert (again.status, again.body.get("lease")) == (200, first.body["lease"])
            assert await http.release("t")

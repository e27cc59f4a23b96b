"""The keeper of a node's images: over registries on loopback that misbehave, and among its peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest

from agentenv.api.image_keeper.app import served
from agentenv.api.image_keeper.keeper import Keeper, KeeperSettings
from agentenv.api.image_keeper.peers import Peers, authorization, peers_of
from agentenv.errors import ImageUnavailableError
from agentenv.store import RegistrySettings, Store
from agentenv.wire import images as wire
from tests.image_sources import OciLayout, member, oci_layout, tar_of
from tests.waiting import START_S

TOKEN = "keepers-token-0123456789"
LAYERS = tar_of(member("base", b"base" * 1000)), tar_of(member("top", b"top"))


class Node:
    """A keeper that is served."""

    def __init__(self, keeper: Keeper, url: str, http: aiohttp.ClientSession) -> None:
        self.keeper = keeper
        self.url = url
        self._http = http

    async def ask(self, request: wire.ImagesRequest) -> list[wire.ImageState]:
        async with self._http.post(f"{self.url}/v1/images", data=request.model_dump_json()) as answer:
            assert answer.status == 200, await answer.text()
            return list(wire.ImagesReply.model_validate_json(await answer.read()).images)

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self._http.get(f"{self.url}{path}", headers=headers) as answer:
            return answer.status, await answer.read()

    async def commit(self, **asked: object) -> tuple[int, bytes]:
        async with self._http.post(f"{self.url}/v1/commits", json=asked) as answer:
            return answer.status, await answer.read()


class Nodes:
    """Keepers on this machine, each with its own store."""

    def __init__(self, directory: Path, stack: AsyncExitStack, http: aiohttp.ClientSession) -> None:
        self._directory = directory
        self._stack = stack
        self._http = http

    async def start(self, name: str, *peers: str, settings: KeeperSettings | None = None) -> Node:
        store = Store.open(self._directory / name, registries=RegistrySettings(tls_verify=False, retries=0))
        asked = Peers(peers_of(peers, None), TOKEN)
        chosen = settings or KeeperSettings(paths=(self._directory, Path("/nonexistent")))
        keeper = await self._stack.enter_async_context(Keeper(store, chosen, peers=asked))
        url = await self._stack.enter_async_context(served(keeper, TOKEN, host="127.0.0.1", port=0))
        return Node(keeper, url, self._http)


@pytest.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    monkeypatch.setattr("agentenv.api.image_keeper.peers._LOOK_S", START_S)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(headers=authorization(TOKEN)))
        yield Nodes(tmp_path, stack, http)


@pytest.fixture
def layout(tmp_path: Path) -> OciLayout:
    return oci_layout(tmp_path / "oci", *LAYERS)


async def _ready(node: Node, request: wire.ImagesRequest) -> wire.ImageRef:
    (state,) = await node.ask(request.model_copy(update={"wait_s": wire.MAX_WAIT_S}))
    assert state.image is not None, state
    return state.image


async def test_an_image_is_fetched_once_and_listed(nodes: Nodes, layout: OciLayout) -> None:
    node = await nodes.start("a")
    reference = f"oci:{layout.directory}"
    asked = [node.keeper.ensure(reference) for _ in range(20)]
    assert len({id(pull) for pull in asked}) == 1
    image = await _ready(node, wire.ImagesRequest(references=(reference,)))
    assert image.reference == reference
    status, body = await node.get("/v1/images")
    assert (status, wire.StoredList.model_validate_json(body).digests) == (200, (image.digest,))


async def test_a_list_is_held_back_until_it_changes(nodes: Nodes, layout: OciLayout) -> None:
    node = await nodes.start("a")
    empty = wire.StoredList.model_validate_json((await node.get("/v1/images"))[1])
    waiting = asyncio.create_task(node.get(f"/v1/images?version={empty.version}&wait_s={wire.MAX_WAIT_S}"))
    image = await _ready(node, wire.ImagesRequest(references=(f"oci:{layout.directory}",)))
    after = wire.StoredList.model_validate_json((await waiting)[1])
    assert after.digests == (image.digest,)
    assert after.version != empty.version


async def test_a_peer_is_asked_before_the_source(
    nodes: Nodes, layout: OciLayout, caplog: pytest.LogCaptureFixture
) -> None:
    first = await nodes.start("a")
    image = await _ready(first, wire.ImagesRequest(references=(f"oci:{layout.directory}",)))
    nowhere = wire.ImageRef(reference="oci:/nonexistent", digest=image.digest)
    second = await nodes.start("b", "http://127.0.0.1:9", first.url)
    assert await _ready(second, wire.ImagesRequest(images=(nowhere,))) == nowhere
    found = second.keeper.store.find(image.digest)
    assert found is not None
    assert tuple(path.read_bytes() for path in found.layers) == LAYERS
    assert found.env == first.keeper.store.images()[0].env
    assert b"agentenv_keeper_from_peers_total 1\n" in (await second.get("/metrics"))[1]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_peer_that_lies_is_found_and_not_asked_again(nodes: Nodes, layout: OciLayout) -> None:
    liar = await nodes.start("a")
    reference = f"oci:{layout.directory}"
    image = await _ready(liar, wire.ImagesRequest(references=(reference,)))
    tar = liar.keeper.store.images()[0].layers[0]
    tar.write_bytes(tar.read_bytes().replace(b"base" * 100, b"evil" * 100))
    second = await nodes.start("b", liar.url)
    assert await _ready(second, wire.ImagesRequest(images=(image,))) == image
    found = second.keeper.store.find(image.digest)
    assert found is not None
    assert found.layers[0].read_bytes() == LAYERS[0], "the source was asked instead"
    assert second.keeper.peers is not None
    assert second.keeper.peers.lies == 1
    assert await second.keeper.peers._having(image.digest) == []


async def test_a_manifest_of_another_image_is_a_lie_too(nodes: Nodes, layout: OciLayout) -> None:
    liar = await nodes.start("a")
    image = await _ready(liar, wire.ImagesRequest(references=(f"oci:{layout.directory}",)))
    manifest = liar.keeper.store.layout.manifest(image.digest)
    manifest.write_bytes(manifest.read_bytes().replace(b'"user":"1000"', b'"user":"0"'))
    second = await nodes.start("b", liar.url)
    (state,) = await second.ask(
        wire.ImagesRequest(images=(wire.ImageRef(reference=image.digest, digest=image.digest),), wait_s=wire.MAX_WAIT_S)
    )
    assert state.error is not None
    assert (state.state, state.error.error) == ("failed", "image_unavailable")
    assert second.keeper.stored == frozenset()


async def test_a_reference_that_means_another_image_here_is_refused(nodes: Nodes, layout: OciLayout) -> None:
    node = await nodes.start("a")
    other = wire.ImageRef(reference=f"oci:{layout.directory}", digest="sha256:" + "0" * 64)
    (state,) = await node.ask(wire.ImagesRequest(images=(other,), wait_s=wire.MAX_WAIT_S))
    assert state.error is not None
    assert "means sha256:" in state.error.message


async def test_what_cannot_be_had_is_told_with_its_own_code(nodes: Nodes) -> None:
    node = await nodes.start("a")
    missing, malformed = await node.ask(
        wire.ImagesRequest(references=("oci:/nonexistent", "A:b:c"), wait_s=wire.MAX_WAIT_S)
    )
    assert missing.error is not None
    assert malformed.error is not None
    assert (missing.error.error, malformed.error.error) == ("config", "config")


@pytest.mark.parametrize(
    "reference",
    ["oci:/", "docker-archive:/etc/passwd", "docker-daemon:x", "dockerfile:/x", "other.example/x", "oci:{below}/../.."],
)
async def test_clients_name_only_what_the_operator_allows(nodes: Nodes, tmp_path: Path, reference: str) -> None:
    below = tmp_path / "below" / "deep"
    settings = KeeperSettings(registries=frozenset(("registry.example",)), paths=(below,))
    node = await nodes.start("a", settings=settings)
    wanted = reference.format(below=below)
    known = wire.ImageRef(reference=wanted, digest="sha256:" + "0" * 64)
    states = await node.ask(wire.ImagesRequest(references=(wanted,), images=(known,), wait_s=wire.MAX_WAIT_S))
    assert [state.error.error for state in states if state.error is not None] == ["forbidden", "forbidden"]


async def test_the_token_is_needed(nodes: Nodes) -> None:
    node = await nodes.start("a")
    for path in ("/v1/images", "/metrics", f"/v1/layers/sha256:{'0' * 64}"):
        assert (await node.get(path, Authorization="Bearer wrong"))[0] == 401
    assert (await node.get("/health", Authorization=""))[0] == 200


async def test_only_digests_name_files(nodes: Nodes) -> None:
    node = await nodes.start("a")
    assert (await node.get("/v1/layers/..%2f..%2fetc%2fpasswd"))[0] == 400
    assert (await node.get(f"/v1/manifests/sha256:{'0' * 64}"))[0] == 404


async def test_what_is_over_the_budget_goes(nodes: Nodes, layout: OciLayout) -> None:
    settings = KeeperSettings(paths=(), budget_bytes=0, keep_s=0.0, gc_every_s=0.05)
    node = await nodes.start("a", settings=settings)
    with suppress(ImageUnavailableError):  # it may be gone before it is returned
        await asyncio.to_thread(node.keeper.store.ensure, f"oci:{layout.directory}")
    async with asyncio.timeout(START_S):
        while not node.keeper.counts["removed_images"]:
            await asyncio.sleep(0.02)
    assert node.keeper.store.images() == []


def test_peers_are_read_from_a_file_that_changes(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    read = peers_of(["http://a:1/"], file)
    assert read() == ["http://a:1"]
    file.write_text("http://b:1\nhttp://a:1\n")
    assert read() == ["http://a:1", "http://b:1"]


async def test_an_image_of_a_checkpoint_needs_the_slots_own_and_the_container(nodes: Nodes, layout: OciLayout) -> None:
    node = await nodes.start("a")
    image = await _ready(node, wire.ImagesRequest(references=(f"oci:{layout.directory}",)))
    asked = {
        "container": "c",
        "checkpoint": "0" * 32,
        "base_url": "http://127.0.0.1:9",
        "token": "t",
        "wait_s": wire.MAX_WAIT_S,
    }
    for base, said in (
        (f"sha256:{'1' * 64}", b"is not in the store of its node"),
        (image.digest, b"container c: GET /v1/checkpoints/"),
    ):
        status, body = await node.commit(**asked, image=base)
        assert (status, said in body, b'"failed"' in body) == (200, True, True), body
        asked["checkpoint"] = "1" * 32
    assert (await node.commit(**asked, image="none"))[0] == 400


async def _named(node: Node, name: str) -> wire.ImageState:
    (state,) = await node.ask(wire.ImagesRequest(references=(name,), wait_s=wire.MAX_WAIT_S))
    return state


async def test_a_committed_name_means_on_every_node_what_was_named_last(nodes: Nodes, tmp_path: Path) -> None:
    first, name = await nodes.start("a"), "committed:prepared:1"
    second = await nodes.start("b", first.url)
    third = await nodes.start("c", first.url, second.url, "http://127.0.0.1:9")
    old, new = (
        node.keeper.store.ensure(f"oci:{oci_layout(tmp_path / tag, layer).directory}")
        for node, tag, layer in ((first, "old", LAYERS[0]), (second, "new", LAYERS[1]))
    )
    first.keeper.store.name(name, old, 1.0)
    for written in (name, "localhost/prepared:1"):
        assert (await _named(second, written)).image == wire.ImageRef(reference=name, digest=old.digest)
    second.keeper.store.name(name, new, 2.0)
    assert (await _named(third, name)).image == wire.ImageRef(reference=name, digest=new.digest)
    first.keeper.store.name(name, old, 3.0)
    assert (await _named(third, name)).image == wire.ImageRef(reference=name, digest=old.digest)
    alone = await nodes.start("d", third.url)
    assert (await _named(alone, name)).image == wire.ImageRef(reference=name, digest=old.digest), "third remembers"


async def test_a_committed_name_that_no_node_knows_or_whose_image_is_gone_is_told(
    nodes: Nodes, layout: OciLayout
) -> None:
    first, name = await nodes.start("a"), "committed:prepared:1"
    second = await nodes.start("b", first.url)
    unknown = await _named(second, name)
    assert unknown.error is not None
    assert "no reachable node has an image named committed:prepared:1" in unknown.error.message
    image = first.keeper.store.ensure(f"oci:{layout.directory}")
    first.keeper.store.name(name, image)
    first.keeper.store.layout.manifest(image.digest).unlink()
    gone = await _named(second, name)
    assert gone.error is not None
    assert (gone.error.error, "commit it again" in gone.error.next_step) == ("image_unavailable", True)
    assert (await second.get("/v1/names?reference=debian"))[0] == 404

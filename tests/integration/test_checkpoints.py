"""Checkpoints of image slots: exact, independent of each other, and images when they are stored."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agentenv.containers.control import ContainerControl
from agentenv.containers.transfer import download_layers
from agentenv.errors import CheckpointError
from agentenv.executor.session import ToolSession
from agentenv.store.addition import Runtime
from agentenv.store.store import Store
from agentenv.wire.leases import CheckpointSlot, RestoreSlot
from tests.security.image_slots import ImageSlots, container, make_images

HERE = Path(__file__).parent
ODD = HERE.parent / "odd_trees.py"
TREE = "/work"

pytestmark = pytest.mark.asyncio(loop_scope="module")


OVER: Final = pytest.mark.parametrize(
    ("slots", "writable"),
    [("local", "memory"), ("local", "disk"), ("lean", "memory")],
    indirect=["slots"],
    scope="module",
)
"""Where slots write; and in a container of few ids, where they write to memory only."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ImageSlots]:
    async with container(make_images(tmp_path_factory.mktemp("images")), request, slots=5) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def released(slots: ImageSlots) -> AsyncIterator[None]:
    yield
    await slots.release_all()


async def _run(session: ToolSession, command: str) -> str:
    result = await session.call("bash", {"command": command})
    assert result.exit_code == 0, result
    return result.stdout.strip()


async def _prepared(slots: ImageSlots, writable: str = "memory") -> ToolSession:
    session = await slots.open(writable=writable)
    await session.call("write_file", {"path": "/tree.py", "content": (HERE / "changing_tree.py").read_text()})
    return session


async def _changed(session: ToolSession, seed: int) -> str:
    """Change the tree at random; its digest."""
    return await _run(session, f"python3 /tree.py change {seed} {TREE}")


async def _digest(session: ToolSession) -> str:
    return await _run(session, f"python3 /tree.py digest {TREE}")


async def _checkpoint(session: ToolSession) -> str:
    async with ContainerControl(session.lease.container) as control:
        return (await control.act(session.lease.key, CheckpointSlot())).checkpoint


async def _restore(session: ToolSession, checkpoint: str) -> None:
    async with ContainerControl(session.lease.container) as control:
        await control.act(session.lease.key, RestoreSlot(checkpoint=checkpoint))


@OVER
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_forks_are_exact_and_independent(slots: ImageSlots, seed: int, writable: str) -> None:
    first = await _prepared(slots, writable)
    was = await _changed(first, seed)
    checkpoint = await _checkpoint(first)
    assert await _digest(first) == was
    kinds = ("memory", writable if slots.kind == "lean" else "disk", writable)
    forks = [await slots.open(checkpoint=checkpoint, writable=kind) for kind in kinds]
    assert [await _digest(fork) for fork in forks] == [was] * 3
    changed = [await _changed(session, seed + number) for number, session in enumerate([first, *forks[:2]], 1)]
    assert [await _digest(session) for session in [first, *forks]] == [*changed, was]
    await _restore(first, checkpoint)
    assert await _digest(first) == was


async def test_names_of_one_file_stay_names_of_one_file(slots: ImageSlots, tmp_path: Path) -> None:
    session = await _prepared(slots)
    await _run(session, 'echo one > /work/a && python3 -c \'import os; os.link("/work/a", "/work/b")\'')
    checkpoint = await _checkpoint(session)
    fork = await slots.open(checkpoint=checkpoint)
    store = Store.open(slots.images.store)
    tars = await download_layers(session.lease.container, checkpoint, tmp_path)
    stored = await slots.open(store.add(store.find(slots.usual), tars, Runtime()).digest)
    for each in (fork, stored):
        assert await _run(each, "[ /work/a -ef /work/b ] && stat -c %h /work/a") == "2"


@OVER
async def test_a_chain_of_checkpoints_can_be_gone_back_to_in_any_order(slots: ImageSlots, writable: str) -> None:
    session = await _prepared(slots, writable)
    kept: list[tuple[str, str]] = []
    for seed in range(8):
        was = await _changed(session, 100 + seed)
        kept.append((await _checkpoint(session), was))
    order = random.Random(5)
    for checkpoint, was in order.sample(kept, len(kept)):
        await _restore(session, checkpoint)
        assert await _digest(session) == was
        await _changed(session, order.randrange(1000))


@OVER
async def test_a_checkpoint_is_an_image_when_it_is_stored(slots: ImageSlots, tmp_path: Path, writable: str) -> None:
    session = await _prepared(slots, writable)
    for seed in (7, 8, 9):
        was = await _changed(session, seed)
        checkpoint = await _checkpoint(session)
    store = Store.open(slots.images.store)
    base = store.find(slots.usual)
    tars = await download_layers(session.lease.container, checkpoint, tmp_path)
    assert len(tars) == 3
    made = store.add(base, tars, Runtime(workdir="/work"))
    assert await _digest(await slots.open(made.digest)) == was


@OVER
async def test_odd_trees_are_the_same_in_forks_and_in_images(slots: ImageSlots, tmp_path: Path, writable: str) -> None:
    session = await _prepared(slots, writable)
    await session.call("write_file", {"path": "/odd.py", "content": ODD.read_text()})
    for seed in range(3):
        for place, without in (("forks", "devices"), ("images", "devices sockets")):
            await _run(
                session, f"mkdir -p /work/{place}/{seed}; python3 /odd.py make {seed} /work/{place}/{seed} {without}"
            )
        checkpoint = await _checkpoint(session)
    was = {place: await _run(session, f"python3 /odd.py describe /work/{place}") for place in ("forks", "images")}
    tars = await download_layers(session.lease.container, checkpoint, tmp_path)
    store = Store.open(slots.images.store)
    stored = await slots.open(store.add(store.find(slots.usual), tars, Runtime()).digest)
    fork = await slots.open(checkpoint=checkpoint)
    for place, each in (("forks", fork), ("images", fork), ("images", stored)):
        assert json.loads(await _run(each, f"python3 /odd.py describe /work/{place}")) == json.loads(was[place])


RESERVED: Final = {
    "removed": ("mkdir d && echo kept > d/.wh.a", "rm d/.wh.a", "d/.wh.a"),
    "moved": ("mkdir -p d/e && echo kept > d/e/.wh..wh..opq", "mv d/e/.wh..wh..opq d/e/opq", "d/e/.wh..wh..opq"),
    "below": ("mkdir d && mkdir 'd/.wh.a b' && echo kept > 'd/.wh.a b/c'", "mv 'd/.wh.a b' d/ab", "d/.wh.a b"),
    "parent replaced": ("mkdir -p d/e && echo > d/e/.wh.a", "rm -r d/e; mkdir d/e", "d/e/.wh.a"),
    "parent removed": ("mkdir -p d/e && mkdir d/e/.wh.a", "rm -r d; echo > d", "d/e/.wh.a"),
}
"""What makes a name that means a deletion in layers of images, what takes it away, and the name."""


@OVER
@pytest.mark.parametrize("how", RESERVED)
async def test_a_name_that_means_a_deletion_in_images_is_refused_while_it_is_there(
    slots: ImageSlots, tmp_path: Path, writable: str, how: str
) -> None:
    make, take_away, name = RESERVED[how]
    session = await _prepared(slots, writable)
    await _run(session, f"cd {TREE} && {make} && touch /etc/.whether")
    was, checkpoint = await _digest(session), await _checkpoint(session)
    with pytest.raises(CheckpointError, match=f"{re.escape(TREE)}/{re.escape(name)} cannot be in an image.*rename"):
        await download_layers(session.lease.container, checkpoint, tmp_path)
    await _run(session, "rm /etc/.whether")
    assert await _digest(await slots.open(checkpoint=checkpoint)) == was
    await _run(session, f"cd {TREE} && {take_away}")
    was, checkpoint = await _digest(session), await _checkpoint(session)
    tars = await download_layers(session.lease.container, checkpoint, tmp_path)
    store = Store.open(slots.images.store)
    stored = await slots.open(store.add(store.find(slots.usual), tars, Runtime()).digest)
    assert await _digest(stored) == was
    assert "passwd" in await _run(stored, "ls /etc")


async def test_processes_end_and_the_network_address_stays(slots: ImageSlots) -> None:
    session = await _prepared(slots)
    await _run(session, "sleep 1000 & echo $! > /pid")
    await _checkpoint(session)
    assert await _run(session, "kill -0 $(cat /pid) 2>/dev/null && echo runs || echo gone") == "gone"


async def test_what_is_not_there_cannot_be_restored(slots: ImageSlots) -> None:
    session = await slots.open()
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        await _restore(session, "0" * 32)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        await slots.open(checkpoint="1" * 32)


async def test_plain_slots_and_image_slots_have_each_their_own(slots: ImageSlots) -> None:
    plain, imaged = await slots.open_plain(), await slots.open()
    await _run(plain, "echo kept > file")
    of_plain, of_image = await _checkpoint(plain), await _checkpoint(imaged)
    with pytest.raises(CheckpointError, match="without an image"):
        await slots.open(checkpoint=of_plain)
    with pytest.raises(CheckpointError, match="made in a slot of image sha256"):
        await _restore(plain, of_image)
    with pytest.raises(CheckpointError, match="without an image"):
        await _restore(imaged, of_plain)

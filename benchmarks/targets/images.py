"""I1 to I9, and F12: image slots. Beside plain slots, and beside docker with the same image where an engine answers."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentenv.executor.session import ToolSession
from agentenv.wire.leases import CheckpointSlot, RestoreSlot
from agentenv.wire.roots import RootSpec
from benchmarks import apt
from benchmarks.image_farm import (
    ImageFarm,
    docker_image,
    docker_ms,
    first_mounts_ms,
    image_farm,
    kernel_bytes,
    many_images,
)
from benchmarks.measure import MIB, Latencies, Outcome, at_most, percentile
from benchmarks.targets.effort import Effort
from benchmarks.workloads import timed_call

CHILDREN = 16
FILL = """mkdir /w && cd /w && for d in {1..80}; do
    mkdir $d; for f in {1..100}; do head -c 62500 /dev/zero > $d/$f; done
done"""
DEPTH = 63
"""Checkpoints below a slot; with its own layer that is 64."""
LOOKUPS = 20_000
IMAGES, LAYER_BYTES = 500, 8 * MIB


async def i1_lease(effort: Effort) -> list[Outcome]:
    """A lease of an image slot while one is free, its reset, and calls in it beside those in a plain slot."""
    leases, resets, ratios, image_ms, plain_ms, paused = [], [], [], [], [], []
    fastest: dict[str, list[float]] = {"lease": [], "reset": []}
    async with image_farm(4) as farm:
        for _ in range(effort.rounds):
            leased, reset = await _leases(farm, effort.calls // 2)
            leases.append(leased.p50_ms)
            resets.append(reset.p50_ms)
            fastest["lease"].append(1e3 * min(leased.seconds))
            fastest["reset"].append(1e3 * min(reset.seconds))
            image, plain = await _calls(farm, 2 * effort.calls)
            image_ms.append(image)
            plain_ms.append(plain)
            ratios.append(image / plain)
            image, plain = await _calls(farm, effort.calls, pause_s=0.01)
            paused.append(image / plain)
        mounts = await asyncio.to_thread(first_mounts_ms, farm.root.image, 20)
    found = [
        at_most("I1", "lease of a slot with a stored image, p50", "ms", 10).outcome(
            leases, fastest_ms=fastest["lease"]
        ),
        at_most("I2", "first mount of a stored image, p50", "ms", 5).outcome([percentile(mounts, 0.5)]),
        at_most("I3", "call in an image slot, p50 against a plain slot", "x", 1.1).outcome(
            ratios, image_p50_ms=image_ms, plain_p50_ms=plain_ms
        ),
        at_most("I3.paused", "the same with 10 ms between calls", "x", 1.1).outcome(paused),
        at_most("I4", "reset of an image slot, p50", "ms", 10).outcome(resets, fastest_ms=fastest["reset"]),
    ]
    with docker_image() as image_name:
        if image_name is not None:
            runs, execs = await asyncio.to_thread(docker_ms, image_name, effort.calls // 5)
            run_ms, exec_ms = percentile(runs, 0.5), percentile(execs, 0.5)
            lease = at_most("I1.docker", "the same against docker run of the same image", "x", 0.1)
            call = at_most("I3.docker", "the same against docker exec of the same image", "x", 0.1)
            found.append(lease.outcome([value / run_ms for value in leases], docker_run_p50_ms=run_ms))
            found.append(call.outcome([value / exec_ms for value in image_ms], docker_exec_p50_ms=exec_ms))
    return found


async def _leases(farm: ImageFarm, times: int) -> tuple[Latencies, Latencies]:
    leased, reset = Latencies(), Latencies()
    for number in range(times):
        began = time.perf_counter()
        lease = await farm.pool.lease(f"l{number}", root=farm.root)
        leased.seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        await lease.release()
        await farm.freed(farm.slots)
        reset.seconds.append(time.perf_counter() - began)
    return leased, reset


async def _calls(farm: ImageFarm, times: int, pause_s: float = 0.0) -> tuple[float, float]:
    """p50 in ms, in turns of 20 calls with a pause before each."""
    image, plain = Latencies(), Latencies()
    async with farm.executor.open("image", root=farm.root) as one, farm.executor.open("plain") as other:
        for _ in range(max(1, times // 20)):
            for session, into in ((one, image), (other, plain)):
                for _ in range(20):
                    if pause_s:
                        await asyncio.sleep(pause_s)
                    into.seconds.append(await timed_call(session, "true"))
    return image.p50_ms, plain.p50_ms


async def i4_neighbours(effort: Effort) -> list[Outcome]:
    """A neighbour's short calls while a slot with 1 GiB of files is discarded, against as many just before."""
    added, slowest = [], []
    async with image_farm(4) as farm, farm.executor.open("neighbour", root=farm.root) as neighbour:
        for number in range(effort.rounds):
            session = farm.executor.open(f"full-{number}", root=farm.root)
            async with session:
                await timed_call(session, "head -c 1G /dev/zero > /full", 300.0)
                before = [await timed_call(neighbour, "true") for _ in range(effort.calls)]
                leaving = asyncio.create_task(session.aclose())
                seconds = []
                while not leaving.done():
                    seconds.append(await timed_call(neighbour, "true"))
                await leaving
            await farm.freed(farm.slots - 1)
            as_many = before[-len(seconds) :]
            added.append(1e3 * (percentile(seconds, 0.5) - percentile(as_many, 0.5)))
            slowest.append(1e3 * (max(seconds) - max(as_many)))
    what = "a neighbour's calls while 1 GiB is discarded, beyond as many just before"
    return [
        at_most("I4.neighbours", f"{what}: p50", "ms", 5).outcome(added),
        at_most("I4.slowest", f"{what}: the slowest", "ms", 5).outcome(slowest),
    ]


@dataclass
class Forks:
    """Times of forks of a slot and of what goes with them, in ms, one for each round."""

    one: list[float] = field(default_factory=list)
    """The median of nine."""
    many: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)

    async def measure(self, farm: ImageFarm, parent: ToolSession, child_of: Callable[[str], RootSpec]) -> None:
        """One round. ``child_of`` gives what begins with the checkpoint of that name."""
        name, seconds = await _kept(farm, parent)
        self.kept.append(1e3 * seconds)
        child = child_of(name)
        self.one.append(1e3 * percentile([await _forked(farm, child) for _ in range(9)], 0.5))
        self.many.append(1e3 * await _forked_at_once(farm, child))
        self.back.append(1e3 * await _restored(farm, parent, name))


async def i5_fork(effort: Effort) -> list[Outcome]:
    """Forks of a workspace of 500 MB in 8,000 files, one and sixteen at once; checkpoint and restore of it."""
    forks = Forks()
    async with image_farm(CHILDREN + 2) as farm:
        for _ in range(effort.rounds):
            async with farm.executor.open("parent", root=farm.root) as parent:
                await timed_call(parent, FILL, 300.0)
                await forks.measure(farm, parent, lambda name: replace(farm.root, checkpoint=name))
            await farm.freed(farm.slots)
    return [
        at_most("I5", "fork of 500 MB in 8,000 files, p50", "ms", 15).outcome(forks.one),
        at_most("I5.16", "16 forks of it at once", "ms", 200).outcome(forks.many),
        at_most("I6", "checkpoint of it", "ms", 30).outcome(forks.kept),
        at_most("I6.restore", "restore of it", "ms", 30).outcome(forks.back),
        at_most("F12", "the same fork", "ms", 30).outcome(forks.one),
        at_most("F12.16", "the same 16 forks", "ms", 150).outcome(forks.many),
        at_most("F12.restore", "the same restore", "ms", 20).outcome(forks.back),
    ]


async def f12_plain(effort: Effort) -> list[Outcome]:
    """The same of a plain slot; and once more when its workspace has to be copied, because a file with two names was
    changed in a fork."""
    forks, copied, filled = Forks(), [], []
    async with image_farm(CHILDREN + 2) as farm:
        for _ in range(effort.rounds):
            async with farm.executor.open("parent") as parent:
                await timed_call(parent, f"{FILL.replace('/w', 'w')} && echo one > name && ln name other", 300.0)
                await forks.measure(farm, parent, lambda name: RootSpec("", checkpoint=name))
                await timed_call(parent, "echo two >> w/other")
                name, seconds = await _kept(farm, parent)
                copied.append(seconds)
                filled.append(await _forked(farm, RootSpec("", checkpoint=name)))
            await farm.freed(farm.slots)
    return [
        at_most("F12.plain", "fork of a plain slot with 500 MB in 8,000 files, p50", "ms", 30).outcome(forks.one),
        at_most("F12.plain.16", "16 forks of it at once", "ms", 200).outcome(forks.many),
        at_most("F12.plain.checkpoint", "checkpoint of it", "ms", 30).outcome(forks.kept),
        at_most("F12.plain.restore", "restore of it", "ms", 30).outcome(forks.back),
        at_most("F12.copy", "fork of it from a copy", "s", 3).outcome(filled),
        at_most("F12.copy.checkpoint", "checkpoint of it by a copy", "s", 3).outcome(copied),
    ]


async def _kept(farm: ImageFarm, session: ToolSession) -> tuple[str, float]:
    lease = session.lease
    async with farm.control(lease) as control:
        began = time.perf_counter()
        return (await control.act(lease.key, CheckpointSlot())).checkpoint, time.perf_counter() - began


async def _restored(farm: ImageFarm, session: ToolSession, name: str) -> float:
    async with farm.control(session.lease) as control:
        began = time.perf_counter()
        await control.act(session.lease.key, RestoreSlot(checkpoint=name))
        return time.perf_counter() - began


async def _forked(farm: ImageFarm, child: RootSpec) -> float:
    began = time.perf_counter()
    lease = await farm.pool.lease("child", root=child)
    took_s = time.perf_counter() - began
    await lease.release()
    await farm.freed(farm.slots - 1)
    return took_s


async def _forked_at_once(farm: ImageFarm, child: RootSpec) -> float:
    began = time.perf_counter()
    leases = await asyncio.gather(*(farm.pool.lease(f"child-{n}", root=child) for n in range(CHILDREN)))
    took_s = time.perf_counter() - began
    await asyncio.gather(*(lease.release() for lease in leases))
    await farm.freed(farm.slots - 1)
    return took_s


async def i6_depth(effort: Effort) -> list[Outcome]:
    """Lookups of names that are not there, on 63 checkpoints against on one."""
    ratios = []
    count = f"for i in {{1..{LOOKUPS}}}; do [ -e /usr/lib/none$i ]; done; true"
    async with image_farm(2) as farm:
        for _ in range(effort.rounds):
            async with farm.executor.open("deep", root=farm.root) as session:
                await _kept(farm, session)
                shallow = min([await timed_call(session, count) for _ in range(3)])
                for _ in range(DEPTH - 1):
                    await timed_call(session, "echo >> /file")
                    await _kept(farm, session)
                ratios.append(min([await timed_call(session, count) for _ in range(3)]) / shallow)
    return [at_most("I6.depth", "lookups on 63 checkpoints against on one", "x", 1.2).outcome(ratios)]


async def i7_hundred(effort: Effort) -> list[Outcome]:
    """100 image slots at once in one container, and what the kernel keeps for each."""
    took, each = [], []
    async with image_farm(100) as farm:
        for _ in range(effort.rounds):
            before = kernel_bytes()
            began = time.perf_counter()
            async with _leased(farm, 100):
                took.append(time.perf_counter() - began)
                each.append((kernel_bytes() - before) / 100 / MIB)
            await farm.freed(100)
    slots = at_most("I7", "100 image slots at once, all leased after", "s", 1.5)
    kernel = at_most("I7.kernel", "the kernel's memory for each, beyond a plain slot's", "MiB", 0.5)
    return [slots.outcome(took), kernel.outcome(each)]


@asynccontextmanager
async def _leased(farm: ImageFarm, count: int) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        leases = await asyncio.gather(*(farm.pool.lease(f"h{n}", root=farm.root) for n in range(count)))
        for lease in leases:
            stack.push_async_callback(lease.release)
        yield


async def i8_disk(effort: Effort) -> list[Outcome]:
    """A store with 500 images of one base, against the bytes of their layers."""
    images = IMAGES if effort.rounds > 1 else IMAGES // 25
    disk, layers = await asyncio.to_thread(many_images, images, LAYER_BYTES)
    goal = at_most("I8", f"disk of {images} images of one base (8 MiB each beyond it), against their layers", "x", 1.1)
    return [goal.outcome([disk / layers], disk_mib=disk / MIB, layers_mib=layers / MIB)]


async def i9_apt(effort: Effort) -> list[Outcome]:
    """``apt-get install`` of many packages, downloaded before, against the same in a plain chroot; both in memory."""
    ratios, ours, theirs = [], [], []
    async with image_farm(2, allow_network=True) as farm:
        with tempfile.TemporaryDirectory() as directory:
            kept = Path(directory) / "kept.tar"
            async with farm.executor.open("parent", root=apt.online(farm).root) as parent:
                checkpoint, packages = await apt.downloaded(parent, kept)
                for _ in range(effort.rounds):
                    ours.append(await apt.in_slot_s(farm, checkpoint))
                    theirs.append(await asyncio.to_thread(apt.chrooted_s, kept))
                    ratios.append(ours[-1] / theirs[-1])
    goal = at_most("I9", f"apt-get install of {packages} packages against a chroot", "x", 1.1)
    return [goal.outcome(ratios, in_slot_s=ours, in_chroot_s=theirs)]

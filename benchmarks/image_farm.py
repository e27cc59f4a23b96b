"""Image slots to be measured: Debian's base in a store of its own, a container that sees it, and docker beside it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings, cache_dir
from agentenv.containers.connection import open_session
from agentenv.containers.control import ContainerControl
from agentenv.executor.session import SessionLease
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.image.base import base_tarball
from agentenv.sdk.roots import store_directory
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.store import Store
from agentenv.store.addition import Runtime
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB, SlotLimits
from agentenv.wire.states import SlotState

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEMORY_BYTES: Final = 4096 * MIB


@dataclass
class ImageFarm:
    """A container of image slots. ``root``: of the base image, with room for 1.5 GiB of files."""

    pool: SlotPool
    executor: ToolExecutor
    root: RootSpec
    slots: int

    async def freed(self, wanted: int) -> None:
        """Wait until so many slots are free."""
        while self.pool.statistics().slots.get(SlotState.free, 0) < wanted:
            await asyncio.sleep(0)

    @asynccontextmanager
    async def control(self, lease: SessionLease) -> AsyncIterator[ContainerControl]:
        """The container of a lease."""
        async with open_session() as http:
            yield ContainerControl(lease.container, http)


def base_tar() -> Path:
    """Debian's base as a tar; made (minutes) where the cache does not have it."""
    place = cache_dir() / "image"
    place.mkdir(parents=True, exist_ok=True)
    return base_tarball(place)


def base_image() -> str:
    """The digest of Debian's base in this machine's store."""
    return Store.open(store_directory()).add(None, [base_tar()], Runtime({"PATH": PATH}, cmd=("bash",))).digest


@asynccontextmanager
async def image_farm(slots: int, *, allow_network: bool = False) -> AsyncIterator[ImageFarm]:
    """One local container with so many slots."""
    digest = await asyncio.to_thread(base_image)
    limits = SlotLimits(memory_bytes=MEMORY_BYTES)
    backend = LocalBackend(ContainerSettings(slots_per_container=slots, limits=limits, allow_network=allow_network))
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=600)
    root = RootSpec(digest, writable_bytes=1536 * MIB)
    async with (
        SlotPool(backend, settings) as pool,
        ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings()) as calls,
    ):
        farm = ImageFarm(pool, calls, root, slots)
        async with calls.open("warm-up", root=root) as session:
            assert (await session.call("bash", {"command": "true"})).exit_code == 0
        await farm.freed(slots)
        yield farm


def first_mounts_ms(digest: str, times: int) -> list[float]:
    """How long each of so many first mounts of a stored image takes."""
    argv = [sys.executable, "-m", "benchmarks.first_mount", str(store_directory()), digest, str(times)]
    done = subprocess.run(["unshare", "--mount", *argv], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


@contextmanager
def docker_image() -> Iterator[str | None]:
    """The same base in this machine's Docker engine, for the time of a block; None if no engine answers."""
    name = f"agentenv-bench-{secrets.token_hex(4)}:1"
    try:
        subprocess.run(["docker", "import", str(base_tar()), name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    try:
        yield name
    finally:
        subprocess.run(["docker", "rmi", "--force", name], check=True, capture_output=True)


def docker_ms(image: str, times: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each ``docker run --detach`` and of each ``docker exec`` in the last of these containers."""
    runs, execs, started = [], [], []
    try:
        for _ in range(times):
            began = time.perf_counter()
            done = subprocess.run(
                ["docker", "run", "--detach", "--network", "none", image, "sleep", "3600"],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            runs.append(1e3 * (time.perf_counter() - began))
            started.append(done.stdout.strip())
        for _ in range(times):
            began = time.perf_counter()
            subprocess.run(["docker", "exec", started[-1], "bash", "-c", "true"], check=True, capture_output=True)
            execs.append(1e3 * (time.perf_counter() - began))
    finally:
        if started:
            subprocess.run(["docker", "rm", "--force", *started], check=True, capture_output=True)
    return runs, execs


def many_images(images: int, layer_bytes: int) -> tuple[int, int]:
    """Bytes on disk of a store with so many images of one base, each with a layer of its own of random bytes, and the
    bytes of the layers alone."""
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-", dir=cache_dir()) as directory:
        store = Store.open(Path(directory) / "store")
        base = store.add(None, [base_tar()], Runtime({"PATH": PATH}))
        file, tar = Path(directory) / "own", Path(directory) / "own.tar"
        for _ in range(images):
            file.write_bytes(os.urandom(layer_bytes))
            subprocess.run(["tar", "-C", directory, "-cf", str(tar), "own"], check=True)
            store.add(base, [tar], Runtime({"PATH": PATH}))
        layers = sum(path.stat().st_blocks * 512 for path in store.layout.layers.iterdir())
        disk = sum(path.stat().st_blocks * 512 for path in (Path(directory) / "store").rglob("*") if path.is_file())
        return disk, layers


def kernel_bytes() -> int:
    """What the kernel keeps for itself on this machine: slabs that cannot be freed at once, stacks, page tables, and
    what is per CPU."""
    wanted = {"SUnreclaim", "KernelStack", "PageTables", "Percpu"}
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(rest.split()[0]) * 1024 for name, _, rest in lines if name in wanted)

"""Large values of a lease, an image and a call: each is taken or refused by its name, and nobody else notices.

A row more is an attempt more. While each is made, a call of a neighbour runs in the same container; afterwards it still
runs, its slot is the same, and no slot is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import BadImageError, ConfigError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.base import MAX_MESSAGE_BYTES
from agentenv.wire.environment import MAX_ENVIRONMENT_BYTES, MAX_VARIABLE_BYTES, MAX_VARIABLES
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB
from agentenv.wire.states import SlotState
from tests.farm_service import served
from tests.security.image_slots import LIMITS, Images, make_images, usual_files
from tests.small_root import RUNTIME, files, use_store
from tests.waiting import START_S, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give image slots their ids"),
]

KIB: Final = 1024
SLOTS: Final = 3
ROOM: Final[dict[str, Any]] = {"writable_bytes": 64 * MIB, "writable_inodes": 5_000}


def one(size_bytes: int) -> dict[str, str]:
    """A variable that takes this many bytes."""
    return {"BIG": "x" * (size_bytes - len("BIG=\0"))}


def many(count: int, size_bytes: int = 16, text: str = "x") -> dict[str, str]:
    return {f"V{number}": text * (size_bytes - len(f"V{number}=\0")) for number in range(count)}


TAKEN: Final[dict[str, dict[str, str]]] = {
    "16 KiB": one(16 * KIB),
    "64 KiB": one(64 * KIB),
    "the longest variable": one(MAX_VARIABLE_BYTES),
    "the most bytes, six of JSON each": many(4, MAX_ENVIRONMENT_BYTES // 4, "\x01"),
    "the most variables": many(MAX_VARIABLES),
}
REFUSED: Final[dict[str, dict[str, str]]] = {
    "a byte too long": one(MAX_VARIABLE_BYTES + 1),
    "256 KiB": one(256 * KIB),
    "a byte too much": {**many(4, MAX_ENVIRONMENT_BYTES // 4), "A": ""},
    "1 MiB": one(MIB),
    "2 MiB": one(2 * MIB),
    "2 MiB of 64 KiB": many(32, 64 * KIB),
    "100,000 variables": many(100_000),
    "a NUL": {"A": "\0"},
}


@dataclass(frozen=True)
class Beside:
    """A container in which a call of a neighbour runs."""

    executor: ToolExecutor
    images: Images
    usual: str
    neighbour: ToolSession
    controlled: ContainerHandle
    """The container, with its control token."""
    running: asyncio.Task[Any]
    epoch: int

    async def unharmed(self) -> None:
        """The neighbour's call still runs, in the same epoch, and every slot of the container can be had."""
        assert not self.running.done(), self.running.result()
        async with ContainerControl(self.controlled, guest=True) as control:

            async def whole() -> bool:
                reports = (await control.slots()).slots
                assert next(one.epoch for one in reports if one.slot == self.neighbour.lease.key.slot) == self.epoch
                states = sorted(one.state for one in reports)
                return states == sorted([SlotState.leased, *[SlotState.free] * (SLOTS - 1)])

            await eventually(whole)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return make_images(tmp_path_factory.mktemp("images"))


@pytest_asyncio.fixture(params=["local", "farm"], scope="module", loop_scope="module")
async def beside(request: pytest.FixtureRequest, images: Images, tmp_path_factory: Any) -> AsyncIterator[Beside]:
    containers = ContainerSettings(slots_per_container=SLOTS, limits=LIMITS)
    one_container = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    async with contextlib.AsyncExitStack() as stack:
        use_store(stack.enter_context(pytest.MonkeyPatch.context()), images.store)
        usual = images.over_programs(*usual_files())
        state_dir: Path = tmp_path_factory.mktemp("state")
        backend = LocalBackend(containers, state_dir=state_dir)
        farm = None
        if request.param == "local":
            pool: Any = SlotPool(backend, one_container)
        else:
            farm = await stack.enter_async_context(served(backend, one_container))
            pool = farm.pool(settings=one_container)
        await stack.enter_async_context(pool)
        executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin()))
        neighbour = await stack.enter_async_context(executor.open("neighbour", root=RootSpec(usual, **ROOM)))
        running = asyncio.create_task(neighbour.call("bash", {"command": "sleep 3600"}, timeout_s=3600))
        controlled = neighbour.lease.container  # of a farm it is a pass, which shows no slots
        if farm is not None:
            controlled = next(iter(farm.farm.manager.links.values())).handle
        yield Beside(executor, images, usual, neighbour, controlled, running, neighbour.lease.key.epoch)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def forged(image: str, **fields: Any) -> RootSpec:
    """A root that no client of ours would send."""
    root = RootSpec(image, **ROOM)
    for name, value in fields.items():
        object.__setattr__(root, name, value)
    return root


async def sizes(session: ToolSession) -> tuple[int, int]:
    """How many variables of ours a command has, and the bytes of the longest of them."""
    shown = "import os; v = [k + '=' + x for k, x in os.environ.items() if k[0] in 'VB' and k != 'BASH'];"
    result = await session.call(
        "bash", {"command": f'python3 -c "{shown} print(len(v), max(map(len, v)) + 1)"'}, timeout_s=60
    )
    assert result.success, result
    count, longest = result.stdout.split()
    return int(count), int(longest)


@pytest.mark.parametrize("env", TAKEN.values(), ids=TAKEN)
async def test_a_lease_s_environment_reaches_its_commands(beside: Beside, env: dict[str, str]) -> None:
    async with beside.executor.open("large", root=RootSpec(beside.usual, env=env, **ROOM)) as session:
        assert await sizes(session) == (len(env), max(len(f"{name}={value}\0") for name, value in env.items()))
    await beside.unharmed()


@pytest.mark.parametrize("env", REFUSED.values(), ids=REFUSED)
async def test_a_lease_s_environment_is_refused_by_its_name(beside: Beside, env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^root\.env: "):
        RootSpec(beside.usual, env=env, **ROOM)
    if len(json.dumps(env)) < MAX_MESSAGE_BYTES:  # no server reads more
        with pytest.raises(ConfigError, match=r"root\.env: "):
            async with beside.executor.open("large", root=forged(beside.usual, env=env), acquire_timeout_s=START_S):
                pass
    await beside.unharmed()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "u" * 300),
        ("user", "a\0b"),
        ("workdir", "/" + "d" * 5_000),
        ("workdir", "/\0"),
        ("checkpoint", "c" * 70_000),
        ("writable_bytes", 2**63),
        ("writable_inodes", 10**30),
        ("memory_bytes", 10**30),
        ("cpu_millis", 10**30),
        ("processes", 10**30),
        ("capabilities", ("sys_ptrace",) * 1_000),
    ],
)
async def test_every_other_field_of_a_root_is_refused_by_its_name(beside: Beside, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^root\.{field}: "):
        RootSpec(beside.usual, **{**ROOM, field: value})
    with pytest.raises(ConfigError, match=rf"root\.{field}"):
        async with beside.executor.open("odd", root=forged(beside.usual, **{field: value}), acquire_timeout_s=START_S):
            pass
    await beside.unharmed()


def image_with(images: Images, **config: Any) -> str:
    return images.make(images.programs, files(*usual_files()), config={**RUNTIME, **config})


def as_env(env: dict[str, str]) -> list[str]:
    return ["PATH=/usr/bin", *(f"{name}={value}" for name, value in env.items())]


@pytest.mark.parametrize("size_bytes", [64 * KIB, MAX_VARIABLE_BYTES])
async def test_an_image_s_environment_reaches_its_commands(beside: Beside, size_bytes: int) -> None:
    image = image_with(beside.images, Env=as_env(one(size_bytes)))
    async with beside.executor.open("large", root=RootSpec(image, **ROOM)) as session:
        assert await sizes(session) == (1, size_bytes)
    await beside.unharmed()


OF_AN_IMAGE: Final[dict[str, dict[str, Any]]] = {
    **{f"env: {name}": {"Env": as_env(env)} for name, env in REFUSED.items() if name != "a NUL"},
    "user: 300 characters": {"User": "u" * 300},
    "workdir: 5,000 characters": {"WorkingDir": "/" + "d" * 5_000},
}


@pytest.mark.parametrize("config", OF_AN_IMAGE.values(), ids=OF_AN_IMAGE)
async def test_an_image_is_refused_where_it_is_stored_and_where_it_was(beside: Beside, config: dict[str, Any]) -> None:
    with pytest.raises(BadImageError, match=r"(env|user|workdir): "):
        image_with(beside.images, **config)
    with patch("agentenv.store.manifest.why_no_config", return_value=""):  # as earlier versions did
        image = image_with(beside.images, **config)
    for _ in range(SLOTS):
        with pytest.raises(BadImageError, match=r"(env|user|workdir): "):
            async with beside.executor.open("large", root=RootSpec(image, **ROOM), acquire_timeout_s=START_S):
                pass
    await beside.unharmed()

"""One suite for every backend: whatever takes ``make`` or ``container`` runs on each of ``BACKENDS``."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.base import ContainerBackend, ContainerStarted
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.container_manager import ContainerManager
from agentenv.slots.lease import SlotLease
from agentenv.slots.pool import SlotPool
from agentenv.wire.calls import Accepted, Batch, Call, CallResult, Result, server_message
from agentenv.wire.leases import EndRequest, LeaseKey, LeaseRequest, Tags
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState
from agentenv.wire.transfers import LEASE_HEADER
from tests.farm_service import WatchingPool, served
from tests.nomad.farm import nomad_farm
from tests.waiting import DEADLINE_S, START_S, eventually

KINDS = ("fake", "local", "nomad")
"""Kinds of containers."""
BACKENDS = (*KINDS, "kept")
"""Those that start and stop them; a kept one starts the containers of ``local``."""


SHARED = ("farm-fake", "farm-nomad")
"""Those behind a farm service, whose clients reach containers by their addresses: in the service's process, and
elsewhere."""
OVER_KEPT = ("test_pool_faults",)
"""Modules whose pools are tried over kept containers too: those that kill them. What a pool does with one that runs is
the same as over ``local``, whose containers they are."""

OF_THE_POOL = frozenset({
    "test_no_slot_in_time_is_a_telling_error", "test_a_senseless_timeout_is_refused",
    "test_a_pool_is_used_only_inside_its_context", "test_a_name_that_is_no_text_is_refused_and_leaks_nothing",
    "test_a_lease_that_fails_in_no_known_way_fails_its_waiter_and_leaks_nothing",
    "test_a_group_that_leaves_lets_others_pass", "test_a_group_that_can_never_be_had_is_refused",
    "test_a_waiter_who_leaves_the_queue_is_forgotten",
})  # fmt: skip
"""Tests of what the pool or the farm decides without a container: one kind of containers is enough for them."""

AnyPool = SlotPool | FarmPool


class Breakable(ContainerBackend, Protocol):
    """A backend of which a test may kill containers."""

    def kill_container(self, container_id: str) -> None:
        """Kill it the hard way."""


class KillableFake(FakeBackend):
    def kill_container(self, container_id: str) -> None:
        self.kill(container_id)


class KillableLocal(LocalBackend):
    def kill_container(self, container_id: str) -> None:
        os.kill(self.pids[container_id], signal.SIGKILL)


class KillableKept(KillableLocal):
    """Detached containers, which it ends when it is closed, as the others do."""

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.stop_all()
        finally:
            await super().__aexit__(*error)


def breakable(request: pytest.FixtureRequest, settings: ContainerSettings, state_dir: Path) -> Breakable:
    """A backend of the kind that is the request's parameter."""
    match request.param.removeprefix("farm-").removeprefix("image-"):
        case "fake":
            return KillableFake(settings)
        case "nomad":
            return nomad_farm(request.getfixturevalue("cluster").address, settings)
        case "kept":
            return KillableKept(settings, detached=True, state_dir=state_dir)
        case _:
            return KillableLocal(settings, state_dir=state_dir)


@asynccontextmanager
async def over(backend: ContainerBackend, settings: PoolSettings, *, shared: bool) -> AsyncIterator[AnyPool]:
    """An open pool over this backend: its own, or (``shared``) one that is the client of a farm service over it."""
    if not shared:
        async with SlotPool(backend, settings) as own:
            yield own
        return
    async with served(backend, settings) as farm, farm.watching_pool(settings) as client:
        yield client


@dataclass(frozen=True)
class Maker:
    """Makes backends and pools of the kind under test, and closes them."""

    new: Callable[[ContainerSettings], Breakable]
    stack: AsyncExitStack
    shared: bool = False
    """Pools are clients of a farm service."""

    def backend(self, slots: int = 2) -> Breakable:
        # require_sandbox=False: an ordinary user's machine tests the isolation it has.
        return self.new(ContainerSettings(slots_per_container=slots, require_sandbox=False))

    async def pool(self, slots: int = 2, **settings: float) -> tuple[AnyPool, Breakable]:
        """An open pool over a new backend."""
        backend = self.backend(slots)
        bounds = PoolSettings.model_validate({"max_containers": 1, "acquire_timeout_s": START_S, **settings})
        return await self.stack.enter_async_context(over(backend, bounds, shared=self.shared)), backend


def yard_of(pool: AnyPool) -> ContainerManager:
    """What keeps the pool's containers."""
    if isinstance(pool, SlotPool):
        return pool._manager
    assert isinstance(pool, WatchingPool)
    return pool.farm.manager


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of pools runs over each kind of container, and over a farm."""
    if "make" in metafunc.fixturenames:
        kept = metafunc.module.__name__.rpartition(".")[2] in OVER_KEPT
        kinds = [*(BACKENDS if kept else KINDS), *SHARED]
        if metafunc.function.__name__ in OF_THE_POOL:
            kinds = ["fake", "farm-fake"]
        metafunc.parametrize("make", kinds, indirect=True)


@pytest.fixture
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Maker]:
    kind = request.param.removeprefix("farm-")
    async with AsyncExitStack() as stack:
        yield Maker(partial(breakable, request, state_dir=tmp_path), stack, shared=kind != request.param)


@pytest_asyncio.fixture(params=KINDS, scope="module", loop_scope="module")
async def handle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContainerHandle]:
    """One running container of three slots, without a pool, which a module's tests share. A kept one is one of
    ``local`` (test_backend_kept)."""
    settings = ContainerSettings(slots_per_container=3, require_sandbox=False)
    async with breakable(request, settings, tmp_path_factory.mktemp("state")) as backend:
        await backend.scale(1)
        async for event in backend.events():
            if isinstance(event, ContainerStarted):
                yield event.handle
                return


@pytest_asyncio.fixture(loop_scope="module")
async def container(handle: ContainerHandle) -> AsyncIterator[Client]:
    """A client of it; whatever a test has leased is free again afterwards."""
    async with Client.open(handle) as client:
        yield client
        await client.end_all()


def controlled(pool: AnyPool, lease: SlotLease) -> ContainerHandle:
    """The lease's container with its control token; the client of a farm has a pass only."""
    return yard_of(pool).links[lease.container.id].handle


async def renewed(pool: AnyPool, lease: SlotLease) -> None:
    """Wait until a heartbeat has renewed the lease: the time that it has left falls until then."""
    least_s = math.inf

    async def more_left() -> bool:
        nonlocal least_s
        left_s = (await control.slots()).slots[lease.key.slot].expires_in_s
        assert left_s is not None, "the lease has ended"
        least_s, before_s = left_s, least_s
        return left_s > before_s

    async with ContainerControl(controlled(pool, lease)) as control:
        await eventually(more_left)


class Client:
    """A plain client of one container: what curl could do, beside the farm that may control it."""

    def __init__(self, handle: ContainerHandle, session: aiohttp.ClientSession) -> None:
        self.handle = handle
        self.session = session
        self.control = ContainerControl(handle, session, guest=True)
        self.boot = ""

    @classmethod
    def open(cls, handle: ContainerHandle) -> _Opening:
        return _Opening(handle)

    async def lease(
        self,
        slot: int = 0,
        ttl_s: float = 60.0,
        trajectory: str = "t",
        tags: Tags | None = None,
        checkpoint: str = "",
    ) -> LeaseKey:
        root = RootSpec("", checkpoint) if checkpoint else None
        request = LeaseRequest(
            slot=slot, trajectory=trajectory, ttl_s=ttl_s, request_id=uuid4().hex, tags=tags or Tags(), root=root
        )
        return (await self.control.lease(request)).key

    def call(self, key: LeaseKey, command: str, timeout_s: float = DEADLINE_S, **changes: str) -> Call:
        return Call(
            id=changes.get("id", uuid4().hex),
            lease=key,
            tool=changes.get("tool", "bash"),
            arguments={"command": command},
            timeout_s=timeout_s,
            boot=changes.get("boot", self.boot),
        )

    async def end_all(self) -> None:
        """End every lease there is; returns when all slots are free again."""

        async def free() -> bool:
            slots = (await self.control.slots()).slots
            for slot in slots:
                if slot.state is SlotState.leased:
                    await self.control.end(EndRequest(slot=slot.slot, epoch=slot.epoch))
            return all(slot.state is SlotState.free for slot in slots)

        await eventually(free)

    async def results(self, *calls: Call) -> AsyncIterator[CallResult]:
        """The results of one batch, each as it arrives."""
        body = Batch(calls=calls).model_dump_json()
        async with self.session.post(self.handle.base_url + "/v1/batch", data=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                message = server_message.validate_json(line)
                if isinstance(message, Result):
                    yield message.result
                else:
                    assert isinstance(message, Accepted)

    async def attached(self, call: Call, field: str) -> str:
        """A text that a result left out."""
        url = f"{self.handle.base_url}/v1/attachments/{call.id}/{field}"
        async with self.session.get(url, headers={LEASE_HEADER: call.lease.model_dump_json()}) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    async def run(self, key: LeaseKey, command: str, timeout_s: float = DEADLINE_S, **changes: str) -> CallResult:
        """One call; its result, with what was too large for the message."""
        call = self.call(key, command, timeout_s, **changes)
        async for result in self.results(call):
            return result.model_copy(
                update={part.field: await self.attached(call, part.field) for part in result.attachments}
            )
        raise AssertionError("the batch ended without a result")


class _Opening:
    def __init__(self, handle: ContainerHandle) -> None:
        self._handle = handle
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {handle.token}"}, read_bufsize=2**22)

    async def __aenter__(self) -> Client:
        client = Client(self._handle, self._session)
        client.boot = (await client.control.info()).boot
        return client

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

"""One suite for every backend. ``KNOWN_FAILURES`` says, test by test and with reasons, what one cannot do."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import aiohttp
import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.wire.calls import Accepted, Batch, Call, CallResult, Result, server_message
from agentenv.wire.leases import EndRequest, LeaseKey, LeaseRequest
from agentenv.wire.states import SlotState
from agentenv.wire.transfers import LEASE_HEADER
from tests.nomad.farm import nomad_farm
from tests.waiting import eventually

KNOWN_FAILURES: dict[str, dict[str, str]] = {"fake": {}, "local": {}, "nomad": {}}


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


@pytest.fixture(params=list(KNOWN_FAILURES))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    reason = KNOWN_FAILURES[name].get(request.function.__name__)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    return name


@dataclass(frozen=True)
class Maker:
    """Makes backends and pools of the kind under test, and closes them."""

    kind: str
    state_dir: Path
    stack: AsyncExitStack
    nomad_address: str = ""

    def backend(self, slots: int = 2, **nomad: object) -> Breakable:
        # require_sandbox=False: an ordinary user's machine tests the isolation it has.
        settings = ContainerSettings(slots_per_container=slots, require_sandbox=False)
        if self.kind == "fake":
            return KillableFake(settings)
        if self.kind == "nomad":
            return nomad_farm(self.nomad_address, settings, **nomad)
        return KillableLocal(settings, state_dir=self.state_dir)

    async def pool(self, slots: int = 2, **settings: float) -> tuple[SlotPool, Breakable]:
        """An open pool over a new backend."""
        backend = self.backend(slots)
        pool = SlotPool(
            backend, PoolSettings.model_validate({"max_containers": 1, "acquire_timeout_s": 120.0, **settings})
        )
        return await self.stack.enter_async_context(pool), backend


@pytest.fixture
async def make(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Maker]:
    address = request.getfixturevalue("cluster").address if kind == "nomad" else ""
    async with AsyncExitStack() as stack:
        yield Maker(kind, tmp_path, stack, address)


@pytest.fixture
async def container(make: Maker, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """One running container of three free slots, without a pool. On Nomad a module's tests share it."""
    kept: dict[str, object] = {}
    if make.kind == "nomad":
        kept = {"job_id": request.getfixturevalue("kept_job"), "purge_job_on_shutdown": False}
    async with make.backend(slots=3, **kept) as backend:
        await backend.scale(1)
        async for event in backend.events():
            if handle := getattr(event, "handle", None):
                async with Client.open(handle) as client:
                    yield client
                    await client.end_all()
                return


class Client:
    """A plain client of one container: what curl could do."""

    def __init__(self, handle: ContainerHandle, session: aiohttp.ClientSession) -> None:
        self.handle = handle
        self.session = session
        self.control = ContainerControl(handle, session)
        self.boot = ""

    @classmethod
    def open(cls, handle: ContainerHandle) -> _Opening:
        return _Opening(handle)

    async def lease(self, slot: int = 0, ttl_s: float = 60.0, trajectory: str = "t") -> LeaseKey:
        request = LeaseRequest(slot=slot, trajectory=trajectory, ttl_s=ttl_s, request_id=uuid4().hex)
        return (await self.control.lease(request)).key

    def call(self, key: LeaseKey, command: str, timeout_s: float = 20.0, **changes: str) -> Call:
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

    async def run(self, key: LeaseKey, command: str, timeout_s: float = 20.0, **changes: str) -> CallResult:
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

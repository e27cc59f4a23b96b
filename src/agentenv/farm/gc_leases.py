"""Leases that are not renewed: found by observing them twice, ended on request."""

from __future__ import annotations

import asyncio

from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError
from agentenv.farm.look import containers_seen
from agentenv.farm.orphans import Orphan, SeenLease, unrenewed
from agentenv.farm.view import Census, OperatorAccess
from agentenv.wire.leases import EndRequest
from agentenv.wire.states import SlotState


async def orphaned_leases(access: OperatorAccess, observe_s: float, *, end: bool) -> list[Orphan]:
    """The farm's leases that are not renewed; with ``end`` they are ended and their slots reset. Takes
    ``observe_s`` if any slot is leased."""
    census = await access.census()
    before, _ = await _leases(census)
    if not before or observe_s <= 0:
        return []
    await asyncio.sleep(observe_s)
    after, handles = await _leases(census)
    found = unrenewed(before, after, observe_s)
    return [await _ended(lease, handles[lease.container], end=end) for lease in found]


async def _leases(census: Census) -> tuple[list[SeenLease], dict[str, ContainerHandle]]:
    seen = await containers_seen(census)
    leases = [
        SeenLease(sight.place.id, slot.slot, slot.epoch, slot.trajectory or "", slot.expires_in_s)
        for sight in seen
        for slot in sight.slots
        if slot.state is SlotState.leased and slot.expires_in_s is not None
    ]
    return leases, {sight.place.id: sight.place.handle for sight in seen if sight.place.handle is not None}


async def _ended(lease: SeenLease, handle: ContainerHandle, *, end: bool) -> Orphan:
    name = f"{lease.trajectory} on {lease.container}/{lease.slot}"
    why = f"it is not renewed and expires in {lease.expires_in_s:.0f} s"
    if not end:
        return Orphan("lease", name, why, problem="--end-leases ends it now")
    try:
        async with ContainerControl(handle, guest=True) as control:
            await control.end(EndRequest(slot=lease.slot, epoch=lease.epoch))
    except AgentEnvError as error:
        return Orphan("lease", name, why, problem=error.message)
    return Orphan("lease", name, why, removed=True)

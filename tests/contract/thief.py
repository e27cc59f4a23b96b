"""Somebody who has a pass of their own, and the key of another run's lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import pytest

from agentenv.errors import StaleLeaseError
from agentenv.sandbox.server.access import ROUTES, Who
from agentenv.wire.calls import Batch, CallResult, Result, server_message
from agentenv.wire.leases import (
    ChangeNetwork,
    CheckpointSlot,
    DropCheckpoint,
    LeaseAction,
    LeaseKey,
    RenewRequest,
    RestoreSlot,
    SealSlot,
)
from agentenv.wire.network import NO_NETWORK
from agentenv.wire.programs import ProgramOrder
from agentenv.wire.server import ErrorReply
from agentenv.wire.transfers import LEASE_HEADER
from tests.contract.conftest import Client


async def refused_everywhere(thief: Client, key: LeaseKey) -> None:
    """The key opens nothing, on any route."""
    assert set(_ATTEMPTS) == {route for route, who in ROUTES.items() if who is Who.run} - _OF_NO_LEASE
    for attempt in _ATTEMPTS.values():
        await attempt(thief, key)


async def _batch(thief: Client, key: LeaseKey) -> None:
    _check(await thief.run(key, "touch stolen"))


async def _stream(thief: Client, key: LeaseKey) -> None:
    async with thief.session.ws_connect(thief.handle.base_url + "/v1/stream") as stream:
        await stream.send_str(Batch(calls=(thief.call(key, "touch stolen"),)).model_dump_json())
        while not isinstance(said := server_message.validate_json(await stream.receive_str(timeout=60)), Result):
            pass
        _check(said.result)


def _check(result: CallResult) -> None:
    assert (result.fault, result.error) == ("infra", "stale_lease")


async def _renew(thief: Client, key: LeaseKey) -> None:
    reply = await thief.control.renew(RenewRequest(keys=(key,), ttl_s=60))
    assert (reply.renewed, reply.stale, reply.lost) == ((), (key.slot,), ())


async def _release(thief: Client, key: LeaseKey) -> None:
    with pytest.raises(StaleLeaseError):
        await thief.control.release(key)


async def _act(thief: Client, key: LeaseKey) -> None:
    for action in _ACTIONS:
        with pytest.raises(StaleLeaseError):
            await thief.control.act(key, action)


async def _ask(method: str, path: str, thief: Client, key: LeaseKey) -> None:
    url = thief.handle.base_url + path.format(slot=key.slot)
    headers = {LEASE_HEADER: key.model_dump_json()}
    async with thief.session.request(method, url, headers=headers, data=b"") as answer:
        assert answer.status == 409, path
        assert ErrorReply.model_validate_json(await answer.read()).error == "stale_lease", path


async def _program(thief: Client, key: LeaseKey) -> None:
    url = f"{thief.handle.base_url}/v1/slots/{key.slot}/program"
    async with thief.session.ws_connect(url, headers={LEASE_HEADER: key.model_dump_json()}) as stream:
        await stream.send_str(ProgramOrder(command="touch stolen").model_dump_json())
        assert "stale_lease" in await stream.receive_str(timeout=60)


_NO_CHECKPOINT: Final = "0" * 32
_ACTIONS: Final[tuple[LeaseAction, ...]] = (
    SealSlot(),
    CheckpointSlot(),
    RestoreSlot(checkpoint=_NO_CHECKPOINT),
    DropCheckpoint(checkpoint=_NO_CHECKPOINT),
    ChangeNetwork(network=NO_NETWORK),
)
_OF_NO_LEASE: Final = {"GET /v1/info", "GET /v1/checkpoints/{checkpoint}/layers/{layer}"}
"""A checkpoint's name is a secret of its own: who knows it may read it."""
_ATTEMPTS: Final[Mapping[str, Callable[[Client, LeaseKey], Awaitable[None]]]] = {
    "POST /v1/batch": _batch,
    "GET /v1/stream": _stream,
    "POST /v1/leases/renew": _renew,
    "POST /v1/leases/act": _act,
    "POST /v1/leases/release": _release,
    "PUT /v1/attachments/{call}/{field}": partial(_ask, "PUT", "/v1/attachments/c/stdin"),
    "GET /v1/attachments/{call}/{field}": partial(_ask, "GET", "/v1/attachments/c/stdout"),
    "GET /v1/calls/{call}/output": partial(_ask, "GET", "/v1/calls/c/output"),
    "PUT /v1/slots/{slot}/transfer": partial(_ask, "PUT", "/v1/slots/{slot}/transfer?path=stolen"),
    "GET /v1/slots/{slot}/transfer": partial(_ask, "GET", "/v1/slots/{slot}/transfer?path=."),
    "PUT /v1/slots/{slot}/tar": partial(_ask, "PUT", "/v1/slots/{slot}/tar?path=stolen"),
    "GET /v1/slots/{slot}/tar": partial(_ask, "GET", "/v1/slots/{slot}/tar?path=."),
    "GET /v1/slots/{slot}/connect": partial(_ask, "GET", "/v1/slots/{slot}/connect?port=80"),
    "GET /v1/slots/{slot}/listen": partial(_ask, "GET", "/v1/slots/{slot}/listen?port=0"),
    "GET /v1/slots/{slot}/image": partial(_ask, "GET", "/v1/slots/{slot}/image"),
    "GET /v1/slots/{slot}/metrics": partial(_ask, "GET", "/v1/slots/{slot}/metrics"),
    "GET /v1/slots/{slot}/program": _program,
}

"""The comparison: the same wire and client, but one ``bwrap … bash -c`` per call, as is usual.

``python -m benchmarks.bwrap_per_call SLOTS [limited]`` serves on a loopback port and prints it. It isolates each
call as a slot's bubblewrap does and remembers nothing: it only exists to be timed. ``limited`` (root only): each
slot has a uid of its own and rlimits, without which nothing here would outlive a fork bomb.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from agentenv.wire.base import PROTOCOL_VERSION
from agentenv.wire.calls import Accepted, Batch, Call, CallResult, Cancel, Result, client_message
from agentenv.wire.leases import LeaseGrant, LeaseKey, LeaseRequest, ReleaseReply, RenewReply, RenewRequest, SlotReport
from agentenv.wire.server import Health, ServerInfo, SlotsReply
from agentenv.wire.states import SlotState
from benchmarks.baselines import limit_this_process, scratch
from benchmarks.measure import MIB

BWRAP = shlex.split(
    "bwrap --unshare-all --unshare-user --die-with-parent --new-session --clearenv --cap-drop ALL"
    " --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64"
    " --proc /proc --dev /dev --tmpfs /tmp --setenv PATH /usr/bin:/bin --chdir /workspace"
)


LIMITED_UIDS = 28_000
"""Not those of a farm's slots on the same machine: the kernel counts a uid's processes wherever they are."""
OUTPUT_BYTES = 2 * MIB
"""Kept of what a call prints; the rest is read and dropped."""


class PerCallServer:
    """Speaks the wire; every bash call is its own bubblewrap."""

    def __init__(self, slots: int, workspaces: Path, *, limited: bool) -> None:
        self.slots = slots
        self.workspaces = workspaces
        self.limited = limited
        self.running: dict[str, asyncio.Task[None]] = {}
        for slot in range(slots):
            (workspaces / str(slot)).mkdir()
            if limited:
                os.chown(workspaces / str(slot), LIMITED_UIDS + slot, LIMITED_UIDS + slot)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/info", self._info),
                web.get("/v1/slots", self._slots),
                web.post("/v1/leases", self._lease),
                web.post("/v1/leases/renew", self._renew),
                web.post("/v1/leases/release", self._release),
                web.get("/v1/stream", self._stream),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return _reply(Health(status="ok", version="bench"))

    async def _info(self, _: web.Request) -> web.Response:
        return _reply(
            ServerInfo(
                container="bwrap-per-call",
                boot="bench",
                version="bench",
                protocol=PROTOCOL_VERSION,
                slots=self.slots,
                isolation="full",
            )
        )

    async def _slots(self, _: web.Request) -> web.Response:
        slots = tuple(SlotReport(slot=k, state=SlotState.free, epoch=1) for k in range(self.slots))
        return _reply(SlotsReply(boot="bench", slots=slots))

    async def _lease(self, request: web.Request) -> web.Response:
        asked = LeaseRequest.model_validate_json(await request.read())
        key = LeaseKey(slot=asked.slot, epoch=1, secret="x" * 16)
        return _reply(LeaseGrant(key=key, trajectory=asked.trajectory, ttl_s=asked.ttl_s))

    async def _renew(self, request: web.Request) -> web.Response:
        asked = RenewRequest.model_validate_json(await request.read())
        return _reply(RenewReply(renewed=tuple(key.slot for key in asked.keys), stale=()))

    async def _release(self, request: web.Request) -> web.Response:
        key = LeaseKey.model_validate_json(await request.read())
        return _reply(ReleaseReply(slot=key.slot, state=SlotState.free))

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            batch = client_message.validate_json(message.data)
            if isinstance(batch, Batch):
                await socket.send_str(Accepted(batch=batch.batch).model_dump_json())
                for call in batch.calls:
                    self.running[call.id] = asyncio.create_task(self._run(call, socket))
            elif isinstance(batch, Cancel):
                for call_id in [call.id for call in batch.calls]:
                    if call_id in self.running:
                        self.running[call_id].cancel()
        return socket

    async def _run(self, call: Call, socket: web.WebSocketResponse) -> None:
        started = time.monotonic()
        process = await self._start(call)
        assert process.stdout is not None
        assert process.stderr is not None
        ended = asyncio.gather(_kept(process.stdout), _kept(process.stderr), process.wait())
        try:
            async with asyncio.timeout(call.timeout_s):
                await asyncio.shield(ended)
        except (TimeoutError, asyncio.CancelledError):
            process.kill()  # and by --die-with-parent all that it started
        out, err, _ = await ended
        del self.running[call.id]
        result = CallResult(
            id=call.id,
            exit_code=process.returncode,
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            duration_s=time.monotonic() - started,
        )
        if not socket.closed:
            await socket.send_str(Result(result=result).model_dump_json())

    async def _start(self, call: Call) -> asyncio.subprocess.Process:
        slot = call.lease.slot
        uid = LIMITED_UIDS + slot
        who: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []} if self.limited else {}
        return await asyncio.create_subprocess_exec(
            *BWRAP,
            *("--bind", str(self.workspaces / str(slot)), "/workspace", "bash", "-c", str(call.arguments["command"])),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            **who,
        )


async def _kept(stream: asyncio.StreamReader) -> bytes:
    """All of it is read, so that nobody waits; the beginning is kept."""
    kept = bytearray()
    while chunk := await stream.read(1 << 16):
        if len(kept) < OUTPUT_BYTES:
            kept += chunk
    return bytes(kept)


def _reply(model: object) -> web.Response:
    return web.Response(text=model.model_dump_json(), content_type="application/json")  # type: ignore[attr-defined]


async def _serve(slots: int, *, limited: bool) -> None:
    if limited:
        limit_this_process()
    runner = web.AppRunner(PerCallServer(slots, scratch(), limited=limited).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # the parent's pipe closes: leave
    await runner.cleanup()


if __name__ == "__main__":
    os.environ.pop("PYTHONWARNINGS", None)
    asyncio.run(_serve(int(sys.argv[1]), limited=sys.argv[2:] == ["limited"]))

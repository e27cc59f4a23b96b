"""The comparison: the same wire and client, but one ``bwrap … bash -c`` per call, as is usual.

``python -m benchmarks.bwrap_per_call SLOTS`` serves on a loopback port and prints it. It isolates each
call as a slot's bubblewrap does, remembers nothing and limits nothing: it only exists to be timed.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from aiohttp import WSMsgType, web

from agentenv.wire.base import PROTOCOL_VERSION
from agentenv.wire.calls import Accepted, Batch, Call, CallResult, Result, client_message
from agentenv.wire.leases import (
    LeaseGrant,
    LeaseKey,
    LeaseRequest,
    ReleaseReply,
    RenewReply,
    RenewRequest,
    SlotReport,
    SlotState,
)
from agentenv.wire.server import Health, ServerInfo, SlotsReply

BWRAP = shlex.split(
    "bwrap --unshare-all --unshare-user --die-with-parent --new-session --clearenv --cap-drop ALL"
    " --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64"
    " --proc /proc --dev /dev --tmpfs /tmp --setenv PATH /usr/bin:/bin --chdir /workspace"
)


class PerCallServer:
    """Speaks the wire; every bash call is its own bubblewrap."""

    def __init__(self, slots: int, workspaces: Path) -> None:
        self.slots = slots
        self.workspaces = workspaces
        self.running: set[asyncio.Task[None]] = set()
        for slot in range(slots):
            (workspaces / str(slot)).mkdir()

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
                    task = asyncio.create_task(self._run(call, socket))
                    self.running.add(task)
                    task.add_done_callback(self.running.discard)
        return socket

    async def _run(self, call: Call, socket: web.WebSocketResponse) -> None:
        workspace = self.workspaces / str(call.lease.slot)
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *BWRAP,
            *("--bind", str(workspace), "/workspace", "bash", "-c", str(call.arguments["command"])),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
        )
        out, err = await process.communicate()
        result = CallResult(
            id=call.id,
            exit_code=process.returncode,
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            duration_s=time.monotonic() - started,
        )
        await socket.send_str(Result(result=result).model_dump_json())


def _reply(model: object) -> web.Response:
    return web.Response(text=model.model_dump_json(), content_type="application/json")  # type: ignore[attr-defined]


async def _serve(slots: int) -> None:
    with tempfile.TemporaryDirectory() as workspaces:
        runner = web.AppRunner(PerCallServer(slots, Path(workspaces)).app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # the parent's pipe closes: leave
        await runner.cleanup()


if __name__ == "__main__":
    os.environ.pop("PYTHONWARNINGS", None)
    asyncio.run(_serve(int(sys.argv[1])))

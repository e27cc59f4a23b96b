"""A call that cannot even be begun: it gets its answer, and the slot goes on."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import Any, cast

import pytest

from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.server import process
from agentenv.sandbox.server.agent_link import AgentLink
from agentenv.sandbox.server.call_runner import CallRunner
from agentenv.sandbox.server.calls import CallInFlight
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.past_calls import PastCalls
from agentenv.sandbox.server.poller import Lane, Poller
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.replies import ReplyMemory
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.wire.calls import Call, Result, server_message
from agentenv.wire.leases import LeaseKey
from agentenv.wire.tools import BashArguments


class Outlet:
    closed = False
    waits = True

    def deliver(self, asked: CallInFlight) -> None:
        pass

    def refuse(self, call_id: str, message: bytes) -> None:
        pass


def _asked(arguments: dict[str, Any]) -> CallInFlight:
    key = LeaseKey(slot=0, epoch=0, secret="s" * 16)
    call = Call(id="c" * 8, lease=key, tool="bash", arguments=arguments, timeout_s=5.0, boot="b" * 16)
    memory = ReplyMemory({}, max_count=9, max_unsent_bytes=2**20, max_sent_bytes=2**20)
    asked = CallInFlight(call, BashArguments.model_validate(arguments), memory, Outlet(), time.monotonic())
    memory.begin(asked)
    return asked


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_a_call_that_cannot_be_begun_is_answered_and_nobody_else_is(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, "nothing left")

    monkeypatch.setattr(process, "memory_file", fail)
    poller = Poller(asyncio.get_running_loop())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = Lane(poller)
    link = AgentLink(ours, lane, 0, lambda *_: None)
    context = ServerContext(poller, cast("SupervisorLink", None), {}, 4096, 9, spare_shells=False)
    over: list[bool] = []
    lost: list[tuple[Loss, str]] = []
    io = SlotIo(link, lane)
    runner = CallRunner(context, io, lambda: over.append(True), lambda *said: lost.append(said), PastCalls())
    asked = _asked({"command": "cat", "stdin": "x"})
    runner.begin(asked)
    async with asyncio.timeout(10):
        while not over:
            await asyncio.sleep(0.001)
    assert asked.message is not None
    answered = server_message.validate_json(asked.message)
    assert isinstance(answered, Result)
    assert (answered.result.fault, answered.result.error) == ("infra", "infra")
    assert "nothing left" in answered.result.message
    assert (asked.timer, lost) == (None, [])
    runner.close()
    poller.close()
    theirs.close()

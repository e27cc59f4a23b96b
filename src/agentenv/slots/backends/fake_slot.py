"""The slots of a fake container: leases with epochs, calls run in order, replies remembered."""

from __future__ import annotations

import asyncio
import base64
import secrets
import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from agentenv.errors import (
    AgentEnvError,
    CallLostError,
    InvalidArgumentsError,
    SandboxUnavailableError,
    StaleLeaseError,
    UnknownToolError,
)
from agentenv.sessions.slot_sessions import SessionArguments
from agentenv.slots.backends.fake_sessions import FakeSessions
from agentenv.slots.backends.fake_tools import FakeShell, Ran, SlotfilesError, run_file_tool
from agentenv.wire.base import LARGE_BYTES, MAX_FILE_BYTES, WireModel
from agentenv.wire.calls import Attachment, Call, CallKey, CallResult
from agentenv.wire.leases import LeaseGrant, LeaseKey, LeaseRequest, SlotReport
from agentenv.wire.sessions import ProcessArguments, TerminalArguments, TmuxArguments
from agentenv.wire.states import SlotState
from agentenv.wire.tools import (
    ArtifactsArguments,
    BashArguments,
    ListFilesArguments,
    PatchArguments,
    ReadFileArguments,
    SearchArguments,
    WriteFileArguments,
)

ARGUMENTS: Mapping[str, type[WireModel]] = {
    "bash": BashArguments,
    "terminal": TerminalArguments,
    "process": ProcessArguments,
    "tmux": TmuxArguments,
    "read_file": ReadFileArguments,
    "write_file": WriteFileArguments,
    "list_files": ListFilesArguments,
    "artifacts": ArtifactsArguments,
    "patch": PatchArguments,
    "search": SearchArguments,
}
SESSION_TOOLS = ("terminal", "process", "tmux")
"""Their calls run beside the slot's others."""


@dataclass
class FakeLease:
    """One lease and the replies remembered for it."""

    key: LeaseKey
    request: LeaseRequest
    expires_at: float
    sealed_by: str = ""
    calls: dict[str, FakeCall] = field(default_factory=dict)
    attached: dict[tuple[str, str], bytearray] = field(default_factory=dict)
    """Large arguments of calls that are still to come."""


@dataclass(eq=False)
class FakeCall:
    """One call: running, waiting its turn, or answered."""

    task: asyncio.Task[CallResult]
    cancelled: bool = False
    left: Mapping[str, bytes] = field(default_factory=dict)
    """What of its result is to be fetched."""


class FakeSlot:
    """One slot. Costs nothing until its first call: then it gets a directory and processes."""

    __slots__ = (
        "_directory",
        "_ended_requests",
        "_env",
        "_lost",
        "_order",
        "_output_bytes",
        "_sessions",
        "_shell",
        "_state",
        "_state_since",
        "epoch",
        "index",
        "lease",
    )

    def __init__(self, index: int, directory: Path, env: Mapping[str, str], output_bytes: int) -> None:
        self.index = index
        self._state = SlotState.free
        self._state_since = time.monotonic()
        self.epoch = 0
        self.lease: FakeLease | None = None
        self._directory = directory
        self._env = env
        self._output_bytes = output_bytes
        self._order: asyncio.Lock | None = None
        self._shell: FakeShell | None = None
        self._sessions: FakeSessions | None = None
        self._ended_requests: deque[str] = deque(maxlen=64)
        self._lost: tuple[LeaseKey, AgentEnvError] | None = None

    @property
    def state(self) -> SlotState:
        """Where it is now."""
        return self._state

    @state.setter
    def state(self, to: SlotState) -> None:
        self._state, self._state_since = to, time.monotonic()

    def grant(self, request: LeaseRequest, now: float) -> LeaseGrant:
        """Lease it. Raises StaleLeaseError when it is not free (and not leased by this very request)."""
        if request.request_id in self._ended_requests:
            raise StaleLeaseError(f"slot {self.index} was leased by this very request, and that lease has ended")
        if self.lease is None or self.lease.request.request_id != request.request_id:
            if self.state is not SlotState.free:
                raise StaleLeaseError(f"slot {self.index} is {self.state}, not free")
            self.state = SlotState.leased
            key = LeaseKey(slot=self.index, epoch=self.epoch, secret=secrets.token_hex(16))
            self.lease = FakeLease(key, request, now + request.ttl_s)
        return LeaseGrant(key=self.lease.key, trajectory=self.lease.request.trajectory, ttl_s=request.ttl_s)

    def held_by(self, key: LeaseKey) -> FakeLease | None:
        """The lease, when ``key`` is its key."""
        return self.lease if self.lease is not None and self.lease.key == key else None

    def renew(self, key: LeaseKey, ttl_s: float, now: float) -> bool:
        """Extend the lease; False when the key is stale."""
        lease = self.held_by(key)
        if lease is not None:
            lease.expires_at = now + ttl_s
        return lease is not None

    def why_lost(self, key: LeaseKey) -> AgentEnvError | None:
        """Why the lease with this key was lost; None when it was not."""
        return self._lost[1] if self._lost is not None and self._lost[0] == key else None

    async def lose(self, error: AgentEnvError) -> None:
        """The slot is lost, and made anew: its lease ends with this error."""
        if self.lease is not None:
            self._lost = self.lease.key, error
        await self.reset(quarantine=False)

    async def reset(self, quarantine: bool) -> None:
        """End lease and processes, discard the workspace, begin a new epoch."""
        if self.state is not SlotState.leased:
            return
        self.state = SlotState.resetting
        lease, self.lease = self.lease, None
        if lease is not None:
            self._ended_requests.append(lease.request.request_id)
        await self._end_calls(lease)
        self._discard()
        self.epoch += 1
        self.state = SlotState.quarantined if quarantine else SlotState.free

    async def seal(self, request_id: str = "") -> None:
        """Kill all that runs; keep workspace and lease; once for each ``request_id`` that is not empty. Running
        calls are answered as cancelled."""
        if self.lease is not None and request_id:
            if request_id == self.lease.sealed_by:
                return
            self.lease.sealed_by = request_id
        for call in self.lease.calls.values() if self.lease is not None else ():
            call.cancelled = not call.task.done()
        await self._end_calls(self.lease)
        self._end_processes()
        self.workspace()
        assert self._shell is not None
        self._shell.seal()

    def forget_replies(self) -> None:
        """The server crashed: what it knew of calls is lost, what ran is killed."""
        if self.lease is not None:
            for call in self.lease.calls.values():
                call.task.cancel()
            self.lease.calls.clear()
        self._end_sessions()

    def destroy(self) -> None:
        """The container is no more."""
        self.forget_replies()
        self.lease = None
        self.state = SlotState.gone
        self._discard()

    async def _end_calls(self, lease: FakeLease | None) -> None:
        tasks = [call.task for call in lease.calls.values()] if lease is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _discard(self) -> None:
        self._end_processes()
        if self._shell is not None:
            self._shell = None
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end_processes(self) -> None:
        used = self._end_sessions()
        if self._shell is not None:
            self._shell.kill_all(used=used)

    def _end_sessions(self) -> bool:
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.close()
        return sessions is not None

    def report(self, now: float) -> SlotReport:
        """What ``GET /v1/slots`` says of it."""
        lease = self.lease
        return SlotReport(
            slot=self.index,
            state=self.state,
            epoch=self.epoch,
            trajectory=lease.request.trajectory if lease is not None else None,
            expires_in_s=lease.expires_at - now if lease is not None else None,
            running_calls=sum(not call.task.done() for call in lease.calls.values()) if lease is not None else 0,
            in_state_s=time.monotonic() - self._state_since,
            reason="a reset was made to fail" if self.state is SlotState.quarantined else "",
        )

    # -- calls --------------------------------------------------------------------------------

    def submit(self, call: Call, boot: str) -> asyncio.Task[CallResult] | CallResult:
        """Run it, or find it running or answered. Refusals are results at once."""
        lease = self.held_by(call.lease)
        if lease is None:
            stale = StaleLeaseError(f"slot {self.index} is not under this lease any more")
            return refusal(call.id, self.why_lost(call.lease) or stale)
        known = lease.calls.get(call.id)
        if known is not None:
            return known.task
        if call.boot != boot:
            return refusal(call.id, CallLostError("the server restarted; the call may have run before"))
        try:
            call = with_attached(call, lease)
        except AgentEnvError as error:
            return refusal(call.id, error)
        record = FakeCall(asyncio.create_task(self._run(call, lease), name=f"call {call.id}"))
        lease.calls[call.id] = record
        return record.task

    def cancel(self, key: CallKey) -> None:
        """End a call now; it still gets a result. One that has ended is forgotten."""
        call = lease.calls.get(key.id) if (lease := self.held_by(key.lease)) is not None else None
        if call is not None and not call.task.done():
            call.cancelled = True
            call.task.cancel()
        else:
            self.forget(key)

    def forget(self, key: CallKey) -> None:
        """Its result has arrived, or it will not be asked."""
        if (lease := self.held_by(key.lease)) is None:
            return
        if (call := lease.calls.get(key.id)) is not None and call.task.done():
            del lease.calls[key.id]
        for one in [one for one in lease.attached if one[0] == key.id]:
            del lease.attached[one]

    def receive(self, key: LeaseKey, call_id: str, field: str, content: bytes, at: int) -> int:
        """Keep a piece of a large argument until its call comes; how much of it is here. Raises StaleLeaseError,
        InvalidArgumentsError."""
        if (lease := self.held_by(key)) is None:
            raise StaleLeaseError(f"slot {self.index} is not under this lease any more")
        if at + len(content) > MAX_FILE_BYTES:
            raise InvalidArgumentsError(f"at most {MAX_FILE_BYTES} bytes fit in one argument")
        kept = lease.attached.setdefault((call_id, field), bytearray())
        if at <= len(kept):
            kept[at:] = content
        return len(kept)

    def fetched(self, key: LeaseKey, call_id: str, field: str) -> bytes:
        """What a result left to be fetched. Raises StaleLeaseError, CallLostError."""
        if (lease := self.held_by(key)) is None:
            raise StaleLeaseError(f"slot {self.index} is not under this lease any more")
        call = lease.calls.get(call_id)
        if call is None or field not in call.left:
            raise CallLostError(f"the call's {field} is not remembered (any more)")
        return call.left[field]

    async def _run(self, call: Call, lease: FakeLease) -> CallResult:
        asked = time.monotonic()
        began = asked
        order = self._order = self._order or asyncio.Lock()
        try:
            if call.tool in SESSION_TOOLS:
                result = await self._attempt(call)
            else:
                async with order:
                    began = time.monotonic()
                    result = await self._attempt(call)
        except asyncio.CancelledError:
            record = lease.calls.get(call.id)
            if record is None or not record.cancelled:
                ended = StaleLeaseError("the lease ended while the call ran")
                result = refusal(call.id, self.why_lost(call.lease) or ended)
            else:
                result = CallResult(id=call.id, cancelled=True, exit_code=137)
        now = time.monotonic()
        timed = result.model_copy(update={"queue_s": began - asked, "duration_s": now - began})
        small, left = without_large(timed)
        if (record := lease.calls.get(call.id)) is not None:
            record.left = left
        return small

    async def _attempt(self, call: Call) -> CallResult:
        try:
            arguments = _validated(call)
            if isinstance(arguments, BashArguments):
                return await self._bash(call, arguments)
            if isinstance(arguments, SessionArguments):
                return await self._session(call, arguments)
            content = await asyncio.to_thread(run_file_tool, self.workspace(), arguments)
            return CallResult(id=call.id, exit_code=0, content=content.model_dump(mode="json"))
        except AgentEnvError as error:
            return refusal(call.id, error)
        except OSError as error:
            return CallResult(id=call.id, exit_code=error.errno or 1, stderr=_sentence(call, error))

    async def _bash(self, call: Call, arguments: BashArguments) -> CallResult:
        self.workspace()
        assert self._shell is not None
        try:
            async with asyncio.timeout(call.timeout_s):
                return _finished(call.id, await self._shell.run(arguments), timed_out=False)
        except TimeoutError:
            return _finished(call.id, self._shell.partial(), timed_out=True)

    async def _session(self, call: Call, arguments: SessionArguments) -> CallResult:
        directory = self.workspace()
        assert self._shell is not None
        if self._sessions is None:
            self._sessions = FakeSessions(directory, self._shell.env, self._output_bytes)
        answer = await self._sessions.call(arguments, asyncio.get_running_loop().time() + call.timeout_s)
        content = answer.content.model_dump(mode="json", exclude_defaults=True)
        return CallResult(id=call.id, content=content, **answer.fields)

    def workspace(self) -> Path:
        """Its directory, made at the first use."""
        if self._shell is None:
            self._directory.mkdir(parents=True, mode=0o700)
            self._shell = FakeShell(self._directory, self._env, self._output_bytes)
        return self._directory


def with_attached(call: Call, lease: FakeLease) -> Call:
    """The call with its large arguments in their places. Raises SandboxUnavailableError."""
    arguments: dict[str, Any] = dict(call.arguments)
    for part in call.attachments:
        content = lease.attached.pop((call.id, part.field), None)
        if content is None or len(content) != part.size_bytes:
            raise SandboxUnavailableError(f"the attachment {part.field!r} of the call did not arrive")
        arguments[part.field] = bytes(content) if part.field == "data" else content.decode("utf-8", "replace")
    return call.model_copy(update={"arguments": arguments})


def without_large(result: CallResult) -> tuple[CallResult, dict[str, bytes]]:
    """The result as it is sent, and what of it is to be fetched, by its field."""
    left = {name: text.encode() for name in ("stdout", "stderr") if len(text := getattr(result, name)) > LARGE_BYTES}
    content = result.content
    if isinstance(content, dict):
        for name in ("text", "data"):
            if isinstance(value := content.get(name), str) and len(value) > LARGE_BYTES:
                left[f"content.{name}"] = value.encode() if name == "text" else base64.b64decode(value)
                content = {**content, name: None}
    if len(encoded := to_json(content)) > LARGE_BYTES:
        left["content"], content = encoded, None
    parts = tuple(Attachment(field=name, size_bytes=len(value)) for name, value in left.items())
    empty = {name: "" for name in left if "." not in name}
    return result.model_copy(update={**empty, "content": content, "attachments": parts}), left


def _validated(call: Call) -> WireModel:
    model = ARGUMENTS.get(call.tool)
    if model is None:
        raise UnknownToolError(f"unknown tool {call.tool!r}", next_step=f"use one of {', '.join(ARGUMENTS)}")
    try:
        return model.model_validate(call.arguments)
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "arguments"
        raise InvalidArgumentsError(f"{where}: {first['msg']}") from error


def refusal(call_id: str, error: AgentEnvError) -> CallResult:
    """The result of a call that was not run, or whose run cannot be told."""
    return CallResult(id=call_id, fault=error.fault, error=error.code, message=str(error))


def _sentence(call: Call, error: OSError) -> str:
    """Of a failed file operation, as slots put it."""
    said = error.strerror or str(error)
    return said if isinstance(error, SlotfilesError) else f"{call.arguments.get('path', '.')}: {said}\n"


def _finished(call_id: str, ran: Ran, *, timed_out: bool) -> CallResult:
    return CallResult(
        id=call_id,
        exit_code=ran.exit_code,
        stdout=ran.stdout,
        stderr=ran.stderr,
        stdout_dropped_bytes=ran.stdout_dropped_bytes,
        stderr_dropped_bytes=ran.stderr_dropped_bytes,
        truncated=bool(ran.stdout_dropped_bytes or ran.stderr_dropped_bytes),
        timed_out=timed_out,
    )

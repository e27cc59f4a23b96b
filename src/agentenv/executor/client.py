"""Client of one container: calls are sent in batches over one stream, resolved as results arrive, and resubmitted
after a lost connection.

Three tasks per container whatever the number of calls: one keeps the connection, one writes, one reads. A call is a
dict entry and a future; there is no task or timer per call. This is the only layer that retries tool calls: a call
keeps its id and the boot of the server it was first sent to, so resubmitting it never runs it twice
(:class:`agentenv.wire.calls.Call`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from agentenv.background import TaskSet
from agentenv.backoff import pause_s
from agentenv.config import ExecutorSettings
from agentenv.containers.attachments import Attachments
from agentenv.containers.connection import ContainerConnection
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.stream import Stream, open_stream
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    InfraError,
    InvalidArgumentsError,
    PoolClosedError,
    ProtocolError,
    SlotDestroyedError,
    ToolCallError,
    from_wire,
)
from agentenv.executor.batcher import Batched, Batcher
from agentenv.executor.observer import CallObserver
from agentenv.executor.pending_call import (
    BOOT_BYTES,
    ENVELOPE_BYTES,
    PendingCall,
    encode_batch,
    encode_keys,
    with_attachments,
    with_boot,
)
from agentenv.wire.base import LARGE_BYTES, MAX_BATCH_CALLS, MAX_MESSAGE_BYTES
from agentenv.wire.calls import Accepted, CallResult, Failure, Result, server_message

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_CALL_BYTES: Final = MAX_MESSAGE_BYTES - ENVELOPE_BYTES - BOOT_BYTES
_MAX_BATCH_BYTES: Final = 4 * LARGE_BYTES
"""A batch is sent when it has this size: on a slow connection the next one waits that long."""
_FORGET_CALLS: Final = 64
_FORGET_BYTES: Final = LARGE_BYTES
"""Number and total size of arrived results after which they are reported to the container."""
_MAX_CANCELLATIONS: Final = MAX_BATCH_CALLS
_FIRST_BACKOFF_S: Final = 0.02
_LONGEST_BACKOFF_S: Final = 1.0
_OVERDUE_S: Final = 30.0
"""Time after its own timeout at which a call without a result is resubmitted. It may still be queued; but if its
result was lost on the way, this fetches it."""
_OVERDUE_CHECK_S: Final = 5.0
"""Interval between checks for such calls."""
_RESENT_KEYS: Final = MAX_BATCH_CALLS


@dataclass
class ClientCounters:
    """Counters of one client since its creation."""

    calls: int = 0
    results: int = 0
    batches: int = 0
    streams: int = 0
    reasked: int = 0
    batch_wait_s: float = 0.0

    @property
    def reconnects(self) -> int:
        """Streams opened after an earlier one."""
        return max(0, self.streams - 1)


class SandboxClient:
    """Client of one container in this process. Connects at the first call; :meth:`aclose` closes it.

    All methods belong to one event loop. :meth:`submit`, :meth:`abandon` and :meth:`fail` never wait.
    """

    def __init__(
        self, handle: ContainerHandle, settings: ExecutorSettings, observer: CallObserver | None = None
    ) -> None:
        self.handle = handle
        self.counters = ClientCounters()
        self._observer = observer
        self._deadline_s = settings.reconnect_deadline_s
        self._loop = asyncio.get_running_loop()
        self._batcher: Batcher[PendingCall] = Batcher(
            window_s=settings.tool_batch_window_ms / 1000,
            max_calls=min(settings.tool_max_batch_size, MAX_BATCH_CALLS),
            max_bytes=_MAX_BATCH_BYTES,
        )
        self.connection = ContainerConnection(handle)
        """For requests outside the stream."""
        self._attachments = Attachments(self.connection, settings.reconnect_deadline_s)
        self._unfinished: dict[str, PendingCall] = {}
        self._held_back: dict[bytes, deque[PendingCall]] = {}
        """Per lease with a large argument being sent: the calls submitted since then, which must not overtake it."""
        self._transfers = TaskSet()
        self._cancelling: dict[str, PendingCall] = {}
        self._unreported: deque[PendingCall] = deque(maxlen=_MAX_CANCELLATIONS)
        """Calls that failed because the container was unreachable; cancelled there if it can be reached again."""
        self._to_cancel: list[bytes] = []
        self._to_forget: list[bytes] = []
        self._forget_bytes = 0
        self._forgotten: deque[bytes] = deque(maxlen=_RESENT_KEYS)
        """Large results reported as arrived: repeated on the next stream, because the container keeps them until it
        receives that."""
        self._overdue_check_at = 0.0
        self._id_prefix = secrets.token_hex(12)
        self._wake: asyncio.Future[None] | None = None
        self._demand = asyncio.Event()
        self._lost_at: float | None = None
        """When the container could not be reached for the first time since its last message; None while it can be."""
        self._failed_attempts = 0
        """Attempts to connect since the last message from the container."""
        self._stream: Stream | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._stream else "not connected"
        return f"<SandboxClient {self.handle.id} {state}, {len(self._unfinished)} calls unfinished, {self._batcher!r}>"

    @property
    def unfinished(self) -> int:
        """Number of calls without a result."""
        return len(self._unfinished)

    def next_id(self) -> str:
        """A new call id, unique for all time."""
        self.counters.calls += 1
        return f"{self._id_prefix}-{self.counters.calls}"

    def submit(
        self, lease: bytes, tool: str, arguments: Mapping[str, Any], timeout_s: float, call_id: str | None = None
    ) -> PendingCall:
        """Queue one call; ``lease`` is the LeaseKey as JSON, ``arguments`` are what ToolCatalog.validate returns.

        With a caller's own ``call_id``, which no unfinished call may have, the container keeps the result for the
        client that submits that id again, unless it is large (an attachment).

        Raises:
            PoolClosedError: the client is closed.
            InvalidArgumentsError: the call is larger than one message may be.
        """
        if self._closed:
            raise PoolClosedError(f"the connection to container {self.handle.id} is closed")
        kept, call_id = call_id is not None, call_id or self.next_id()
        future, now = self._loop.create_future(), self._loop.time()
        call = PendingCall(call_id, lease, tool, arguments, timeout_s, future, now, kept=kept)
        if len(call.body) > _MAX_CALL_BYTES:
            raise InvalidArgumentsError(
                f"the call is {len(call.body)} bytes, more than the {_MAX_CALL_BYTES} one call may have",
                next_step="send it in smaller parts",
            )
        self._unfinished[call_id] = call
        self._cancelling.pop(call_id, None)  # submitted again: its result is wanted, cancelled or not
        if (queue := self._held_back.get(lease)) is not None:
            queue.append(call)
        elif call.parts:
            self._held_back[lease] = deque((call,))
            self._transfers.start(call_id, self._send_in_order(lease), "attachments")
        else:
            self._enqueue(call)
        return call

    def abandon(self, call: PendingCall, error: AgentEnvError | None = None) -> None:
        """Cancel a call that no caller awaits: it is withdrawn, or ended in the container. Repeatable.

        A caller that still awaits it gets (a copy of) ``error``, or is cancelled.
        """
        if not self._withdraw(call):
            return
        if error is None:
            call.future.cancel()
        else:
            self._finish(call, error.copy())
        if call.boot is not None and call.awaited:
            if len(self._cancelling) >= _MAX_CANCELLATIONS:
                self._cancelling.pop(next(iter(self._cancelling)))
            self._cancelling[call.id] = call
            self._to_cancel.append(call.key)
            self._wake_writer()

    def fail(self, calls: Iterable[PendingCall], error: AgentEnvError) -> None:
        """End these calls with (a copy of) ``error``; they are not resubmitted."""
        for call in calls:
            if self._withdraw(call):
                self._finish(call, error.copy())

    async def aclose(self) -> None:
        """End every unfinished call with PoolClosedError and close the connection. Repeatable."""
        if not self._closed:
            self._closed = True
            self.fail(tuple(self._unfinished.values()), PoolClosedError(f"the client of {self.handle.id} was closed"))
            if self._keeper is not None:
                self._keeper.cancel()
        if self._keeper is not None:
            await asyncio.wait({self._keeper})
        await self._transfers.wait()
        await self.connection.aclose()

    def _withdraw(self, call: PendingCall) -> bool:
        """Stop all work for this call. False: it has ended already."""
        if self._unfinished.pop(call.id, None) is None:
            return False
        self._batcher.drop(call)
        if call.transfer is not None:
            call.transfer.cancel()
        if call.transfer is not None or (call.attached and call.boot is None):
            self._forget(call, LARGE_BYTES)  # attachments still to be fetched, or already sent
        return True

    # -- attachments ---------------------------------------------------------------------------------

    def _enqueue(self, call: PendingCall) -> None:
        """Put the call into the next batch."""
        now = self._loop.time()
        call.awaited = True
        call.overdue_at = now + call.timeout_s + _OVERDUE_S
        self._batcher.add(call, len(call.body) + BOOT_BYTES, now)
        if self._stream is None:
            self._connect()
        self._wake_writer()

    async def _send_in_order(self, lease: bytes) -> None:
        """Send the large arguments of this lease's calls, and the calls behind them, in the order of submission."""
        queue = self._held_back[lease]
        while queue:
            call = queue.popleft()
            if call.id in self._unfinished and call.parts:
                await self._send_parts(call)
            if call.id in self._unfinished:
                self._enqueue(call)
        del self._held_back[lease]

    async def _send_parts(self, call: PendingCall) -> None:
        call.attached = True
        attachments = await self._transferred(call, self._attachments.put(call.lease, call.id, call.parts))
        if attachments is not None:
            call.parts = {}
            call.body = with_attachments(call.body, attachments)

    async def _fetch_rest(self, call: PendingCall, result: CallResult) -> None:
        complete = await self._transferred(call, self._attachments.complete(call.lease, result))
        if complete is not None and self._unfinished.pop(call.id, None) is not None:
            self._forget(call, LARGE_BYTES)
            self._finish(call, complete)

    async def _transferred(self, call: PendingCall, work: Coroutine[Any, Any, T]) -> T | None:
        """Result of the transfer; None if the call has ended in the meantime, or ends through this."""
        call.transfer = self._loop.create_task(work)
        await asyncio.wait({call.transfer})
        if call.transfer.cancelled():
            return None
        error = call.transfer.exception()
        if error is None:
            result: T = call.transfer.result()
            call.transfer = None
            return result
        if isinstance(error, ToolCallError) and self._withdraw(call):
            self._finish(call, CallResult(id=call.id, fault=error.fault, error=error.code, message=str(error)))
            return None
        if not isinstance(error, AgentEnvError):
            log.error("an attachment of %s failed", call.id, exc_info=error)
            error = ProtocolError(f"an attachment of call {call.id} failed: {error!r}")
        self.fail((call,), error)
        return None

    def _forget(self, call: PendingCall, size_bytes: int) -> None:
        self._to_forget.append(call.key)
        self._forget_bytes += size_bytes
        if self._forget_due():
            if self._stream is None and not self._closed:
                self._connect()
            self._wake_writer()

    # -- the connection ----------------------------------------------------------------------------

    def _connect(self) -> None:
        self._demand.set()
        if self._keeper is None:
            self._keeper = self._loop.create_task(self._keep(), name=f"stream-{self.handle.id}")

    async def _keep(self) -> None:
        """Stay connected while there is work; every failure becomes a typed error of the calls."""
        while True:
            await self._demand.wait()
            self._demand.clear()
            try:
                await self._serve()
            except (ConnectionLostError, TimeoutError) as cut:
                await self._pause_or_fail(cut)
            except AgentEnvError as error:
                self._fail_all(error)
            except Exception as error:
                log.exception("the client of %s failed", self.handle.id)
                self._fail_all(ProtocolError(f"the client of {self.handle.id} failed: {error!r}"))
            if self._cancelling or self._forget_due() or any(call.awaited for call in self._unfinished.values()):
                self._demand.set()
            else:
                self._lost_at, self._failed_attempts = None, 0

    async def _serve(self) -> None:
        """Connect once and serve that stream until it ends; raises the error that ended it."""
        now = self._loop.time()
        if self._lost_at is None:
            self._lost_at = now
        self._failed_attempts += 1
        attempt_ends_at = min(now + self._deadline_s / 3, self._lost_at + self._deadline_s)
        async with asyncio.timeout_at(attempt_ends_at):
            stream = await open_stream(self.handle, silence_s=self._deadline_s)
        self._resubmit(stream)
        tasks = [self._loop.create_task(work(stream)) for work in (self._read, self._write)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:  # the reader's error has the cause
                if task.done():
                    task.result()
        finally:
            self._stream = None
            if self._lost_at is None or self._failed_attempts == 1:
                # A first stream that opened and stayed silent does not count: the deadline starts at its end.
                self._lost_at = self._loop.time()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await stream.aclose(polite=self._closed)

    async def _pause_or_fail(self, cut: BaseException) -> None:
        """Wait before the next attempt (not after a stream that worked), or fail the calls after the deadline."""
        now = self._loop.time()
        left_s = (now if self._lost_at is None else self._lost_at) + self._deadline_s - now
        log.info("container %s: stream cut (%r), %.1f s left", self.handle.id, cut, left_s)
        if left_s <= 0:
            reason = str(cut) or type(cut).__name__
            self._fail_all(
                ConnectionLostError(
                    f"container {self.handle.id} could not be reached for {self._deadline_s:g} s: {reason}"
                )
            )
        elif self._failed_attempts:
            longest_s = pause_s(2 * _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, self._failed_attempts)
            await asyncio.sleep(min(left_s, random.uniform(0, longest_s)))  # noqa: S311

    def _fail_all(self, error: AgentEnvError) -> None:
        self._lost_at, self._failed_attempts = None, 0
        self._cancelling.clear()
        awaited = [call for call in self._unfinished.values() if call.awaited]
        self._unreported.extend(call for call in awaited if call.boot is not None)
        self.fail(awaited, error)

    def _resubmit(self, stream: Stream) -> None:
        """Resubmit everything unfinished on the new stream, in the original order."""
        self.counters.streams += 1
        awaited = [call for call in self._unfinished.values() if call.awaited]
        self.counters.reasked += sum(call.boot is not None for call in awaited)
        self._batcher.restart(((call, len(call.body) + BOOT_BYTES) for call in awaited), self._loop.time())
        # Another server process does not have the calls that were cancelled in the previous one.
        cancelled = [*self._cancelling.values(), *self._unreported]
        self._unreported.clear()
        self._cancelling = {call.id: call for call in cancelled if call.boot == stream.boot}
        self._to_cancel = [call.key for call in self._cancelling.values()]
        self._to_forget += self._forgotten
        self._forgotten.clear()
        self._stream = stream

    # -- writing -----------------------------------------------------------------------------------

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _write(self, stream: Stream) -> None:
        while True:
            now = self._loop.time()
            if now >= self._overdue_check_at:
                self._resubmit_overdue(now)
            due = self._batcher.due(now)
            if due.batches:
                for batch in due.batches:
                    await stream.send(self._encoded(batch, stream.boot))
                    self._batcher.written(batch.number, self._loop.time())
            elif self._to_cancel:
                keys, self._to_cancel = self._to_cancel[:MAX_BATCH_CALLS], self._to_cancel[MAX_BATCH_CALLS:]
                await stream.send(encode_keys("cancel", keys))
            elif self._forget_due():
                keys, self._to_forget = self._to_forget[:MAX_BATCH_CALLS], self._to_forget[MAX_BATCH_CALLS:]
                if self._forget_bytes >= LARGE_BYTES:
                    self._forgotten.extend(keys)
                self._forget_bytes = 0
                await stream.send(encode_keys("forget", keys))
            else:
                # Nothing was awaited since due() was called, so no wake-up can have been missed.
                await self._wait_for_work(due.wake_at)

    def _resubmit_overdue(self, now: float) -> None:
        """Resubmit calls that should have a result by now; this never runs a call twice."""
        self._overdue_check_at = now + _OVERDUE_CHECK_S
        for call in self._unfinished.values():
            if call.awaited and call.sent_at is not None and now >= call.overdue_at:
                log.info("call %s has no result yet: resubmitting", call.id)
                self.counters.reasked += 1
                self._batcher.drop(call)
                self._enqueue(call)

    def _forget_due(self) -> bool:
        return len(self._to_forget) >= _FORGET_CALLS or self._forget_bytes >= _FORGET_BYTES

    def _encoded(self, batch: Batched[PendingCall], boot: str) -> bytes:
        now = self._loop.time()
        self.counters.batches += 1
        if self._observer is not None:
            self._observer.batch_left(len(batch.calls))
        for call in batch.calls:
            if call.boot is None:
                call.boot, call.sent_at = boot, now
                call.body = with_boot(call.body, boot)
                self.counters.batch_wait_s += now - call.added_at
        return encode_batch(batch.number, [call.body for call in batch.calls])

    async def _wait_for_work(self, wake_at: float | None) -> None:
        """Wait until something is to be sent, for ``wake_at``, or until an acknowledgement is overdue."""
        moments = [] if wake_at is None else [wake_at]
        if (written_at := self._batcher.oldest_unacknowledged_at) is not None:
            moments.append(written_at + self._deadline_s)
        if self._unfinished:
            moments.append(self._overdue_check_at)
        self._wake = self._loop.create_future()
        timer = self._loop.call_at(min(moments), self._wake_writer) if moments else None
        try:
            await self._wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()
        written_at = self._batcher.oldest_unacknowledged_at  # an acknowledgement may have arrived
        if written_at is not None and self._loop.time() >= written_at + self._deadline_s:
            raise ConnectionLostError(f"a batch was not acknowledged within {self._deadline_s:g} s")

    # -- reading -----------------------------------------------------------------------------------

    async def _read(self, stream: Stream) -> None:
        while True:
            text = await stream.receive()
            try:
                message = server_message.validate_json(text)
            except ValidationError as error:
                raise ProtocolError(f"the container sent an unknown message: {error}") from error
            self._lost_at, self._failed_attempts = None, 0
            if isinstance(message, Result):
                self._on_result(message.result, len(text))
            elif isinstance(message, Accepted):
                if not self._batcher.accepted(message.batch):
                    raise ProtocolError(f"the container acknowledged batch {message.batch}, which was not sent")
                if self._batcher.waiting:
                    self._wake_writer()
            else:
                self._on_failure(message)

    def _on_result(self, result: CallResult, size_bytes: int) -> None:
        if (cancelled := self._cancelling.pop(result.id, None)) is not None:
            self._forget(cancelled, size_bytes + sum(part.size_bytes for part in result.attachments))
            return
        call = self._unfinished.get(result.id)
        if call is None or not call.awaited:
            return  # a duplicate
        call.awaited = False
        self._batcher.drop(call)
        if result.attachments:
            self._transfers.start(call.id, self._fetch_rest(call, result), "attachments")
        else:
            del self._unfinished[call.id]
            if not call.kept:
                self._forget(call, size_bytes)
            self._finish(call, result)

    def _finish(self, call: PendingCall, outcome: CallResult | AgentEnvError) -> None:
        call.done_at = self._loop.time()
        if call.future.done():
            return
        if isinstance(outcome, AgentEnvError):
            call.future.set_exception(outcome)
        elif outcome.fault == "infra" or outcome.error == SlotDestroyedError.code:
            call.future.set_exception(_failure_of(outcome.error, outcome.message))
        else:
            self.counters.results += 1
            call.future.set_result(outcome)

    def _on_failure(self, failure: Failure) -> None:
        """The container refused a message, and would refuse it again: its calls end, the stream stays open."""
        error = _failure_of(failure.error, f"the container refused a message: {failure.message}")
        if failure.batch is None:
            raise error
        self.fail(self._batcher.refused(failure.batch), error)
        self._wake_writer()


def _failure_of(code: str | None, message: str) -> AgentEnvError:
    """The exception for a call without a result: an infrastructure failure, or the end of its slot."""
    return from_wire(code, message, "", InfraError, SlotDestroyedError)

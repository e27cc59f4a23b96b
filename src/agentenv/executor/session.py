"""Sessions: a trajectory's lease, and the tool calls made under it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from agentenv.config import ExecutorSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.live_output import LiveView, OnOutput, as_text
from agentenv.errors import (
    AgentEnvError,
    CheckpointError,
    ConfigError,
    ContainerLostError,
    InvalidArgumentsError,
    PolicyRefusalError,
    PoolClosedError,
    ProtocolError,
    ToolCallError,
    UnknownToolError,
)
from agentenv.executor.client import SandboxClient
from agentenv.executor.observer import UNKNOWN_TOOL, CallObserver, CallTiming
from agentenv.executor.pending_call import PendingCall, size_of
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.spec import ToolSpec
from agentenv.wire.base import MAX_TIMEOUT_S
from agentenv.wire.calls import CallResult
from agentenv.wire.leases import (
    ActionReply,
    ChangeNetwork,
    CheckpointSlot,
    DropCheckpoint,
    LeaseAction,
    LeaseKey,
    PauseSlot,
    PauseWhenIdle,
    RestoreSlot,
    SealSlot,
    SlotRequest,
    short_tag,
)
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.tools import BASH, WriteFileReply
from agentenv.wire.toolserver import CallScope

logger = logging.getLogger(__name__)


class SessionLease(Protocol):
    """The part of the pool's ``SlotLease`` that a session needs."""

    @property
    def key(self) -> LeaseKey:
        """Sent with every call."""

    @property
    def container(self) -> ContainerHandle:
        """Container of the slot."""

    @property
    def lost(self) -> AgentEnvError | None:
        """Why the lease was lost, once it is."""

    async def wait_lost(self) -> AgentEnvError:
        """Return when the lease is lost."""

    async def act(self, action: LeaseAction) -> ActionReply:
        """Do something to the slot, keeping the lease, but for a pause."""

    @property
    def root(self) -> RootSpec | None:
        """Of a lease that was found again: what its slot was made from, where that is known."""

    def leave(self) -> None:
        """Hold it no longer, without a release."""

    async def release(self) -> None:
        """Release the slot. Repeatable."""


@dataclass(frozen=True)
class _ServiceLease:
    """The lease of a slot, for calls of one of its services: what is done to the slot, is done by the slot's own."""

    slot: SessionLease
    service: str

    @property
    def key(self) -> LeaseKey:
        return self.slot.key.model_copy(update={"service": self.service})

    @property
    def container(self) -> ContainerHandle:
        return self.slot.container

    @property
    def lost(self) -> AgentEnvError | None:
        return self.slot.lost

    async def wait_lost(self) -> AgentEnvError:
        return await self.slot.wait_lost()

    async def act(self, action: LeaseAction) -> ActionReply:
        raise ConfigError(
            action.do, f"{self.service} is a service, a part of its slot", next_step="call it of the slot itself"
        )

    @property
    def root(self) -> RootSpec | None:
        return None

    def leave(self) -> None:
        """No effect: it is the slot's."""

    async def release(self) -> None:
        """No effect: it is released with the slot."""


class ExternalTools(Protocol):
    """Runs the tools of kind ``external`` (on a tool server); results and faults as for slot tools."""

    async def call(self, scope: CallScope, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        """Run one validated call. Raises: InfraError."""

    async def ended(self, trajectory: str) -> None:
        """Close the tools' state for this trajectory (a browser page). Never raises, and is quick."""


@dataclass
class CallCounters:
    """Calls of all sessions of an executor, by outcome."""

    calls: int = 0
    model_faults: int = 0
    policy_faults: int = 0
    infra_faults: int = 0
    cancelled: int = 0


class SessionHost(Protocol):
    """The part of its executor that a session needs."""

    catalog: ToolCatalog
    settings: ExecutorSettings
    external: ExternalTools | None
    observer: CallObserver | None
    tally: CallCounters
    pool: Any

    async def acquire(self, session: ToolSession) -> SessionLease:
        """Lease a slot in the caller's task."""

    def attach(self, container: ContainerHandle) -> SandboxClient:
        """The client of that container; kept open until detached."""

    def detach(self, client: SandboxClient, *, gone: bool) -> None:
        """The session no longer uses it; ``gone``: the container no longer exists."""

    def ended(self, session: ToolSession) -> None:
        """The session is closed."""


@dataclass(frozen=True)
class Checkpoint:
    """The files of a slot at one moment, without its processes; of a slot without an image: those of its workspace. It
    exists in the slot's container, until that ends or the checkpoint is dropped."""

    container: str
    root: RootSpec
    """The root of slots that begin with it."""

    def to_json(self) -> str:
        """For another process of the same run."""
        return json.dumps({"container": self.container, "root": self.root.to_dict()})

    @classmethod
    def parse(cls, text: str) -> Self:
        """From :meth:`to_json`. Raises ConfigError."""
        try:
            given = json.loads(text)
            return cls(str(given["container"]), RootSpec.parse(given["root"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("checkpoint", f"got {text[:80]!r}", next_step="allowed: what to_json() gave") from error


class ToolSession:
    """Calls tools on one leased slot; created by ``ToolExecutor.open``, used as ``async with``.

    Entering leases the slot in the caller's own task; leaving cancels running calls and releases it. Calls may
    overlap; the slot runs them one at a time, in the order of submission.
    """

    def __init__(
        self,
        host: SessionHost,
        request: SlotRequest,
        acquire_timeout_s: float | None,
        *,
        group: str = "",
        item: str = "",
    ) -> None:
        """``request`` is for one slot. ``group`` and ``item``: as external tools get them, not cut to tags."""
        (self.trajectory,) = request.trajectories
        self.request = request
        """The request that its slot is leased with."""
        self.acquire_timeout_s = acquire_timeout_s
        self.root = request.root
        """The root of its slot, with its current network; None: a plain slot with an empty workspace."""
        self.last_timing: CallTiming | None = None
        """Timing of the call that returned last; read it before the next ``await``."""
        self.stays = False
        """Whether closing it leaves the slot as it is, until the lease's time to live has passed."""
        self.root_unknown = False
        """It was found again at a farm that has been restarted: ``root`` is None, and the slot has one."""
        self._host = host
        self._lease: SessionLease | None = None
        self._lease_json = b""
        self._client: SandboxClient | None = None
        self._outstanding: set[PendingCall] = set()
        self._group = group
        self._item = item
        self._forks = 0
        self._services: list[ToolSession] = []
        self._externals: set[asyncio.Task[CallResult]] = set()
        self._has_external_state = False
        """Whether the tool server may have state for this trajectory."""
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closing else "open" if self._lease else "new"
        return f"<ToolSession {self.trajectory} {state}, {len(self._outstanding)} calls running>"

    @property
    def lease(self) -> SessionLease:
        """The lease. Raises PoolClosedError before the session is entered."""
        if self._lease is None:
            raise self._not_open()
        return self._lease

    @property
    def pool(self) -> object:
        """What leases its slots."""
        return self._host.pool

    @property
    def container_id(self) -> str:
        """The container of its slot. Raises PoolClosedError before the session is entered."""
        return self.lease.container.id

    @property
    def last_batch_wait_s(self) -> float:
        """How long the call that returned last had waited for its batch to be sent."""
        return self.last_timing.batch_wait_s if self.last_timing else 0.0

    async def __aenter__(self) -> Self:
        if self._lease is not None or self._closing is not None:
            raise PoolClosedError(f"the session of {self.trajectory} was opened before", next_step="open another one")
        # Nothing is awaited afterwards: a cancellation finds either no lease or a complete session.
        self._use(await self._host.acquire(self))
        return self

    def _use(self, lease: SessionLease) -> None:
        self._lease = lease
        if self.request.existing:
            self.root = lease.root
        self._lease_json = lease.key.model_dump_json().encode()
        self._client = self._host.attach(lease.container)
        self._watch = asyncio.create_task(self._end_with(lease), name=f"lease-{self.trajectory}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any] | str,
        *,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        call_id: str | None = None,
    ) -> CallResult:
        """Run one call and return its result; ``arguments`` may be JSON text.

        ``timeout_s`` bounds the run in the slot (None: the tool's default; ``math.inf``: no limit, but for external
        tools); waiting behind the slot's earlier calls
        does not count. A call the model got wrong, or that the rules forbid, is a result with ``fault`` "model" or
        "policy" and a message for the model. Cancelling the awaiting task cancels the call in the slot.

        ``on_output`` (of ``bash``) is called with "stdout" or "stderr" and text, as the command prints it; it may be a
        coroutine function, or :class:`agentenv.OutputBytes`. What it raises cancels the command and is raised here.

        ``call_id`` names the call, uniquely within the lease: called again with it, also by another process, this
        returns the result of the first time, and the call never runs twice (CallLostError when the result was
        discarded; large ones are not kept). While the call runs no other call may use its id. Not for external tools.

        Raises: SlotDestroyedError: what ran in the slot destroyed it; nothing is left to call. InfraError: the
        failure was ours; its class has the cause (:mod:`agentenv.errors`). InvalidArgumentsError: ``timeout_s`` itself
        is not a positive number in range.
        """
        client = self._usable()
        self._host.tally.calls += 1
        started_at = asyncio.get_running_loop().time()
        try:
            checked = self._host.catalog.validate(tool, arguments)
        except (ToolCallError, PolicyRefusalError) as error:
            known = UNKNOWN_TOOL if isinstance(error, UnknownToolError) else tool
            return self._counted(known, CallResult.refused(client.next_id(), error))
        spec = self._host.catalog.spec(tool)
        limit_s = self._limit_s(spec, timeout_s)
        if spec.kind == "external":
            return await self._external(spec, checked, limit_s)
        wants_text = tool == BASH.name and not checked.get("binary")
        if wants_text and on_output is not None:  # offsets into the output are in bytes
            checked = {**checked, "binary": True}
        try:
            pending = client.submit(self._lease_json, tool, checked, limit_s, call_id)
        except ToolCallError as error:
            return self._counted(tool, CallResult.refused(client.next_id(), error))
        if on_output is None:
            result = await self._result_of(client, pending, tool, checked)
        else:
            result = await self._result_with_output(client, pending, tool, checked, on_output)
        if wants_text and result.content is not None:
            result = await as_text(result)
        total_s = asyncio.get_running_loop().time() - started_at
        self.last_timing = CallTiming(
            pending.id, tool, pending.batch_wait_s, result.queue_s, result.duration_s, total_s
        )
        return self._counted(tool, result, self.last_timing)

    async def seal(self) -> None:
        """Kill every process of the slot and recreate its namespaces; the workspace and lease stay.

        The external tools' state for the trajectory (a browser page) is closed as well.

        Raises: InfraError: it could not be done; the workspace must not be trusted.
        """
        self._usable()
        await self._end_external()
        await self.lease.act(SealSlot())

    async def checkpoint(self) -> Checkpoint:
        """Keep the slot's files, and no process: everything running in it is killed, and a running call cancelled. The
        slot continues with the same files.

        Raises: CheckpointError: there is no room to keep them. InfraError.
        """
        return await self._kept_by(CheckpointSlot())

    async def pause(self) -> Checkpoint:
        """Keep the slot's files, and no process, under the trajectory's name, and end the lease. Raises as
        :meth:`checkpoint`, and then nothing has ended."""
        return await self._kept_by(PauseSlot())

    async def _kept_by(self, action: CheckpointSlot | PauseSlot) -> Checkpoint:
        self._check_root()
        await self._end_external()
        name = (await self.lease.act(action)).checkpoint
        return Checkpoint(self.lease.container.id, replace(self.root or RootSpec("", name), checkpoint=name))

    async def pause_when_idle(self) -> None:
        """Have the slot paused, not ended, when nobody has been connected to it for the lease's time to live. Raises:
        InfraError."""
        self._usable()
        await self.lease.act(PauseWhenIdle())

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Give the slot the files of a checkpoint in place of its own, and no process: everything running in it is
        killed, and a running call cancelled.

        Raises: CheckpointError: it is another container's, or of another image, or of none. InfraError; when the
        checkpoint was dropped, the slot is lost.
        """
        self._check_root()
        if checkpoint.root.image != (self.root.image if self.root else ""):
            raise CheckpointError("the checkpoint is not of this slot's image")
        self._check_here(checkpoint)
        await self._end_external()
        await self.lease.act(RestoreSlot(checkpoint=checkpoint.root.checkpoint))

    async def drop(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint, and free its memory once no slot uses it. Slots that began with it keep its files.
        Raises CheckpointError when it is another container's, InfraError."""
        self._usable()
        self._check_here(checkpoint)
        await self.lease.act(DropCheckpoint(checkpoint=checkpoint.root.checkpoint))

    async def set_network(self, network: NetworkPolicy) -> None:
        """Change what the slot may connect to; its processes continue. Connections that are no longer allowed
        are closed when this returns; under an allow list, new commands get the proxy's address. Forks begin with the
        network that the slot has then; a checkpoint's files are restored under the one it has now.

        Raises: ConfigError: the slot has no image, and so the network of its container. SandboxUnavailableError: the
        container gives its slots no network, or it failed; the slot then has none. InfraError.
        """
        self._check_root()
        if self.root is None or not self.root.image:
            raise ConfigError(
                "network", "a slot without an image uses its container's network", next_step="lease one with an image"
            )
        root = replace(self.root, network=network)  # raises where the slot's capabilities forbid it
        await self.lease.act(ChangeNetwork(network=network))
        self.root = root

    async def fork(self, n: int = 1) -> list[ToolSession]:
        """Open n sessions on slots that begin with this one's files, and no process: everything running in this slot is
        killed, and a running call cancelled.

        They are slots of the same container, waited for as long as for this one, and independent of it and each other.
        All are opened, or none. Raises: ConfigError, and changes nothing: the container has fewer slots.
        CheckpointError: there is no room to keep its files. AcquireTimeoutError, InfraError.
        """
        self._usable()
        slots = self.lease.container.slots
        if n >= slots:  # however long it waited
            raise ConfigError(
                "forks",
                f"fork({n}) needs {n + 1} slots in one container, and this slot's has {slots}",
                next_step=f"open it with Sandbox(forks={n}); of a farm or an environment: more slots_per_container",
            )
        checkpoint = await self.checkpoint()
        forks = [self._fork_of(checkpoint) for _ in range(n)]
        try:
            opened = await asyncio.gather(*(fork.__aenter__() for fork in forks), return_exceptions=True)
            if failed := next((one for one in opened if isinstance(one, BaseException)), None):
                raise failed
        except BaseException:
            await asyncio.gather(*(fork.aclose() for fork in forks))
            raise
        finally:
            await self.drop(checkpoint)
        return forks

    def service(self, name: str) -> ToolSession:
        """A session that calls one of the slot's services. It ends with this one, or before by its own ``aclose``; what
        is done to the slot as a whole is refused. Raises ConfigError when the slot has no such service, InfraError."""
        self._usable()
        names = [one.name for one in self.root.services] if self.root else []
        if name not in names:
            allowed = f"allowed: {', '.join(names)}" if names else "lease a slot with services"
            raise ConfigError("service", f"this slot has no service {name!r}", next_step=allowed)
        session = ToolSession(self._host, self.request, None, group=self._group, item=self._item)
        session._use(_ServiceLease(self.lease, name))
        self._services.append(session)
        return session

    def _fork_of(self, checkpoint: Checkpoint) -> ToolSession:
        self._forks += 1
        request = replace(
            self.request,
            trajectories=(f"{self.trajectory}-{self._forks}",),
            tags=self.request.tags.model_copy(update={"environment": "", "item": short_tag(self._item)}),
            request_id="",
            ttl_s=None,
            existing=False,
            root=checkpoint.root,
            container=checkpoint.container,
        )
        return ToolSession(self._host, request, self.acquire_timeout_s, group=self._group, item=self._item)

    def _check_root(self) -> None:
        self._usable()
        if self.root_unknown:
            raise CheckpointError(
                "the farm was restarted since this slot was leased, and does not know its root any more",
                next_step="copy the files: download()",
            )

    def _check_here(self, checkpoint: Checkpoint) -> None:
        if checkpoint.container != self.lease.container.id:
            raise CheckpointError(f"the checkpoint is in another container, {checkpoint.container}")

    async def aclose(self) -> None:
        """Cancel running calls and release the slot. Repeatable; cancelling the caller does not interrupt it."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close-{self.trajectory}")
        await asyncio.shield(self._closing)

    def _not_open(self) -> PoolClosedError:
        return PoolClosedError(f"the session of {self.trajectory} is not open", next_step="use it as 'async with'")

    def _usable(self) -> SandboxClient:
        if self._closing is not None:
            raise PoolClosedError(f"the session of {self.trajectory} is closed")
        if self._lease is None or self._client is None:  # they are set together
            raise self._not_open()
        if (lost := self._lease.lost) is not None:
            raise lost.copy()
        return self._client

    def _limit_s(self, spec: ToolSpec, timeout_s: float | None) -> float:
        if timeout_s is None:
            return spec.default_timeout_s or self._host.settings.default_timeout_s
        number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        unlimited = number and timeout_s == math.inf and spec.kind != "external"
        if not unlimited and (not number or not 0 < timeout_s <= MAX_TIMEOUT_S):
            allowed = f"give seconds, more than 0 and at most {MAX_TIMEOUT_S:g}"
            none = "" if spec.kind == "external" else ", or math.inf for no limit"
            raise InvalidArgumentsError(f"timeout_s is {timeout_s!r}", next_step=allowed + none)
        return float(timeout_s)

    async def _result_with_output(
        self,
        client: SandboxClient,
        pending: PendingCall,
        tool: str,
        arguments: Mapping[str, Any],
        on_output: OnOutput,
    ) -> CallResult:
        view = LiveView(client.connection, self._lease_json, pending.id, on_output)
        output = asyncio.create_task(view.follow(), name=f"output-{pending.id}")
        ending = asyncio.create_task(self._result_of(client, pending, tool, arguments), name=f"result-{pending.id}")
        try:
            await asyncio.wait({output, ending}, return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                output.result()
            result = await ending
            async with view.telling:  # a callback that runs gets to its end
                if output.done():
                    output.result()
                output.cancel()
        finally:
            output.cancel()
            ending.cancel()  # of a command that still runs: cancels it
            await asyncio.gather(output, ending, return_exceptions=True)
        await view.finish(result)
        return result

    async def _result_of(
        self, client: SandboxClient, pending: PendingCall, tool: str, arguments: Mapping[str, Any]
    ) -> CallResult:
        self._outstanding.add(pending)
        try:
            result = await pending.future
            if tool == "write_file":
                _check_written(arguments, result)
            return result
        except asyncio.CancelledError:
            client.abandon(pending)
            self._count_cancelled(tool)
            raise
        except AgentEnvError as error:
            self._count_failure(tool, error)
            raise
        finally:
            self._outstanding.discard(pending)

    def _count_cancelled(self, tool: str) -> None:
        self._host.tally.cancelled += 1
        if self._host.observer is not None:
            self._host.observer.cancelled(tool)

    def _count_failure(self, tool: str, error: AgentEnvError) -> None:
        self._host.tally.policy_faults += error.fault == "policy"
        self._host.tally.infra_faults += error.fault != "policy"
        if self._host.observer is not None:
            self._host.observer.finished(tool, error.fault, None)

    async def _external(self, spec: ToolSpec, arguments: Mapping[str, Any], limit_s: float) -> CallResult:
        external = self._host.external
        assert external is not None  # the executor rejects catalogs it cannot run
        began_s = asyncio.get_running_loop().time()
        self._has_external_state = True
        scope = CallScope(trajectory=self.trajectory, group=self._group, item=self._item)
        task = asyncio.create_task(external.call(scope, spec.name, arguments, limit_s))
        self._externals.add(task)
        try:
            result = await self._external_result(task)
        except asyncio.CancelledError:
            self._count_cancelled(spec.name)
            raise
        except AgentEnvError as error:
            self._count_failure(spec.name, error)
            raise
        finally:
            self._externals.discard(task)
        total_s = asyncio.get_running_loop().time() - began_s
        self.last_timing = CallTiming(result.id, spec.name, 0.0, result.queue_s, result.duration_s, total_s)
        return self._counted(spec.name, result, self.last_timing)

    async def _external_result(self, task: asyncio.Task[CallResult]) -> CallResult:
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.cancelled():
            raise PoolClosedError(f"the session of {self.trajectory} was closed while the call ran")
        return task.result()

    async def _end_external(self) -> None:
        """Cancel running calls and close the state of this trajectory's external tools; a failure is only logged."""
        for task in self._externals:
            task.cancel()
        if not self._has_external_state or self._host.external is None:
            return
        self._has_external_state = False
        try:
            await self._host.external.ended(self.trajectory)
        except Exception:
            logger.exception("the tool server could not be notified that %s has ended", self.trajectory)

    def _counted(self, tool: str, result: CallResult, timing: CallTiming | None = None) -> CallResult:
        self._host.tally.model_faults += result.fault == "model"
        self._host.tally.policy_faults += result.fault == "policy"
        if self._host.observer is not None:
            self._host.observer.finished(tool, result.fault, timing)
        return result

    async def _end_with(self, lease: SessionLease) -> None:
        """End every call under the lease as soon as it is lost."""
        lost = await lease.wait_lost()
        if self._client is not None:
            self._client.fail(tuple(self._outstanding), lost)

    async def _close(self) -> None:
        try:
            await asyncio.gather(*(service.aclose() for service in self._services))
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)
            if self._client is not None:
                error = PoolClosedError(f"the session of {self.trajectory} was closed while the call ran")
                for pending in tuple(self._outstanding):
                    self._client.abandon(pending, error)
            if self._lease is not None and self.stays:
                self._lease.leave()
            elif self._lease is not None:
                await self._lease.release()
        finally:
            if self._client is not None:
                gone = self._lease is not None and isinstance(self._lease.lost, ContainerLostError)
                self._host.detach(self._client, gone=gone)
            await self._end_external()
            self._host.ended(self)


def _check_written(arguments: Mapping[str, Any], result: CallResult) -> None:
    """Compare the size that write_file wrote with that of its argument. Raises ProtocolError when they differ: the
    content was changed on the way, and neither a model nor its score may suffer from that."""
    if result.fault != "none" or result.content is None:
        return
    sent_bytes = size_of(arguments["text"] if arguments.get("data") is None else arguments["data"])
    written_bytes = WriteFileReply.model_validate(result.content).size_bytes
    if written_bytes != sent_bytes:
        raise ProtocolError(f"write_file was given {sent_bytes} bytes and wrote {written_bytes}")

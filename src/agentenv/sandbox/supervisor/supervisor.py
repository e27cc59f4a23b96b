"""PID 1 of a container: makes slots, keeps the server running, ends everything.

One thread, one event loop. It has no network, reads nothing written by a slot except the agent's HELLO and the
self-test's report, and accepts a few requests from the server, checked in :mod:`agentenv.sandbox.control_protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import time
from pathlib import Path

from agentenv.background import TaskSet
from agentenv.backoff import pause_s
from agentenv.deadlines import SERVING_DEADLINE_S, scaled
from agentenv.errors import AgentEnvError, ConfigError, SandboxUnavailableError, StartTimeoutError
from agentenv.sandbox.control_protocol import (
    Connect,
    Connected,
    Drop,
    Export,
    Exported,
    Fence,
    Freeze,
    Hello,
    NotFrozen,
    Ping,
    Pong,
    Remember,
    Request,
    Reroot,
    Reset,
    Seal,
    Serving,
    SlotFailed,
    SlotLost,
    SlotReady,
    SlotRefused,
    SlotView,
    Unattended,
)
from agentenv.sandbox.descriptors import needed
from agentenv.sandbox.loop_watch import LoopWatch
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slot_paths import USUAL_PATHS
from agentenv.sandbox.supervisor import (
    child,
    events,
    isolation,
    mounts,
    selftest,
    server_process,
    workspace_layers,
)
from agentenv.sandbox.supervisor.checkpoints import unmount
from agentenv.sandbox.supervisor.image_formats import NO_STORE, ImageSupport
from agentenv.sandbox.supervisor.layer_export import LayerExport
from agentenv.sandbox.supervisor.limits import limit_files, server_plan
from agentenv.sandbox.supervisor.preparation import Launch, image_support, prepare_setup
from agentenv.sandbox.supervisor.proxy_process import ProxySetup, ProxyTemplate, default_argv
from agentenv.sandbox.supervisor.reaper import Reaper, end_of
from agentenv.sandbox.supervisor.server_process import ServerProcess, ServerSetup
from agentenv.sandbox.supervisor.slot_lifecycle import CrashLoop, SlotLifecycle, SlotServices
from agentenv.sandbox.supervisor.slot_network import NetworkServices
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec, unfit
from agentenv.wire.states import SlotPhase

log = logging.getLogger(__name__)

_SETTLE_DEADLINE_S = scaled(30.0)
_LATE = f"it was not ready within {SERVING_DEADLINE_S:.0f} s"
_CRASHES = 5
_CRASHES_WITHIN_S = 10.0
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0
_END_DEADLINE_S = scaled(10.0)


class Supervisor:
    """The life of one container. Its ``ready``, ``failed`` and ``lost`` are called by the slots."""

    def __init__(
        self,
        launch: Launch,
        pid: int,
        reaper: Reaper,
        watch: LoopWatch,
        stop: asyncio.Event,
        support: ImageSupport = NO_STORE,
    ) -> None:
        """``stop`` is set when the container has to end without a request."""
        self._launch = launch
        self._support = support
        self._stop = stop
        self._pid = pid
        self._watch = watch
        self._reaper = reaper
        self._server: ServerProcess | None = None
        self._greeted = False
        self._generation = 0
        self._server_broke = ""
        self._copied = ""
        self._proofs: list[dict[str, object]] = []
        setup, self._private = prepare_setup(launch, reaper, support)
        starting_at_once = 2 * len(os.sched_getaffinity(0))
        networks = None
        if setup.images is not None:
            spec = launch.spec
            proxy = ProxySetup(default_argv(), launch.identity, self._private, spec.slots, spec.closed_networks)
            networks = NetworkServices(spec, reaper, ProxyTemplate(proxy, reaper))
        self._layer_export = None
        if setup.checkpoints is not None and setup.images is not None:
            self._layer_export = LayerExport(setup.checkpoints, launch.root_launcher, launch.tar_program, reaper)
        self._background = TaskSet()
        gate = asyncio.Semaphore(starting_at_once)
        services = SlotServices(setup, reaper, self, gate, launch.network_tool, networks)
        self._setup = setup
        self._slots = [SlotLifecycle(services, number) for number in range(launch.spec.slots)]

    async def run(self) -> None:
        """Serve until cancelled. Raises AgentEnvError when the container cannot serve (any more)."""
        await self._start_slots_and_server()
        await self._until_serving()
        await self._until_settled()
        port = self._launch.listener.getsockname()[1]
        isolation_mode = self._launch.identity.mode
        self._watch.begin()
        events.emit("ready", port=port, pid=self._pid, isolation=isolation_mode, weaker=list(self._launch.weaker))
        crashes = CrashLoop(_CRASHES, _CRASHES_WITHIN_S)
        while True:
            reason = await self._server_end()
            log.error("the server ended: %s", reason)
            if crashes.crashed(time.monotonic()):
                raise SandboxUnavailableError(
                    f"the server died {_CRASHES} times within {_CRASHES_WITHIN_S:.0f} s; the last time: {reason}",
                    next_step="see the log on standard error",
                )
            await asyncio.sleep(pause_s(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, len(crashes.times)))
            self._reset_orphans()
            self._start_server()
            self._greet()
            if await self._serving_or_end():
                events.emit("server_restarted")

    # ---- SlotReports

    def ready(self, slot: SlotLifecycle) -> None:
        """Hand the slot to the server, if one has been greeted; otherwise the greeting will."""
        if self._greeted and self._server is not None and slot.process is not None:
            limits = limit_files(slot.process.plan, 1 + len(slot.process.services))
            view, services = _views(slot)
            paths = dataclasses.replace(USUAL_PATHS, workdir=slot.kind.workdir)
            packet = SlotReady(slot.number, slot.epoch, slot.lease, slot.kept, limits, paths, view, services)
            slot.handed = True
            agents = (slot.process.agent, *(one.agent for one in slot.process.services.values()))
            try:
                self._server.link.send(packet, *(agent.fileno() for agent in agents))
            except ConfigError as error:  # that slot's lease ends, and no other one
                slot.refuse(error)

    def failed(self, slot: SlotLifecycle) -> None:
        """Report to the server that the slot is quarantined."""
        if self._greeted and self._server is not None:
            self._server.link.send(SlotFailed(slot.number, slot.epoch, slot.reason))

    def not_frozen(self, slot: SlotLifecycle, reason: str, *, ended: bool = False) -> None:
        """Report to the server that the requested checkpoint was not made."""
        if self._greeted and self._server is not None:
            self._server.link.send(NotFrozen(slot.number, slot.epoch, reason, ended))

    def connected(self, slot: SlotLifecycle, env: dict[str, str], reason: str) -> None:
        """Report to the server that the slot's network has changed, or why not."""
        if self._greeted and self._server is not None:
            self._server.link.send(Connected(slot.number, slot.epoch, env, reason))

    def refused(self, slot: SlotLifecycle, error: AgentEnvError) -> None:
        """Report to the server that the slot cannot have the requested root."""
        log.warning("slot %d: %s", slot.number, error.message)
        if self._greeted and self._server is not None:
            self._server.link.send(SlotRefused(slot.number, slot.epoch, error.code, error.message))

    def lost(self, slot: SlotLifecycle, loss: LossReason, reason: str) -> None:
        """Report to the server that the slot ended by itself."""
        log.warning("slot %d: %s", slot.number, reason)
        if self._greeted and self._server is not None:
            self._server.link.send(SlotLost(slot.number, loss, reason))

    # ---- starting

    async def _start_slots_and_server(self) -> None:
        """Start slots and server concurrently: the server's imports, the self-test and the other slots take time."""
        self._start_server()
        first, *others = self._slots
        try:
            await first.first_start()
        except OSError as error:
            raise SandboxUnavailableError(f"the first slot could not be created: {error}") from error
        except SandboxUnavailableError as error:
            raise isolation.explain_bwrap(error.message) from error
        for slot in others:
            slot.begin()
        self._copied = await self._why_workspaces_are_copied()
        assert first.process is not None
        address = self._probe_address()
        proofs = await selftest.prove(self._setup, first.process, self._launch.host_namespaces, address)
        self._proofs = selftest.as_packets(proofs)
        broken = selftest.failure(proofs)
        if broken is not None:
            raise broken
        first.reset()

    async def _why_workspaces_are_copied(self) -> str:
        """Why checkpoints of plain slots are copies here; empty if they are layers."""
        setup, identity = self._setup, self._launch.identity
        assert setup.checkpoints is not None
        if not self._launch.owner.root:
            return "forks need a container started by root"
        place, uids = self._private / "layers-probe", (identity.slot_uid(0), identity.slot_uid(1))
        copied = await workspace_layers.refusal(place, setup.root_launcher, self._reaper, uids)
        setup.checkpoints.layered = not copied
        if copied:
            log.warning("checkpoints of workspaces are copies: %s", copied)
        return copied

    def _probe_address(self) -> tuple[str, int]:
        """Address at which a slot with network tries to reach the server, and must fail."""
        host, port = self._launch.listener.getsockname()[:2]
        return ("10.0.2.2" if host in ("0.0.0.0", "127.0.0.1", "::", "::1") else host), port  # noqa: S104

    def _start_server(self) -> None:
        self._server_broke = ""
        self._greeted = False
        layout = self._launch.layout
        plan = server_plan(layout, self._launch.spec.container) if layout else None
        setup = ServerSetup(self._launch.server_argv, self._launch.identity, self._launch.listener, self._private, plan)
        self._server = server_process.start(
            setup, self._launch.spec.slots, self._reaper, self._request, self._link_broken
        )

    def _greet(self) -> None:
        """Send Hello, then every slot: running ones with their leases, quarantined ones as failed."""
        assert self._server is not None
        launch = self._launch
        refused = self._refused_roots()
        no_images = refused.get("image", "")
        self._server.link.send(
            Hello(
                dataclasses.asdict(launch.spec),
                launch.token,
                launch.identity.mode,
                list(launch.weaker),
                self._proofs,
                isolation.SHELL_PATH if launch.shell else "",
                self._generation,
                refused,
                "" if no_images else self._support.format or "",
                [no_images] if no_images else [*self._support.weaker, *self._weaker_images()],
                self._copied,
            )
        )
        self._greeted = True
        for slot in self._slots:
            if slot.phase is SlotPhase.ready:
                slot.kept = slot.lease is not None
                self.ready(slot)
            elif slot.phase is SlotPhase.quarantined:
                self.failed(slot)

    def _weaker_images(self) -> list[str]:
        if self._support.format is None:
            return []
        return isolation.weaker_images(self._launch.controllers, root=self._launch.owner.root)

    def _refused_roots(self) -> dict[str, str]:
        launch = self._launch
        images, memory = self._support.refused, self._support.no_memory
        disk = self._support.no_disk or launch.disk_refusal
        return isolation.refused_roots(launch.spec, launch.controllers, images, memory, disk, root=launch.owner.root)

    async def _until_serving(self) -> None:
        self._greet()
        if not await self._serving_or_end():
            failure = StartTimeoutError if self._server_broke == _LATE else SandboxUnavailableError
            reason = await self._server_end()
            raise failure(f"the server did not start: {reason}", next_step="see the log on standard error")

    async def _until_settled(self) -> None:
        """Wait until every slot is ready or quarantined; a container without a ready slot is useless."""
        settling = [asyncio.ensure_future(slot.settled()) for slot in self._slots]
        _, late = await asyncio.wait(settling, timeout=_SETTLE_DEADLINE_S)
        for waiting in late:  # those slots keep trying
            waiting.cancel()
        if all(slot.phase is SlotPhase.quarantined for slot in self._slots):
            raise SandboxUnavailableError(f"no slot could be created: {self._slots[0].reason}")
        if not any(slot.phase is SlotPhase.ready for slot in self._slots):
            raise StartTimeoutError(f"no slot could be created within {_SETTLE_DEADLINE_S:.0f} s; see the log")

    async def _serving_or_end(self) -> bool:
        """Whether the server is serving; False when it ended first, or had to be killed for silence."""
        assert self._server is not None
        server = self._server
        serving = asyncio.create_task(server.serving.wait())
        try:
            waits: list[asyncio.Future[object]] = [serving, server.exited]  # type: ignore[list-item]
            await asyncio.wait(waits, timeout=SERVING_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if server.serving.is_set():
            return True
        if not server.exited.done():
            self._server_broke = _LATE
            server.kill()
        return False

    # ---- while serving

    def _request(self, request: Request) -> None:
        assert self._server is not None
        match request:
            case Serving():
                self._server.serving.set()
            case Ping():
                self._server.link.send(Pong(self._watch.stalls()))
            case Unattended() if self._launch.spec.unattended_after_s:
                events.emit("unattended", after_s=self._launch.spec.unattended_after_s)
                self._stop.set()
            case Reset(number, epoch) if epoch == self._slots[number].epoch:
                self._slots[number].reset()
            case Seal(number, epoch) if epoch == self._slots[number].epoch:
                self._slots[number].seal()
            case Reroot(number, epoch, root) if epoch == self._slots[number].epoch:
                self._reroot(self._slots[number], RootSpec.parse(root))
            case Connect(number, epoch, policy) if epoch == self._slots[number].epoch:
                self._slots[number].connect(NetworkPolicy.parse(policy))
            case Freeze(number, epoch, name) if epoch == self._slots[number].epoch:
                self._slots[number].freeze(name)
            case Export(name, layer):
                self._background.start("exports", self._export(name, layer), "export")
            case Drop(name) if self._setup.checkpoints is not None:
                if unneeded := self._setup.checkpoints.drop(name):
                    self._background.start("drops", asyncio.to_thread(unmount, unneeded), "drop")
            case Remember(number, epoch, lease) if epoch == self._slots[number].epoch:
                self._slots[number].remember(lease)
            case Fence(generation):
                self._generation = max(self._generation, generation)

    def _reroot(self, slot: SlotLifecycle, root: RootSpec) -> None:
        """The server has looked too, but it is the side that is less trusted."""
        if why := unfit(root, self._launch.spec.limits, self._refused_roots()):
            slot.refuse(why)
        else:
            slot.reroot(root)

    async def _export(self, checkpoint: str, layer: int) -> None:
        descriptor, layers, reason = -1, 0, ""
        try:
            if self._layer_export is None:
                raise ConfigError("checkpoint", "this container has plain slots only")
            descriptor, layers = await self._layer_export.open(checkpoint, layer)
        except (AgentEnvError, OSError) as error:
            reason = str(error)
        try:
            if self._greeted and self._server is not None:
                exported = Exported(checkpoint, layer, layers, reason)
                self._server.link.send(exported, *((descriptor,) if descriptor >= 0 else ()))
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _link_broken(self, reason: str) -> None:
        """A server without a link is useless, and one that violates the contract is not trusted."""
        if self._server is not None and not self._server.exited.done():
            self._server_broke = self._server_broke or reason
            self._server.kill()

    async def _server_end(self) -> str:
        """Wait until the server's process has ended; returns the reason."""
        assert self._server is not None
        status = await asyncio.shield(self._server.exited)
        self._server.link.drain()
        self._greeted = False
        return f"{end_of(status)}{f' ({self._server_broke})' if self._server_broke else ''}"

    def _reset_orphans(self) -> None:
        """Reset slots that the dead server had and that have no remembered lease: it may have been about to request
        their reset, or to report a lease."""
        for slot in self._slots:
            if slot.phase is SlotPhase.ready and slot.handed and slot.lease is None:
                slot.reset()


def _views(slot: SlotLifecycle) -> tuple[SlotView | None, dict[str, SlotView]]:
    """Of its main root, and of its services."""
    of_network = dict(slot.network_env)
    views = [dataclasses.replace(view, network_env=of_network) for view in slot.kind.views]
    names = slot.process.services if slot.process is not None else ()
    return (views[0] if views else None), dict(zip(names, views[1:], strict=True))


def _watch_lifeline(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Standard input at EOF: the process that started us has ended, or closed it on purpose."""

    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, readable)


async def _live(launch: Launch, pid: int, watch: LoopWatch) -> int:
    """Run the container from start to end; returns its exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    reaper = Reaper(loop)
    if launch.lifeline:
        _watch_lifeline(loop, stop)
    try:
        return await _until_stopped(launch, pid, reaper, watch, stop)
    finally:
        reaper.close()
        await _end_everything()


async def _until_stopped(launch: Launch, pid: int, reaper: Reaper, watch: LoopWatch, stop: asyncio.Event) -> int:
    try:
        support = await image_support(launch, reaper, stop)
        serving = asyncio.create_task(Supervisor(launch, pid, reaper, watch, stop, support).run())
    except OSError as error:
        return events.emit_failure(SandboxUnavailableError(f"the container could not be prepared: {error}"))
    except AgentEnvError as error:
        return events.emit_failure(error)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    if not serving.done():
        serving.cancel()
        await asyncio.wait([serving])
        return 0
    failure = serving.exception()
    if isinstance(failure, AgentEnvError):
        return events.emit_failure(failure)
    log.error("the supervisor itself failed", exc_info=failure)
    return events.emit_failure(SandboxUnavailableError(f"the supervisor itself failed: {failure!r}"))


async def _end_everything() -> None:
    """Kill every process of this pid namespace and reap them all."""
    deadline = time.monotonic() + _END_DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if _reap_all():
            break
        await asyncio.sleep(0.002)


def _reap_all() -> bool:
    """Reap dead children; True when none are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _too_few_descriptors(hard: int, slots: int) -> ConfigError:
    return ConfigError(
        "slots",
        f"{slots} slots need a limit of at least {needed(slots)} open files; the limit here is {hard}",
        next_step="raise the hard limit (ulimit -Hn), or start fewer slots per container",
    )


def run(launch: Launch) -> int:
    """Be the supervisor, as PID 1 of the new pid namespace. Returns the exit code."""
    os.umask(0o022)
    child.reserve_low_descriptors()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < needed(launch.spec.slots):
        return events.emit_failure(_too_few_descriptors(hard, launch.spec.slots))
    try:
        pid = int(str(Path("/proc/self").readlink()))  # as the machine counts: still the old /proc
        mounts.enter_private_namespace()
        mounts.mount_proc()
    except OSError as error:
        return events.emit_failure(isolation.explain_namespaces(error))
    with LoopWatch("supervisor") as watch, asyncio.Runner(loop_factory=watch.new_loop) as runner:
        code = runner.run(_live(launch, pid, watch))
    if code == 0:
        events.emit("stopped")
    return code

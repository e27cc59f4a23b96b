"""Sandboxes for scripts: a slot that is leased for the duration of ``async with``.

::

    async with AsyncSandbox() as box:
        result = await box.run("python3 -c 'print(6 * 7)'")
        print(result.stdout)

    async with AsyncFarm(slots=50) as farm:  # many at once share containers
        async with farm.sandbox() as box:
            ...

:class:`agentenv.Sandbox` and :class:`agentenv.Farm` are the same without ``await``, for scripts and notebooks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeVar, Unpack, cast

from agentenv.config import ContainerFields, ContainerSettings, ExecutorSettings, NomadSettings, PoolSettings
from agentenv.containers.live_output import OnOutput
from agentenv.deadlines import CALL_TIMEOUT_S, START_TIMEOUT_S
from agentenv.errors import CheckpointError, ConfigError, LeaseLostError, PoolClosedError, UserUnsupportedError
from agentenv.executor.session import Checkpoint, ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.access import FarmAccess, farm_access
from agentenv.farm_client.pool import FarmPool
from agentenv.run_files import RunFile
from agentenv.sdk.attached import attach_command, offered
from agentenv.sdk.images import stored
from agentenv.sdk.loop_thread import forked_error
from agentenv.sdk.named import IDLE_TIMEOUT_S, NAMED, Mark, NamedSandbox, OnIdle, listed, marks_of, paused_of
from agentenv.sdk.processes import sendable
from agentenv.sdk.roots import (
    ImageFields,
    ImageRoot,
    RootFields,
    SandboxFields,
    container_for,
    plain_container_for,
    plain_root,
    root_of,
    with_memory,
)
from agentenv.sdk.slot_tools import SlotTools
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import BackendName, make_backend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from agentenv.wire.farm import LeaseView, PausedView
from agentenv.wire.leases import OWN_RUN, SlotRequest, Tags
from agentenv.wire.passes import make_pass
from agentenv.wire.roots import RootSpec

T = TypeVar("T")

_MAX_NAME_CHARS: Final = 256
_FIRST_PAUSE_S: Final = 0.05
"""Between two looks for a sandbox that others pause and resume meanwhile."""
SLOTS_PER_CONTAINER: Final = ContainerSettings().slots_per_container


class _OpenedOnce(ABC, Generic[T]):
    """The life of a farm or a sandbox: opened once, closed repeatably, used only in the process that made it."""

    _what: ClassVar[str]
    _backend: ContainerBackend | FarmAccess

    def _begin(self) -> None:
        """Called once by the constructor."""
        self._stack: AsyncExitStack | None = None
        self._opened: T | None = None
        self._process = os.getpid()

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> T:
        """Start it within ``stack``; what :meth:`_usable` returns from then on."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend!r} {'open' if self.is_open else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._opened is not None

    async def open(self) -> Self:
        """Start it. Raises SandboxUnavailableError with cause and cure, and then nothing is left running; that no
        container of a farm can be started is raised where its first sandbox is opened. Raises PoolClosedError if it
        was opened before: an open one stays as it is."""
        if self._stack is not None:
            raise already_open(self._what, open_now=self.is_open)
        self._stack = AsyncExitStack()
        async with AsyncExitStack() as stack:
            self._opened = await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Wipe its slots and stop whatever :meth:`open` started. Repeatable."""
        self._opened = None
        if self._stack is not None and self._process == os.getpid():
            await self._stack.aclose()

    async def __aenter__(self) -> Self:
        """Opens it, unless it is open."""
        return self if self.is_open else await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _usable(self) -> T:
        if self._process != os.getpid():
            raise forked_error(self._process)
        if self._opened is None:
            raise PoolClosedError(f"the {self._what} is not open", next_step="use it inside `with`, or call open()")
        return self._opened


class AsyncFarm(_OpenedOnce[ToolExecutor]):
    """Containers that up to ``slots`` sandboxes share, from :meth:`open` to :meth:`close`, or as an async context
    manager. Containers are started as they are needed.

    ``backend``: ``local`` runs containers on this machine, ``nomad`` a job of its own on the cluster that
    ``NOMAD_ADDR`` names, ``farm`` takes slots of a farm service (``farm``, by default that of ``AGENTENV_FARM_URL`` or
    of this machine), ``fake`` plain child processes without any isolation (only for code you would run
    yourself); or a :class:`ContainerBackend`, which is opened and closed here and has settings of its own.
    The containers are configured by ``settings``, and by its fields as keyword arguments, which override it:
    ``isolation="user"``, ``allow_network=True``, ``env={"NAME": "value"}``, ``binds=["/source:/target"]``,
    ``limits={"processes": 100}`` and so on (:class:`ContainerSettings` has all of them).
    ``memory_mib``: memory of each sandbox that does not name its own. One with an image may request up to
    ``limits={"max_memory_bytes": …}``.
    ``timeout_s`` bounds each call without a timeout of its own, ``start_timeout_s`` the wait for a sandbox.

    Raises ConfigError naming the wrong setting.
    """

    _what = "farm"

    def __init__(
        self,
        backend: BackendName | Literal["farm"] | ContainerBackend = "local",
        *,
        slots: int = SLOTS_PER_CONTAINER,
        memory_mib: int | None = None,
        settings: ContainerSettings | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        farm: FarmAccess | None = None,
        **fields: Unpack[ContainerFields],
    ) -> None:
        if slots < 1:
            raise ConfigError("slots", f"got {slots!r}", next_step="allowed: 1 or more")
        if memory_mib is not None and (backend == "farm" or not isinstance(backend, str)):
            raise ConfigError(
                "memory_mib", "is of the backend's containers", next_step="give it to a sandbox with an image"
            )
        containers = 1
        if backend == "farm":
            if settings is not None or fields:
                raise ConfigError("settings", "are set by the farm service", next_step="omit them with backend='farm'")
            self._backend = farm or farm_access()
        elif farm is not None:
            raise ConfigError("farm", "is for backend='farm'", next_step="set that, or leave it out")
        elif isinstance(backend, str):
            if settings is None:
                fields.setdefault("slots_per_container", min(slots, SLOTS_PER_CONTAINER))
            chosen = ContainerSettings.made(settings, fields)
            if memory_mib is not None:
                chosen = with_memory(chosen, memory_mib)
            self._backend = _backend(backend, chosen, start_timeout_s)
            containers = -(-slots // chosen.slots_per_container)
        elif settings is not None or fields:
            raise ConfigError("settings", "cannot be given with a backend object", next_step="give them to the backend")
        else:
            self._backend = backend
            containers = slots  # enough if each has one
        self._containers = PoolSettings(min_containers=1, max_containers=containers, start_timeout_s=start_timeout_s)
        self._calls = ExecutorSettings(default_timeout_s=timeout_s)
        self._memory_mib = memory_mib
        self._begin()

    async def _open(self, stack: AsyncExitStack) -> ToolExecutor:
        pool: SlotPool | FarmPool
        if isinstance(self._backend, FarmAccess):
            pool = FarmPool(self._backend, tags=Tags(environment="sandbox"), settings=self._containers)
        else:
            pool = SlotPool(self._backend, self._containers)
        await stack.enter_async_context(pool)
        self._pool = pool
        return await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin(), self._calls))

    async def _ready(self) -> None:
        """Awaited before the farm is used: one that whoever uses it opens does it here."""

    def sandbox(
        self,
        root: ImageRoot | RootSpec | Checkpoint | str | None = None,
        *,
        name: str | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        on_idle: OnIdle = "kill",
        **fields: Unpack[ImageFields],
    ) -> AsyncSandbox:
        """A sandbox in one of the farm's containers. Opening it leases a slot, closing it wipes the slot; if all
        ``slots`` are in use, opening waits up to ``start_timeout_s`` and then raises AcquireTimeoutError.

        ``root``: an image, which is the sandbox's root; it is fetched when the sandbox is opened, if this machine does
        not have it. ``fields`` are those of an :class:`ImageRoot`, which may also be given whole: ``memory_mib``,
        ``storage_mib``, ``cpus``, ``network``, ``user``, ``env`` and so on; without an image there is ``workdir``. A
        RootSpec names an image that this machine's store has. A checkpoint
        (:meth:`AsyncSandbox.pause`): it begins with those files, in the container that has them; CheckpointError when
        that is gone.

        ``name``, of a farm service: it stays when it is closed, with its files and processes, until no process has been
        connected to it for ``idle_timeout_s``, and :meth:`connect` finds it from any process of the run. Then it is
        killed, or with ``on_idle="pause"`` paused: its files are kept, and its slot is given back. Opening raises
        ConfigError when there is one of that name, QuotaError when the farm gives no such time (an hour by default)."""
        box = AsyncSandbox.__new__(AsyncSandbox)
        box._enlist(self, root_of(root, fields), owned=False)
        if name is not None:
            self._check_named()
            if not 0 < len(name) <= _MAX_NAME_CHARS:
                raise ConfigError("name", f"has {len(name)} characters", next_step=f"1 to {_MAX_NAME_CHARS}")
            box._name, box._idle_timeout_s, box._on_idle = name, idle_timeout_s, on_idle
        return box

    def connect(self, name: str) -> AsyncSandbox:
        """The sandbox of that name, of a farm service, with its files and processes; another process may be connected
        to it as well. One that is paused is resumed: it has its files again, in a slot of the container that kept them,
        for which opening waits if all are in use. Opening raises ConfigError when there is none."""
        self._check_named()
        box = AsyncSandbox.__new__(AsyncSandbox)
        box._enlist(self, None, owned=False)
        box._name, box._idle_timeout_s = name, None
        return box

    async def sandboxes(self) -> list[NamedSandbox]:
        """The sandboxes with names that this run has at the farm service, running and paused, by name. Raises
        InfraError."""
        self._check_named()
        await self._ready()
        leases = await self._named_leases()
        return listed(leases, await self._farm_pool().paused_of(NAMED))

    async def pause(self, name: str) -> None:
        """Pause the sandbox of that name, whoever is connected to it: :meth:`AsyncSandbox.pause`. No effect on one that
        is paused. Raises as that; ConfigError when there is none."""
        self._check_named()
        await self._ready()
        running, paused = await self._known(name)
        if paused is None and not running:
            raise _no_sandbox(name)
        if paused is None or paused[0].resumed:
            async with self.connect(name) as box:
                await box.pause()

    async def kill(self, name: str) -> None:
        """End the sandbox of that name, running or paused, with its files. Raises ConfigError when there is none,
        InfraError."""
        self._check_named()
        await self._ready()
        if not await self._farm_pool().end_by_name(name, NAMED):
            raise _no_sandbox(name)

    def _check_named(self) -> None:
        if not isinstance(self._backend, FarmAccess):
            raise ConfigError(
                "name",
                "sandboxes that stay are kept by a farm service, and the containers of this farm end with it",
                next_step='start one (`agentenv farm serve`), and use Farm("farm")',
            )

    def _farm_pool(self) -> FarmPool:
        self._usable()
        assert isinstance(self._pool, FarmPool)
        return self._pool

    async def _named_leases(self) -> tuple[LeaseView, ...]:
        return await self._farm_pool().leases_of(NAMED)

    async def _named(self, stack: AsyncExitStack, box: AsyncSandbox, root: RootSpec | None) -> ToolSession:
        """Open the session of a sandbox with a name: a new one, or without a timeout the one that is there."""
        name = box._name
        if box._idle_timeout_s is None:
            return await self._found(stack, name)
        running, paused = await self._known(name)
        if running or paused:
            raise _taken(name)
        mark = Mark.new(box._idle_timeout_s, root, box._on_idle)
        session = await self._begun(stack, mark, mark.request(name, root, box._container))
        if marks_of(await self._named_leases(), name)[:1] != [mark]:
            session.stays = False
            raise _taken(name)  # by another process at the same moment; leaving the stack wipes this one
        return session

    async def _known(self, name: str) -> tuple[list[Mark], tuple[PausedView, Mark] | None]:
        """The marks of the leases of that name, and what is paused of it."""
        leases = await self._named_leases()
        return marks_of(leases, name), paused_of(await self._farm_pool().paused_of(NAMED), name)

    async def _found(self, stack: AsyncExitStack, name: str) -> ToolSession:
        """The one that is paused, else the one that runs. Others may pause and resume it meanwhile, and the farm learns
        of that a moment later: so it is looked for again."""
        failed: LeaseLostError | CheckpointError | None = None
        loop, looks, pause_s = asyncio.get_running_loop(), 0, _FIRST_PAUSE_S
        until_s = loop.time() + self._containers.start_timeout_s
        while True:
            running, paused = await self._known(name)
            looks += 1
            try:
                if paused is not None and not paused[0].resumed:
                    view, mark = paused
                    again = mark.resumed()
                    return await self._begun(stack, again, again.request(name, view.root, view.container))
                if running:
                    return await self._connected(stack, running[0], name)
            except (LeaseLostError, CheckpointError) as error:
                failed = error
            if loop.time() >= until_s or (looks > 1 and not running and paused is None):
                raise _no_sandbox(name) from failed
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    async def _connected(self, stack: AsyncExitStack, mark: Mark, name: str) -> ToolSession:
        """The lease that is there."""
        request = mark.request(name, None, existing=True)
        session = ToolSession(self._usable(), request, self._containers.start_timeout_s)
        session.stays = True
        await stack.enter_async_context(session)
        session.root_unknown = mark.has_root and session.root is None
        return session

    async def _begun(self, stack: AsyncExitStack, mark: Mark, request: SlotRequest) -> ToolSession:
        """A lease that is not there yet."""
        session = await stack.enter_async_context(
            ToolSession(self._usable(), request, self._containers.start_timeout_s)
        )
        session.stays = True
        if mark.on_idle == "pause":
            await session.pause_when_idle()
        return session

    async def _stored(self, root: ImageRoot) -> RootSpec:
        """See :func:`agentenv.sdk.images.stored`. It has the farm's memory unless it names its own."""
        self._usable()
        if root.memory_mib is None:
            root = replace(root, memory_mib=self._memory_mib)
        return await stored(root, self._pool, self._containers.start_timeout_s)

    def session(self, root: RootSpec | None = None, container: str = "") -> ToolSession:
        """A session of the executor below, for a sandbox; ``container``: the one that has the root's checkpoint. Raises
        PoolClosedError when it is not open."""
        name = f"sandbox-{secrets.token_hex(4)}"
        patience_s = self._containers.start_timeout_s
        return self._usable().open(
            name, acquire_timeout_s=patience_s, kind="interactive", run=OWN_RUN, root=root, container=container
        )


class AsyncSandbox(_OpenedOnce[ToolSession], SlotTools):
    """A sandbox from :meth:`open` to :meth:`close`, or as an async context manager: a farm of one slot. The arguments
    are those of :class:`AsyncFarm`, and

    - ``image``: the sandbox's root, in which it is root: ``debian:trixie``, ``dockerfile:DIR``, ``oci:DIR`` and what
      else docs/images.md names; it is fetched or built if this machine does not have it. Without one, the sandbox has
      this machine's programs, read-only;
    - ``memory_mib`` and ``storage_mib``, what it may write (and with an image where: ``storage`` is ``memory`` or
      ``disk``). Its container gets the limits that this needs;
    - ``network``: ``none``, ``public``, or with an image a list of hosts, or a NetworkPolicy, which
      :meth:`set_network` changes. By default what ``allow_network`` says, with an image ``none``;
    - ``workdir``: where its commands start and what relative paths are below, in place of ``/workspace`` or the image's
      own. It is made if it is missing;
    - with an image: ``cpus`` (cores), ``user`` in place of the image's, ``capabilities``, ``nested_namespaces``
      (:class:`ImageRoot`);
    - ``forks``: how many forks it may have at once;
    - ``pool``: a farm that is open. The sandbox is one of its slots, as :meth:`AsyncFarm.sandbox` gives them; backend,
      timeouts and the container's settings are the farm's.

    A failing command is data (``exit_code``); invalid calls raise ToolCallError, forbidden ones PolicyRefusalError,
    failures of the sandbox InfraError. File operations raise ``OSError`` like local ones.
    """

    _what = "sandbox"

    def __init__(
        self,
        backend: BackendName | Literal["farm"] | ContainerBackend = "local",
        *,
        settings: ContainerSettings | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        farm: FarmAccess | None = None,
        image: str | None = None,
        forks: int = 0,
        pool: AsyncFarm | None = None,
        **fields: Unpack[SandboxFields],
    ) -> None:
        asked, container = _split(fields)
        root: ImageRoot | RootSpec | None
        root = plain_root(asked.pop("workdir", "")) if image is None else ImageRoot(image, **asked)
        if pool is not None:
            times = (timeout_s, start_timeout_s) != (CALL_TIMEOUT_S, START_TIMEOUT_S)
            given = backend != "local" or settings or farm or forks or container or times
            if given or (image is None and asked):
                raise ConfigError("pool", "excludes backend, settings and limits", next_step="set them on the Farm")
            self._enlist(pool, root, owned=False)
            return
        if isinstance(backend, str) and backend != "farm":
            if settings is None:
                container.setdefault("slots_per_container", 1 + forks)  # all of them in one container
            made = ContainerSettings.made(settings, container)
            settings = container_for(root, made) if isinstance(root, ImageRoot) else plain_container_for(asked, made)
            container = {}
        elif image is None and asked:
            raise ConfigError(next(iter(asked)), "needs an image", next_step="pass image=…, or configure the backend")
        alone = AsyncFarm(
            backend,
            slots=1 + forks,
            settings=settings,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            farm=farm,
            **container,
        )
        self._enlist(alone, root, owned=True)

    def _enlist(self, farm: AsyncFarm, root: ImageRoot | RootSpec | Checkpoint | None, *, owned: bool) -> None:
        self._container = root.container if isinstance(root, Checkpoint) else ""
        self._root = root.root if isinstance(root, Checkpoint) else root
        self._name = ""
        self._service = ""
        self._idle_timeout_s: float | None = None
        self._on_idle: OnIdle = "kill"
        self._offer: RunFile | None = None
        self._farm = farm
        self._owned = owned
        self._backend = farm._backend
        self._begin()

    async def _open(self, stack: AsyncExitStack) -> ToolSession:
        if self._owned:
            await stack.enter_async_context(self._farm)
        await self._farm._ready()
        root = await self._farm._stored(self._root) if isinstance(self._root, ImageRoot) else self._root
        if self._name:
            return await self._farm._named(stack, self, root)
        return await stack.enter_async_context(self._farm.session(root, self._container))

    def __repr__(self) -> str:
        services = self._root.services if isinstance(self._root, ImageRoot) else {}
        words = [repr(self._name)] if self._name else []
        if self._service:
            words = ["service", repr(self._service)]
        elif services:
            words += ["with services", ", ".join(services)]
        return super().__repr__().replace(" ", f" {' '.join(words)} of ", 1) if words else super().__repr__()

    async def kill(self) -> None:
        """End the sandbox, also one with a name, and wipe its slot. Repeatable."""
        if self._opened is not None:
            self._opened.stays = False
        await self.close()

    async def pause(self) -> Checkpoint:
        """Keep its files, and no process, and give its slot back.

        One with a name keeps that, and :meth:`AsyncFarm.connect` resumes it, from any process of the run. Of any other,
        ``farm.sandbox(checkpoint)`` goes on with the files, also in another process (``Checkpoint.to_json``), as often
        as you like. They live in the container, and end with it; a sandbox with a name is paused for a day at most.

        For sandboxes of a farm. Raises ConfigError for a lone one, whose container ends with it; CheckpointError when
        there is no room, and then it goes on; InfraError.
        """
        if self._owned:
            raise ConfigError(
                "pause", "the container of a lone sandbox ends with it", next_step="open it on a farm: farm.sandbox()"
            )
        if self._name:
            kept = await self._usable().pause()
        else:
            kept = await self.checkpoint()
        await self.kill()
        return kept

    # -- commands ----------------------------------------------------------------------------------

    async def run(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | None = None,
        output_bytes: int | None = None,
        on_output: OnOutput | None = None,
    ) -> CallResult:
        """Run a bash command in a new shell in the workspace; it is killed after ``timeout_s`` (``math.inf``: never),
        and waits for the slot's earlier calls: they run one at a time. ``user`` and ``output_bytes``: see :meth:`exec`,
        which runs a program without a shell.

        ``on_output(stream, text)`` is called with the output as it comes; stream is "stdout" or "stderr"
        (:meth:`exec`). What it raises cancels the command and is raised here.
        """
        _, env = sendable((), env)
        arguments: dict[str, Any] = {"command": command, "cwd": cwd, "env": dict(env) if env else None, "user": user}
        arguments |= {"output_bytes": output_bytes, "stdin_data" if isinstance(stdin, bytes) else "stdin": stdin}
        return await self._typed_call("bash", arguments, timeout_s, on_output)

    async def terminal(
        self,
        command: str,
        timeout_s: float | None = None,
        *,
        session: str = "default",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: bool | None = None,
        user: str | None = None,
    ) -> CallResult:
        """Run a command in the persistent bash session of that name, which keeps directory, variables and
        functions. A command that exceeds ``timeout_s`` keeps running; an empty command returns more of its output.
        ``pty`` and ``user`` are those of a new session."""
        arguments: dict[str, Any] = {"command": command, "env": dict(env) if env else None, "user": user}
        arguments |= {"session": session, "timeout_s": timeout_s, "workdir": cwd, "pty": pty}
        return await self._typed_call("terminal", arguments)

    async def shell_command(self, *, user: str | None = None) -> list[str]:
        """A program and its arguments, with which this user of this machine opens a terminal in the sandbox from
        another process, beside what runs in it: ``agentenv shell --attach FILE``. Leaving that terminal ends its shell
        and nothing else. ``user``: see :meth:`exec`.

        The file, which only this user can read, has what is needed to use this sandbox, and is removed when that is
        closed. Raises UserUnsupportedError, SandboxUnavailableError when the file cannot be written.
        """
        session = self._usable()
        if user is not None and not session.root_unknown and not (session.root and session.root.image):
            raise UserUnsupportedError(
                f"a sandbox without an image has one user, and {user!r} cannot be another", next_step="leave user out"
            )
        if self._offer is None:
            container = session.lease.container
            if not isinstance(self._backend, FarmAccess):  # which gives passes only
                container = replace(container, token=make_pass(container.token, session.request.tags.run))
            self._offer = offered(session.lease.key, container)
            assert self._stack is not None  # it is open
            self._stack.callback(self._offer.close)
        return attach_command(self._offer.file, user)

    def _used(self) -> AbstractAsyncContextManager[ToolSession]:
        return nullcontext(self._usable())

    def _over(self, session: ToolSession) -> Self:
        box = type(self).__new__(type(self))
        box._enlist(self._farm, self._root, owned=False)
        box._service = session.lease.key.service
        box._stack = AsyncExitStack()
        box._stack.push_async_callback(session.aclose)
        box._opened = session
        return box


def _split(fields: SandboxFields) -> tuple[RootFields, ContainerFields]:
    """What is the sandbox's, and what its container's."""
    asked = {name: value for name, value in fields.items() if name in RootFields.__annotations__}
    rest = {name: value for name, value in fields.items() if name not in asked}
    return cast("RootFields", asked), cast("ContainerFields", rest)


def _taken(name: str) -> ConfigError:
    return ConfigError("name", f"there is a sandbox {name!r} already", next_step=f"use it: farm.connect({name!r})")


def _no_sandbox(name: str) -> ConfigError:
    return ConfigError(
        "name", f"there is no sandbox {name!r} (any more)", next_step="farm.sandboxes() lists those of this run"
    )


def already_open(what: str, *, open_now: bool) -> PoolClosedError:
    """The error of a second open()."""
    if open_now:
        return PoolClosedError(f"the {what} is already open", next_step="use it, or close() it and make a new one")
    return PoolClosedError(f"the {what} was opened before; it can be opened only once", next_step="make a new one")


def _backend(name: str, settings: ContainerSettings, start_timeout_s: float) -> ContainerBackend:
    nomad = None
    if name == "nomad":  # a separate job: closing a script's sandbox must not end a farm's containers
        nomad = NomadSettings.from_environment(job_id=f"agentenv-sandbox-{secrets.token_hex(4)}")
    return make_backend(name, settings, nomad=nomad, start_timeout_s=start_timeout_s, field="backend")

"""The sandboxes of clients: each a slot in which envd runs, or paused, an image of its files."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp

from agentenv.background import TaskSet
from agentenv.deadlines import scaled
from agentenv.e2b.envd import PORT, Envd, environment_of
from agentenv.e2b.replies import RefusalError, check_supported, moment, network_of
from agentenv.e2b.templates import DEFAULT_TAG, TemplateBook, Version
from agentenv.errors import AgentEnvError, LeaseLostError
from agentenv.sdk.async_sandbox import AsyncFarm, AsyncSandbox
from agentenv.sdk.roots import ImageRoot, Network

logger = logging.getLogger(__name__)

LONGEST_S: Final = 24 * 3600
_DEFAULT_S: Final = 300.0
_EXPIRY_S: Final = 0.2
_READY_S: Final = scaled(60.0)
_READY_POLL_S: Final = 0.1
_SHELL: Final = ("/bin/bash", "-l", "-c")


@dataclass(frozen=True)
class Tenant:
    """Whose sandboxes they are: a run of the farm, and the farm as its token sees it."""

    run: str
    farm: AsyncFarm


@dataclass
class Held:
    """A sandbox. ``box`` is None while it is paused; then ``version`` is its files."""

    id: str
    run: str
    template: str
    version: Version
    token: str | None
    traffic_token: str | None
    metadata: dict[str, str]
    env: dict[str, str]
    network: Network
    asked: Mapping[str, Any]
    tenant: Tenant
    auto_pause: bool = False
    auto_resume: bool = False
    started_unix_s: float = field(default_factory=time.time)
    ends_unix_s: float = 0.0
    box: AsyncSandbox | None = None
    pausing: bool = False
    urls: dict[int, str] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    forwarding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> str:
        """``running``, or ``paused``: also while its files are still being kept."""
        return "paused" if self.box is None or self.pausing else "running"

    def ends_in(self, timeout_s: float, *, at_least: bool = False) -> None:
        """It ends after so long from now; ``at_least``: or later, if that was said before."""
        ends = time.time() + timeout_s
        self.ends_unix_s = max(self.ends_unix_s, ends) if at_least else ends

    async def url(self, port: int) -> str:
        """Where a port of it is reached on this machine. Raises RefusalError while it is paused."""
        async with self.forwarding:
            if self.box is None:
                raise RefusalError(409, "the sandbox is paused")
            if port not in self.urls:
                self.urls[port] = await self.stack.enter_async_context(self.box.forward(port))
            return self.urls[port]

    def told(self, envd_version: str, memory_mib: int, disk_mib: int, cpus: int) -> dict[str, Any]:
        """It, as the API describes it. ``memory_mib`` and so on: those of slots whose template does not say."""
        network = self.asked.get("network")
        told: dict[str, Any] = {
            "sandboxID": self.id,
            "templateID": self.template,
            "alias": self.template,
            "clientID": "agentenv",
            "envdVersion": envd_version,
            "metadata": self.metadata,
            "startedAt": moment(self.started_unix_s),
            "endAt": moment(self.ends_unix_s),
            "cpuCount": round(self.version.cpus or cpus) or 1,
            "memoryMB": self.version.memory_mib or memory_mib,
            "diskSizeMB": disk_mib,
            "state": self.state,
            "network": network if isinstance(network, dict) else {},
            "allowInternetAccess": self.network != "none",
            "lifecycle": {
                "autoResume": self.auto_resume, "onTimeout": "pause" if self.auto_pause else "kill"
            },
        }  # fmt: skip
        if self.state == "paused":
            told["pauseMode"] = "filesystem"  # its processes are gone
        if self.token is not None:
            told["envdAccessToken"] = self.token
        if self.traffic_token is not None:
            told["trafficAccessToken"] = self.traffic_token
        return told


class Sandboxes:
    """All of them, by id. An async context manager: leaving it ends them."""

    def __init__(self, envd: Envd, templates: TemplateBook, http: aiohttp.ClientSession) -> None:
        self._envd = envd
        self._templates = templates
        self.http = http
        self._held: dict[str, Held] = {}
        self._prepared: dict[str, Version] = {}
        self._preparing: dict[str, asyncio.Lock] = {}
        self._tasks = TaskSet()

    async def __aenter__(self) -> Sandboxes:
        self._tasks.start("sandboxes", self._expire(), "expiry")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()
        await asyncio.gather(*(self.end(held) for held in [*self._held.values()]), return_exceptions=True)

    # -- looking ---------------------------------------------------------------------------------------

    def of(self, run: str) -> list[Held]:
        """Those of a run."""
        return [held for held in self._held.values() if held.run == run]

    def get(self, run: str, sandbox: str) -> Held:
        """One of a run's. Raises RefusalError."""
        held = self._held.get(sandbox)
        if held is None or held.run != run:
            raise RefusalError(404, f"sandbox {sandbox} not found")
        return held

    def any(self, sandbox: str) -> Held | None:
        """One of anybody's: what is in it is protected by its own token."""
        return self._held.get(sandbox)

    def all(self) -> list[Held]:
        """Those of everybody."""
        return [*self._held.values()]

    # -- beginning and ending --------------------------------------------------------------------------

    async def create(self, tenant: Tenant, asked: Mapping[str, Any]) -> Held:
        """A new one, of a request to create it. Raises RefusalError, AgentEnvError."""
        check_supported(asked)
        reachable, timeout_s = network_of(asked), seconds(asked.get("timeout", _DEFAULT_S))
        template, version = self._templates.version(tenant.run, str(asked.get("templateID", "")))
        version = await self.prepared(tenant, version)
        network = asked.get("network") or {}
        resume = asked.get("autoResume") or {}
        held = Held(
            id=secrets.token_hex(10),
            run=tenant.run,
            template=template.name,
            version=version,
            token=secrets.token_hex(20) if asked.get("secure", True) else None,
            traffic_token=secrets.token_hex(20) if network.get("allowPublicTraffic") is False else None,
            metadata=dict(asked.get("metadata") or {}),
            env=dict(asked.get("envVars") or {}),
            network=reachable,
            asked=asked,
            tenant=tenant,
            auto_pause=bool(asked.get("autoPause")),
            auto_resume=bool(resume.get("enabled")),
        )
        await self._start(held)
        held.ends_in(timeout_s)
        self._held[held.id] = held
        return held

    async def end(self, held: Held) -> None:
        """End it and forget it, with its files. Repeatable."""
        self._held.pop(held.id, None)
        async with held.changing:
            await self._close(held)

    async def pause(self, held: Held) -> None:
        """Keep its files as an image, and give its slot back; its processes end. Raises RefusalError if it is
        paused."""
        async with held.changing:
            if (box := held.box) is None:
                raise RefusalError(409, f"sandbox {held.id} is already paused")
            held.pausing = True
            try:
                image = await box.commit(f"e2b-paused:{held.id}")
                held.version = held.version.model_copy(update={"image": image})
                await self._close(held)
            finally:
                held.pausing = False

    async def resume(self, held: Held) -> None:
        """Continue it with the files that it was paused with; nothing, if it runs."""
        async with held.changing:
            if held.id not in self._held:
                raise RefusalError(404, f"sandbox {held.id} not found")
            if held.box is None:
                await self._start(held)

    async def snapshot(self, held: Held, name: str | None) -> str:
        """Make its files a template, and return its name. Its processes end, and envd is started again."""
        name = name or f"snapshot-{secrets.token_hex(6)}"
        async with held.changing:
            image = await self._committed(held, f"e2b-snapshot:{secrets.token_hex(8)}")
            version = held.version.model_copy(update={"image": image, "created_unix_s": time.time()})
            await self._templates.add(held.run, name, [DEFAULT_TAG], version, snapshot_of=held.id)
        return name

    async def fork(self, held: Held, count: int, timeout_s: float) -> list[Held]:
        """Others that begin with its files. Its processes end."""
        async with held.changing:
            image = await self._committed(held, f"e2b-fork:{held.id}")
        version = held.version.model_copy(update={"image": image})
        forks = [self._twin(held, version, timeout_s) for _ in range(count)]
        started = await asyncio.gather(*(self._start(fork) for fork in forks), return_exceptions=True)
        failed = [each for each in started if isinstance(each, BaseException)]
        if failed:
            await asyncio.gather(*(self._close(fork) for fork in forks))
            raise failed[0]
        self._held.update({fork.id: fork for fork in forks})
        return forks

    def _twin(self, held: Held, version: Version, timeout_s: float) -> Held:
        return replace(
            held,
            id=secrets.token_hex(10),
            version=version,
            token=held.token and secrets.token_hex(20),
            traffic_token=held.traffic_token and secrets.token_hex(20),
            started_unix_s=time.time(),
            ends_unix_s=time.time() + timeout_s,
            box=None,
            pausing=False,
            urls={},
            stack=AsyncExitStack(),
            changing=asyncio.Lock(),
            forwarding=asyncio.Lock(),
        )

    async def _committed(self, held: Held, name: str) -> str:
        if (box := held.box) is None:
            raise RefusalError(409, f"sandbox {held.id} is paused: connect to it first")
        image = await box.commit(name)
        await self._serve(held, box)
        return image

    async def set_network(self, held: Held, asked: Mapping[str, Any]) -> None:
        """Change what it may reach."""
        network = network_of(asked)
        async with held.changing:
            if held.box is not None:
                await held.box.set_network(network)
            held.network = network

    # -- a slot ----------------------------------------------------------------------------------------

    async def prepared(self, tenant: Tenant, version: Version) -> Version:
        """The version with envd and the user in its image, made once for each image."""
        if version.prepared:
            return version
        async with self._preparing.setdefault(version.image, asyncio.Lock()):
            if (made := self._prepared.get(version.image)) is None:
                async with tenant.farm.sandbox(ImageRoot(version.image, user="0")) as box:
                    await self._envd.install(box)
                    env = await environment_of(box)
                    image = await box.commit(f"e2b-base:{secrets.token_hex(8)}")
                made = Version(image=image, env=env, prepared=True)
                self._prepared[version.image] = made
        return version.model_copy(update={"image": made.image, "env": {**made.env, **version.env}, "prepared": True})

    async def _start(self, held: Held) -> None:
        version = held.version
        root = ImageRoot(
            version.image, user="0", network=held.network, cpus=version.cpus, memory_mib=version.memory_mib
        )
        async with AsyncExitStack() as stack:
            box = await stack.enter_async_context(held.tenant.farm.sandbox(root))
            stack.callback(held.urls.clear)
            stack.callback(setattr, held, "box", None)
            held.stack, held.box = stack, box
            await self._serve(held, box)
            held.stack = stack.pop_all()

    async def _serve(self, held: Held, box: AsyncSandbox) -> None:
        """Start envd, and what the template starts."""
        version = held.version
        env = {**version.env, "E2B_SANDBOX_ID": held.id, "E2B_TEMPLATE_ID": held.template, **held.env}
        told: dict[str, Any] = {"envVars": env, "defaultUser": version.user, "defaultWorkdir": version.workdir}
        if held.token is not None:
            told["accessToken"] = held.token
        await self._envd.start(box, self.http, await held.url(PORT), told)
        if version.start_command:
            await box.start([*_SHELL, version.start_command], user=version.user, cwd=version.workdir, env=env)
            await self._ready(box, version, env)

    async def _ready(self, box: AsyncSandbox, version: Version, env: dict[str, str]) -> None:
        argv = [*_SHELL, version.ready_command]
        ends_s = time.monotonic() + _READY_S
        while version.ready_command:
            done = await box.exec(argv, user=version.user, cwd=version.workdir, env=env)
            if done.success:
                return
            if time.monotonic() > ends_s:
                raise RefusalError(503, f"the template's ready command failed for {_READY_S:g} s: {done.stderr[-300:]}")
            await asyncio.sleep(_READY_POLL_S)

    async def _close(self, held: Held) -> None:
        stack, held.stack = held.stack, AsyncExitStack()
        held.box = None
        await stack.aclose()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            now = time.time()
            for held in self.all():
                if held.box is not None and held.ends_unix_s < now and f"end of {held.id}" not in self._tasks:
                    self._tasks.start(f"end of {held.id}", self._ended(held), "timeout")

    async def _ended(self, held: Held) -> None:
        if not held.auto_pause:
            await self.end(held)
            return
        try:
            await self.pause(held)
        except LeaseLostError:
            await self.end(held)
        except (AgentEnvError, RefusalError) as error:
            logger.error("sandbox %s cannot be paused at its timeout: %s", held.id, error)
            held.ends_unix_s = time.time() + 60.0


def seconds(asked: object) -> float:
    """A timeout that somebody asked for. Raises RefusalError."""
    if not isinstance(asked, int | float) or isinstance(asked, bool) or not 0 <= asked <= LONGEST_S:
        raise RefusalError(400, f"timeout: got {asked!r}; allowed are 0 to {LONGEST_S} seconds")
    return float(asked)

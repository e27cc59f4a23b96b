"""Fetches images into a node's store: one pull of an image however many ask, from peers before the registry."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agentenv.api.image_keeper.patience import PatienceSettings, Registry
from agentenv.api.image_keeper.peers import Peers
from agentenv.api.image_keeper.reach import Reach, refused
from agentenv.background import report_failure
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.layers import image_above
from agentenv.errors import AgentEnvError, ForbiddenError, ImageUnavailableError, InfraError
from agentenv.image.progress import BuildStep
from agentenv.store import Store, StoredImage
from agentenv.store.addition import Runtime
from agentenv.store.reference import Reference, has_source, is_committed, located, parse
from agentenv.wire import images as wire
from agentenv.wire.server import ErrorReply

logger = logging.getLogger(__name__)

_AGAIN: Final = "commit it again; its nodes may be unreachable, or have removed it after a week without use"

_REMEMBERED_S: Final = 30.0
"""How long it is remembered that a pull failed: who asks in this time gets the same answer."""
_LOOK_S: Final = 1.0
"""How often the store is looked at for what other processes fetched or removed."""


@dataclass(frozen=True)
class KeeperSettings:
    """``pulls``: at once, of all registries and peers; their layers are downloaded several at a time.

    ``budget_bytes``: what the store may keep, None: everything; looked after every ``gc_every_s``. What was used in the
    last ``keep_s`` stays.
    """

    pulls: int = 4
    patience: PatienceSettings = field(default_factory=PatienceSettings)
    registries: frozenset[str] = frozenset()
    """The only ones that may be named, ``docker.io`` for instance, wherever they are; empty: any public one."""
    paths: tuple[Path, ...] = ()
    """Directories below which OCI layouts and archives may be named; no others, because who asks is on another
    machine."""
    budget_bytes: int | None = None
    keep_s: float = 3600.0
    gc_every_s: float = 60.0


@dataclass(eq=False)
class Pull:
    """An image that is being fetched, or was, or could not be."""

    wanted: str
    step: BuildStep = field(default_factory=lambda: BuildStep("wait", ""))
    image: wire.ImageRef | None = None
    error: AgentEnvError | None = None
    ended_s: float | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""
    """What failed last and is tried again."""
    of: Pull | None = None
    """The pull of the same image that it waits for: its own has another name."""

    def progress(self, step: BuildStep) -> None:
        """It has come so far."""
        self.step = step
        if step.done:
            self.problem = ""

    def failed(self, problem: str) -> None:
        """It is tried again."""
        self.problem = problem

    def state(self) -> wire.ImageState:
        """As it is told."""
        if self.error is not None:
            return wire.ImageState(wanted=self.wanted, state="failed", error=ErrorReply.of(self.error))
        if self.image is not None:
            return wire.ImageState(wanted=self.wanted, state="ready", image=self.image)
        at = self.of or self
        step = at.step
        return wire.ImageState(
            wanted=self.wanted,
            state="fetching",
            step=f"{step.name} {step.detail}".strip(),
            problem=at.problem,
            done_bytes=step.done,
            total_bytes=step.total or None,
        )


class Keeper:
    """See the module. An async context manager: leaving it ends its pulls; what has arrived is used by the next."""

    def __init__(
        self,
        store: Store,
        settings: KeeperSettings | None = None,
        *,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        """Pulls by how they ended, bytes collected and so on, for metrics."""
        self.peers = peers
        self.registries: dict[str, Registry] = {}
        self.stored: frozenset[str] = frozenset()
        """Digests of the images in the store, as last looked."""
        self.listed: tuple[str, ...] = ()
        """The same, those used last first."""
        self._settings = settings or KeeperSettings()
        self._reach = Reach(self._settings.registries)
        self._clock = clock
        self._pulls: dict[str, Pull] = {}
        self._turns = asyncio.Semaphore(self._settings.pulls)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._look()
        self._start(self._watch())
        if self._settings.budget_bytes is not None:
            self._start(self._collect(self._settings.budget_bytes))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def fetching(self) -> int:
        """Images that are being fetched."""
        return sum(not pull.over.is_set() for pull in self._pulls.values())

    @property
    def version(self) -> str:
        """Names what the store has: another set, another version."""
        return hashlib.sha256("".join(sorted(self.stored)).encode()).hexdigest()[:16]

    # -- asking -------------------------------------------------------------------------------

    def ensure(self, wanted: str | wire.ImageRef) -> Pull:
        """The pull of a reference, or of an image that was resolved before: the one that goes on, or a new one."""
        name = wanted if isinstance(wanted, str) else wanted.digest
        known = self._known(name)
        moved = known is not None and known.over.is_set() and is_committed(name)  # perhaps: nobody tells
        if known is not None and not moved:
            return known
        pull = self._pulls[name] = Pull(name)
        self._start(self._pull(pull, wanted))
        return pull

    def _known(self, name: str) -> Pull | None:
        now = self._clock()
        for key, pull in list(self._pulls.items()):
            if pull.ended_s is not None and now - pull.ended_s > _REMEMBERED_S:
                del self._pulls[key]
        known = self._pulls.get(name)
        gone = known is not None and known.image is not None and known.image.digest not in self.stored
        return None if gone else known

    def commit(self, asked: wire.LayersRequest) -> Pull:
        """The making of an image of a checkpoint, of which an image in this store is the base: the one that goes on, or
        a new one."""
        key = f"{asked.checkpoint} {asked.name}"
        if (known := self._known(key)) is not None:
            return known
        pull = self._pulls[key] = Pull(asked.checkpoint)
        self._start(self._followed(pull, self._committed(asked)))
        return pull

    async def _committed(self, asked: wire.LayersRequest) -> wire.ImageRef:
        base = await asyncio.to_thread(self.store.find, asked.image)
        if base is None:
            raise ImageUnavailableError(f"the image {asked.image} is not in the store of its node (any more)")
        container = ContainerHandle(asked.container, 0, asked.base_url, asked.token, 0)
        image, _ = await image_above(self.store, base, container, asked.checkpoint, Runtime.of(base))
        if asked.name:
            await asyncio.to_thread(self.store.name, asked.name, image)
        return wire.ImageRef(reference=asked.name or image.digest, digest=image.digest)

    async def ensured(self, wanted: Iterable[str | wire.ImageRef], wait_s: float) -> list[wire.ImageState]:
        """The states of images, which are fetched if they are missing, when all are decided or ``wait_s`` is over."""
        return await self.states([self.ensure(one) for one in wanted], wait_s)

    async def states(self, pulls: Sequence[Pull], wait_s: float) -> list[wire.ImageState]:
        """The states of pulls, when all are decided or ``wait_s`` is over."""
        waiting = [asyncio.ensure_future(pull.over.wait()) for pull in pulls if not pull.over.is_set()]
        if waiting:
            await asyncio.wait(waiting, timeout=wait_s)
            for task in waiting:
                task.cancel()
        return [pull.state() for pull in pulls]

    async def changed(self, version: str, wait_s: float) -> None:
        """Wait until the store has something else than at ``version``, at most ``wait_s``."""
        until_s = self._clock() + wait_s
        while self.version == version and (left_s := until_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    # -- pulling ------------------------------------------------------------------------------

    async def _pull(self, pull: Pull, wanted: str | wire.ImageRef) -> None:
        made = self._resolved(wanted, pull) if isinstance(wanted, wire.ImageRef) else self._named(wanted, pull)
        await self._followed(pull, made)

    async def _followed(self, pull: Pull, made: Coroutine[Any, Any, wire.ImageRef]) -> None:
        try:
            pull.image = await made
            self.counts["pulled"] += 1
            await self._look()
        except AgentEnvError as error:
            pull.error = error
            self.counts["failed"] += 1
        except Exception as error:
            logger.exception("%s could not be fetched", pull.wanted)
            pull.error = InfraError(f"{pull.wanted} could not be fetched: {error!r}")
            self.counts["failed"] += 1
        finally:
            pull.ended_s = self._clock()
            pull.over.set()

    async def _named(self, wanted: str, pull: Pull) -> wire.ImageRef:
        """What a reference means, fetched."""
        if (named := parse(wanted)).kind == "committed":
            return await self._meant(named, pull)
        if named.kind == "sha256":  # no registry knows it
            return await self._resolved(wire.ImageRef(reference=wanted, digest=wanted), pull)
        reference = self._allowed(wanted)
        await self._reach.check(reference, self.store)
        if reference.kind == "docker" and not reference.digest:
            ask = self._registry(reference).ask
            reference = await ask(lambda: asyncio.to_thread(self.store.pinned, reference), pull.failed)
            pull.of = pinned = self.ensure(str(reference))  # tags of one image are one pull
            await pinned.over.wait()
            if pinned.image is None:
                raise (pinned.error or ImageUnavailableError(f"{wanted} was not fetched")).copy()
            return pinned.image
        image = await self._by_reference(reference, pull)
        return wire.ImageRef(reference=str(reference), digest=image.digest)

    async def _meant(self, wanted: Reference, pull: Pull) -> wire.ImageRef:
        """What a name of ``commit`` means on the node that gave it last, fetched from there; it means the same here
        from then on, also when that node is gone."""
        own = await asyncio.to_thread(self.store.named, wanted)
        known = [] if own is None else [wire.NamedImage(reference=str(wanted), digest=own.digest, named_s=own.named_s)]
        if self.peers is not None:
            known += await self.peers.named(str(wanted))
        if not known:
            raise ImageUnavailableError(f"no reachable node has an image named {wanted}", next_step=_AGAIN)
        latest = max(known, key=lambda name: name.named_s)
        found = wire.ImageRef(reference=str(wanted), digest=latest.digest)
        try:
            await self._resolved(found, pull)
        except ImageUnavailableError as error:
            raise ImageUnavailableError(f"{wanted}: {error.message}", next_step=_AGAIN) from error
        if own is None or own.named_s < latest.named_s:
            with self.store.pin(latest.digest) as image:
                await asyncio.to_thread(self.store.name, str(wanted), image, latest.named_s)
        return found

    async def _resolved(self, wanted: wire.ImageRef, pull: Pull) -> wire.ImageRef:
        """An image that another node has had: from this store, a peer, or where it came from."""
        if await asyncio.to_thread(self.store.used, wanted.digest) is not None:
            return wanted
        named = wanted.reference if has_source(wanted.reference) else ""
        if self.peers is not None:
            async with self._turns:
                if await self.peers.fetch(self.store, wanted.digest, named, pull.progress) is not None:
                    self.counts["from_peers"] += 1
                    return wanted
        if not named:
            raise ImageUnavailableError(
                f"no reachable node has the image {wanted.digest}", next_step="resolve its reference again"
            )
        reference = self._allowed(named)
        await self._reach.check(reference, self.store)
        found = await self._by_reference(reference, pull)
        if found.digest != wanted.digest:
            raise ImageUnavailableError(
                f"{named} means {found.digest} here, not {wanted.digest}", next_step="resolve it again"
            )
        return wanted

    def _allowed(self, wanted: str) -> Reference:
        """The reference, if this keeper may fetch it. Raises ForbiddenError, ConfigError."""
        reference = located(parse(wanted))
        if reference.kind == "docker":
            host, only = reference.name.partition("/")[0], self._settings.registries
            if only and host not in only:
                raise refused(host)
        elif reference.kind in ("oci", "docker-archive"):
            path = Path(reference.name).resolve()
            if not any(path.is_relative_to(allowed.resolve()) for allowed in self._settings.paths):
                raise ForbiddenError("image", f"{reference.name} is outside the directories that keepers read")
        else:
            raise ForbiddenError(
                "image", f"{reference.kind}: is of one machine only", next_step="push the image to a registry"
            )
        return reference

    async def _by_reference(self, reference: Reference, pull: Pull) -> StoredImage:
        def attempt() -> StoredImage:
            return self.store.ensure(reference, progress=pull.progress)

        async def turn() -> StoredImage:
            async with self._turns:
                return await asyncio.to_thread(attempt)

        return await (self._registry(reference).ask(turn, pull.failed) if reference.kind == "docker" else turn())

    def _registry(self, reference: Reference) -> Registry:
        host = reference.name.partition("/")[0]
        if host not in self.registries:
            self.registries[host] = Registry(self._settings.patience, self._clock)
        return self.registries[host]

    # -- upkeep -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        async with self._looking:  # so that an older list does not replace a newer one
            listed = await asyncio.to_thread(self.store.digests)
            if self.stored != frozenset(listed):
                self.stored, self.listed = frozenset(listed), tuple(listed)
                self._changed.set()
                self._changed = asyncio.Event()

    async def _collect(self, budget_bytes: int) -> None:
        while True:
            try:
                done = await asyncio.to_thread(self.store.gc, budget_bytes=budget_bytes, keep_s=self._settings.keep_s)
                self.counts["removed_images"] += len(done.images)
                for name in done.committed:
                    logger.warning("removed %s: unused for long, and the store is full", name)
                self.counts["removed_bytes"] += done.freed_bytes
                await self._look()
            except OSError as error:
                logger.warning("the store could not be cleaned up: %s", error)
            await asyncio.sleep(self._settings.gc_every_s)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report_failure)

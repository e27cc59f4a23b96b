"""A container whose slots can have images, and the images that tests of this folder use."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import aiohttp
import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sandbox.supervisor.user_namespace import FIRST_ID, LEAN_IDS
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB, Capability, ImageFormat, SlotLimits
from tests.few_ids import few_ids
from tests.image_sources import member
from tests.nomad.farm import KillableNomad, first_pid, nomad_farm
from tests.small_root import PASSWD, PROGRAMS, PYTHON, add_image, file_capability, files, programs, use_store
from tests.waiting import START_S

Kind = Literal["local", "nomad", "lean"]
"""lean: local, of few ids."""
LIMITS: Final = SlotLimits(
    processes=80,
    memory_bytes=320 * MIB,
    max_memory_bytes=512 * MIB,
    workspace_bytes=32 * MIB,
    workspace_inodes=2_000,
    tmp_bytes=32 * MIB,
    shm_bytes=16 * MIB,
)
NET_RAW: Final = 13
KIT: Final = Path(__file__).parent / "root_attacks.py"


@dataclass
class Images:
    """A store, and the images that were put in it so far."""

    directory: Path
    programs: bytes
    _made: dict[bytes, str] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.directory / "store"

    def make(self, *layers: bytes, config: dict[str, Any] | None = None) -> str:
        """An image of these layers; returns its digest."""
        return add_image(self.store, self.directory / "layout", *layers, config=config)

    def over_programs(self, *members: tuple[tarfile.TarInfo, bytes]) -> str:
        """An image of the small root with these entries over it."""
        return self.make(self.programs, files(*members))


def usual_files() -> tuple[tuple[tarfile.TarInfo, bytes], ...]:
    """Users, the attack kit, and programs with privileges: setuid, and by a file capability."""
    python = PYTHON.read_bytes()
    return (
        member("etc", type=tarfile.DIRTYPE, mode=0o755),
        member("etc/passwd", PASSWD.encode()),
        member("etc/group", b"root:x:0:\nuser:x:1000:\n"),
        member("tmp", type=tarfile.DIRTYPE, mode=0o1777),
        member("work", type=tarfile.DIRTYPE, mode=0o777),
        member("attacks.py", KIT.read_bytes(), mode=0o644),
        member("usr/bin/python3", type=tarfile.SYMTYPE, linkname=PYTHON.name),
        member("usr/bin/setuid", python, mode=0o4755),
        member("usr/bin/raw", python, mode=0o755, pax_headers=file_capability(NET_RAW)),
    )


def make_images(directory: Path) -> Images:
    return Images(directory, programs(*PROGRAMS))


class ImageSlots:
    """Opens tool sessions in image slots of one container."""

    def __init__(self, kind: Kind, executor: ToolExecutor, images: Images, usual: str) -> None:
        self.kind = kind
        self.backend: LocalBackend | None = None
        """Where it is one of processes of this machine."""
        self._container = ""
        self.executor = executor
        self.images = images
        self.usual = usual
        self._stack = AsyncExitStack()
        self._opened = 0

    async def open(self, image: str = "", **root: Any) -> ToolSession:
        """A session in a slot with this image; the usual one if none is named."""
        self._opened += 1
        spec = RootSpec(image or self.usual, **{"writable_bytes": 64 * MIB, "writable_inodes": 5_000, **root})
        session = await self._stack.enter_async_context(self.executor.open(f"slot-{self._opened}", root=spec))
        self._container = session.lease.container.id
        return session

    async def open_plain(self) -> ToolSession:
        return await self._stack.enter_async_context(self.executor.open("plain"))

    def agents(self) -> list[int]:
        """The first processes of the image slots, as this machine counts."""
        return [pid for pid in self.processes() if _is_root_of_a_slot(pid)]

    def processes(self) -> list[int]:
        """All processes of the container of the session that was opened last, as this machine counts."""
        return _below(self.backend.pids[self._container] if self.backend else first_pid(self._container))

    async def epochs(self, session: ToolSession) -> list[int]:
        """How often each slot of the container of that session was made anew."""
        async with ContainerControl(session.lease.container, guest=True) as control:
            return [report.epoch for report in (await control.slots()).slots]

    async def stalls(self, session: ToolSession, process: str) -> dict[str, Any]:
        """How long the loop of ``supervisor`` or ``server`` was held so far, and where for longest."""
        handle = session.lease.container
        headers = {"Authorization": f"Bearer {handle.token}"}
        async with aiohttp.ClientSession() as http, http.get(f"{handle.base_url}/v1/stalls", headers=headers) as told:
            assert told.status == 200, await told.text()
            found: dict[str, Any] = (await told.json())[process]
            return found

    async def release_all(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()


@asynccontextmanager
async def container(
    images: Images,
    request: pytest.FixtureRequest | None = None,
    *,
    kind: Kind | None = None,
    slots: int = 3,
    image_format: ImageFormat = "auto",
    allowing: bool = True,
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[ImageSlots]:
    """One container of image slots over this store, of this kind, or else of that which is the request's parameter, or
    else local. Unless it is not ``allowing``, leases get all capabilities that there are. ``variables`` are of the
    Nomad job."""
    of_request: Kind = "local" if request is None else getattr(request, "param", "local")
    kind = kind or of_request
    containers = ContainerSettings(slots_per_container=slots, limits=LIMITS, image_format=image_format)
    if allowing:
        allowed = {"allowed_capabilities": get_args(Capability), "allow_nested_namespaces": True}
        containers = containers.model_copy(update=allowed)
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    with pytest.MonkeyPatch.context() as patch, few_ids() if kind == "lean" else contextlib.nullcontext():
        use_store(patch, images.store)
        usual = images.over_programs(*usual_files())
        backend = (
            _docker_farm(request, containers, images.store, variables or {})
            if request and kind == "nomad"
            else LocalBackend(containers)
        )
        async with SlotPool(backend, settings) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as opened:
            made = ImageSlots(kind, opened, images, usual)
            made.backend = backend if isinstance(backend, LocalBackend) else None
            yield made


def _docker_farm(
    request: pytest.FixtureRequest, containers: ContainerSettings, store: Path, variables: Mapping[str, str]
) -> KillableNomad:
    given = {"image_store": json.dumps(str(store)), **variables}
    return nomad_farm(request.getfixturevalue("cluster").address, containers, variables=given)


def _below(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return [*children, *(below for child in children for below in _below(child))]


def _is_root_of_a_slot(pid: int) -> bool:
    try:
        mapped = [int(word) for word in Path(f"/proc/{pid}/uid_map").read_text().split()]
        first = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1] == "1"
    except (OSError, ValueError):  # it has ended meanwhile, or has no map yet
        return False
    # Empty: a namespace is being made.
    return first and mapped[:1] == [0] and (mapped[1] >= FIRST_ID or mapped[2] == LEAN_IDS)

"""Sessions on every backend that can be had here: one container of four slots.

A module's tests share the container, each on a slot of its own; tests that break containers take ``pool``,
which is theirs alone.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB
from tests.contract.conftest import KINDS, SHARED, AnyPool, Breakable, breakable, over
from tests.contract.executor.farm import Breaker, FakeBreaker, LocalBreaker, NomadBreaker
from tests.few_ids import few_ids
from tests.image_sources import member
from tests.nomad.farm import KillableNomad
from tests.small_root import PASSWD, PROGRAMS, PYTHON, add_image, files, programs, use_store
from tests.waiting import START_S

SETTINGS = ContainerSettings(slots_per_container=4)
EVERY_WAY: Final = (*KINDS, "farm-fake")
"""What looks at the way between client and container. A farm's client reaches the container itself, by a pass; that its
pools do what others do, on every kind of container, is test_pool_leases, test_pool_faults and test_lost_slots."""
_OF_THE_WAY: Final = frozenset(
    {"test_executor_cuts", "test_executor_large", "test_serving", "test_slot_metrics", "test_transfers"}
)
_OF_THE_MACHINE: Final = frozenset(
    {
        "test_executor_bash",
        "test_executor_files",
        "test_executor_process",
        "test_executor_terminal",
        "test_slot_metrics",
    }
)
"""Their tests reach into the slot's kernel and use its programs, which a container of Docker has of its own. What the
other modules look at is the server's and the client's, the same in every container."""
OF_IMAGES: Final = {
    "image-local": _OF_THE_MACHINE,
    "image-lean": frozenset({"test_executor_process"}),
}
"""Modules that also run over slots with an image, whose root they are: those whose tests reach into the slot's kernel
(processes, files, terminals). One of few ids (image-lean) differs in its users, which processes meet. Slots with images
in Docker's containers are tests/security/test_image_slots and tests/nomad/test_image_slots."""
MORE: Final = (
    *(
        "awk",
        "base64",
        "basename",
        "cksum",
        "cmp",
        "cut",
        "date",
        "diff",
        "dirname",
        "du",
        "echo",
        "expr",
        "false",
        "find",
        "git",
    ),
    *(
        "kill",
        "ln",
        "mkfifo",
        "mknod",
        "nohup",
        "od",
        "paste",
        "pgrep",
        "printf",
        "ps",
        "readlink",
        "realpath",
        "rmdir",
        "sed",
    ),
    *("sha256sum", "sort", "stty", "sync", "tac", "tar", "tee", "timeout", "truncate", "tty", "uniq", "xargs", "yes"),
)
"""Programs that tests of this folder use, beside PROGRAMS."""


class ImageExecutor(ToolExecutor):
    """Whose sessions have an image, unless they ask for something else."""

    image: ClassVar[RootSpec]

    def open(self, trajectory: str, *, root: RootSpec | None = None, **given: Any) -> ToolSession:
        return super().open(trajectory, root=root or self.image, **given)


@dataclass(frozen=True)
class Image:
    """An image in a store, as the root of slots."""

    store: Path
    root: RootSpec


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """This machine's programs, and a workspace."""
    place = tmp_path_factory.mktemp("image")
    members = (
        member("etc/passwd", PASSWD.encode()),
        member("etc/gitconfig", b"[user]\nname = agent\nemail = agent@localhost\n", mode=0o644),
        member("tmp", type=tarfile.DIRTYPE, mode=0o1777),
        member("workspace", type=tarfile.DIRTYPE, mode=0o777),
        member("usr/bin/sh", type=tarfile.SYMTYPE, linkname="bash"),
        member("usr/bin/python", type=tarfile.SYMTYPE, linkname=PYTHON.name),
        member("usr/bin/python3", type=tarfile.SYMTYPE, linkname=PYTHON.name),
    )
    config = {"Env": ["PATH=/usr/bin", "HOME=/workspace", "PIP_BREAK_SYSTEM_PACKAGES=1"], "WorkingDir": "/workspace"}
    digest = add_image(place / "store", place / "oci", programs(*PROGRAMS, *MORE), files(*members), config=config)
    return Image(place / "store", RootSpec(digest, writable_bytes=512 * MIB))


def _one_container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An open pool of the kind that is the request's parameter."""
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    backend = breakable(request, SETTINGS, tmp_path_factory.mktemp("state"))
    return over(backend, settings, shared=request.param in SHARED)


@pytest_asyncio.fixture(params=EVERY_WAY, scope="module", loop_scope="module")
async def shared_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AnyPool]:
    async with _one_container(request, tmp_path_factory) as opened:
        yield opened


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of a session runs over each kind of container, and over what its module is named for above."""
    if "executor" in metafunc.fixturenames and "pool" not in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".")[2]
        plain = EVERY_WAY if module in _OF_THE_WAY else KINDS if module in _OF_THE_MACHINE else ("fake", "local")
        kinds = [*plain, *(kind for kind, modules in OF_IMAGES.items() if module in modules)]
        if "sweep" in metafunc.fixturenames:
            kinds = ["local", "image-local", "farm-fake"]  # the others differ in where a container is
        metafunc.parametrize("executor", kinds, indirect=True, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ToolExecutor]:
    kind = ImageExecutor if request.param in OF_IMAGES else ToolExecutor
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if kind is ImageExecutor:
            image: Image = request.getfixturevalue("image")
            ImageExecutor.image = image.root
            use_store(patch, image.store)
        if request.param == "image-lean":
            stack.enter_context(few_ids())
        async with (
            _one_container(request, tmp_path_factory) as pool,
            kind(pool, ToolCatalog.builtin()) as opened,
        ):
            yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def session(executor: ToolExecutor) -> AsyncIterator[ToolSession]:
    async with executor.open("t", acquire_timeout_s=START_S) as opened:
        yield opened


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Breakable:
    return breakable(request, SETTINGS, tmp_path)


@pytest.fixture
async def pool(backend: Breakable) -> AsyncIterator[SlotPool]:
    settings = PoolSettings(
        min_containers=1, max_containers=1, suspect_after_s=0.5, gone_after_s=60, acquire_timeout_s=START_S
    )
    async with SlotPool(backend, settings) as opened:
        yield opened


@pytest.fixture
def breaker(backend: Breakable) -> Breaker:
    match backend:
        case FakeBackend():
            return FakeBreaker(backend)
        case KillableNomad():
            return NomadBreaker(backend)
        case LocalBackend():
            return LocalBreaker(backend)
    raise AssertionError(f"nothing breaks a {backend.name} container")

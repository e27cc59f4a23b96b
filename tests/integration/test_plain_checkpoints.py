"""Checkpoints of plain slots under the real supervisor: exact however the workspace is kept, bounded, and gone when
they are no longer needed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.errors import CheckpointError
from agentenv.executor.session import Checkpoint, ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sandbox.supervisor.checkpoints import MAX_LAYERS
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.spec import MIB
from tests.waiting import START_S

HERE = Path(__file__).parent
BUDGET_BYTES = 64 * MIB

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Slots:
    """One container, and the sessions opened in it."""

    def __init__(self, backend: LocalBackend, executor: ToolExecutor) -> None:
        self.backend = backend
        self._executor = executor
        self._stack = AsyncExitStack()

    async def open(self) -> ToolSession:
        return await self._stack.enter_async_context(self._executor.open("t"))

    async def fork(self, session: ToolSession, n: int = 1) -> list[ToolSession]:
        forks = await session.fork(n)
        for fork in forks:
            self._stack.push_async_callback(fork.aclose)
        return forks

    async def release_all(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    def mounts(self) -> list[str]:
        """Mount points of workspaces and checkpoints, as the supervisor has them."""
        (pid,) = self.backend.pids.values()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = Path(f"/proc/{children[0] if children else pid}/mountinfo").read_text().splitlines()
        return sorted(line.split()[4] for line in lines if "/ws/" in line or "/checkpoints/" in line)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slots(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Slots]:
    settings = ContainerSettings(slots_per_container=5, require_sandbox=False, checkpoint_bytes=BUDGET_BYTES)
    pools = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    backend = LocalBackend(settings, state_dir=tmp_path_factory.mktemp("state"))
    async with SlotPool(backend, pools) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        yield Slots(backend, executor)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def released(slots: Slots) -> AsyncIterator[None]:
    yield
    await slots.release_all()


async def _run(session: ToolSession, command: str) -> str:
    result = await session.call("bash", {"command": command}, timeout_s=60)
    assert result.exit_code == 0, result
    return result.stdout.strip()


async def _prepared(slots: Slots) -> ToolSession:
    session = await slots.open()
    await session.call("write_file", {"path": "tree.py", "content": (HERE / "changing_tree.py").read_text()})
    await _run(session, "mkdir tree")
    return session


async def _changed(session: ToolSession, seed: int) -> str:
    return await _run(session, f"python3 tree.py change {seed} tree")


async def _digest(session: ToolSession) -> str:
    return await _run(session, "python3 tree.py digest tree")


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_forks_of_forks_are_exact_and_independent(slots: Slots, seed: int) -> None:
    first = await _prepared(slots)
    was = await _changed(first, seed)
    forks = await slots.fork(first, 2)
    assert [await _digest(session) for session in (first, *forks)] == [was] * 3
    changed = [await _changed(session, 10 * seed + number) for number, session in enumerate(forks)]
    below = await slots.fork(forks[0], 2)
    assert [await _digest(session) for session in (*below, forks[0], forks[1], first)] == [changed[0]] * 3 + [
        changed[1],
        was,
    ]
    again = await _changed(below[0], 100 * seed)
    assert [await _digest(session) for session in (below[1], forks[0])] == [changed[0]] * 2
    await below[1].aclose()
    (last,) = await slots.fork(below[0])
    assert await _digest(last) == again


async def test_a_chain_is_gone_back_to_in_any_order(slots: Slots) -> None:
    session = await _prepared(slots)
    kept: list[tuple[Checkpoint, str]] = []
    for seed in range(6):
        was = await _changed(session, 200 + seed)
        kept.append((await session.checkpoint(), was))
    order = random.Random(5)
    for checkpoint, was in order.sample(kept, len(kept)):
        await session.restore(checkpoint)
        assert await _digest(session) == was
        await _changed(session, order.randrange(1000))
    for checkpoint, _ in kept:
        await session.drop(checkpoint)


async def test_names_of_one_file_stay_that_when_it_was_changed_in_a_fork(slots: Slots) -> None:
    session = await slots.open()
    await _run(session, "mkdir d && echo one > a && ln a d/b && ln a d/c")
    (fork,) = await slots.fork(session)
    await _run(fork, "echo two >> d/b && rm d/c")
    (below,) = await slots.fork(fork)
    for one in (fork, below):
        assert await _run(one, "[ a -ef d/b ] && stat -c %h a && cat a") == "2\none\ntwo"
    await _run(below, "echo three >> a")
    assert await _run(below, "cat d/b") == "one\ntwo\nthree"


async def test_there_may_be_more_checkpoints_than_layers(slots: Slots) -> None:
    session = await slots.open()
    for number in range(MAX_LAYERS + 3):
        await _run(session, f"echo {number} > f{number % 7} && echo {number} >> all")
        kept = await session.checkpoint()
    await _run(session, "rm *")
    await session.restore(kept)
    assert await _run(session, "wc -l < all; cat f0") == f"{MAX_LAYERS + 3}\n63"
    await session.drop(kept)


async def test_the_workspace_itself_is_kept_as_it_was(slots: Slots) -> None:
    session = await slots.open()
    await _run(session, "touch f && chmod 1751 . && touch -d '2001-02-03 04:05:06.789' .")
    (fork,) = await slots.fork(session)
    assert await _run(fork, "stat -c '%a %Y' . && stat -c %a f") == "1751 981173106\n644"
    await _run(fork, "chmod 000 .")
    (below,) = await slots.fork(fork)
    assert await _run(below, "stat -c %a .") == "700"


async def test_what_does_not_fit_is_refused_by_name_and_the_slot_goes_on(slots: Slots) -> None:
    session = await slots.open()
    await _run(session, "head -c 40M /dev/urandom > large && ln large other")
    (fork,) = await slots.fork(session)
    await _run(fork, "head -c 40M /dev/urandom > more")
    with pytest.raises(CheckpointError, match=f"checkpoint_bytes.* of {BUDGET_BYTES} are used"):
        await fork.checkpoint()
    await _run(fork, "rm more && echo changed >> other")
    with pytest.raises(CheckpointError, match="checkpoint_bytes"):
        await fork.checkpoint()
    assert await _run(fork, "tail -c 8 large") == "changed"
    await session.aclose()
    await fork.aclose()
    again = await slots.open()
    await _run(again, "head -c 40M /dev/urandom > large")
    await again.drop(await again.checkpoint())


async def test_a_slot_is_shown_nothing_of_the_machine_and_keeps_its_bounds(slots: Slots) -> None:
    session = await slots.open()
    (fork,) = await slots.fork(session)
    shown = await _run(fork, "grep ' /workspace ' /proc/mounts")
    assert len(shown.splitlines()) == 1
    assert "=/" not in shown
    assert ":/" not in shown
    size = await _run(session, "stat -f -c '%b %S' /workspace")
    assert await _run(fork, "stat -f -c '%b %S' /workspace") == size
    assert (await _run(fork, "touch x && chown 0 x 2>&1 || echo no")).endswith("no")


async def test_nothing_is_left_when_all_is_released(slots: Slots) -> None:
    await slots.release_all()
    before = slots.mounts()
    session = await _prepared(slots)
    forks = await slots.fork(session, 2)
    (below,) = await slots.fork(forks[1])
    kept = await below.checkpoint()
    assert len(slots.mounts()) > len(before)
    await below.drop(kept)
    await slots.release_all()
    assert slots.mounts() == before


async def test_the_container_says_how_workspaces_are_kept(slots: Slots) -> None:
    session = await slots.open()
    async with ContainerControl(session.lease.container) as control:
        info = await control.info()
    if info.isolation == "full":
        assert info.workspaces_copied == ""
    else:
        assert "root" in info.workspaces_copied

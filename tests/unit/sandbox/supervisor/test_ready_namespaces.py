"""User namespaces made in advance: each is given once, and a lease never depends on there being one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import cast

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import ready_namespaces
from agentenv.sandbox.supervisor.id_ranges import IdRanges
from agentenv.sandbox.supervisor.ready_namespaces import READY, ReadyNamespaces
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.user_namespace import RANGES
from tests.waiting import until


class Node:
    """A node's files of ranges, and how often a namespace was made here."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(RANGES):
            (directory / str(number)).touch()
        self.made: list[bool] = []
        self.failure: Exception | None = None

        async def make(*_: object, nested: bool) -> int:
            await asyncio.sleep(0)
            if self.failure:
                raise self.failure
            self.made.append(nested)
            return os.open("/dev/null", os.O_RDONLY)

        monkeypatch.setattr(ready_namespaces, "make_user_namespace", make)
        self.ranges = IdRanges(directory)
        self.namespaces = ReadyNamespaces(Path("slotroot"), self.ranges, cast("Reaper", None))

    async def filled(self) -> None:
        self.namespaces.refill()
        await until(lambda: self.namespaces._making is not None and self.namespaces._making.done())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


async def test_ready_ones_are_given_once_and_made_anew(node: Node) -> None:
    await node.filled()
    assert len(node.made) == READY
    taken = [await node.namespaces.take(nested=False) for _ in range(READY + 1)]
    assert len(node.made) == READY + 1
    await node.filled()
    taken += [await node.namespaces.take(nested=False) for _ in range(READY)]
    assert len({one.fd for one in taken}) == len({one.range.ids for one in taken}) == 2 * READY + 1
    for one in taken:
        one.close()


async def test_nested_ones_are_never_ready(node: Node) -> None:
    await node.filled()
    one = await node.namespaces.take(nested=True)
    assert node.made == [False] * READY + [True]
    one.close()
    for _ in range(READY):
        (await node.namespaces.take(nested=False)).close()


async def test_a_failure_in_advance_is_told_to_who_needs_one(node: Node) -> None:
    node.failure = SandboxUnavailableError("no more")
    await node.filled()
    with pytest.raises(SandboxUnavailableError, match="no more"):
        await node.namespaces.take(nested=False)
    node.failure = None
    (await node.namespaces.take(nested=False)).close()


async def test_a_range_is_free_again_after_a_failure(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.sandbox.supervisor.id_ranges.TREES", 1)
    node.ranges._next = 0
    node.failure = OSError("no process")
    for _ in range(3):
        with pytest.raises(OSError, match="no process"):
            await node.namespaces.take(nested=False)

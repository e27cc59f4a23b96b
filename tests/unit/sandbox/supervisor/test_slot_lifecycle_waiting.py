"""A plain slot that nothing has run in waits while its place is taken by an image slot; any other is ended first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from agentenv.sandbox.supervisor import slot_lifecycle
from agentenv.sandbox.supervisor.plain_slot import PlainSlot
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_lifecycle import SlotLifecycle, SlotServices
from agentenv.sandbox.supervisor.slot_process import SlotProcess, SlotSetup
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotPhase
from tests.unit.sandbox.supervisor.test_slot_lifecycle import Reports
from tests.waiting import until

ROOT = RootSpec(image=f"sha256:{'0' * 64}")


class Process:
    """Of one start of a slot."""

    network_fd = -1
    plan = None
    services: Mapping[str, SlotProcess] = {}

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.untouched = True

    async def kill(self) -> None:
        if not self.exited.done():
            self.exited.set_result(9)


class Image:
    """What an image slot is to its life cycle."""

    plan = None
    views = ()

    def __init__(self, started: list[tuple[str, Process]]) -> None:
        self._started = started

    async def gather(self) -> None:
        return None

    async def prepare(self) -> None:
        return None

    async def start(self) -> Process:
        self._started.append(("image", Process()))
        return self._started[-1][1]

    def give_back(self) -> list[Path]:
        return []

    def discard(self) -> None:
        return None


class Slot:
    """A slot in its life, and what was started for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, Process]] = []
        self.reports = Reports()
        tree = SimpleNamespace(image_root=lambda _: Path("/none"))
        answers = {"plan": lambda _: None, "layers_of": lambda _: (), "require_fit": lambda _: None}
        setup = cast("SlotSetup", SimpleNamespace(tree=tree, **answers))
        services = SlotServices(setup, cast("Reaper", None), self.reports, asyncio.Semaphore(1), None)
        self.life = SlotLifecycle(services, 0)

        async def prepare(_: object) -> None:
            return None

        async def start(_: object) -> SlotProcess:
            self.started.append(("plain", Process()))
            return cast("SlotProcess", self.started[-1][1])

        class Made(Image):
            def __init__(made, *_: object) -> None:
                super().__init__(self.started)

        monkeypatch.setattr(PlainSlot, "prepare", prepare)
        monkeypatch.setattr(PlainSlot, "start", start)
        monkeypatch.setattr(PlainSlot, "discard", lambda _: None)
        monkeypatch.setattr(slot_lifecycle, "ImageSlot", Made)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.started]

    @property
    def now(self) -> Process:
        return cast("Process", self.life.process)

    async def plain(self) -> Process:
        self.life.begin()
        return await self._ready()

    async def with_image(self) -> Process:
        self.life.reroot(ROOT)
        return await self._ready()

    async def reset(self) -> Process:
        self.life.reset()
        return await self._ready()

    async def _ready(self) -> Process:
        await until(lambda: self.life.phase is SlotPhase.ready)
        return self.now


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> Slot:
    return Slot(monkeypatch)


async def test_an_unused_plain_slot_is_there_again_after_any_number_of_images(slot: Slot) -> None:
    plain = await slot.plain()
    for epoch in range(1, 4):
        image = await slot.with_image()
        assert image is not plain
        assert not plain.exited.done()
        assert await slot.reset() is plain
        assert image.exited.done()
        assert slot.life.epoch == epoch
    assert slot.kinds == ["plain", "image", "image", "image"]
    assert slot.reports.heard == ["ready"] * 7
    plain.exited.set_result(9)  # and its end is told, once
    await until(lambda: slot.life.phase is SlotPhase.ready and slot.now is not plain)
    assert [words.partition(":")[0] for words in slot.reports.heard] == ["ready"] * 7 + ["lost", "ready"]


async def test_a_plain_slot_in_which_something_ran_is_ended_first(slot: Slot) -> None:
    plain = await slot.plain()
    plain.untouched = False
    await slot.with_image()
    assert plain.exited.done()
    assert await slot.reset() is not plain
    assert slot.kinds == ["plain", "image", "plain"]


async def test_one_that_ran_something_while_it_waited_is_ended(slot: Slot) -> None:
    plain = await slot.plain()
    await slot.with_image()
    plain.untouched = False
    assert await slot.reset() is not plain
    assert plain.exited.done()
    assert slot.kinds == ["plain", "image", "plain"]


async def test_an_image_s_slot_begins_anew_for_another_image(slot: Slot) -> None:
    plain = await slot.plain()
    first = await slot.with_image()
    second = await slot.with_image()
    assert first.exited.done()
    assert not second.exited.done()
    assert await slot.reset() is plain

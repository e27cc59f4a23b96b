"""Programs of sessions as runs of an agent: a run's number is used only while it is the program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from agentenv.sandbox.server.agent_link import AgentLink
from agentenv.sandbox.server.process import Outcome, Process, SlotIo
from agentenv.sandbox.server.slot_sessions import SlotProgram
from agentenv.sandbox.slotagent.protocol import SpawnStep, Usage
from agentenv.sessions.host import Program

USAGE = Usage(0.0, 0.0, 0)


class _Link:
    """Notes what an agent would be told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def kill(self, run: int) -> None:
        self.told.append(("kill", run))

    def signal(self, run: int, number: int, began_s: float | None = None) -> None:
        self.told.append((f"signal {number}", run))


def _io(link: _Link, lane: object = None) -> SlotIo:
    return SlotIo(cast("AgentLink", link), cast("Any", lane), cast("Any", None))


class _Events:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize(
    "over",
    [
        lambda program: program.on_exit(0, USAGE),
        lambda program: program.on_spawn_failed(2, SpawnStep.EXEC),
        lambda program: program.on_lost(),
    ],
)
def test_a_program_that_is_over_uses_its_number_no_more(over: Callable[[SlotProgram], None]) -> None:
    link = _Link()
    program = SlotProgram(_io(link), Program(("true",), {}, "/"), cast("Any", _Events()))
    program.run = 7
    program.signal(2)
    program.kill()
    assert link.told == [("signal 2", 7), ("kill", 7)]
    over(program)
    program.kill()
    program.signal(2)
    assert len(link.told) == 2


def test_a_process_that_is_over_uses_its_number_no_more() -> None:
    link = _Link()

    class _Lane:
        def not_later(self, _: object) -> None:
            """Nothing was to come later."""

    process = Process(_io(link, _Lane()), 1_000)
    process._run = 7
    process.kill()
    process.on_exit(0, USAGE)
    assert process.outcome is Outcome.exited
    process.kill()
    assert link.told == [("kill", 7)]

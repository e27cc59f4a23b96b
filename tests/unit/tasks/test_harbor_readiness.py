from __future__ import annotations

from typing import Any

import pytest

from agentenv.errors import TaskError
from agentenv.tasks.harbor.machine import until_healthy
from agentenv.tasks.harbor.task import Healthcheck
from agentenv.wire.calls import CallResult


class Machine:
    """Answers a command with these exit codes, then with the last of them; None: it takes too long."""

    def __init__(self, *codes: int | None) -> None:
        self.codes = list(codes)
        self.asked: list[tuple[str, float, str | None]] = []

    async def call_tool(self, tool: str, arguments: dict[str, str], *, timeout_s: float) -> CallResult:
        assert tool == "bash"
        self.asked.append((arguments["command"], timeout_s, arguments.get("user")))
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        return CallResult.model_validate(
            {"id": "c" * 32, "exit_code": code, "timed_out": code is None, "stderr": "not yet"}
        )


class Clock:
    """A time that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("agentenv.tasks.harbor.machine.time", made)
    monkeypatch.setattr("agentenv.tasks.harbor.machine.asyncio", made)
    return made


async def asked(machine: Any, check: Healthcheck) -> None:
    await until_healthy(machine, check, user="root")


async def test_a_check_that_succeeds_at_last(clock: Clock) -> None:
    machine = Machine(1, None, 0)
    await asked(machine, Healthcheck("pg_isready", interval_s=2.0, timeout_s=7.0))
    assert machine.asked == [("pg_isready", 7.0, "root")] * 3
    assert clock.slept == [2.0, 2.0]


async def test_so_many_failures_are_the_tasks_fault(clock: Clock) -> None:
    with pytest.raises(TaskError, match="healthcheck failed 3 times: false: not yet"):
        await asked(Machine(1), Healthcheck("false"))
    assert clock.slept == [5.0, 5.0]


async def test_failures_count_only_after_the_start_period(clock: Clock) -> None:
    machine = Machine(1)
    with pytest.raises(TaskError, match="failed 1 times"):
        await asked(machine, Healthcheck("false", retries=1, start_period_s=10.0, start_interval_s=4.0))
    assert clock.slept == [4.0, 4.0, 4.0]
    assert len(machine.asked) == 4

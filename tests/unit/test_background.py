"""Background work: tasks by key, and waiting for work that may be lost."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.background import TaskSet


async def test_tasks_are_cancelled_by_key_and_forgotten_when_they_end() -> None:
    tasks, ended = TaskSet(), list[str]()

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    for key, name in (("a", "first"), ("a", "second"), ("b", "third")):
        tasks.start(key, work(name), name)
    await asyncio.sleep(0)
    tasks.cancel("a")
    tasks.cancel("nothing runs for this")
    await asyncio.wait([task for task in tasks if task.get_name().endswith("of a")])
    assert (sorted(ended), tasks.keys, "a" in tasks) == (["first", "second"], ["b"], False)
    await tasks.aclose()
    await tasks.aclose()
    assert (ended[2:], list(tasks)) == (["third"], [])


async def test_wait_covers_tasks_that_are_started_meanwhile() -> None:
    tasks, ended = TaskSet(), list[str]()

    async def work(rest: str) -> None:
        await asyncio.sleep(0.001)
        ended.append(rest)
        if rest[1:]:
            tasks.start("chain", work(rest[1:]), "work")

    tasks.start("chain", work("abc"), "work")
    await tasks.wait()
    assert ended == ["abc", "bc", "c"]


async def test_a_failure_is_logged_with_what_it_was_for(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet()

    async def fails() -> None:
        raise ValueError("no such thing")

    tasks.start("container c-1", fails(), "handshake")
    await tasks.wait()
    assert "handshake of container c-1 failed" in caplog.text
    assert "no such thing" in caplog.text

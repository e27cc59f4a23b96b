"""One bug is one error in the log, with the author's frames alone; the others of its kind are counted."""

from __future__ import annotations

import json
import logging
import sysconfig
from typing import Any

import pytest

from agentenv.agent.failure_log import MOST_KINDS, FailureLog
from agentenv.agent.hooks import call_hook
from agentenv.errors import DockerfileError, TaskError


def broken_hook(item: str) -> float:
    return float(json.loads("{}")[item])


ATROPOS = """
async def run(hook):
    try:
        raise RuntimeError("no running event loop")
    except RuntimeError:
        await hook
"""


async def failed(item: str) -> TaskError:
    """As atropos runs an environment: inside an ``except`` block of an installed package."""
    atropos: dict[str, Any] = {}
    exec(compile(ATROPOS, f"{sysconfig.get_path('purelib')}/atroposlib/envs/base.py", "exec"), atropos)
    with pytest.raises(TaskError) as caught:
        await atropos["run"](call_hook("score_trajectory", broken_hook, item))
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value.__cause__.__context__, RuntimeError)
    return caught.value


async def test_a_hooks_bug_is_shown_once_with_hook_item_and_place(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(12):
        log.hook_failed(await failed(f"item-{number}"), item=f"item-{number}", trajectory=f"item-{number}-0")
    log.close()
    first, *others = [record.getMessage() for record in caplog.records]
    assert first.startswith("score_trajectory raised KeyError: 'item-0'\n  item item-0, rollout item-0-0")
    assert 'return float(json.loads("{}")[item])' in first
    assert first.count("Traceback") == 1
    assert "no running event loop" not in first
    assert "hooks.py" not in first
    place = f"test_failure_log.py:{broken_hook.__code__.co_firstlineno + 1} broken_hook"
    assert others == [f"again ×{n}: score_trajectory raised KeyError at {place}" for n in (9, 11)]


async def test_an_environment_that_is_installed_has_its_frames_shown_too(caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, Any] = {}
    source = "def hook():\n    raise ValueError('no')\n"
    exec(compile(source, f"{sysconfig.get_path('purelib')}/my_env/env.py", "exec"), names)
    with pytest.raises(TaskError) as caught:
        await call_hook("build_task", names["hook"])
    FailureLog().hook_failed(caught.value, item="x", trajectory="x-0")
    assert 'my_env/env.py", line 2, in hook' in caplog.text
    assert "hooks.py" not in caplog.text


async def test_what_a_hook_returned_wrongly_is_shown_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().hook_failed(TaskError("the verifier must return a number"), item="x", trajectory="x-0")
    assert "Traceback" not in caplog.text


async def test_a_wrong_dockerfile_is_named_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def hook() -> None:
        try:
            raise ValueError("no")
        except ValueError as error:
            raise DockerfileError("Dockerfile:2", "COPY: cannot", next_step="correct it", line=2) from error

    with pytest.raises(TaskError) as caught:
        await call_hook("task_image", hook)
    FailureLog().hook_failed(caught.value, item="x", trajectory="x-0")
    assert "Dockerfile:2: COPY: cannot (correct it)" in caplog.text
    assert "Traceback" not in caplog.text


def test_kinds_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(MOST_KINDS + 50):
        log.add(f"kind {number}", f"text {number}", level=logging.WARNING, exact=True)
    log.close()
    assert len(caplog.records) == MOST_KINDS + 3  # the first of the others, their tenth, and how many they were
    assert caplog.records[-1].getMessage() == "again ×49: further kinds of failures"

"""A test that fails is one failed test, and the run goes on, whatever the test does.

An exception out of one of pytest's own hooks ends a run, with xdist that of every process. Four ways led there, each
closed below: the time-out's alarm struck while a report was being made; a report could not be made at all; a report
could not be sent to the process that prints it; a SIGINT meant for a child reached the tests' process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import execnet
import pytest
import pytest_timeout

_LIMIT = pytest.StashKey[pytest_timeout.Settings]()
_SHOWN_FRAMES = 20


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """Keeps the limit for the phases: an alarm set here would strike between them as well, where nobody catches it."""
    item.stash[_LIMIT] = settings
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _one_failure(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _one_failure(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with _one_failure(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    try:
        with _clock(item):
            report = yield
            execnet.dumps(item.config.hook.pytest_report_to_serializable(config=item.config, report=report))
    except (Exception, pytest.fail.Exception) as error:
        return _plain_report(item, call, error)
    return report


@contextmanager
def _one_failure(item: pytest.Item) -> Iterator[None]:
    """A phase of a test: within its time, and Ctrl-C of a whole run is for the process that gave the test out."""
    try:
        with _clock(item):
            yield
    except KeyboardInterrupt:
        if not os.environ.get("PYTEST_XDIST_WORKER"):
            raise
        pytest.fail("SIGINT reached the process that runs the tests")


@contextmanager
def _clock(item: pytest.Item) -> Iterator[None]:
    """The test's time-out, for one phase: it strikes inside the phase, so it is the phase that fails."""
    settings = item.stash.get(_LIMIT, None)
    if settings is None:
        yield
        return
    pytest_timeout.pytest_timeout_set_timer(item, settings)
    try:
        yield
    except pytest.fail.Exception as error:
        if str(error).startswith("Timeout"):
            _print_tasks()
        raise
    finally:
        pytest_timeout.pytest_timeout_cancel_timer(item)


def _print_tasks() -> None:
    """What each coroutine waits for: the stack of a test that ran out of time ends in its event loop."""
    for task in [found for found in gc.get_objects() if type(found) is asyncio.Task and not found.done()]:
        task.print_stack(limit=_SHOWN_FRAMES)


def _plain_report(item: pytest.Item, call: pytest.CallInfo[None], error: BaseException) -> pytest.TestReport:
    """What can be said without reading sources, asking the test's objects, or anything but ASCII."""
    assert call.when != "collect", "an item is there"
    lines = [f"This test's report could not be made or sent: {type(error).__name__}: {error}"]
    if call.excinfo is not None:
        frames = traceback.StackSummary.extract(
            traceback.walk_tb(call.excinfo.tb), limit=-_SHOWN_FRAMES, lookup_lines=False
        )
        lines += [f"{frame.filename}:{frame.lineno}: in {frame.name}" for frame in frames]
        lines.append(f"raised {call.excinfo.typename}")
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr="\n".join(lines).encode("ascii", "backslashreplace").decode(),
        when=call.when,
        start=call.start,
        stop=call.stop,
        duration=call.duration,
    )

"""The judge: runs a package's tests and prints the outcome of each, for the holder of the nonce.

Standard library only; it is uploaded and run by the slot's own ``python3 -I -S -B judge.py``, with a request as
JSON on standard input, and it answers with one line: the nonce, a space, a JSON object.

The tests run in a child process, so that output, kills and leftovers of the package under test do not affect the
judge. The child reports each test over a pipe. ``docs/repair.md`` explains how far this protects against forgery.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

PR_SET_DUMPABLE = 4  # linux/prctl.h
MAX_REPORT_BYTES = 16 * 1024 * 1024


def main() -> int:
    """Read the request, run the tests in a child, print the verdict."""
    _hide_memory()
    request = json.loads(sys.stdin.read())
    nonce = request.pop("nonce")
    started = time.monotonic()
    raw, timed_out, exit_code = _run_child(request)
    verdict = {
        **_outcomes(raw),
        "timed_out": timed_out,
        "exit_code": exit_code,
        "duration_s": round(time.monotonic() - started, 3),
    }
    print(f"\n{nonce} {json.dumps(verdict)}", flush=True)
    return 0


def _hide_memory() -> None:
    """Prevent processes of the same user from reading this process's memory (where the nonce is)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _run_child(request: dict[str, Any]) -> tuple[bytes, bool, int]:
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-s", "-S", "-B", os.path.abspath(__file__), "--child", str(writer)],  # noqa: PTH100
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=request["tree"],
            env={
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
                "TZ": "UTC",
                "HOME": "/nonexistent",
            },
            pass_fds=(writer,),
            start_new_session=True,
        )
    finally:
        os.close(writer)
    with child, open(reader, "rb", buffering=0) as pipe:  # noqa: PTH123
        assert child.stdin is not None
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
        raw, timed_out = _drain(pipe.fileno(), time.monotonic() + request["timeout_s"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return raw, timed_out, child.wait()


def _drain(fd: int, deadline: float) -> tuple[bytes, bool]:
    """Read the pipe until its last line, its end, or the deadline."""
    raw = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while len(raw) < MAX_REPORT_BYTES:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return bytes(raw), True
            chunk = os.read(fd, 65536)
            raw += chunk
            if not chunk or raw.endswith(b'"finished"]\n'):
                break
    return bytes(raw), False


def _outcomes(raw: bytes) -> dict[str, Any]:
    outcomes: dict[str, str] = {}
    finished = False
    for line in raw.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            name, outcome = json.loads(line)
            finished = finished or outcome == "finished"
            if outcome != "finished":
                outcomes[str(name)] = str(outcome)
    return {"outcomes": outcomes, "finished": finished}


# --- the child: from here on in the same process as the package under test ---------------------


class Reporter:
    """A pytest plugin: one JSON line a test, worst outcome of its setup, call and teardown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst of a test's phases."""
        outcome = report.outcome if report.when == "call" or report.outcome != "failed" else "error"
        if outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "xfailed"  # pytest calls an expected failure skipped
        rank = ("passed", "xfailed", "skipped", "failed", "error")
        known = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = max(known, outcome, key=rank.index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Report that the test is over."""
        self._send(nodeid, self._outcomes.pop(nodeid, "error"))

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be collected is a broken test too."""
        if report.failed:
            self._send(report.nodeid, "error")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The last line: without it, nothing before it counts."""
        self._send(int(exitstatus), "finished")

    def _send(self, name: object, outcome: str) -> None:
        os.write(self._fd, json.dumps([name, outcome]).encode() + b"\n")


def child(fd: int) -> int:
    """Run pytest as requested on standard input, reporting to ``fd``."""
    request = json.loads(sys.stdin.read())
    os.set_inheritable(fd, False)
    for limit, value in request["rlimits"].items():
        resource.setrlimit(getattr(resource, limit), (value, value))
    sys.path[:] = [request["runner"], *request["paths"], *sys.path[1:]]
    import pytest

    arguments = ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-W", "ignore", *request["tests"]]
    return int(pytest.main(arguments, plugins=[Reporter(fd)]))


if __name__ == "__main__":
    sys.exit(child(int(sys.argv[2])) if "--child" in sys.argv else main())

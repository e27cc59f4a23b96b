"""The Docker engine of this machine: a running one is used, else one is started, and only that one is ever stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.config import cache_dir
from agentenv.deadlines import scaled
from agentenv.dev import processes
from agentenv.errors import SandboxUnavailableError
from agentenv.image import connect
from agentenv.locks import locked, try_lock

_MARK = "AGENTENV_ENGINE"
_START_DEADLINE_S = scaled(60.0)
_STOP_GRACE_S = scaled(30.0)
_BRIDGE = "docker0"


def place() -> Path:
    """Directory of an engine started here: its pid file, its log and its users' lock."""
    return cache_dir() / "engine"


def answers() -> bool:
    """Whether any Docker engine answers."""
    try:
        connect(timeout_s=int(scaled(10.0))).close()
    except SandboxUnavailableError:
        return False
    return True


def is_ours() -> bool:
    """Whether the engine was started here."""
    return any(process.runs("dockerd") for process in processes.find(_mark()))


@contextmanager
def using() -> Iterator[int]:
    """Keep the engine from being stopped. Yields the lock's descriptor, for a process that needs the engine for
    longer."""
    with locked(place() / "users.lock", shared=True) as held:
        yield held


def ensure() -> bool:
    """Start an engine unless one answers; returns whether it was started. Call it inside :func:`using`.

    Raises SandboxUnavailableError when none can be started: not root, not installed, or it failed (with the end of its
    log).
    """
    if answers():
        return False
    with locked(place() / "start.lock"):
        if answers():
            return False
        _start()
    return True


def stop() -> str:
    """Stop the engine if it was started here and is not in use. Returns what was done, as text."""
    if not is_ours():
        return "left running: it was not started by agentenv" if answers() else "not running"
    try:
        held = try_lock(place() / "users.lock", create=True)
    except BlockingIOError:
        held = None
    if held is None:
        return "left running: another process uses it"
    try:
        _stop()
    finally:
        os.close(held)
    return "stopped"


def _mark() -> str:
    return f"{_MARK}={place()}"


def _start() -> None:
    dockerd = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if dockerd is None:
        raise SandboxUnavailableError(
            "no Docker engine runs and dockerd is not installed", next_step="apt-get install docker.io"
        )
    if os.geteuid() != 0:
        raise SandboxUnavailableError(
            "no Docker engine runs, and only root can start one", next_step="sudo systemctl start docker"
        )
    had_bridge = _bridge_exists()
    (place() / "made-bridge").unlink(missing_ok=True)
    if not had_bridge:
        (place() / "made-bridge").touch()
    log = place() / "dockerd.log"
    log.unlink(missing_ok=True)
    argv = [dockerd, "--pidfile", str(place() / "dockerd.pid")]
    pid = processes.start(argv, _mark(), os.environ, log, {})
    deadline = time.monotonic() + _START_DEADLINE_S
    while not answers():
        code = processes.reap(pid)
        if code is not None or time.monotonic() > deadline:
            _stop()
            how = f"ended with {code}" if code is not None else f"did not answer within {_START_DEADLINE_S:.0f} s"
            raise SandboxUnavailableError(f"dockerd {how}: {processes.last_words(log)}", next_step=f"see {log}")
        time.sleep(0.1)


def _stop() -> None:
    found = processes.find(_mark())
    processes.end(_mark(), [process for process in found if process.runs("dockerd")], grace_s=_STOP_GRACE_S)
    processes.end_all(_mark(), grace_s=_STOP_GRACE_S)  # containerd, if it did not end with dockerd
    if (place() / "made-bridge").exists():
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "link", "delete", _BRIDGE], capture_output=True, check=False)
        (place() / "made-bridge").unlink(missing_ok=True)


def _bridge_exists() -> bool:
    return Path("/sys/class/net", _BRIDGE).exists()

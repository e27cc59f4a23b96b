"""The Docker engine of this machine: the one that runs, else one started here, and only that one stopped."""

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
from agentenv.dev import processes
from agentenv.errors import SandboxUnavailableError
from agentenv.image import connect
from agentenv.locks import locked, try_lock

_MARK = "AGENTENV_ENGINE"
_START_DEADLINE_S = 60.0
_STOP_GRACE_S = 30.0
_BRIDGE = "docker0"


def place() -> Path:
    """Where an engine started here keeps its pid file, its log and the lock of its users."""
    return cache_dir() / "engine"


def answers() -> bool:
    """Whether a Docker engine answers, whoever started it."""
    try:
        connect(timeout_s=10).close()
    except SandboxUnavailableError:
        return False
    return True


def is_ours() -> bool:
    """Whether the engine was started here."""
    return any(process.runs("dockerd") for process in processes.find(_mark()))


@contextmanager
def using() -> Iterator[int]:
    """Hold the engine: while anybody does, nobody stops it. Yields the descriptor that holds it, for a
    process that is to hold it longer than we do."""
    with locked(place() / "users.lock", shared=True) as held:
        yield held


def ensure() -> bool:
    """See that an engine answers; True when it had to be started. Call it inside :func:`using`.

    Raises SandboxUnavailableError: none runs and none can be started (no root, not installed, its own
    last words).
    """
    if answers():
        return False
    with locked(place() / "start.lock"):
        if answers():
            return False
        _start()
    return True


def stop() -> str:
    """Stop the engine if it was started here and nobody uses it; what was done, in words."""
    if not is_ours():
        return "left alone: it was not started here" if answers() else "none runs"
    try:
        held = try_lock(place() / "users.lock", create=True)
    except BlockingIOError:
        held = None
    if held is None:
        return "left running: somebody else uses it"
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
    processes.end_all(_mark(), grace_s=_STOP_GRACE_S)  # containerd goes with it, or now
    if (place() / "made-bridge").exists():
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "link", "delete", _BRIDGE], capture_output=True, check=False)
        (place() / "made-bridge").unlink(missing_ok=True)


def _bridge_exists() -> bool:
    return Path("/sys/class/net", _BRIDGE).exists()

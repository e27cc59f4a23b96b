"""``ops/systemd`` tried inside a guest, as root: ``python -m hosts.services``, and again with ``--booted`` after the
machine was restarted. One line of JSON per check, as in :mod:`hosts.inside`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from agentenv import Sandbox
from agentenv.farm_client.access import FarmAccess, Route
from hosts.disk import AT, BASE
from hosts.inside import Seen, report

FARM: Final = "agentenv-farm.service"
KEEPER: Final = "agentenv-keeper.service"
RELAY: Final = "agentenv-relay.service"
_HOME: Final = Path("/opt/agentenv")
_CONFIG: Final = "/etc/agentenv/farm.toml"
_URL: Final = "http://127.0.0.1:8700"
_RELAY_URL: Final = "http://127.0.0.1:8701"
_SLICE: Final = Path("/sys/fs/cgroup/agentenv.slice")
_BOOTED_S: Final = 900.0
_ADD: Final = f"""
from pathlib import Path
from agentenv.store import Store
from agentenv.store.addition import Runtime
runtime = Runtime({{"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}}, cmd=("bash",))
print(Store.open(Path("/var/lib/agentenv/store")).add(None, [Path("{BASE}")], runtime).digest)
"""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return done.stdout.strip()


def _shown(unit: str, name: str) -> str:
    return _run("systemctl", "show", "--value", "--property", name, unit)


def _token(run: str, scope: str) -> str:
    return _run(str(_HOME / "bin/agentenv"), "farm", "token", "--config", _CONFIG, "--run", run, "--scope", scope)


@contextmanager
def _slot(route: Route = "auto", **fields: Any) -> Iterator[Sandbox]:
    """A slot of the service, as a client has it."""
    with Sandbox(backend="farm", farm=FarmAccess((_URL,), _token("hosts", "run"), route=route), **fields) as box:
        yield box


def _containers() -> set[str]:
    """The processes of containers, from the scopes of systemd; not those of slots, which are started for each."""
    groups = [*_SLICE.glob("agentenv-*.scope/agentenv/outside"), *_SLICE.glob("agentenv-*.scope/agentenv/*/server")]
    return {pid for group in groups for pid in (group / "cgroup.procs").read_text().split()}


def installed() -> Seen:
    """The script ends well, twice; the guest has no network, so its environment is this checkout's."""
    if not _HOME.exists():
        _HOME.symlink_to(f"{AT}/.venv")
    _run(f"{AT}/ops/systemd/install")
    said = _run(f"{AT}/ops/systemd/install")
    return "systemctl enable --now" in said, said.splitlines()[:1]


def started() -> Seen:
    """Both are there as soon as systemctl says so, and the keeper has an ordinary user."""
    _run("systemctl", "enable", "--now", KEEPER, FARM)
    states = [_shown(unit, "ActiveState") for unit in (KEEPER, FARM)]
    user = Path(f"/proc/{_shown(KEEPER, 'MainPID')}").stat().st_uid
    with _slot() as box:
        said = box.run("echo hi").stdout
    seen = (states, "root" if user == 0 else "a user", said)
    return seen == (["active", "active"], "a user", "hi\n"), seen


def scopes() -> Seen:
    """A container has a scope of its own, in which its slots have limits, and none of it is in the service's cgroup."""
    with _slot() as box:
        box.run("true")
        limits = [file.read_text().strip() for file in _SLICE.glob("agentenv-*.scope/**/slot-*/memory.max")]
        inside = (_SLICE / FARM / "cgroup.procs").read_text().split()
    seen = {"slots' limits": sorted(set(limits)), "in the service": len(inside)}
    return bool(limits) and "max" not in limits and inside == [_shown(FARM, "MainPID")], seen


def restarted() -> Seen:
    """A lease and its container go on while the service is restarted, and while it is killed."""
    seen = []
    with _slot() as box:
        box.run("echo kept > file")
        before = _containers()
        _run("systemctl", "restart", FARM)
        seen.append(box.run("cat file").stdout)
        os.kill(int(_shown(FARM, "MainPID")), signal.SIGKILL)
        until = time.monotonic() + _BOOTED_S
        while _shown(FARM, "NRestarts") == "0" or _shown(FARM, "ActiveState") != "active":
            if time.monotonic() > until:
                raise TimeoutError(f"{FARM} is not started again")
            time.sleep(0.5)
        seen.append(box.run("cat file").stdout)
        gone = before - _containers()
    return seen == ["kept\n", "kept\n"] and bool(before) and not gone, {"read": seen, "ended": [*before, "-", *gone]}


def reloaded() -> Seen:
    """The settings are read again, and a mistake in them is in the journal and ends nothing."""
    path = Path(_CONFIG)
    text = path.read_text()
    path.write_text(text + "\n[pool\n")
    _run("systemctl", "reload", FARM)
    time.sleep(5)
    path.write_text(text)
    _run("systemctl", "reload", FARM)
    said = _run("journalctl", "--unit", FARM, "--output", "cat", "--lines", "20")
    return "cannot be read" in said and _shown(FARM, "ActiveState") == "active", said.splitlines()[-3:]


def image() -> Seen:
    """A slot with an image that the keeper's store has."""
    digest = _run("runuser", "-u", "agentenv", "--", str(_HOME / "bin/python"), "-c", _ADD)
    with _slot(image=digest, storage="disk", storage_mib=200) as box:
        seen = box.run("cat /etc/debian_version").stdout
    return seen[:1].isdigit(), seen


def relayed() -> Seen:
    """A client that only reaches the relay has a slot, and the relay has a user of its own."""
    token, config = Path("/etc/agentenv/relay.token"), Path(_CONFIG)
    token.touch(0o600)
    token.write_text(_token("*", "read"))
    Path("/etc/default/agentenv").write_text(f"RELAY_OPTIONS=--url {_URL}\n")
    config.write_text(f'relay_url = "{_RELAY_URL}"\n{config.read_text()}')
    _run("systemctl", "restart", FARM)
    _run("systemctl", "start", RELAY)
    user = Path(f"/proc/{_shown(RELAY, 'MainPID')}").stat().st_uid
    with _slot("relay") as box:
        said = box.run("echo hi").stdout
    _run("systemctl", "stop", RELAY)
    return said == "hi\n" and user != 0, (said, user)


def journal() -> Seen:
    """Who looks there finds where they listen."""
    said = _run("journalctl", "--unit", FARM, "--unit", KEEPER, "--output", "cat")
    lines = [line for line in said.splitlines() if "listening" in line]
    return len(lines) >= 2 and "Traceback" not in said, lines[:2]


def booted() -> Seen:
    """Both are there again after a boot, and the old token's key is the same."""
    until = time.monotonic() + _BOOTED_S
    while _shown(FARM, "ActiveState") != "active" and time.monotonic() < until:
        time.sleep(1)
    with _slot() as box:
        said = box.run("echo hi").stdout
    return said == "hi\n" and _shown(KEEPER, "ActiveState") == "active", said


def ended() -> Seen:
    """Stopping the service leaves its containers, and stopping the slice ends them: nothing is left."""
    _run("systemctl", "disable", "--now", FARM, KEEPER)
    kept = _containers()
    _run("systemctl", "stop", "agentenv.slice")
    left = [*_SLICE.glob("*.scope")]
    return bool(kept) and not left, {"kept": len(kept), "left": left}


CHECKS: Final[Mapping[str, Callable[[], Seen]]] = {
    check.__name__: check for check in (installed, started, scopes, restarted, reloaded, image, relayed, journal)
}

if __name__ == "__main__":
    sys.exit(report({"booted": booted, "ended": ended} if "--booted" in sys.argv else CHECKS))

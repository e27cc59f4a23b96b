"""Network namespaces that stand for a container, the Internet and slots, with the container's part of a supervisor.

    slot 0, slot 1 (only lo) ── proxy or stack ── container 11.22.33.1 ── veth ── Internet 11.22.33.2, .3, .4

Nothing of it is visible to this machine's own network, and the kernel ends it with the processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.waiting import wait_for

CONTAINER, WEB, OTHER, CLOSED = "11.22.33.1", "11.22.33.2", "11.22.33.3", "11.22.33.4"
HOSTS = f"""\
127.0.0.1 localhost loops.test
{WEB} web.test a.wild.test
{OTHER} other.test
{CLOSED} closed.test
{CONTAINER} own.test
169.254.169.254 metadata.test
10.9.9.9 private.test
"""
RECIPE = "-all,+sys_admin,+setuid,+setgid,+setpcap,+kill"
"""The capabilities of the container recipe (docs/isolation.md)."""
_FIRST_UID = 0x7000_0000
_HERE = Path(__file__)
REPOSITORY = _HERE.resolve().parents[2]


class Slot:
    """A user namespace of its own ids and a network namespace, held by a process."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self.pid = process.pid
        self.home = home
        self.env: Mapping[str, str] = {}

    def argv(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-U", "-n", "-S", "0", "-G", "0", "--", *argv]

    def whole_env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "GIT_TERMINAL_PROMPT": "0", **self.env}

    def run(self, *argv: str, stdin: str = "", timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*argv), env=self.whole_env(), input=stdin, capture_output=True, text=True, timeout=timeout_s,
            cwd=self.home,
        )  # fmt: skip

    def curl(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self.run("curl", "-sS", "-m", "100", *argv)

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.argv(*argv), env=self.whole_env(), stdin=pipe, stdout=pipe, cwd=self.home)


class Networks:
    """The supervisor's part, spoken to in lines; and the slots."""

    def __init__(
        self, program: subprocess.Popen[str], slots: list[Slot], directory: Path, internet: subprocess.Popen[str]
    ) -> None:
        self._program = program
        self.internet = internet
        """A process in the Internet's namespace."""
        self.directory = directory
        """What lies in it, the Internet's git server serves."""
        self._errors = directory / "stderr"
        self._requests = directory / "requests"
        self.slots = slots
        self.lost: list[dict[str, Any]] = []

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(asked) + "\n")
        self._program.stdin.flush()
        while True:
            line = self._program.stdout.readline()
            assert line, self._errors.read_text()
            answer: dict[str, Any] = json.loads(line)
            if "lost" not in answer:
                return answer
            self.lost.append(answer)

    def apply(self, slot: int, kind: str, *hosts: str, denied: Sequence[str] = ()) -> Slot:
        answer = self.ask(slot=slot, policy={"kind": kind, "hosts": list(hosts), "denied": list(denied)})
        assert "error" not in answer, answer["error"] + self._errors.read_text()
        self.slots[slot].env = answer["env"]
        return self.slots[slot]

    def stacks(self) -> list[int]:
        """The processes behind the public networks."""
        children = Path(f"/proc/{self._program.pid}/task/{self._program.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"slirp4netns" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def counts(self, slot: int) -> dict[str, int]:
        return self.ask(slot=slot)

    def requests(self) -> list[dict[str, Any]]:
        """What the servers of the Internet were asked."""
        return [json.loads(line) for line in self._requests.read_text().splitlines()]


@contextmanager
def networks(slots: int = 2, *, allow_network: bool = True) -> Iterator[Networks]:
    """Everything, started; ended on exit."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))  # pytest's may not be entered by a slot's root
        directory.chmod(0o755)
        container, internet = (stack.enter_context(network_namespace()) for _ in range(2))
        connect(container, internet)
        requests = directory / "requests"
        requests.touch()
        server = [sys.executable, "-B", str(_HERE.with_name("internet.py")), str(requests), WEB, OTHER, CLOSED]
        served = stack.enter_context(process(inside(internet, *server), stdout=subprocess.PIPE))
        assert served.stdout is not None
        assert served.stdout.readline() == "serving\n"
        made = []
        for number in range(slots):
            home = directory / f"home{number}"
            home.mkdir()
            os.chown(home, _FIRST_UID, _FIRST_UID)
            made.append(Slot(stack.enter_context(_slot_namespace()), home))
        hosts, errors = directory / "hosts", directory / "stderr"
        hosts.write_text(HOSTS)
        hosts.chmod(0o644)
        program = f"mount --bind {hosts} /etc/hosts && exec " + " ".join(
            [sys.executable, "-B", str(_HERE.with_name("slot_network_process.py")), str(directory)]
            + ["allow_network" if allow_network else "no_network"]
            + [str(slot.pid) for slot in made]
        )
        log = stack.enter_context(errors.open("w"))
        pipe = subprocess.PIPE
        command = inside(container, "unshare", "-m", "setpriv", f"--bounding-set={RECIPE}", "sh", "-c", program)
        running = stack.enter_context(process(command, stdin=pipe, stdout=pipe, stderr=log))
        yield Networks(running, made, directory, internet)
        assert running.stdin is not None
        running.stdin.close()
        assert running.wait(60) == 0, errors.read_text()


def inside(namespace: subprocess.Popen[str], *argv: str) -> list[str]:
    return ["nsenter", "-t", str(namespace.pid), "-n", *argv]


def _ip(namespace: subprocess.Popen[str], *words: str) -> None:
    subprocess.run(inside(namespace, "ip", *words), check=True, timeout=60)


def connect(container: subprocess.Popen[str], internet: subprocess.Popen[str]) -> None:
    _ip(container, "link", "add", "veth", "type", "veth", "peer", "name", "eth0", "netns", str(internet.pid))
    _ip(container, "addr", "add", f"{CONTAINER}/24", "dev", "veth")
    for address in (WEB, OTHER, CLOSED):
        _ip(internet, "addr", "add", f"{address}/24", "dev", "eth0")
    for namespace, device in ((internet, "eth0"), (container, "veth")):
        _ip(namespace, "link", "set", device, "up")
        _ip(namespace, "link", "set", "lo", "up")


@contextmanager
def process(command: list[str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"}
    with subprocess.Popen(command, env=env, text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def network_namespace() -> Iterator[subprocess.Popen[str]]:
    with process(["unshare", "-n", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder


@contextmanager
def _slot_namespace() -> Iterator[subprocess.Popen[str]]:
    command = ["unshare", "-U", "-n", "sh", "-c", "echo; exec sleep infinity"]
    with process(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{holder.pid}/{kind}").write_text(f"0 {_FIRST_UID} 65536\n")
        _ip(holder, "link", "set", "lo", "up")
        yield holder


def until_open(networks: Networks, slot: int, count: int) -> None:
    """Wait until the slot has that many connections to its proxy."""
    wait_for(lambda: networks.counts(slot)["open"] == count, explain=lambda: str(networks.counts(slot)))

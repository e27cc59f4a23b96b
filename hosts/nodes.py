"""A machine of its own for each node of tests/nomad/two_nodes.py: ``make hosts`` runs tests/nomad/test_two_nodes.py
with two guests. The Nomad server and the farm are this machine's; what crosses between them and a node crosses a tap
device, which is the card of the guest's that its Nomad client serves at."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentenv.deadlines import scaled
from hosts import disk
from hosts.guests import GUESTS
from hosts.machine import Machine
from tests.nomad.two_nodes import Node, ip

GUEST: Final = "AGENTENV_NODES_GUEST"
"""The environment variable that names the guest, for the tests."""
_ENGINE_PORT: Final = 2375
_ROOT: Final = "/srv/node"


@dataclass(frozen=True)
class MachineNode(Node):
    """A node that is a machine of this guest's disk."""

    guest: str = "bookworm"
    _running: list[Machine] = field(default_factory=list, compare=False)
    """The machine, while it runs."""

    @property
    def socket(self) -> str:
        """Its Docker engine, which nothing reaches but this machine."""
        return f"tcp://{self.address}:{_ENGINE_PORT}"

    @property
    def agentenv(self) -> str:
        """The command, on it."""
        return f"{disk.AT}/.venv/bin/agentenv"

    def plug_in(self) -> None:
        """Make the tap device, and boot the machine."""
        ip("tuntap", "add", "dev", self.outside, "mode", "tap")
        ip("address", "add", f"{self.host}/24", "dev", self.outside)
        ip("link", "set", self.outside, "up")
        self.start_again()

    def start_again(self) -> None:
        """Boot the machine, whose disk is as it was made: a machine that died is replaced by a new one."""
        card = (
            *("-netdev", f"tap,id=node,ifname={self.outside},script=no,downscript=no"),
            *("-device", f"virtio-net-pci,netdev=node,mac={disk.node_mac(self.number)}"),
        )
        machine = Machine(disk.made(GUESTS[self.guest]), self.root / "console", devices=card)
        self._running.append(machine.__enter__())

    def die(self) -> None:
        """End the machine."""
        while self._running:
            self._running.pop().__exit__(None, None, None)

    def unplug(self) -> None:
        """End the machine; its device goes with it."""
        self.die()
        ip("tuntap", "delete", "dev", self.outside, "mode", "tap")

    def start_engine(self, mark: str) -> None:
        """Debian's Docker engine, with the image of the guest's own checkout."""
        del mark  # it ends with its machine
        engine = f"dockerd --host {self.socket} --host unix:///run/docker.sock"
        self._run(f"systemd-run --quiet --unit node-engine -p Type=notify -p Delegate=yes {engine}")
        self._run(f"docker load --quiet --input {disk.SANDBOX}")

    def start_client(self, program: Path, server_rpc: int, mark: str) -> None:
        """The Nomad client, which is the guest's."""
        del program, mark
        found = self._run(f"basename $(dirname $(grep -l {disk.node_mac(self.number)} /sys/class/net/*/address))")
        configuration = shlex.quote(self.client_config(server_rpc, _ROOT, found))
        self._run(f"mkdir -p {_ROOT}/store && printf %s {configuration} >{_ROOT}/hcl")
        configured = f"-config {disk.AT}/nomad/dev.hcl -config {_ROOT}/hcl"
        self._run(f"systemd-run --quiet --unit node-client -p Delegate=yes /usr/local/bin/nomad agent {configured}")

    def _run(self, line: str) -> str:
        done = self._running[0].run(line, within_s=scaled(120.0), log=self.root / "log")
        assert done.code == 0, f"{self.name}: {line}: {done.output[-2000:]}"
        return done.output.strip()

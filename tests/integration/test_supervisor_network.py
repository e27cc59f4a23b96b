"""allow_network: the slot reaches the outside, but neither this machine nor another slot."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.slot_loss import LossReason
from tests.integration.supervisor_harness import Container, assert_nothing_left, cgroups_of, living, members

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making an outside to reach takes root")

OUTSIDE = "10.231.77.2"
HERE = "10.231.77.1"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@pytest.fixture
def outside() -> Iterator[int]:
    """A machine next door: a network namespace behind a veth pair, with a server in it; its port."""
    name = f"outside{os.getpid()}"
    device = f"v{os.getpid() % 100_000}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("addr", "add", f"{HERE}/30", "dev", device)
        _ip("link", "set", device, "up")
        _ip("-n", name, "addr", "add", f"{OUTSIDE}/30", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        script = (
            "import socket\n"
            "s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True)\n"
            "while True:\n c, _ = s.accept(); c.sendall(b'outside\\n'); c.close()\n"
        )
        command = ["ip", "netns", "exec", name, "python3", "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                yield int(server.stdout.readline())
            finally:
                server.kill()
    finally:
        _ip("netns", "del", name)


def connect(host: str, port: int) -> str:
    return f"timeout 60 bash -c 'cat < /dev/tcp/{host}/{port}' 2>&1; echo"


def test_the_outside_is_reached_and_this_machine_is_not(tmp_path: Path, outside: int) -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as here,
        Container(tmp_path, allow_network=True, host="0.0.0.0") as container,
    ):
        port = container.ready()["port"]
        assert container.bash(1, connect(OUTSIDE, outside)) == "outside\n\n"
        for host in (HERE, "10.0.2.2", "127.0.0.1"):
            for target in (port, here.getsockname()[1]):
                refused = container.bash(1, connect(host, target))
                assert "connect" in refused, (host, target, refused)
                assert "outside" not in refused
        assert "connect" in container.bash(1, connect("169.254.169.254", 80))
        here.setblocking(False)
        with pytest.raises(BlockingIOError):
            here.accept()


PAST_THE_LOCAL_ROUTES = """
import socket, sys
device = next(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line and " lo:" not in line)
index = socket.htonl(socket.if_nametoindex(device)).to_bytes(4, sys.byteorder)
bound = (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + bytes(1))
routed = (socket.IPPROTO_IP, 50, index)  # IP_UNICAST_IF
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "0.0.0.1"):
        for option in (bound, routed):
            with socket.socket(socket.AF_INET, kind) as sender:
                sender.settimeout(0.3)
                sender.setsockopt(*option)
                try:
                    sender.connect((address, int(sys.argv[1])))
                    sender.send(b"x")
                except OSError as error:
                    pass
print("tried", device)
"""


def test_this_machines_loopback_hears_nothing(tmp_path: Path) -> None:
    """A socket bound to the slot's device passes by the routes that keep loopback addresses its own."""
    with socket.create_server(("127.0.0.1", 0)) as here, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        port = here.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        with Container(tmp_path, allow_network=True) as container:
            container.ready()
            script = f"cat > try.py <<'END'\n{PAST_THE_LOCAL_ROUTES}\nEND\npython3 try.py {port}"
            assert container.bash(0, script).startswith("tried tap")
            for heard in (here, datagrams):
                heard.setblocking(False)
            with pytest.raises(BlockingIOError):
                here.accept()
            with pytest.raises(BlockingIOError):
                datagrams.recv(10)


def test_slots_do_not_reach_each_other(tmp_path: Path) -> None:
    with Container(tmp_path, allow_network=True) as container:
        container.ready()
        serve = "import socket; s = socket.create_server(('0.0.0.0', 7777)); print(1, flush=True); s.accept()"
        container.bash(0, f'python3 -c "{serve}" > up & while [ ! -s up ]; do sleep 0.01; done')
        address = container.bash(0, "hostname -I").split()[0]
        assert "connect" in container.bash(1, connect(address, 7777))


def test_nobody_inside_can_reopen_the_way(tmp_path: Path) -> None:
    with Container(tmp_path, allow_network=True) as container:
        container.ready()
        assert "not permitted" in container.bash(0, "ip route flush type unreachable 2>&1")
        assert "not permitted" in container.bash(0, "ip route del unreachable 169.254.0.0/16 2>&1")


def stacks(supervisor: int) -> list[int]:
    """The processes behind the slots' networks."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [int(pid) for pid in children if b"slirp4netns" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("number", "loss"),
    [
        (signal.SIGSEGV, LossReason.offline),  # as a packet of the slot's own may bring about
        (signal.SIGKILL, LossReason.memory_above),  # as the kernel does; nothing in a slot can
    ],
)
def test_a_slot_whose_network_ended_is_lost_and_comes_back_with_one(
    tmp_path: Path, number: signal.Signals, loss: LossReason
) -> None:
    with Container(tmp_path, allow_network=True, slots=1) as container:
        supervisor = container.ready()["pid"]
        (stack,) = stacks(supervisor)
        os.kill(stack, number)
        lost = container.packet("slot_lost", slot=0)
        assert lost["loss"] == loss
        assert f"killed by {number.name}" in lost["reason"]
        container.packet("slot_ready", slot=0, epoch=2)
        assert len(stacks(supervisor)) == 1


def test_the_stack_lives_and_dies_with_its_slot(tmp_path: Path) -> None:
    with Container(tmp_path, allow_network=True, slots=1) as container:
        supervisor = container.ready()["pid"]
        (before,) = stacks(supervisor)
        slot = [members(base / "slot-0") for base in cgroups_of(container.spec.container)]
        assert all(slot)
        assert not any(before in pids for pids in slot)  # it counts for the container, not for the slot
        assert (Path(f"/proc/{before}/root") / "usr").exists()
        assert not (Path(f"/proc/{before}/root") / str(tmp_path).lstrip("/")).exists()
        container.send(op="reset", slot=0)
        container.packet("slot_ready", slot=0, epoch=2)
        (after,) = stacks(supervisor)
        assert after != before
        assert container.stop() == 0
        assert_nothing_left(container)
        assert living(container) == set()

"""A server that serves nobody: it speaks the control socket, and does what a test writes to it.

It connects to the TCP address in ``--report`` (the test listens there), forwards every
packet of the supervisor's as one JSON line, and performs the JSON lines it reads: ``{"send": …}``
passes a packet on, ``{"bash": slot, "script": …}`` runs a script in a slot through its agent and
reports ``{"ran": …}``, ``{"exit": code}`` ends. Standard library and the agent codec only.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import select
import socket
from pathlib import Path
from typing import Any

from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.protocol import Kind


class FakeServer:
    def __init__(self, control: socket.socket, report: socket.socket) -> None:
        self.control = control
        self.report = report
        self.agents: dict[int, socket.socket] = {}
        self.runs = int.from_bytes(os.urandom(2)) + 1
        self.buffer = b""

    def tell(self, **fields: Any) -> None:
        self.report.sendall(json.dumps(fields).encode() + b"\n")

    def from_supervisor(self) -> bool:
        packet, ancillary, _, _ = self.control.recvmsg(65536, socket.CMSG_SPACE(16))
        if not packet:
            return False
        message = json.loads(packet)
        for _, _, content in ancillary:
            fd = array.array("i", content)[0]
            old = self.agents.pop(message["slot"], None)
            if old is not None:
                old.close()
            self.agents[message["slot"]] = socket.socket(fileno=fd)
            self.agents[message["slot"]].setblocking(True)
        self.tell(packet=message, fds=len(ancillary))
        return True

    def bash(self, slot: int, script: str) -> None:
        agent = self.agents[slot]
        self.runs += 1
        env = {"PATH": "/usr/bin:/bin", "HOME": "/workspace"}
        payload = protocol.spawn_text(["bash", "-c", script], env, "/workspace")
        protocol.send(agent, protocol.encode(Kind.SPAWN, run=self.runs, payload=payload))
        fds: tuple[int, ...] = ()
        while True:
            message = protocol.receive(agent)
            if message is None:
                self.tell(ran=slot, status=None, output="")
                return
            if message.run != self.runs:
                continue
            if message.kind is Kind.SPAWNED:
                fds = message.fds
            elif message.kind is Kind.SPAWN_FAILED:
                self.tell(ran=slot, status=-message.arg, output=os.strerror(message.arg))
                return
            elif message.kind is Kind.EXIT:
                break
        output = b""
        for fd in fds:
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                output += os.read(fd, 65536)
            os.close(fd)
        self.tell(ran=slot, status=os.waitstatus_to_exitcode(message.arg), output=output.decode(errors="replace"))

    def from_test(self) -> bool:
        chunk = self.report.recv(65536)
        if not chunk:
            return False
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "send" in order:
                self.control.send(json.dumps(order["send"]).encode())
            elif "bash" in order:
                self.bash(order["bash"], order["script"])
            elif "status" in order:
                status = Path("/proc/self/status").read_text()
                self.tell(status=status, environ=dict(os.environ), cwd=str(Path.cwd()), pid=os.getpid())
            elif "exit" in order:
                os._exit(order["exit"])
        return True

    def loop(self) -> None:
        while True:
            ready, _, _ = select.select([self.control, self.report], [], [])
            if self.control in ready and not self.from_supervisor():
                return
            if self.report in ready and not self.from_test():
                return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", required=True)
    parser.add_argument("--mute", action="store_true", help="never say serving")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    options = parser.parse_args()
    control = socket.socket(fileno=options.control_fd)
    host, _, port = options.report.rpartition(":")
    report = socket.create_connection((host, int(port)))
    if not options.mute:
        control.send(json.dumps({"op": "serving"}).encode())
    FakeServer(control, report).loop()


if __name__ == "__main__":
    main()

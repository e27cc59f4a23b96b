"""``python -m agentenv.sandbox.proxy --control-fd N --slots N [--closed NETWORK]...``: forks the slots' proxies.

Started by the supervisor under a uid of its own, without access to the slots' files. It has everything imported that a
proxy needs, so a fork takes milliseconds and shares those pages. Each packet on the control socket is a slot's number
and carries the socket over which a proxy of that slot is controlled; nothing that a slot sends is read here. It ends
when the supervisor's end of the control socket closes, and so does each proxy with its own.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import signal
import socket
import sys
from typing import Final

_MAX_PACKET_BYTES: Final = 64


def main() -> None:
    """Run until the supervisor has ended; exit status 1 with the reason on stderr when it cannot."""
    parser = argparse.ArgumentParser(description="The slots' proxies; started by their supervisor.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--closed", action="append", default=[], help="a closed network, or: attached")
    options = parser.parse_args()
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.modules["ssl"] = None  # type: ignore[assignment]  # it decrypts nothing, and asyncio does without
    control = socket.socket(fileno=options.control_fd)
    control.set_inheritable(False)
    status = _run(control, options.slots, options.closed, open_files)
    sys.stderr.flush()
    os._exit(status)  # a thread may still wait for a name server: do not join it


def _run(control: socket.socket, slots: int, closed: list[str], open_files: int) -> int:
    # Not at the top: modules imported here must not import ssl.
    from agentenv.errors import AgentEnvError
    from agentenv.sandbox.closed_networks import ClosedNetworks
    from agentenv.sandbox.proxy.server import serve
    from agentenv.sandbox.proxy.slot import connections_per_slot

    try:
        connections = connections_per_slot(slots, open_files)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
        gc.freeze()  # a collection in a child would copy the pages that it shares
        while True:
            slot, descriptors, _, _ = socket.recv_fds(control, _MAX_PACKET_BYTES, 1)
            if not slot:
                return 0
            with socket.socket(fileno=descriptors[0]) as own:
                if os.fork() == 0:
                    control.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    serve(own, int(slot), ClosedNetworks(closed), connections)
                    return 0
    except (AgentEnvError, OSError, ValueError) as error:
        sys.stderr.write(f"the slots' proxy: {error}\n")
        return 1


if __name__ == "__main__":
    main()

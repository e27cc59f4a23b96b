"""``python -m agentenv.sandbox.proxy --control-fd N --slots N [--closed NETWORK]...``: the proxy of one container.

Started by the supervisor under a uid of its own, which hands it the slots' listening sockets. It has no access to the
slots' files, and ends when the supervisor's end of the control socket closes.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_MOST_THREADS: Final = 64


def main() -> None:
    """Run the proxy; exit status 1 with the reason on stderr when it cannot."""
    parser = argparse.ArgumentParser(description="The slots' proxy; started by their supervisor.")
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
    os._exit(status)  # a thread may wait for a name server; nobody waits for it


def _run(control: socket.socket, slots: int, closed: list[str], open_files: int) -> int:
    # Not at the top: modules imported here must not import ssl.
    import asyncio

    from agentenv.errors import AgentEnvError
    from agentenv.sandbox.closed_networks import ClosedNetworks
    from agentenv.sandbox.proxy.names import LOOKUPS_AT_ONCE, system_lookup
    from agentenv.sandbox.proxy.server import Proxy
    from agentenv.sandbox.proxy.slot import Resources, connections_per_slot

    try:
        resources = Resources(
            system_lookup,
            ThreadPoolExecutor(min(_MOST_THREADS, LOOKUPS_AT_ONCE * slots), thread_name_prefix="names"),
            ClosedNetworks(closed),
            connections_per_slot(slots, open_files),
        )
        asyncio.run(Proxy(control, resources).run())
    except (AgentEnvError, OSError) as error:
        sys.stderr.write(f"the slots' proxy: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    main()

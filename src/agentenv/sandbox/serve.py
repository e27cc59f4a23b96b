"""The unprivileged sandbox server: ``python -m agentenv.sandbox.serve --control-fd N --listen-fd M``.

Started by the supervisor, which hands it slots over the control socket and owns the listening socket.
It never starts a process itself. It ends when the supervisor's end of the control socket closes.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys


def main() -> None:
    """Run the server; exit status 1 with the reason on stderr when it cannot."""
    parser = argparse.ArgumentParser(description="The sandbox server; started by its supervisor.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    options = parser.parse_args()
    for fd in (options.control_fd, options.listen_fd):
        os.set_inheritable(fd, False)
    # A slot takes up to 40 descriptors: its agent, a spare shell, what background processes still hold.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # It speaks no TLS, and asyncio and aiohttp do without: 10 MiB and 0.2 s less for every container.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    gc.set_threshold(20_000, 20, 50)
    # While a thread works on a large listing or archive, the loop waits this long after each of its system calls.
    sys.setswitchinterval(0.0005)
    _serve(options.control_fd, options.listen_fd)


def _serve(control_fd: int, listen_fd: int) -> None:
    # Not at the top: modules imported here must not import ssl.
    import asyncio

    from agentenv.errors import AgentEnvError
    from agentenv.sandbox.loop_watch import LoopWatch
    from agentenv.sandbox.server.server import serve

    try:
        with LoopWatch("sandbox server") as watch, asyncio.Runner(loop_factory=watch.new_loop) as runner:
            runner.run(serve(control_fd, listen_fd, watch))
    except AgentEnvError as error:
        sys.exit(f"sandbox server: {error}")


if __name__ == "__main__":
    main()

"""``python -m benchmarks.proxy [FLOOD]...``: a neighbour's fetches and changes of network beside each flood of a slot's
proxy, as a Markdown table; and the memory of the proxies. Root's.

It needs no cluster and no image: the slots are namespaces, with a supervisor's part for their networks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext

from benchmarks.measure import MIB, Latencies
from benchmarks.processes import processes_of, pss_bytes
from tests.security.proxy_floods import FLOODS
from tests.security.proxy_neighbours import FLOODER, NEIGHBOUR, change_s, farm, fetches_s, flooded

FETCHES, CHANGES = 100, 5


def main() -> None:
    """Print a line for each flood."""
    print("| flood | p50 ms | p99 ms | longest ms | neighbour's change ms | own change ms | proxies' PSS MiB |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("", *(sys.argv[1:] or FLOODS)):
        print(f"| {kind or 'none'} | {' | '.join(_measured(kind))} |", flush=True)


def _measured(kind: str) -> Iterator[str]:
    with farm() as world:
        fetches_s(world, 10)
        with flooded(world, kind) if kind else nullcontext():
            try:
                found = Latencies(fetches_s(world, FETCHES))
                yield f"{found.p50_ms:.1f}"
                yield f"{found.p99_ms:.1f}"
                yield f"{1e3 * max(found.seconds):.0f}"
            except Exception as error:
                yield from (f"{type(error).__name__}: {str(error)[-100:]!r}", "-", "-")
            for slot, hosts in ((NEIGHBOUR, ["web.test"]), (FLOODER, ["other.test", "*.flood.test"])):
                yield f"{1e3 * max(change_s(world, slot, *hosts) for _ in range(CHANGES)):.0f}"
            yield f"{_proxies_bytes() / MIB:.1f}"


def _proxies_bytes() -> int:
    """The proportional set size of all processes of the proxies."""
    return sum(map(pss_bytes, processes_of("agentenv.sandbox.proxy")))


if __name__ == "__main__":
    main()

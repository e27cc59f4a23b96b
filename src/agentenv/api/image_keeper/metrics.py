"""A keeper's numbers, as data and as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agentenv.api.image_keeper.keeper import Keeper
from agentenv.metrics.catalog import Metric

IMAGES = Metric("agentenv_keeper_images", "gauge", "Images in the store.")
FETCHING = Metric("agentenv_keeper_fetching", "gauge", "Images that are being fetched.")
PULLED = Metric("agentenv_keeper_pulled_total", "counter", "Images fetched, or found in the store when asked for.")
FAILED = Metric("agentenv_keeper_failed_total", "counter", "Images that could not be fetched.")
FROM_PEERS = Metric("agentenv_keeper_from_peers_total", "counter", "Images that another node's keeper sent.")
LIES = Metric("agentenv_keeper_peer_lies_total", "counter", "Times that a peer sent what its digest denies.")
THROTTLED = Metric("agentenv_keeper_throttled_total", "counter", "Times that a registry had too many requests.")
REMOVED = Metric("agentenv_keeper_removed_images_total", "counter", "Images removed to make room.")
REMOVED_BYTES = Metric("agentenv_keeper_removed_bytes_total", "counter", "Bytes freed by that.")

READINGS: Final[dict[Metric, Callable[[Keeper], int]]] = {
    IMAGES: lambda keeper: len(keeper.stored),
    FETCHING: lambda keeper: keeper.fetching,
    PULLED: lambda keeper: keeper.counts["pulled"],
    FAILED: lambda keeper: keeper.counts["failed"],
    FROM_PEERS: lambda keeper: keeper.counts["from_peers"],
    LIES: lambda keeper: keeper.peers.lies if keeper.peers is not None else 0,
    THROTTLED: lambda keeper: sum(registry.throttled for registry in keeper.registries.values()),
    REMOVED: lambda keeper: keeper.counts["removed_images"],
    REMOVED_BYTES: lambda keeper: keeper.counts["removed_bytes"],
}

KEEPER_METRICS: Final[tuple[Metric, ...]] = tuple(READINGS)


def exposition(keeper: Keeper) -> str:
    """All of them, in Prometheus' text format."""
    lines = []
    for metric, read in READINGS.items():
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines.append(f"{metric.name} {read(keeper)}")
    return "\n".join(lines) + "\n"

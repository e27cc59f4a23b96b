"""Reads what an exporter serves, for ``agentenv status``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from agentenv.errors import ConnectionLostError, ProtocolError

KIND = "metrics"
"""Kind of announcement with the address to scrape (:mod:`agentenv.run_files`)."""
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Samples:
    """Every value of one scrape, by name and labels. A histogram is its ``_bucket``, ``_sum``, ``_count``."""

    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def one(self, name: str, **labels: str) -> float | None:
        """The value with exactly these labels."""
        return self.values.get(name, {}).get(frozenset(labels.items()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values by one label, summed over the others."""
        found: dict[str, float] = {}
        for labels, value in self.values.get(name, {}).items():
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def parse(text: str) -> Samples:
    """Parse an exposition. Raises ProtocolError when it is not in Prometheus' format."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    except ValueError as error:
        raise ProtocolError(f"the response is not in Prometheus' format: {error}") from error
    return Samples(found)


async def scrape(url: str, *, timeout_s: float = 5.0, token: str | None = None) -> Samples:
    """Raises ConnectionLostError when nothing answers in time, ProtocolError when it is not metrics."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), trust_env=False) as http,
            http.get(url, headers=headers) as reply,
        ):
            text = await reply.text(errors="replace")
            status = reply.status
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ConnectionLostError(f"{url}: {error or 'no answer in time'}") from error
    if status != 200:
        raise ProtocolError(f"{url} answered {status}")
    return parse(text)

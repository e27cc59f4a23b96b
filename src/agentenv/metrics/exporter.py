"""``GET /metrics`` of a process that runs a pool.

Values are read at each scrape, in the pool's own event loop: no locks, and no cost between scrapes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING

from aiohttp import web

from agentenv.config import cannot_listen, state_dir
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.pool import FarmPool
from agentenv.metrics import readings
from agentenv.metrics.calls import CallCounts
from agentenv.metrics.readings import Reading
from agentenv.metrics.scrape import KIND
from agentenv.run_files import RunFile
from agentenv.slots.histogram import Buckets
from agentenv.slots.pool import SlotPool

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

Read = Callable[[], Awaitable[Iterable[Reading]]]
"""Raises AgentEnvError when there is nothing to read at the moment: the scrape is answered with 503."""


class Meter:
    """The metrics of one pool and executor; with ``port`` None they are disabled and cost nothing."""

    def __init__(self, backend: str, port: int | None, host: str = "127.0.0.1") -> None:
        self.observer = None if port is None else CallCounts()
        """For the executor."""
        self._backend = backend
        self._port = port
        self._host = host

    @asynccontextmanager
    async def serving(
        self, pool: SlotPool | FarmPool, executor: ToolExecutor | None = None
    ) -> AsyncIterator[str | None]:
        """Serve while the block runs; yields the URL, or None when disabled.

        Raises ConfigError naming ``metrics_port`` when the port cannot be listened on, or prometheus-client is not
        installed.
        """
        if self._port is None:
            yield None
            return
        counts = self.observer

        async def read() -> Iterable[Reading]:
            mine = chain(readings.build(self._backend), readings.of_pool(pool.statistics()))
            if executor is None or counts is None:
                return mine
            return chain(mine, readings.of_executor(executor.statistics(), counts))

        async with exporting(read, self._host, self._port) as url:
            yield url


@asynccontextmanager
async def exporting(read: Read, host: str, port: int, *, announce: bool = True) -> AsyncIterator[str]:
    """Serve ``read()`` at ``/metrics`` (port 0: any free one); yields the URL. Raises ConfigError, see
    :class:`Meter`.

    ``announce``: let ``agentenv status`` on this machine find this process as one that leases slots.
    """
    render = renderer()

    async def answer(_: web.Request) -> web.Response:
        try:
            body, kind = render(await read())
        except AgentEnvError as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=body, headers={"Content-Type": kind})

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise cannot_listen(error, host, port, prefix="metrics_") from error
        url = f"http://{_reachable(host)}:{runner.addresses[0][1]}/metrics"
        if not announce:
            yield url
            return
        with RunFile.open(state_dir(), KIND, f"{os.getpid()}-{secrets.token_hex(3)}") as run_file:
            run_file.write({"url": url})
            yield url
    finally:
        await runner.cleanup()


def _reachable(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - looked up, not bound
    return f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown


def renderer() -> Callable[[Iterable[Reading]], tuple[bytes, str]]:
    """Makes body and content type of an exposition, with the process' own metrics. Raises ConfigError when
    prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    except ImportError as error:
        raise ConfigError(
            "metrics_port", "metrics need the package prometheus-client", next_step="pip install 'agentenv[farm]'"
        ) from error

    def render(read: Iterable[Reading]) -> tuple[bytes, str]:
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(_Readings(read))
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4

    return render


class _Readings:
    """The collector that prometheus_client calls for values."""

    def __init__(self, read: Iterable[Reading]) -> None:
        self._read = read

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        return map(_family, self._read)


def _family(reading: Reading) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    metric = reading.metric
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in reading.values.items():
            assert isinstance(value, Buckets)
            histogram.add_metric(labels, buckets=value.cumulative(), sum_value=value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    plain = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in reading.values.items():
        assert not isinstance(value, Buckets)
        plain.add_metric(labels, value)
    return plain

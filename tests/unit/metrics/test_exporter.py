"""What a farm's process serves at /metrics: every metric of the catalog, with the values pool and executor have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings, cannot_listen, state_dir
from agentenv.errors import ConfigError, ConnectionLostError, ProtocolError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.metrics.catalog import METRICS
from agentenv.metrics.exporter import Meter, exporting
from agentenv.metrics.readings import Reading
from agentenv.metrics.scrape import KIND, Samples, parse, scrape
from agentenv.run_files import running
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.waiting import until


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path))
    return tmp_path


async def nothing() -> Iterable[Reading]:
    return ()


async def measured(began: Path) -> tuple[Samples, str]:
    """A small farm after a good call, an unknown tool, a wrong argument and a call that was given up."""
    meter = Meter("fake", 0)
    settings = PoolSettings(min_containers=1, max_containers=2)
    async with (
        SlotPool(FakeBackend(ContainerSettings(slots_per_container=3)), settings) as pool,
        ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings(), observer=meter.observer) as executor,
        meter.serving(pool, executor) as url,
    ):
        assert url is not None
        async with executor.open("gone"):
            pass
        async with executor.open("t") as session:
            assert (await session.call("bash", {"command": "exit 3"})).exit_code == 3
            assert (await session.call("rm_rf_everything_7f3a", {})).fault == "model"
            assert (await session.call("bash", {"command": 7})).fault == "model"
            given_up = asyncio.create_task(session.call("bash", {"command": f"touch {began}; sleep 60"}))
            await until(began.exists)
            given_up.cancel()
            await asyncio.wait([given_up])
            return await scrape(url), url


async def test_values_are_what_happened(tmp_path: Path) -> None:
    samples, _ = await measured(tmp_path / "began")
    assert samples.by("agentenv_pool_slots", "state") == {
        "free": 2, "leased": 1, "resetting": 0, "quarantined": 0
    }  # fmt: skip
    assert samples.by("agentenv_pool_containers", "state")["ready"] == 1
    assert samples.one("agentenv_pool_containers_goal") == 1
    assert samples.one("agentenv_pool_containers_max") == 2
    assert samples.one("agentenv_pool_leases_granted_total") == 2
    assert samples.one("agentenv_pool_leases_released_total") == 1
    assert samples.one("agentenv_pool_acquire_wait_seconds_count") == 2
    assert samples.one("agentenv_pool_reset_seconds_count") == 1
    assert samples.one("agentenv_executor_calls_total", tool="bash", fault="none") == 1
    assert samples.one("agentenv_executor_calls_total", tool="bash", fault="model") == 1
    assert samples.one("agentenv_executor_calls_cancelled_total", tool="bash") == 1
    assert samples.one("agentenv_executor_run_seconds_count", tool="bash") == 1
    assert samples.one("agentenv_executor_batch_size_calls_sum") == 2
    assert samples.one("agentenv_executor_sessions") == 1
    assert samples.one("agentenv_executor_streams_total") == 1
    assert samples.one("agentenv_executor_reconnects_total") == 0


async def test_a_name_the_model_made_up_is_no_label(tmp_path: Path) -> None:
    samples, _ = await measured(tmp_path / "began")
    assert samples.one("agentenv_executor_calls_total", tool="unknown", fault="model") == 1
    assert "rm_rf" not in repr(samples)


async def test_every_metric_of_the_catalog_is_there_and_no_other(tmp_path: Path) -> None:
    samples, _ = await measured(tmp_path / "began")
    found = {name for name in samples.values if name.startswith("agentenv_")}
    expected = set()
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        expected |= {metric.name + suffix for suffix in suffixes}
    assert expected - found == {"agentenv_pool_faults_total"}  # nothing failed
    assert found - expected == set()


async def test_labels_are_those_of_the_catalog(tmp_path: Path) -> None:
    samples, _ = await measured(tmp_path / "began")
    for metric in METRICS:
        for labels in samples.values.get(metric.name, {}):
            assert tuple(sorted(name for name, _ in labels)) == tuple(sorted(metric.labels))


async def test_buckets_are_cumulative_and_end_with_all(tmp_path: Path) -> None:
    samples, _ = await measured(tmp_path / "began")
    buckets = samples.by("agentenv_pool_acquire_wait_seconds_bucket", "le")
    assert buckets["+Inf"] == samples.one("agentenv_pool_acquire_wait_seconds_count")
    ordered = [count for _, count in sorted(buckets.items(), key=lambda pair: float(pair[0]))]
    assert ordered == sorted(ordered)


async def test_the_process_is_measured_too(tmp_path: Path) -> None:
    samples, _ = await measured(tmp_path / "began")
    assert (samples.one("process_resident_memory_bytes") or 0) > 1e6


async def test_off_is_nothing() -> None:
    meter = Meter("fake", None)
    assert meter.observer is None
    async with SlotPool(FakeBackend(), PoolSettings()) as pool, meter.serving(pool) as url:
        assert url is None


async def test_where_it_is_served_is_announced_while_it_is() -> None:
    async with exporting(nothing, "127.0.0.1", 0) as url:
        assert [said["url"] for said in running(state_dir(), KIND)] == [url]
    assert running(state_dir(), KIND) == []
    with pytest.raises(ConnectionLostError):
        await scrape(url)


async def test_a_taken_port_names_the_setting() -> None:
    async with exporting(nothing, "127.0.0.1", 0) as url:
        port = int(url.split(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match="metrics_port") as raised:
            async with exporting(nothing, "127.0.0.1", port):
                raise AssertionError("it listened")
    assert "another port" in raised.value.next_step


async def test_an_address_of_another_machine_names_the_other_setting() -> None:
    with pytest.raises(ConfigError, match="metrics_host") as raised:
        async with exporting(nothing, "203.0.113.77", 0):
            raise AssertionError("it listened")
    assert "address of this machine" in raised.value.next_step


def test_and_where_asyncio_gives_the_failure_no_number() -> None:
    """As Python 3.13 and later do."""
    error = cannot_listen(OSError("could not bind on any address out of [('203.0.113.77', 80)]"), "203.0.113.77", 80)
    assert (error.field, error.next_step) == ("host", "name an address of this machine")


async def test_nothing_to_read_is_503_and_a_sentence() -> None:
    async def fails() -> Iterable[Reading]:
        raise ConnectionLostError("nobody answers")

    async with exporting(fails, "127.0.0.1", 0) as url:
        with pytest.raises(ProtocolError, match="503"):
            await scrape(url)


def test_what_is_no_exposition_is_a_typed_error() -> None:
    with pytest.raises(ProtocolError):
        parse("<html>{ hello")

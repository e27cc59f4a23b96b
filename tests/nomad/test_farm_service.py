"""The real farm service as a Nomad job, and a standby beside it: killed, succeeded, found again by its clients."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from agentenv import shipped
from agentenv.api.farm_server.tokens import TokenKeys
from agentenv.config import PoolSettings
from agentenv.dev.agent import Ports
from agentenv.errors import FarmUnreachableError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.client import FarmClient
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.nomad.job import hcl
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.farm import FarmInfo
from tests.nomad.cluster import Cluster
from tests.waiting import START_S, eventually, wait_for

AGENTENV = Path(sys.executable).with_name("agentenv")
SETTINGS = """
name = "{containers}"
backend = "nomad"
[pool]
max_containers = 1
start_timeout_s = 180
[containers]
slots_per_container = 2
[nomad]
job_id = "{containers}"
image = "{image}"
build_image = false
cpu_mhz = 20
memory_mib = 1024
memory_oversubscription = true
[tokens]
key_files = ["{key_file}"]
"""


def _submit(cluster: Cluster, job_id: str, settings: str, key: str) -> None:
    path = f"nomad/jobs/{job_id}"
    cluster.nomad.put(f"/v1/var/{path}", {"Path": path, "Items": {"key": key, "settings": settings}})
    given = {
        "job_id": job_id, "service": job_id, "driver": "raw_exec", "command": str(AGENTENV), "port": 0,
        "nomad_address": cluster.address, "cpu_mhz": 20, "memory_mib": 256,
    }  # fmt: skip
    text = shipped.path("nomad/farm.nomad.hcl").read_text()
    cluster.nomad.put(
        "/v1/jobs", {"Job": cluster.nomad.parse_job(text, {name: hcl(value) for name, value in given.items()})}
    )


def _pid(cluster: Cluster, job_id: str) -> int:
    """The service's process."""

    def look() -> int | None:
        [allocation] = cluster.allocations(job_id)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if "farm" in words and "serve" in words and any(allocation["ID"] in word for word in words):
                    return int(entry.name)
        return None

    return wait_for(look, START_S, lambda: cluster.tell(job_id))


async def _leader(url: str, token: str, former: str = "") -> FarmInfo:
    """The farm that leads, once there is one, another than ``former``: at that address, or where it refers to."""
    seen: list[FarmInfo] = []
    async with FarmClient(url, token) as client:

        async def look() -> bool:
            try:
                seen.append(await client.info())
            except FarmUnreachableError:
                return False
            return seen[-1].boot != former

        await eventually(look, START_S)
    found = seen[-1]
    assert found.state == "leader"
    return found


@asynccontextmanager
async def _standing_by(cluster: Cluster, directory: Path, settings: str, key: str, port: int) -> AsyncIterator[None]:
    """Another service with the same settings, from when it refers to the one that leads."""
    (directory / "farm.toml").write_text(settings)
    (directory / "farm.key").write_text(key)
    (directory / "farm.key").chmod(0o600)
    environment = {**os.environ, "NOMAD_ADDR": cluster.address, "AGENTENV_STATE_DIR": str(directory / "state")}
    process = await asyncio.create_subprocess_exec(
        str(AGENTENV), "farm", "serve", "--json", "--config", str(directory / "farm.toml"), "--port", str(port),
        env=environment, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as http:

            async def refers() -> bool:
                try:
                    async with http.get(url + "/v1/farm", allow_redirects=False) as answer:
                        return answer.status == 307
                except aiohttp.ClientError:
                    return False

            await eventually(refers, START_S)
            async with http.get(url + "/ready") as answer:
                assert answer.status == 503
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def test_leases_outlive_the_job_s_process_and_its_end(
    cluster: Cluster, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOMAD_ADDR", cluster.address)
    containers, key = cluster.job_id("containers"), secrets.token_hex(32)
    told = {"containers": containers, "image": cluster.image}
    token = TokenKeys([key]).mint("exp7", "run", expires_s=3600)
    place, port = f"nomad://{job_id}", Ports.free().http
    standby = f"http://127.0.0.1:{port}"
    _submit(cluster, job_id, SETTINGS.format(**told, key_file="../secrets/farm.key"), key)
    try:
        patient = PoolSettings(acquire_timeout_s=START_S)
        async with (
            FarmPool(FarmAccess((place, standby), token), settings=patient) as pool,
            ToolExecutor(pool, ToolCatalog.builtin()) as executor,
            executor.open("holder") as session,
        ):
            await session.call("bash", {"command": "echo kept > file"})
            first = await _leader(place, token)

            os.kill(_pid(cluster, job_id), signal.SIGKILL)
            second = await _leader(place, token, first.boot)
            assert second.generation > first.generation
            async with await asyncio.wait_for(pool.lease("after its kill"), START_S):
                pass

            async with _standing_by(cluster, tmp_path, SETTINGS.format(**told, key_file="farm.key"), key, port):
                assert (await _leader(standby, token)).boot == second.boot, "the standby refers to it"
                cluster.nomad.stop(job_id)
                third = await _leader(standby, token, second.boot)
                assert third.generation > second.generation
                async with await asyncio.wait_for(pool.lease("after its end"), START_S):
                    pass
            assert (await session.call("bash", {"command": "cat file"})).stdout == "kept\n"
            assert (executor.tally.infra_faults, pool.statistics().leases_lost) == (0, 0)
    finally:
        cluster.nomad.purge(job_id)
        cluster.purge(containers)

"""The shipped ACL policy: a server with ACLs lets a farm's token do what a farm does, and no more."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentenv import shipped
from agentenv.config import ContainerSettings, NomadSettings
from agentenv.dev.agent import AgentPlace, Ports, Role, local_config
from agentenv.errors import ConfigError
from agentenv.farm.nomad import NomadFarm, OperatorApi
from agentenv.farm.view import Census
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.nomad.explain import NomadError
from agentenv.slots.backends.nomad.job import job_text, job_variables
from tests.nomad.cluster import Cluster
from tests.waiting import START_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "nomad/policies/agentenv.policy.hcl"
FARM_POLICY = POLICY.with_name("agentenv-farm.policy.hcl")


class Server:
    """A Nomad server with ACLs, and its first token."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.token = ""

    def ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data=data, method=method, headers={"X-Nomad-Token": self.token}
        )
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def bootstrap(self) -> bool | None:
        """True once the server has made its first token; None while it cannot."""
        try:
            self.token = self.ask("POST", "/v1/acl/bootstrap")["SecretID"]
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except OSError:
            return None
        return True

    def remembers(self) -> bool | None:
        """True once variables can be written: the keyring is made a little later."""
        path = "/v1/var/nomad/jobs/first"
        try:
            self.ask("PUT", path, {"Path": "nomad/jobs/first", "Items": {"a": "b"}})
            self.ask("DELETE", path)
        except urllib.error.HTTPError as error:
            error.close()
            return None
        return True


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place, ports = AgentPlace(tmp_path_factory.mktemp("acl")), Ports.free()
    place.config.write_text(local_config(place, ports, "acl", Role.server, ports.rpc) + "acl { enabled = true }\n")
    configs = ("-config", str(shipped.path("nomad/dev.hcl")), "-config", str(place.config))
    with place.log.open("wb") as log:
        process = subprocess.Popen([cluster.server.program, "agent", *configs], stdout=log, stderr=log)
    try:
        found = Server(f"http://127.0.0.1:{ports.http}")
        wait_for(found.bootstrap, START_S, place.log.read_text)
        wait_for(found.remembers, START_S, place.log.read_text)
        found.ask("POST", "/v1/acl/policy/agentenv", {"Name": "agentenv", "Rules": POLICY.read_text()})
        yield found
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


@pytest.fixture
def settings(server: Server, job_id: str) -> NomadSettings:
    """Of somebody whose token has the shipped policy alone."""
    wanted = {"Name": "trainers", "Type": "client", "Policies": ["agentenv"]}
    token = server.ask("POST", "/v1/acl/token", wanted)["SecretID"]
    return NomadSettings(address=server.address, token=token, job_id=job_id)


async def the_census_that_says(reason: str, settings: NomadSettings) -> Census:
    """Nomad's scheduler comes to an evaluation in its own time: asked again until it has."""
    ends_s = time.monotonic() + START_S
    while True:
        census = await NomadFarm(settings).census()
        if any(reason in waiting for waiting in census.waiting_for):
            return census
        assert time.monotonic() < ends_s, census
        await asyncio.sleep(0.1)


async def test_it_allows_what_a_farm_does(settings: NomadSettings) -> None:
    async with OperatorApi.opened(settings) as api:
        assert len(await api.agree_on_token("t" * 32)) == 32
        text = job_text(settings)
        await api.register(await api.parse(text, job_variables(text, ContainerSettings(), settings)))
        await api.scale(2, "test")
        assert (await api.snapshot()).job is not None
        await api.reschedule()
        await api.stop("00000000-0000-4000-8000-000000000000")  # allowed, and there is none
        assert await api.node_names() == {}
        await api.keep(settings.job_id, kept=True)
        variable = await api.variable(settings.job_id)
        assert variable is not None
        assert (variable.token, "kept" in variable.items) == ("t" * 32, True)
        assert await api.variable_owners() == [settings.job_id]
    census = await the_census_that_says("no node is ready", settings)
    assert census.goal == 2
    assert "purged" in await NomadFarm(settings).down()
    assert (await NomadFarm(settings).census()).exists is False


async def test_the_farm_service_has_what_it_needs_for_its_own_containers_only(server: Server, job_id: str) -> None:
    rules = FARM_POLICY.read_text().replace("agentenv-sandbox", job_id)
    server.ask("POST", "/v1/acl/policy/service", {"Name": "service", "Rules": rules})
    wanted = {"Name": "service", "Type": "client", "Policies": ["service"]}
    token = server.ask("POST", "/v1/acl/token", wanted)["SecretID"]
    settings = NomadSettings(address=server.address, token=token, job_id=job_id)
    async with NomadBackend(ContainerSettings(), settings) as backend:
        await backend.scale(1)
        assert backend.generation > 0
    assert server.ask("GET", "/v1/jobs") == []
    other = settings.model_copy(update={"job_id": "other"})
    with pytest.raises(ConfigError, match=r"token: may not write .*nomad/jobs/other/owner"):
        await NomadBackend(ContainerSettings(), other).__aenter__()


async def test_it_allows_no_more(server: Server, settings: NomadSettings) -> None:
    limited = Server(server.address)
    limited.token = settings.token or ""
    forbidden = [
        ("GET", "/v1/acl/tokens", None),
        ("PUT", "/v1/var/other/path", {"Path": "other/path", "Items": {"a": "b"}}),
        ("PUT", "/v1/system/gc", None),
        ("POST", "/v1/namespace", {"Name": "mine"}),
        ("GET", "/v1/operator/raft/configuration", None),
    ]
    for method, path, body in forbidden:
        with pytest.raises(urllib.error.HTTPError) as refused:
            limited.ask(method, path, body)
        with refused.value as refusal:
            assert refusal.code == 403, path


@pytest.mark.parametrize(("token", "said"), [(None, "requires an ACL token"), ("nonsense", "refuses it")])
async def test_without_a_token_that_has_it_the_setting_is_named(server: Server, token: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        await NomadFarm(NomadSettings(address=server.address, token=token)).census()
    assert raised.value.field == "token"
    assert "NOMAD_TOKEN" in raised.value.next_step


async def test_a_missing_capability_is_nomads_refusal(server: Server, settings: NomadSettings) -> None:
    """What the policy's comments call (write) can be left out: then looking works, changing does not."""
    rules = "\n".join(line for line in POLICY.read_text().splitlines() if "(write)" not in line or line[0] == "#")
    server.ask("POST", "/v1/acl/policy/readers", {"Name": "readers", "Rules": rules})
    wanted = {"Name": "readers", "Type": "client", "Policies": ["readers"]}
    reader = settings.model_copy(update={"token": server.ask("POST", "/v1/acl/token", wanted)["SecretID"]})
    assert (await NomadFarm(reader).census()).exists is False
    async with OperatorApi.opened(settings) as writing:
        text = job_text(settings)
        await writing.register(await writing.parse(text, job_variables(text, ContainerSettings(), settings)))
    try:
        with pytest.raises((NomadError, ConfigError)):
            async with OperatorApi.opened(reader) as api:
                await api.scale(3, "test")
    finally:
        await NomadFarm(settings).down()


async def test_a_token_that_may_not_write_the_owners_lock_opens_nothing(
    server: Server, settings: NomadSettings
) -> None:
    exact = POLICY.read_text().replace('"nomad/jobs/*"', f'"nomad/jobs/{settings.job_id}"')
    server.ask("POST", "/v1/acl/policy/exact", {"Name": "exact", "Rules": exact})
    wanted = {"Name": "exact", "Type": "client", "Policies": ["exact"]}
    narrow = settings.model_copy(update={"token": server.ask("POST", "/v1/acl/token", wanted)["SecretID"]})
    with pytest.raises(ConfigError, match=rf"token: may not write .*nomad/jobs/{settings.job_id}/owner") as refused:
        await NomadBackend(ContainerSettings(), narrow).__aenter__()
    assert "nomad/jobs/*" in refused.value.next_step
    assert server.ask("GET", "/v1/jobs") == []

"""TLS of the farm service and its relay, by certificates of a CA of one's own."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from agentenv.api import serving
from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.config import ContainerSettings
from agentenv.slots.backends.fake import FakeBackend
from tests.cli import Command
from tests.farm_process import COMMAND
from tests.farm_service import KEYS
from tests.faults.proxy import Proxy
from tests.waiting import START_S

SETTINGS = """
backend = "fake"
relay_url = "https://127.0.0.1:{port}"
[pool]
min_containers = 1
max_containers = 1
"""
TRAINER = """
import asyncio, sys
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.pool import FarmPool
from agentenv.tools.catalog import ToolCatalog

async def main(url, token):
    pool = FarmPool(FarmAccess((url,), token, route="relay"))
    async with pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("t") as session:
        print(session.lease.container.base_url, (await session.call("bash", {"command": "echo secretly"})).stdout)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True)
class Files:
    """A CA, and what a server with its certificate needs."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.certificate), "--tls-key", str(self.key))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(made.ca)
    ours = ca.issue_cert("127.0.0.1")
    ours.private_key_pem.write_to_path(made.key)
    for number, pem in enumerate(ours.cert_chain_pems):
        pem.write_to_path(made.certificate, append=number > 0)
    return made


@pytest.fixture
def trusting(tmp_path: Path, files: Files) -> Command:
    """A user who has said that the CA is trusted."""
    return Command({"AGENTENV_STATE_DIR": str(tmp_path), "SSL_CERT_FILE": str(files.ca)})


@asynccontextmanager
async def started(user: Command, *arguments: str) -> AsyncIterator[str]:
    """A verb that serves; yields its URL."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, "--json", env=user.environment, stdout=PIPE)
    try:
        assert process.stdout is not None
        yield str(json.loads(await asyncio.wait_for(process.stdout.readline(), START_S))["url"])
    finally:
        process.terminate()
        await process.wait()


async def said(user: Command, *arguments: str) -> tuple[int, str]:
    """Exit code, and all that a program of this user says."""
    process = await asyncio.create_subprocess_exec(
        *arguments, env=user.environment, stdout=PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), START_S)
    return process.returncode or 0, output.decode()


async def test_a_trainer_a_relay_and_an_operator_over_tls(tmp_path: Path, files: Files, trusting: Command) -> None:
    config = tmp_path / "farm.toml"
    async with Proxy(0) as address:
        config.write_text(SETTINGS.format(port=address.port))
        serve = ("farm", "serve", "--config", str(config), "--port", "0", *files.options)
        async with started(trusting, *serve) as farm:
            assert farm.startswith("https://127.0.0.1:")
            mint = (*COMMAND, "farm", "token", "--config", str(config), "--run", "*", "--scope", "admin", "--json")
            token = json.loads((await said(trusting, *mint))[1])["token"]

            code, output = await said(trusting, *COMMAND, "farm", "runs", "--url", farm, "--token", token, "--json")
            assert (code, json.loads(output)) == (0, {"runs": []})
            stranger = Command({**trusting.env, "SSL_CERT_FILE": None})
            code, output = await said(stranger, *COMMAND, "farm", "runs", "--url", farm, "--token", token)
            assert code == 125
            assert "CERTIFICATE_VERIFY_FAILED" in output
            assert "SSL_CERT_FILE" in output

            relay = ("farm", "relay", "--url", farm, "--token", token, "--port", "0", *files.options)
            async with started(trusting, *relay) as relay_url:
                address.upstream_port = urlsplit(relay_url).port or 0
                script = (sys.executable, "-c", TRAINER, farm, await one_run(trusting, farm, token))
                code, output = await said(trusting, *script)
                assert code == 0, output
                assert output.startswith(f"https://127.0.0.1:{address.port}/c/")
                assert output.strip().endswith("secretly")


async def one_run(user: Command, farm: str, token: str) -> str:
    """A token for one run, which the farm makes."""
    asked = (*COMMAND, "farm", "token", "--run", "exp7", "--days", "1", "--url", farm, "--token", token, "--json")
    code, output = await said(user, *asked)
    assert code == 0, output
    return str(json.loads(output)["token"])


async def test_a_token_does_not_follow_from_tls_into_the_clear(files: Files, trusting: Command) -> None:
    standby = Farm(FakeBackend(ContainerSettings()))
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.close()

    plain = await asyncio.start_server(listen, "127.0.0.1", 0)
    standby.leader_url = f"http://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
    certified = functools.partial(serving.served, certificate=files.certificate, key=files.key)
    app = farm_app(standby, Access(KEYS))
    async with plain, certified(app, "farm", host="127.0.0.1", port=0) as url:
        code, output = await said(trusting, *COMMAND, "farm", "runs", "--url", url, "--token", "secret")
    assert code == 125
    assert f"is a standby, and refers to '{standby.leader_url}" in output.replace("\n", " ")
    assert heard == []


async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, files: Files, trusting: Command) -> None:
    for verb in ("serve", "relay"):
        bad = ("--tls-cert", str(files.certificate), "--tls-key", str(tmp_path / "nowhere.pem"))
        code, output = await said(trusting, *COMMAND, "farm", verb, "--port", "0", *bad)
        assert code == 2
        assert "cannot be used" in output
        code, output = await said(trusting, *COMMAND, "farm", verb, "--port", "0", "--tls-key", str(files.key))
        assert code == 2
        assert "give both, or neither" in output

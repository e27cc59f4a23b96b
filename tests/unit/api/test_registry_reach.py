"""Which registries are asked for a name that a run or a task gave, and where skopeo can be led from there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentenv.api.image_keeper.keeper import Keeper, KeeperSettings
from agentenv.api.image_keeper.reach import Reach, ensured, guarded
from agentenv.errors import AgentEnvError, ForbiddenError, ImageUnavailableError
from agentenv.store import Store
from agentenv.store.reference import parse
from agentenv.store.route import is_enforced


@dataclass
class Listener:
    """A server on loopback, and how often it was connected to."""

    port: int = 0
    hits: list[str] = field(default_factory=list)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    found = Listener()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.hits.append("hit")
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return Store.open(tmp_path / "store")


HOSTS = (
    *(
        "127.0.0.1:{port}",
        "localhost:{port}",
        "[::1]:{port}",
        "[::ffff:127.0.0.1]:{port}",
        "127.1.2.3",
        "0.0.0.0:{port}",
    ),
    *(
        "169.254.169.254",
        "10.0.0.1",
        "172.16.0.1:5000",
        "192.168.1.1",
        "100.64.0.1",
        "224.0.0.1",
        "[fec0::1]",
        "[fe80::1]",
    ),
    *("[fd00::1]", "[ff02::1]", "[64:ff9b::7f00:1]", "name.of.inside:5000", "2130706433.", "0x7f.1"),
)


@pytest.mark.parametrize("host", HOSTS)
async def test_what_is_not_public_is_not_asked(
    host: str, store: Store, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = asyncio.get_running_loop().getaddrinfo

    async def resolved(name: str, port: int, **given: object) -> object:
        return await resolve("127.0.0.1" if name.startswith("name.") else name, port, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    name = f"{host.format(port=listener.port)}/a/b:x"
    said = set()
    async with Keeper(store, KeeperSettings()) as keeper:
        for attempt in (keeper.ensure(name), keeper.ensure(f"{name.removesuffix(':x')}@sha256:{'0' * 64}")):
            await attempt.over.wait()
            assert attempt.error is not None
            said.add((attempt.error.code, attempt.error.message.partition(" is ")[2]))
    with contextlib.suppress(AgentEnvError):
        await ensured(store, parse(name), Reach())
    assert listener.hits == []
    assert said in (
        {("forbidden", "not on this machine's allow list")},
        {("config", "")},  # what some software reads as an address is no host
    )


async def test_a_name_that_leads_elsewhere_when_it_is_connected_to_gains_nothing(
    store: Store, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    resolve, addresses = loop.getaddrinfo, iter(["8.8.8.8"])

    async def rebound(name: str, port: int, **given: object) -> object:
        return await resolve(next(addresses, "127.0.0.1"), port, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "getaddrinfo", rebound)
    settings = KeeperSettings()
    async with guarded(store, Reach()) as reaching, Keeper(reaching, settings) as keeper:
        pull = keeper.ensure(f"rebound.example:{listener.port}/a/b@sha256:{'0' * 64}")
        await pull.over.wait()
    assert isinstance(pull.error, ImageUnavailableError)
    assert listener.hits == []


@pytest.mark.parametrize("named", ["127.0.0.1:{port}", "localhost:{port}"])
async def test_a_named_registry_is_asked_wherever_it_is(named: str, store: Store, listener: Listener) -> None:
    host = named.format(port=listener.port)
    with pytest.raises(ImageUnavailableError):
        await ensured(store, parse(f"{host}/a/b"), Reach([host]))
    assert listener.hits
    with pytest.raises(ForbiddenError):
        await ensured(store, parse("127.0.0.1:9/a/b"), Reach([host]))


async def test_skopeo_has_no_way_out_but_the_proxy(
    store: Store, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a registry leads it on by a redirect: Go asks no proxy for addresses of loopback."""
    assert is_enforced(), "Linux 6.7 or newer, with Landlock"
    program = tmp_path / "skopeo"
    program.write_text(
        f"#!{sys.executable}\nimport os, socket, sys\nassert os.environ['HTTPS_PROXY']\n"
        f"socket.create_connection(('127.0.0.1', {listener.port}))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    async with guarded(store, Reach()) as reaching:
        with pytest.raises(ImageUnavailableError, match="Permission denied"):
            await asyncio.to_thread(reaching.pinned, parse("registry.example/a/b"))
    assert listener.hits == []
    with socket.create_connection(("127.0.0.1", listener.port)):
        pass  # this process is not restricted


async def test_a_digest_alone_is_asked_of_nobody(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without skopeo, asking a registry is a ConfigError
    digest = f"sha256:{'0' * 64}"
    async with Keeper(store) as keeper:
        pull = keeper.ensure(digest)
        await pull.over.wait()
    assert isinstance(pull.error, ImageUnavailableError)
    with pytest.raises(ImageUnavailableError, match="no image in this store has the digest"):
        store.ensure(digest)

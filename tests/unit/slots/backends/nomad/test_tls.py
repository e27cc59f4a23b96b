"""How Nomad is reached: by its own variables, over mutual TLS under a name that is not its address, as whom.

Requests and the event stream go by different libraries: each must know the same of both.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from agentenv.config import NomadSettings
from agentenv.errors import ConfigError
from agentenv.farm.nomad import follow_log
from agentenv.slots.backends.nomad.api import EventStream, NomadApi, open_stream_session
from agentenv.slots.backends.nomad.explain import NomadError
from tests.waiting import until

TLS = Path(__file__).parent / "tls"
ALL = {
    "ca_cert": TLS / "ca.pem", "client_cert": TLS / "client.pem", "client_key": TLS / "client-key.pem",
    "tls_server_name": "server.global.nomad",
}  # fmt: skip


class Nomad(http.server.ThreadingHTTPServer):
    """Answers everything with one JSON line; wants a certificate of its CA. ``heard`` is what it was asked;
    ``elsewhere``: the address it sends everybody to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heard: list[tuple[str, dict[str, list[str]], str | None]] = []
        self.elsewhere = ""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "server.pem", TLS / "server-key.pem")
        context.load_verify_locations(TLS / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def address(self) -> str:
        return f"https://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that fails is what a test wants."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Nomad

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.server.heard.append((asked.path, parse_qs(asked.query), self.headers.get("X-Nomad-Token")))
        body = json.dumps({"Name": "team"}).encode() + b"\n"
        if self.server.elsewhere:
            body = b"moved\n"
            self.send_response(307)
            self.send_header("Location", self.server.elsewhere + self.path)
        else:
            self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
async def server() -> AsyncIterator[Nomad]:
    with serving() as found:
        yield found
        # aiohttp does not wait until TLS connections that it closes have ended ("Graceful Shutdown" of its manual).
        polled = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        await until(lambda: len(polled.get_map()) == 1)  # the loop's own


@contextmanager
def serving() -> Iterator[Nomad]:
    with Nomad() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


async def by_request(settings: NomadSettings) -> None:
    api = NomadApi(settings, settings.address)
    try:
        await api.check_access()
    finally:
        await api.aclose()


async def by_stream(settings: NomadSettings) -> None:
    async with open_stream_session(settings) as session:
        lines = EventStream(session, settings, settings.address).lines(after=0, nodes=False)
        assert await anext(lines) == {}
        assert await anext(lines) == {"Name": "team"}
        await lines.aclose()


async def by_log(settings: NomadSettings) -> None:
    assert [line async for line in follow_log(settings, "a" * 36, tail_bytes=1)] == ['{"Name": "team"}']


Way = Callable[[NomadSettings], Awaitable[None]]
WAYS = pytest.mark.parametrize("way", [by_request, by_stream, by_log])


def settings_for(server: Nomad, **given: Any) -> NomadSettings:
    return NomadSettings(address=server.address, token="secret", namespace="team", region="mars", **given)


@WAYS
async def test_it_is_reached_with_all_it_wants_and_told_who_asks(server: Nomad, way: Way) -> None:
    await way(settings_for(server, **ALL))

    [(_, query, token)] = server.heard
    assert (token, query["region"]) == ("secret", ["mars"])
    assert "team" in (*query.get("namespace", ()), server.heard[0][0].rpartition("/")[2])


@WAYS
@pytest.mark.parametrize(
    "wrong",
    [{"ca_cert": None}, {"tls_server_name": None}, {"tls_server_name": "other.global.nomad"}],
    ids=["unknown CA", "by its address", "another name"],
)
async def test_a_server_that_is_not_known_for_who_it_is_hears_nothing(
    server: Nomad, way: Way, wrong: dict[str, Any]
) -> None:
    with pytest.raises(NomadError, match=r"(?i)certificate|hostname") as refused:
        await way(settings_for(server, **{**ALL, **wrong}))
    assert refused.value.status == 0
    assert server.heard == [], "not even the token"


@WAYS
async def test_without_a_certificate_of_ones_own_nothing_is_answered(server: Nomad, way: Way) -> None:
    with pytest.raises(NomadError):
        await way(settings_for(server, ca_cert=ALL["ca_cert"], tls_server_name=ALL["tls_server_name"]))
    assert server.heard == []


@WAYS
@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")  # asked for by name; urllib3 says so all the same
async def test_skip_verify_takes_any_server(server: Nomad, way: Way) -> None:
    own = {"client_cert": ALL["client_cert"], "client_key": ALL["client_key"]}
    await way(settings_for(server, skip_verify=True, **own))
    assert len(server.heard) == 1


@WAYS
async def test_proxies_are_for_the_internet(server: Nomad, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await way(settings_for(server, **ALL))
    assert len(server.heard) == 1


@WAYS
async def test_a_token_goes_nowhere_by_a_redirect(server: Nomad, way: Way) -> None:
    with serving() as other:
        server.elsewhere = other.address
        with pytest.raises(NomadError):
            await way(settings_for(server, **ALL))
        assert (len(server.heard), other.heard) == (1, [])


@pytest.mark.parametrize("field", ["ca_cert", "client_cert"])
def test_a_file_that_is_no_certificate_is_named(field: str, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=rf"^{field}: cannot be used"):
        open_stream_session(NomadSettings(**{field: tmp_path / "x.pem"}))


def test_nomads_own_variables_are_heeded_and_what_is_given_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "NOMAD_ADDR": "https://nomad:4646", "NOMAD_TOKEN": "t", "NOMAD_NAMESPACE": "team", "NOMAD_REGION": "mars",
        "NOMAD_CACERT": "/ca", "NOMAD_CLIENT_CERT": "/cert", "NOMAD_CLIENT_KEY": "/key",
        "NOMAD_TLS_SERVER_NAME": "server.mars.nomad", "NOMAD_SKIP_VERIFY": "true",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = NomadSettings.from_environment(namespace="mine", region=None)

    assert (found.address, found.token, found.namespace, found.region) == ("https://nomad:4646", "t", "mine", "mars")
    assert (found.ca_cert, found.client_cert, found.client_key) == (Path("/ca"), Path("/cert"), Path("/key"))
    assert (found.tls_server_name, found.skip_verify) == ("server.mars.nomad", True)
    assert NomadSettings.from_environment().namespace == "team"
    monkeypatch.setenv("NOMAD_SKIP_VERIFY", "perhaps")
    with pytest.raises(ConfigError, match="skip_verify"):
        NomadSettings.from_environment()

"""What may be reached: names before they are resolved, addresses after."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp.resolver import ThreadedResolver

from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import AllowRule
from agentenv.api.web.network import AllowList, GuardedResolver
from agentenv.errors import ConfigError, InvalidArgumentsError, PolicyRefusalError


def allowing(*rules: str | dict[str, Any], secrets: Secrets | None = None) -> AllowList:
    read = [AllowRule(host=rule) if isinstance(rule, str) else AllowRule.model_validate(rule) for rule in rules]
    return AllowList(read, secrets)


@pytest.mark.parametrize(
    ("rules", "url"),
    [
        (["example.org"], "http://example.org/a?b#c"),
        (["Example.ORG."], "https://EXAMPLE.org./"),
        (["*.example.org"], "https://a.b.example.org/"),
        (["*"], "http://anything.example/"),
        (["*"], "http://8.8.8.8/"),
        (["8.8.8.0/24"], "http://8.8.8.8/"),
        (["127.0.0.1"], "http://127.0.0.1/"),
        (["::1"], "http://[::1]/"),
        (["127.0.0.0/8"], "http://[::ffff:127.0.0.1]/"),
        ([{"host": "example.org", "ports": [8080]}], "http://example.org:8080/"),
        (["xn--mnchen-3ya.de"], "http://münchen.de/"),
    ],
)
def test_what_is_on_the_list_is_let_through(rules: Sequence[Any], url: str) -> None:
    allowing(*rules).judged(url)


@pytest.mark.parametrize(
    ("rules", "url", "said"),
    [
        ([], "http://example.org/", "not on the tool server's allow list"),
        (["example.org"], "http://example.com/", "example.com is not on"),
        (["example.org"], "http://example.org.evil.com/", "is not on"),
        (["*.example.org"], "http://example.org/", "is not on"),
        (["*.example.org"], "http://evilexample.org/", "is not on"),
        (["example.org"], "http://example.org:8080/", "port 8080"),
        (["example.org"], "http://8.8.8.8/", "not on"),
        (["*"], "http://127.0.0.1/", "not a public address"),
        (["*"], "http://10.1.2.3/", "not a public address"),
        (["*"], "http://169.254.169.254/latest/meta-data/", "not a public address"),
        (["*"], "http://[::1]/", "not a public address"),
        (["*"], "http://[::ffff:10.0.0.1]/", "not a public address"),
        (["*"], "http://[64:ff9b::7f00:1]/", "not a public address"),
        (["*"], "http://[2002:7f00:1::]/", "not a public address"),
        (["*"], "http://[fe80::1%25eth0]/", "not a public address"),
        (["*"], "http://0.0.0.0/", "not a public address"),
        (["*"], "http://127.0.0.1./", "not a public address"),
        (["*"], "http://224.0.0.1/", "not a public address"),
        (["127.0.0.1"], "http://127.0.0.2/", "not a public address"),
        (["127.0.0.1"], "http://127.0.0.1:8080/", "not a public address"),
    ],
)
def test_what_is_not_is_refused_as_policy(rules: Sequence[Any], url: str, said: str) -> None:
    with pytest.raises(PolicyRefusalError, match=said):
        allowing(*rules).judged(url)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.org/", "example.org", "//example.org/", "http://", "http://:80/", "",
     "javascript:alert(1)", "http://user:pw@example.org/", "http://example.org:99999/", "http://[::1", "http://a b/",
     "http://example.org/" + "a" * 9_000, "\0", "http://\ud800/"],
)  # fmt: skip
def test_what_is_no_web_address_is_the_models_mistake(url: str) -> None:
    with pytest.raises(InvalidArgumentsError):
        allowing("*").judged(url)


def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    async def resolve(_: object, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        return [{"hostname": host, "host": each, "port": port, "family": socket.AF_INET} for each in addresses]

    monkeypatch.setattr(ThreadedResolver, "resolve", resolve)


@pytest.mark.parametrize(
    ("rules", "addresses", "kept"),
    [
        (["inside.example"], ["93.184.216.34"], ["93.184.216.34"]),
        (["inside.example"], ["10.0.0.1", "93.184.216.34"], ["93.184.216.34"]),
        (["inside.example", "10.0.0.0/8"], ["10.0.0.1"], ["10.0.0.1"]),
    ],
)
async def test_only_judged_addresses_are_connected_to(
    monkeypatch: pytest.MonkeyPatch, rules: list[str], addresses: list[str], kept: list[str]
) -> None:
    resolving_to(monkeypatch, *addresses)
    assert await allowing(*rules).addresses("inside.example", 80) == kept
    found = await GuardedResolver(allowing(*rules)).resolve("inside.example", 80)
    assert [each["host"] for each in found] == kept


@pytest.mark.parametrize("address", ["127.0.0.1", "192.168.1.1", "::1", "fd00::1", "169.254.169.254"])
async def test_a_listed_name_that_leads_inside_leads_nowhere(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    resolving_to(monkeypatch, address)
    with pytest.raises(PolicyRefusalError, match="not a public address"):
        await allowing("public.example", "*").addresses("public.example", 443)


async def test_another_name_of_loopback_is_loopback() -> None:
    with pytest.raises(PolicyRefusalError, match=r"127\.0\.0\.1 is not a public address"):
        await allowing("*").addresses("localhost", 80)


@pytest.mark.parametrize(
    "host",
    ["127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "0x7f000001", "0X7F.1", "017700000001", "2130706433", "0", "0.0",
     "2130706433.", "127.1.", "2852039166", "1.2.3.4.5", "name.1", "name.0x1", "8.8.2056"],
)  # fmt: skip
def test_a_number_that_is_no_address_is_no_name_either(host: str) -> None:
    """Some read it as an address: an HTTP client without asking the resolver, the C library when it is asked."""
    with pytest.raises(PolicyRefusalError, match="neither a host name nor an IP address"):
        allowing("*").judged(f"http://{host}/")
    with pytest.raises(ConfigError, match=r"network\.allow\.host"):
        allowing(host)


@pytest.mark.parametrize("host", ["1.example.org", "0x7f.example", "x86", "a1", "7-zip.org", "example.x0"])
def test_a_name_with_digits_is_a_name(host: str) -> None:
    assert allowing("*").judged(f"http://{host}/").host == host


def test_credentials_go_to_their_host_only() -> None:
    rule = {"host": "api.example", "ports": [443], "headers": {"Authorization": "Bearer {key}"}}
    allowed = allowing(rule, "*", secrets=Secrets({"key": "value-of-key"}))
    assert allowed.headers_for(allowed.judged("https://api.example/x")) == {"Authorization": "Bearer value-of-key"}
    assert allowed.headers_for(allowed.judged("http://api.example/x")) == {}
    assert allowed.headers_for(allowed.judged("https://www.api.example/x")) == {}
    with pytest.raises(ConfigError, match="unknown secret 'key'"):
        allowing(rule)
    with pytest.raises(ConfigError, match="would go to every host"):
        allowing({**rule, "host": "*"}, secrets=Secrets({"key": "value-of-key"}))


def test_credentials_go_over_http_only_where_the_operator_named_the_port() -> None:
    """It is the model that writes http:// or https://."""
    secrets = Secrets({"key": "value-of-key"})
    rule = {"host": "api.example", "headers": {"Authorization": "Bearer {key}"}}
    sent = {"Authorization": "Bearer value-of-key"}

    allowed = allowing(rule, secrets=secrets)
    assert allowed.headers_for(allowed.judged("https://api.example/")) == sent
    with pytest.raises(PolicyRefusalError, match=r"port 80 of api\.example"):
        allowed.judged("http://api.example/")
    assert allowed.headers_for(allowed.judged("http://api.example:443/")) == {}

    beside = allowing(rule, "api.example", secrets=secrets)
    assert beside.headers_for(beside.judged("http://api.example/")) == {}, "the page may be read, without them"

    named = allowing({**rule, "ports": [443, 8080]}, secrets=secrets)
    assert named.headers_for(named.judged("http://api.example:8080/")) == sent
    assert named.headers_for(named.judged("http://api.example:443/")) == {}


@pytest.mark.parametrize("host", ["http://example.org", "example.org:80", "a.*.org", "**", "10.0.0.0/40", "a b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.allow\.host"):
        allowing(host)

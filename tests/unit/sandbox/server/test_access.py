"""Who may use which route of a sandbox server: the table, and the decisions it leads to."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from aiohttp import web

from agentenv.errors import FencedError, ProtocolError
from agentenv.sandbox.control_protocol import MAX_GENERATION
from agentenv.sandbox.server.access import FENCED, ROUTES, Bearer, Who, bearer_of, fence, generation_of, refusal
from agentenv.sandbox.server.app import SandboxApp
from agentenv.wire.passes import make_pass

TOKEN = "t" * 32


def _served() -> set[str]:
    """Every route of the application."""
    nothing: Any = MagicMock()
    application = SandboxApp(nothing, nothing, nothing, TOKEN, nothing, nothing).application()
    routes = {(route.method, cast("web.Resource", route.resource).canonical) for route in application.router.routes()}
    return {f"{'GET' if method == 'HEAD' else method} {path}" for method, path in routes}


def test_every_route_has_an_entry() -> None:
    assert _served() == set(ROUTES)


def test_what_a_run_may_use_is_this() -> None:
    """A line more here is a right more for every trainer."""
    assert {route for route, who in ROUTES.items() if who is Who.run} == {
        "GET /v1/info",
        "GET /v1/stream",
        "POST /v1/batch",
        "POST /v1/leases/renew",
        "POST /v1/leases/release",
        "POST /v1/leases/act",
        "GET /v1/checkpoints/{checkpoint}/layers/{layer}",
        "PUT /v1/slots/{slot}/tar",
        "GET /v1/slots/{slot}/tar",
        "PUT /v1/attachments/{call}/{field}",
        "GET /v1/attachments/{call}/{field}",
        "GET /v1/calls/{call}/output",
        "PUT /v1/slots/{slot}/transfer",
        "GET /v1/slots/{slot}/transfer",
        "GET /v1/slots/{slot}/connect",
        "GET /v1/slots/{slot}/listen",
        "GET /v1/slots/{slot}/program",
        "GET /v1/slots/{slot}/image",
        "GET /v1/slots/{slot}/metrics",
    }
    assert [route for route, who in ROUTES.items() if who is Who.anybody] == ["GET /health"]


@pytest.mark.parametrize(
    ("header", "bearer"),
    [
        (f"Bearer {TOKEN}", Bearer()),
        (f"Bearer {make_pass(TOKEN, 'a.b')}", Bearer("a.b")),
        (f"Bearer {make_pass('another', 'a.b')}", None),
        ("", None),
        ("Bearer ", None),
        ("Bearer wrong", None),
        (TOKEN, None),
        (f"bearer {TOKEN}", None),
        (f"Basic {TOKEN}", None),
        (f"Bearer  {TOKEN}", None),
        (f"Bearer {TOKEN} ", None),
        ("Bearer \udce9", None),
    ],
)
def test_a_bearer_is_the_token_or_a_pass(header: str, bearer: Bearer | None) -> None:
    assert bearer_of(header, TOKEN) == bearer


def test_a_route_that_is_not_in_the_table_needs_the_control_token() -> None:
    for route in ("", "GET /v1/nowhere"):
        assert refusal(route, Bearer()) is None
        for bearer, status in ((None, 401), (Bearer("a"), 403)):
            refused = refusal(route, bearer)
            assert refused is not None
            assert (refused[0], refused[1].error) == (status, "refused")


def test_health_is_for_anybody() -> None:
    for bearer in (None, Bearer("a"), Bearer()):
        assert refusal("GET /health", bearer) is None


# -- the fence


def test_whatever_changes_leases_is_fenced() -> None:
    leases = {route for route in ROUTES if route.startswith("POST /v1/leases")}
    assert leases | {"DELETE /v1/paused/{checkpoint}"} == FENCED


@pytest.mark.parametrize(
    ("highest", "given", "guest", "then"),
    [
        (0, None, False, 0),
        (0, None, True, 0),
        (0, 0, False, 0),
        (0, 4, False, 4),
        (4, 4, False, 4),
        (4, 5, False, 5),
        (4, 5, True, 5),
        (4, None, True, 4),
    ],
)
def test_who_controls_a_container_is_admitted(highest: int, given: int | None, guest: bool, then: int) -> None:
    assert fence(highest, given, guest=guest) == then


@pytest.mark.parametrize(
    ("highest", "given", "guest", "told"),
    [
        (4, 3, False, "generation 4 controls the container, not this one of generation 3"),
        (4, 0, False, "not this one of generation 0"),
        (4, 3, True, "not this one of generation 3"),
        (4, None, False, r"\(generation 4\) controls the container \(lease through the service \(farm_url, --farm\)"),
    ],
)
def test_who_does_not_is_told_who_does(highest: int, given: int | None, guest: bool, told: str) -> None:
    with pytest.raises(FencedError, match=told):
        fence(highest, given, guest=guest)


def test_a_generation_is_a_number() -> None:
    assert generation_of(None) is None
    assert generation_of("0") == 0
    assert generation_of(str(MAX_GENERATION)) == MAX_GENERATION
    for header in ("", "-1", "+1", "1.0", " 1", "1_0", "\N{SUPERSCRIPT TWO}", "x", str(MAX_GENERATION + 1), "9" * 5000):
        with pytest.raises(ProtocolError, match="X-Agentenv-Generation"):
            generation_of(header)

"""Who may use which route, and which farm controls the leases. Data and pure decisions.

Two kinds of bearer: the container's control token may do everything; a pass (:mod:`agentenv.wire.passes`) may use the
leases of its run. A request with a pass also needs the key of such a lease
(:class:`agentenv.sandbox.server.container.Requester`).

Two farms may have the control token, when one was cut off or frozen and another has replaced it. Each farm sends its
generation with requests that change leases, and a container refuses any but the highest it has seen.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from aiohttp import web

from agentenv.errors import FencedError, ProtocolError
from agentenv.sandbox.control_protocol import MAX_GENERATION
from agentenv.wire.passes import run_of_pass
from agentenv.wire.server import ErrorReply
from agentenv.wire.watch import GENERATION_HEADER


class Who(Enum):
    """Who may use a route."""

    anybody = "anybody"
    run = "with a pass or the control token"
    control = "with the control token"


ROUTES: Final[Mapping[str, Who]] = MappingProxyType(
    {
        "GET /health": Who.anybody,
        "GET /metrics": Who.control,
        "GET /v1/info": Who.run,
        "GET /v1/slots": Who.control,
        "GET /v1/watch": Who.control,
        "GET /v1/statistics": Who.control,
        "GET /v1/stalls": Who.control,
        "GET /v1/stream": Who.run,
        "POST /v1/batch": Who.run,
        "POST /v1/leases": Who.control,
        "POST /v1/leases/renew": Who.run,
        "POST /v1/leases/release": Who.run,
        "POST /v1/leases/act": Who.run,
        "POST /v1/leases/end": Who.control,
        "GET /v1/paused": Who.control,
        "DELETE /v1/paused/{checkpoint}": Who.control,
        "GET /v1/checkpoints/{checkpoint}/layers/{layer}": Who.run,
        "PUT /v1/attachments/{call}/{field}": Who.run,
        "GET /v1/attachments/{call}/{field}": Who.run,
        "GET /v1/calls/{call}/output": Who.run,
        "GET /v1/slots/{slot}/tail": Who.control,
        "PUT /v1/slots/{slot}/tar": Who.run,
        "GET /v1/slots/{slot}/tar": Who.run,
        "PUT /v1/slots/{slot}/transfer": Who.run,
        "GET /v1/slots/{slot}/transfer": Who.run,
        "GET /v1/slots/{slot}/connect": Who.run,
        "GET /v1/slots/{slot}/listen": Who.run,
        "GET /v1/slots/{slot}/program": Who.run,
        "GET /v1/slots/{slot}/image": Who.run,
        "GET /v1/slots/{slot}/metrics": Who.run,
    }
)

FENCED: Final = frozenset(
    {
        "POST /v1/leases",
        "POST /v1/leases/renew",
        "POST /v1/leases/release",
        "POST /v1/leases/act",
        "POST /v1/leases/end",
        "DELETE /v1/paused/{checkpoint}",
    }
)
"""Requests that change leases: with the control token subject to :func:`fence`; with a pass the lease's key is
enough."""


@dataclass(frozen=True)
class Bearer:
    """The sender of a request: a run, by its pass; with the control token ``run`` is None."""

    run: str | None = None


BEARER: Final = web.RequestKey("bearer", Bearer)
"""The sender of a request, set for every route that needs a credential."""


def route_of(request: web.Request) -> str:
    """The request's entry in :data:`ROUTES`; empty if there is no such route."""
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return f"{method} {resource.canonical}" if resource is not None else ""


def bearer_of(authorization: str, control_token: str) -> Bearer | None:
    """The sender by the header ``Authorization``; None if neither token nor pass are right. Compared in constant
    time."""
    scheme, _, token = authorization.partition(" ")
    if scheme != "Bearer":
        return None
    if hmac.compare_digest(token.encode("utf-8", "surrogateescape"), control_token.encode()):
        return Bearer()
    run = run_of_pass(control_token, token)
    return None if run is None else Bearer(run)


def refusal(route: str, bearer: Bearer | None) -> tuple[int, ErrorReply] | None:
    """Status and body for a sender who may not use the route; None for one who may. An unknown route
    needs the control token."""
    who = ROUTES.get(route, Who.control)
    if who is Who.anybody:
        return None
    if bearer is None:
        return 401, ErrorReply(error="refused", message="the bearer token is missing or wrong")
    if who is Who.control and bearer.run is not None:
        return 403, ErrorReply(
            error="refused",
            message=f"a pass does not allow {route or 'this'}",
            next_step="use the farm service, which has the container's control token",
        )
    return None


def generation_of(header: str | None) -> int | None:
    """The generation in the header ``X-Agentenv-Generation``; None without one. Raises ProtocolError for anything
    but a number up to ``MAX_GENERATION``."""
    if header is None:
        return None
    digits = header.isascii() and header.isdigit() and len(header) <= len(str(MAX_GENERATION))
    if not digits or (generation := int(header)) > MAX_GENERATION:
        raise ProtocolError(f"the header {GENERATION_HEADER} must be a number up to {MAX_GENERATION}")
    return generation


def fence(highest: int, sent: int | None, *, guest: bool) -> int:
    """The highest generation seen, after a request that changes leases. ``sent`` is the sender's; ``guest``: it may
    lease although a farm controls the container. Raises FencedError when another farm controls it."""
    if sent is None:
        if highest > 0 and not guest:
            raise FencedError(
                f"a farm service or a trainer (generation {highest}) controls the container",
                next_step="lease through the service (farm_url, --farm), or beside it as a guest (--guest)",
            )
        return highest
    if sent < highest:
        raise FencedError(
            f"a farm service of generation {highest} controls the container, not this one of generation {sent}",
            next_step="use the later one, or restart this one: it then gets a higher generation",
        )
    return sent

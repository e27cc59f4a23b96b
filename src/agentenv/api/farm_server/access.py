"""Who may use which route of the farm service. A table, and its check."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal

from fastapi import Depends, Request

from agentenv.api.farm_server.limits import AskLimiter
from agentenv.api.farm_server.settings import AskLimits, OpenPages
from agentenv.api.farm_server.tokens import Right, Scope, TokenKeys
from agentenv.errors import ForbiddenError, TooManyRequestsError

Needs = Literal["nothing", "read", "run", "admin"]
ROUTES: Final[Mapping[str, Needs]] = MappingProxyType(
    {
        "GET /health": "nothing",
        "GET /ready": "nothing",
        "GET /openapi.json": "read",
        "GET /": "nothing",
        "GET /page.js": "nothing",
        "GET /page.css": "nothing",
        "GET /metrics": "read",
        "GET /v1/sight": "read",
        "GET /v1/sight/changes": "read",
        "GET /v1/leases/{container}/{slot}/{epoch}/tail": "run",
        "GET /v1/farm": "read",
        "POST /v1/asks": "run",
        "GET /v1/asks/{request_id}": "run",
        "DELETE /v1/asks/{request_id}": "run",
        "GET /v1/news": "run",
        "GET /v1/leases": "read",
        "POST /v1/leases/release": "run",
        "DELETE /v1/leases": "run",
        "DELETE /v1/leases/{container}/{slot}/{epoch}": "run",
        "GET /v1/runs": "read",
        "DELETE /v1/runs/{run:path}": "admin",
        "GET /v1/containers": "read",
    }
)
"""What a token's scope has to allow. Every scope allows ``read``, admin allows all; and everything a token allows, it
allows for the runs it covers."""
_ALLOWS: Final[Mapping[Scope, Collection[Needs]]] = {
    "read": ("nothing", "read"),
    "run": ("nothing", "read", "run"),
    "admin": ("nothing", "read", "run", "admin"),
}


class Access:
    """Checks the token of every request, and how often it asks. ``denied``: ids of tokens that are no longer
    accepted."""

    def __init__(
        self,
        keys: TokenKeys,
        *,
        denied: Collection[str] = (),
        limits: AskLimits | None = None,
        public: OpenPages | None = None,
    ) -> None:
        self.keys = keys
        self.denied = denied
        self.limiter = AskLimiter(limits or AskLimits())
        pages = public or OpenPages()
        self._open = {
            path for path, isopen in (("/metrics", pages.metrics), ("/openapi.json", pages.openapi)) if isopen
        }

    async def check(self, request: Request) -> None:
        """Raises UnauthorizedError, ForbiddenError. The right is then ``request.state.right``."""
        path = request.scope["route"].path
        needs = ROUTES[f"{request.method} {path}"]
        if needs == "nothing" or path in self._open:
            return
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        right = self.keys.verify(token.strip() if kind.lower() == "bearer" else "", denied=self.denied)
        if needs not in _ALLOWS[right.scope]:
            raise ForbiddenError(
                "farm_token",
                f"a token of scope {right.scope!r} may not do this",
                next_step=f"use one of scope {needs!r}",
            )
        request.state.right = right

    def run_of(self, right: Right, named: str) -> str:
        """The run that a request is for. Raises ForbiddenError when the token does not cover it, or names several."""
        run = named or right.only_run
        if not run:
            raise ForbiddenError(
                "farm_run", f"the token is for {right.run!r}: several runs", next_step="say which (farm_run)"
            )
        if not right.covers(run):
            raise ForbiddenError("farm_run", f"the token is for {right.run!r}, not for {run!r}")
        return run

    def limit(self, right: Right, cost: int) -> None:
        """Count so many asks of a token. Raises TooManyRequestsError."""
        if (retry_after_s := self.limiter.hit(right.jti, cost)) is not None:
            raise TooManyRequestsError(
                f"the token has asked for more than its rate allows; try again in {retry_after_s:.1f} s",
                retry_after_s=retry_after_s,
            )


def _right(request: Request) -> Right:
    right: Right = request.state.right
    return right


MyRight = Annotated[Right, Depends(_right)]
"""What the token of a request allows."""

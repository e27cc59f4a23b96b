"""Who may use which route of the farm service, and how often each token may ask. A table, and its check."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Set
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from pydantic import TypeAdapter
from starlette.types import Message, Receive, Scope, Send

from agentenv.api.farm_server.bodies import MalformedError, TypedRequest, parsed
from agentenv.api.farm_server.settings import AskLimits, OpenPages
from agentenv.api.farm_server.tokens import Right, TokenKeys, bearer_token
from agentenv.errors import ForbiddenError, TooManyRequestsError
from agentenv.wire import farm as wire
from agentenv.wire.leases import MAX_TOKENS

Needs = Literal["nothing", "read", "look", "run", "admin", "operate"]
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
        "GET /v1/leases/{container}/{slot}/{epoch}/tail": "look",
        "GET /v1/farm": "read",
        "POST /v1/asks": "run",
        "GET /v1/asks/{request_id}": "run",
        "DELETE /v1/asks/{request_id}": "run",
        "GET /v1/news": "run",
        "GET /v1/leases": "read",
        "POST /v1/leases/release": "run",
        "DELETE /v1/leases": "run",
        "DELETE /v1/leases/{container}/{slot}/{epoch}": "run",
        "GET /v1/paused": "run",
        "DELETE /v1/paused": "run",
        "GET /v1/runs": "read",
        "DELETE /v1/runs/{run:path}": "admin",
        "GET /v1/containers": "read",
        "POST /v1/containers/{container}/drain": "operate",
        "POST /v1/tokens": "admin",
        "DELETE /v1/tokens/{jti}": "operate",
        "POST /v1/images": "run",
        "POST /v1/images/commit": "run",
        "GET /v1/images": "read",
        "POST /execute": "run",
        "POST /release": "run",
        "POST /artifacts/read": "run",
        "POST /artifacts/list": "run",
        "POST /artifacts/archive": "run",
        "GET /status": "read",
    }
)
"""What a token has to allow. Every scope allows ``read``, admin allows all; and everything a token allows, it allows
for the runs it covers. ``operate`` concerns the runs of everybody: admin of all (``*``)."""
_MALFORMED: Final = AskLimits(asks_per_s=0.5, burst=5)
"""Bodies of one token that are not as described: each may take some 50 ms of the event loop."""
_ALLOWS: Final[Mapping[wire.Scope, Set[Needs]]] = {
    "read": {"read"},
    "look": {"read", "look"},
    "run": {"read", "look", "run"},
    "admin": {"read", "look", "run", "admin"},
}


_MINT_COST: Final = 20
"""Asks for slots that making a token counts as: each is a line of the audit log, and programs need few."""


def allows(right: Right, needs: Needs) -> bool:
    """Whether a token may use a route that needs this; of which runs is the route's to check."""
    if needs == "operate":
        return right.scope == "admin" and right.run == "*"
    return needs == "nothing" or needs in _ALLOWS[right.scope]


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
        self.denied = frozenset(denied)
        self._lasting: dict[asyncio.Timeout, Right] = {}
        """Answers that go on, each until its token ends."""
        self.limiter = AskLimiter(limits or AskLimits())
        self._malformed = AskLimiter(_MALFORMED)
        pages = public or OpenPages()
        self._open = {
            path for path, isopen in (("/metrics", pages.metrics), ("/openapi.json", pages.openapi)) if isopen
        }

    def check(self, request: Request) -> Right | None:
        """The right by which the request may use its route, which is then ``request.state.right``; None: it needs none.
        Raises UnauthorizedError, ForbiddenError."""
        path = request.scope["route"].path
        route = f"{request.method} {path}"
        if ROUTES[route] == "nothing" or path in self._open:
            return None
        request.state.right = self.right(request, route)
        return request.state.right  # type: ignore[no-any-return]

    def right(self, request: Request, route: str) -> Right:
        """What the request's token allows. Raises UnauthorizedError, ForbiddenError when that is not this route."""
        needs = ROUTES[route]
        right = self.keys.verify(bearer_token(request.headers.get("authorization")), denied=self.denied)
        if not allows(right, needs):
            raise ForbiddenError(
                "farm_token",
                f"a token of scope {right.scope!r} for {right.run!r} may not do this",
                next_step="use one of scope 'admin' for '*'" if needs == "operate" else f"use one of scope {needs!r}",
            )
        return right

    async def parsed(self, right: Right, adapter: TypeAdapter[Any], request: Request) -> Any:
        """What a request's body means. Raises MalformedError, and after many of them TooManyRequestsError: then bodies
        of the token are not read for a while."""
        self._check_malformed(right)
        raw = await request.body()
        self._check_malformed(right)  # others of the token may have come meanwhile
        try:
            return parsed(adapter, raw, request.headers.get("content-type", ""))
        except MalformedError:
            self._malformed.hit(right.jti)
            raise

    def _check_malformed(self, right: Right) -> None:
        if (retry_after_s := self._malformed.full(right.jti)) is not None:
            raise TooManyRequestsError(
                "the token has sent too many bodies that do not match /openapi.json",
                retry_after_s=retry_after_s,
            )

    def check_again(self, right: Right) -> None:
        """Raises UnauthorizedError when the token has been revoked, or has expired, since it was checked."""
        if (over := right.revoked(self.denied) or right.expired(time.time())) is not None:
            raise over

    def deny(self, denied: Collection[str]) -> None:
        """Accept the tokens with these ids no longer, nor those that they made: their answers that go on end now."""
        self.denied = frozenset(denied)
        for lasting, right in self._lasting.items():
            if right.revoked(self.denied) is not None and not lasting.expired():
                lasting.reschedule(asyncio.get_running_loop().time())

    def streams(self, jti: str) -> int:
        """Answers that go on by this token, and by those that it made."""
        return sum(right.revoked({jti}) is not None for right in self._lasting.values())

    @asynccontextmanager
    async def while_valid(self, right: Right) -> AsyncIterator[None]:
        """Ends the block, silently, when the token is revoked or expires."""
        left_s = None if math.isinf(right.ends_unix_s) else max(0.0, right.ends_unix_s - time.time())
        lasting = asyncio.timeout(left_s)
        try:
            async with lasting:
                self._lasting[lasting] = right
                yield
        except TimeoutError:
            if not lasting.expired():
                raise
        finally:
            self._lasting.pop(lasting, None)

    def run_of(self, right: Right, named: str) -> str:
        """The run that a request is for. Raises ForbiddenError when the token does not cover it, or names several."""
        run = named or right.only_run
        if not run:
            raise ForbiddenError(
                "farm_run", f"the token is for {right.run!r}: several runs", next_step="name the run (farm_run)"
            )
        if not right.covers(run):
            raise ForbiddenError("farm_run", f"the token is for {right.run!r}, not for {run!r}")
        return run

    def mint(self, request: wire.TokenRequest, right: Right) -> wire.MintedToken:
        """A token for somebody else by the right of one's own. Raises ForbiddenError when it would allow more."""
        if not right.covers(request.run):
            raise ForbiddenError("run", f"the token is for {right.run!r}, not for {request.run!r}")
        if right.cap is not None and (request.cap is None or request.cap > right.cap):
            raise ForbiddenError("cap", f"the token has a cap of {right.cap}", next_step="use a smaller token")
        if len(right.tokens) >= MAX_TOKENS:
            raise ForbiddenError(
                "farm_token",
                f"it is the last of {MAX_TOKENS} tokens of which each was made by the next",
                next_step="have it made by an earlier one",
            )
        left_s = right.ends_unix_s - time.time()
        if request.expires_s > left_s:
            raise ForbiddenError(
                "expires_s", f"the token itself expires in {left_s:.0f} s", next_step="let the new one end before it"
            )
        token = self.keys.mint(request.run, request.scope, cap=request.cap, expires_s=request.expires_s, maker=right)
        jti = self.keys.verify(token).jti
        return wire.MintedToken(token=token, jti=jti, **request.model_dump())

    def limit_minting(self, right: Right) -> None:
        """Count a request to make a token. Raises TooManyRequestsError."""
        self.limit(right, _MINT_COST)

    def limit(self, right: Right, cost: int) -> None:
        """Count so many asks of a token. Raises TooManyRequestsError."""
        if (retry_after_s := self.limiter.hit(right.jti, cost)) is not None:
            raise TooManyRequestsError(
                f"the token exceeds its request rate; retry in {retry_after_s:.1f} s",
                retry_after_s=retry_after_s,
            )


class Lasting(Response):
    """An answer that goes on until its end, or until that of the token."""

    def __init__(self, access: Access, right: Right, response: StreamingResponse) -> None:
        super().__init__()
        self._access = access
        self._right = right
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        goes_on = False

        async def noted(message: Message) -> None:
            nonlocal goes_on
            await send(message)
            goes_on = message["type"] == "http.response.start" or message.get("more_body", False)

        async with self._access.while_valid(self._right):
            await self._response(scope, receive, noted)
        if goes_on:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def checking(access: Access) -> type[APIRoute]:
    """The kind of routes that check the token first: before anything of the body is read."""

    class Checked(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            kind: Any = self.body_field and self.body_field.field_info.annotation
            body = None if kind is None else TypeAdapter[Any](kind)

            async def checked(request: Request) -> Response:
                right = access.check(request)
                if right is None:
                    return await handle(request)
                try:
                    if body is not None:
                        found = await access.parsed(right, body, request)
                        request = TypedRequest(request, await request.body(), found)
                    response = await handle(request)
                finally:
                    access.check_again(right)  # it may have taken long
                return Lasting(access, right, response) if isinstance(response, StreamingResponse) else response

            return checked

    return Checked


def _right(request: Request) -> Right:
    right: Right = request.state.right
    return right


MyRight = Annotated[Right, Depends(_right)]
"""What the token of a request allows, for routes."""


_LEAST_WAIT_S: Final = 0.05


class AskLimiter:
    """Limits asks by token. Memory: two counters for each token used within two windows (``burst / asks_per_s``).

    The window is whole seconds, at least one: within it, ``asks_per_s`` times its length may come, all at once if
    they like. Whoever uses that up may have to wait for a whole window.
    """

    def __init__(self, limits: AskLimits) -> None:
        self._storage = _Counters()
        self._windows = SlidingWindowCounterRateLimiter(self._storage)
        self._limit = _window(limits)

    def set_limits(self, limits: AskLimits) -> None:
        """Other limits from now on; if they differ, everybody begins anew."""
        self._limit = _window(limits)

    def hit(self, key: str, cost: int = 1) -> float | None:
        """Count ``cost`` asks of a token. None: they are within its limit. Otherwise they were not counted, and may
        be tried again after so many seconds.

        ``key`` is the id of a token that was verified; others must not be counted, for there may be any number. A
        request of more asks than the limit counts as many as that: otherwise it could never be made.
        """
        self._storage.drop_expired(self._limit.get_expiry())
        cost = min(cost, self._limit.amount)
        if self._windows.hit(self._limit, key, cost=cost):
            return None
        return self._wait_s(key, cost)

    def full(self, key: str) -> float | None:
        """As :meth:`hit`, and counts nothing."""
        return None if self._windows.test(self._limit, key) else self._wait_s(key, 1)

    def _wait_s(self, key: str, cost: int) -> float:
        window_s = self._limit.get_expiry()
        before, _, now, now_expires_s = self._storage.get_sliding_window(self._limit.key_for(key), window_s)
        room = self._limit.amount - cost
        return max(_LEAST_WAIT_S, wait_s(room, window_s, before, now, ends_s=now_expires_s - window_s))


class _NoTimer(threading.Timer):
    """Never started, and never to be replaced."""

    def is_alive(self) -> bool:
        """As far as the storage asks, it runs."""
        return True


class _Counters(MemoryStorage):
    """Without the thread that its base starts for each hit to drop expired counters: the thread shares the counters
    with us, and dies by a KeyError when we drop one at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.timer.cancel()
        self.timer.join()
        self.timer = _NoTimer(0, self.reset)
        self._dropped_s = time.monotonic()

    def drop_expired(self, every_s: float) -> None:
        """Drop them, if it was not done for this long."""
        if (now_s := time.monotonic()) - self._dropped_s < every_s:
            return
        self._dropped_s = now_s
        for key in tuple(self.expirations):
            self.get(key)  # drops it if it has expired


def wait_s(room: int, window_s: float, before: int, now: int, *, ends_s: float) -> float:
    """Seconds until what is counted has fallen to ``room``, if nothing more comes.

    Counted are ``now``, in this window, which ends in ``ends_s``, and of the ``before`` in the window before it as
    large a part as a window that ends at this moment covers of it.
    """
    if now <= room:
        return max(0.0, ends_s - (room - now) * window_s / before) if before else 0.0
    return ends_s + window_s - room * window_s / now


def _window(limits: AskLimits) -> RateLimitItem:
    window_s = max(1, round(limits.burst / limits.asks_per_s))
    return RateLimitItemPerSecond(max(1, round(limits.asks_per_s * window_s)), window_s)

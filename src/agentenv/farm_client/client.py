"""Requests to a farm service, at whichever of its addresses answers. No decisions about slots; see
:mod:`agentenv.wire.farm` for what is said."""

from __future__ import annotations

import asyncio
import io
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
from pydantic import ValidationError

from agentenv.config import NomadSettings
from agentenv.containers.connection import error_reply, open_session
from agentenv.deadlines import scaled
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    FarmUnreachableError,
    ProtocolError,
    TooManyRequestsError,
    from_wire,
    missing_extra,
)
from agentenv.wire import farm as wire
from agentenv.wire import images
from agentenv.wire.base import PROTOCOL_VERSION, WireModel
from agentenv.wire.server import ErrorReply

Reply = TypeVar("Reply", bound=WireModel)
Params = Sequence[tuple[str, str]]

_CONNECT_S: Final = scaled(5.0)
_ANSWER_S: Final = scaled(15.0)
"""Beyond the time that the farm was asked to wait."""
_SILENCE_S: Final = scaled(3 * wire.NEWS_BEAT_S)
_MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
_MOST_REDIRECTS: Final = 3
_PASSING: Final = frozenset({502, 503, 504})
"""Statuses of a farm that is starting or ending, and of a proxy in front of one that is."""
_TOKEN_READ_S: Final = 600.0
"""How often a token that is renewed is read again: much more often than it expires."""
_LONGEST_PAUSE_S: Final = 60.0
"""Longest pause that a farm may ask for."""
_NOMAD: Final = "nomad"
"""Scheme of a service's name: ``nomad://agentenv-farm``."""


class FarmClient:
    """A farm service at one of several addresses, used with one token. An async context manager.

    Methods raise FarmUnreachableError when no address answers as it should for now (nothing is known about what was
    asked), TooManyRequestsError when the token asks too often, and otherwise the error that the farm names:
    UnauthorizedError, ForbiddenError, ProtocolError.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str,
        *,
        run: str = "",
        renew: Callable[[], str | None] | None = None,
    ) -> None:
        """``urls``: see :class:`FarmAddresses`. ``run``: which, if the token is for several. ``renew``: see
        :class:`agentenv.farm_client.access.FarmAccess`. Raises ConfigError for an address that is none."""
        self._addresses = FarmAddresses(urls)
        self._token = token
        self._renew = renew
        self._token_read_s = time.monotonic()
        self.run = run
        self.name = secrets.token_hex(8)
        """Names the news stream."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> FarmClient:
        self._session = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def url(self) -> str:
        """The address in use."""
        return self._addresses.url

    def __repr__(self) -> str:
        return f"<FarmClient {self.url}>"

    # -- requests --------------------------------------------------------------------------------

    async def info(self) -> wire.FarmInfo:
        """The handshake. Raises ProtocolError when the farm speaks another version."""
        info = await self._request(wire.FarmInfo, "GET", "/v1/farm")
        if info.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the farm at {self.url} speaks protocol {info.protocol}, this client {PROTOCOL_VERSION}",
                next_step="use the same agentenv release on both sides",
            )
        return info

    async def runs(self) -> wire.RunList:
        """The runs that hold or wait for slots, as far as the token covers them."""
        return await self._request(wire.RunList, "GET", "/v1/runs")

    async def ask(self, asks: Sequence[wire.Ask], *, wait_s: float = 0.0) -> wire.AsksReply:
        """Ask, or ask again."""
        body = wire.AsksRequest(asks=tuple(asks), run=self.run, client=self.name, wait_s=wait_s)
        return await self._request(wire.AsksReply, "POST", "/v1/asks", body, wait_s=wait_s)

    async def cancel(self, request_id: str) -> None:
        """Withdraw an ask; if it was granted its leases end."""
        await self._request(wire.Cancelled, "DELETE", f"/v1/asks/{request_id}", params=(("run", self.run),))

    async def want_images(self, request: images.ImagesRequest) -> images.ImagesReply:
        """Have images fetched by the farm, and follow them."""
        return await self._request(images.ImagesReply, "POST", "/v1/images", request, wait_s=request.wait_s)

    async def commit_image(self, request: images.CommitRequest) -> images.ImageState:
        """Have an image made of a checkpoint, and follow it."""
        asked = request.model_copy(update={"run": self.run})
        return await self._request(images.ImageState, "POST", "/v1/images/commit", asked, wait_s=request.wait_s)

    async def image_map(self) -> images.ImageMap:
        """Which images are where."""
        return await self._request(images.ImageMap, "GET", "/v1/images")

    async def containers(self) -> wire.ContainerList:
        """The containers, for relays and operators."""
        return await self._request(wire.ContainerList, "GET", "/v1/containers")

    async def leases(self, run: str = "", tags: Sequence[str] = ()) -> wire.LeaseList:
        """Leases that the token covers: of this run (empty: of any), with all of these tags (``name:value``)."""
        return await self._request(wire.LeaseList, "GET", "/v1/leases", params=_chosen(run, tags))

    async def end_leases(self, run: str = "", tags: Sequence[str] = ()) -> wire.EndedLeases:
        """End the leases that :meth:`leases` lists; their holders are told. Raises ConfigError without run and tags."""
        return await self._request(wire.EndedLeases, "DELETE", "/v1/leases", params=_chosen(run, tags))

    async def paused(self, run: str = "") -> wire.PausedList:
        """What was paused of this run (empty: of any), as far as the token covers it."""
        return await self._request(wire.PausedList, "GET", "/v1/paused", params=(("run", run),))

    async def drop_paused(self, trajectory: str, run: str = "") -> wire.DroppedPaused:
        """Drop what was paused of a trajectory."""
        params = (("run", run), ("trajectory", trajectory))
        return await self._request(wire.DroppedPaused, "DELETE", "/v1/paused", params=params)

    async def drain(self, container: str) -> wire.Draining:
        """Give no new leases on a container, and replace it when those it has have ended."""
        return await self._request(wire.Draining, "POST", f"/v1/containers/{quote(container, safe='')}/drain")

    async def mint(self, request: wire.TokenRequest) -> wire.MintedToken:
        """A token that allows no more than the one in use."""
        return await self._request(wire.MintedToken, "POST", "/v1/tokens", request)

    async def revoke(self, jti: str, *, end_leases: bool = False) -> wire.Revoked:
        """Have a token accepted no longer, and end what it has; see :class:`agentenv.wire.farm.Revoked`."""
        params = (("end_leases", str(end_leases).lower()),)
        return await self._request(wire.Revoked, "DELETE", f"/v1/tokens/{quote(jti, safe='')}", params=params)

    async def news(self) -> AsyncGenerator[wire.NewsLine, None]:
        """The news as they come, the hello first; the caller closes it. Ends by FarmUnreachableError."""
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=_SILENCE_S)
        params = {"client": self.name, "run": self.run}
        url = await self._addresses.current()
        try:
            async with self._opened().get(
                url + "/v1/news", headers=self._headers(), params=params, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise self._refusal(url, response, await response.read())
                unfinished = b""
                async for piece in response.content.iter_any():
                    *lines, unfinished = (unfinished + piece).split(b"\n")
                    for line in lines:
                        yield _line(url, line)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(url, error) from error
        raise self._unreachable(url, "the news were cut")

    async def _request(
        self,
        model: type[Reply],
        method: str,
        path: str,
        body: WireModel | None = None,
        *,
        params: Params = (),
        wait_s: float = 0.0,
    ) -> Reply:
        content = None if body is None else body.model_dump_json().encode()
        headers = {**self._headers(), **({} if content is None else {"Content-Type": "application/json"})}
        timeout = aiohttp.ClientTimeout(total=wait_s + _ANSWER_S, connect=_CONNECT_S)
        for _ in range(_MOST_REDIRECTS):
            url = await self._addresses.current()
            try:
                async with self._opened().request(
                    method,
                    url + path,
                    data=None if content is None else io.BytesIO(content),
                    headers=headers,
                    params=tuple(params),
                    timeout=timeout,
                    allow_redirects=False,
                ) as response:
                    raw = await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise self._unreachable(url, error) from error
            if response.status == 307 and self._follow(response):
                continue
            if response.status != 200:
                raise self._refusal(url, response, raw)
            try:
                return model.model_validate_json(raw)
            except ValidationError as error:
                raise ProtocolError(f"the farm at {url}: {model.__name__}: {error}") from error
        raise self._unreachable(self.url, "its standbys refer to each other")

    # -- addresses and errors --------------------------------------------------------------------

    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used inside `async with`"
        return self._session

    def _headers(self) -> dict[str, str]:
        if self._renew is not None and time.monotonic() - self._token_read_s > _TOKEN_READ_S:
            self._token_read_s = time.monotonic()
            self._token = self._renew() or self._token
        return {"Authorization": f"Bearer {self._token}"}

    def _follow(self, response: aiohttp.ClientResponse) -> bool:
        return self._addresses.follow(response.headers.get("Location", ""))

    def _unreachable(self, url: str, why: object) -> FarmUnreachableError:
        self._addresses.failed(url)
        said = "no answer in time" if isinstance(why, TimeoutError) else str(why) or repr(why)
        cure = "is farm_url right, and is the farm running?"
        if isinstance(why, aiohttp.ClientConnectorCertificateError):
            cure = "if a CA of your own signed its certificate, name the CA's file in SSL_CERT_FILE"
        return FarmUnreachableError(f"the farm at {url} cannot be reached: {said}", next_step=cure)

    def _refusal(self, url: str, response: aiohttp.ClientResponse, body: bytes) -> AgentEnvError:
        if response.status == 307:
            followed = self._follow(response)
            whither = "" if followed else f", and refers to {response.headers.get('Location', '')!r}"
            return FarmUnreachableError(f"the farm at {url} is a standby{whither}")
        reply = error_reply(body)
        if response.status == 429:
            said = reply.message if reply is not None else f"{url} is asked too often"
            return TooManyRequestsError(said, retry_after_s=_retry_after_s(reply, response))
        if response.status in _PASSING:
            return self._unreachable(url, reply.message if reply is not None else f"HTTP {response.status}")
        if reply is None:
            return ProtocolError(
                f"{url} answered HTTP {response.status}: {body[:200]!r}",
                next_step="is it the address of a farm service?",
            )
        return from_wire(reply.error, reply.message, reply.next_step)


def _retry_after_s(reply: ErrorReply | None, response: aiohttp.ClientResponse) -> float:
    """The farm says it exactly, a proxy in whole seconds (or as a date, which is not read)."""
    if reply is not None and reply.retry_after_s is not None:
        return min(reply.retry_after_s, _LONGEST_PAUSE_S)
    said = response.headers.get("Retry-After", "")
    return min(float(said), _LONGEST_PAUSE_S) if said.isascii() and said.isdigit() else 1.0


def _chosen(run: str, tags: Sequence[str]) -> Params:
    return [("run", run), *(("tag", tag) for tag in tags)]


def _line(url: str, raw: bytes) -> wire.NewsLine:
    try:
        return wire.news_line.validate_json(raw)
    except ValidationError as error:
        raise ProtocolError(f"the farm at {url}: a line of the news: {error}") from error


async def reachable(base_url: str, within_s: float) -> bool:
    """Whether something listens there."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connecting = asyncio.ensure_future(asyncio.open_connection(parts.hostname, port))
    try:
        for patience_s in (within_s, within_s / 4):  # where this loop was held, it has yet to look at its sockets
            if (await asyncio.wait({connecting}, timeout=patience_s))[0]:
                connecting.result()[1].close()
                return True
    except OSError:
        pass
    finally:
        connecting.cancel()
    return False


class FarmAddresses:
    """The addresses of one farm: its own, perhaps those of its standbys, and names of services that Nomad is asked for
    (``nomad://SERVICE``, by ``NOMAD_ADDR`` and ``NOMAD_TOKEN``). One is in use until it fails.

    Raises ConfigError for an address that is none. ``registered`` looks a service up.
    """

    def __init__(self, given: str | Sequence[str], *, registered: Callable[[str], list[str]] | None = None) -> None:
        urls = [given] if isinstance(given, str) else list(given)
        if not urls:
            raise ConfigError("farm_url", "is missing", next_step="for example http://farm:8700")
        self._fixed = [checked_url(url) for url in urls if urlsplit(url).scheme != _NOMAD]
        self._services = [_service(url) for url in urls if urlsplit(url).scheme == _NOMAD]
        self._registered = registered or nomad_service
        self._found: list[str] = []
        self._look = bool(self._services)
        self._at = 0
        self._leader = ""

    @property
    def url(self) -> str:
        """The address in use; that of a service which has not been looked up is its name."""
        known = self._known()
        return self._leader or (known[self._at % len(known)] if known else f"{_NOMAD}://{self._services[0]}")

    async def current(self) -> str:
        """The address in use. Raises FarmUnreachableError when Nomad names none."""
        if self._look:
            problems = []
            self._found = []
            for service in self._services:
                try:
                    self._found += await asyncio.to_thread(self._registered, service)
                except FarmUnreachableError as error:
                    problems.append(str(error))
            if not self._known():
                raise FarmUnreachableError(
                    problems[0] if problems else f"Nomad has no service {self._services[0]!r}",
                    next_step="is the farm's job running? (nomad service info)",
                )
            self._look = False
        return self.url

    def follow(self, location: str) -> bool:
        """A standby refers to the leader, which is used until it fails. False: that is no address, or it would send
        the token in the clear where it was not before."""
        parts = urlsplit(location)
        clear = parts.scheme == "http" and urlsplit(self.url).scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.netloc or clear:
            return False
        self._leader = f"{parts.scheme}://{parts.netloc}"
        return True

    def failed(self, url: str) -> None:
        """That address does not answer: another is used next. Services are looked up again."""
        if url == self.url:
            self._leader = ""
            self._at += 1
        self._look = bool(self._services)

    def _known(self) -> list[str]:
        return self._fixed + self._found


def checked_url(url: str) -> str:
    """A farm's address without a trailing slash. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("farm_url", f"got {url!r}", next_step="allowed: http(s)://host:port, or nomad://service")
    return url.rstrip("/")


def _service(url: str) -> str:
    parts = urlsplit(url)
    if not parts.netloc or parts.path.strip("/") or parts.query:
        raise ConfigError("farm_url", f"got {url!r}", next_step="for example nomad://agentenv-farm")
    return parts.netloc


def nomad_service(name: str) -> list[str]:
    """Addresses under which Nomad has registered a service, ``https`` for those with that tag. Blocks. Raises
    FarmUnreachableError when Nomad cannot be asked, ConfigError for wrong ``NOMAD_*`` variables."""
    try:  # python-nomad is in [farm]
        from agentenv.slots.backends.nomad.client import NomadClient
        from agentenv.slots.backends.nomad.explain import NomadError
    except ModuleNotFoundError as error:
        raise missing_extra("farm_url: nomad", error) or error from None

    settings = NomadSettings.from_environment()
    with NomadClient(settings, settings.address) as client:
        try:
            found = client.service(name)
        except NomadError as error:
            raise FarmUnreachableError(
                f"Nomad at {settings.address} does not say where service {name!r} is: {error.message}",
                next_step=error.next_step or "see NOMAD_ADDR and NOMAD_TOKEN",
            ) from error
    return [
        f"{'https' if 'https' in (one.get('Tags') or ()) else 'http'}://{one['Address']}:{one['Port']}" for one in found
    ]

"""What registries may be: public, or allowed by the operator of the machine that connects to them.

Who names an image is a run, a task or a Dockerfile, and must not reach what only this machine reaches. An address is
judged when it is connected to, also where a registry leads skopeo on by a redirect or for a token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

from yarl import URL

from agentenv.api.web.egress import EgressProxy
from agentenv.errors import ForbiddenError, PolicyRefusalError
from agentenv.store.manifest import StoredImage
from agentenv.store.reference import Reference
from agentenv.store.route import Route, is_enforced
from agentenv.store.store import Store
from agentenv.wire.addresses import as_address, is_public

logger = logging.getLogger(__name__)

_WEB_PORTS: Final = (443, 80)


class Reach:
    """``named``: registries (``registry.example:5000``; without a port those of the web) that are asked wherever they
    are. Any other host is reached at public addresses only."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._named = frozenset(named)

    @property
    def ports(self) -> tuple[int, ...]:
        """Those of named registries on this machine, which programs connect to by themselves."""
        places = [_place(name) for name in self._named]
        return tuple({port for host, found in places if _is_loopback(host) for port in found})

    async def check(self, wanted: Reference, store: Store) -> None:
        """Raise ForbiddenError when the registry that the store would ask is neither named nor public: in the same
        words whatever listens there. A host that cannot be resolved now is judged when it is connected to."""
        if wanted.kind != "docker" or store.is_mirrored(wanted):
            return
        registry = wanted.name.partition("/")[0]
        host, ports = _place(registry)
        try:
            await self.addresses(host, ports[0])
        except PolicyRefusalError as error:
            raise refused(registry) from error
        except (OSError, UnicodeError):
            pass

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host that may be connected to. Raises PolicyRefusalError when it has none, OSError when it
        cannot be resolved."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not self._is_named(host, port):
            addresses = [each for each in addresses if is_public(ipaddress.ip_address(each.partition("%")[0]))]
        if not addresses:
            raise PolicyRefusalError(f"{host} is neither public nor on this machine's allow list")
        return addresses

    def _is_named(self, host: str, port: int) -> bool:
        bare = host.strip("[]").lower().rstrip(".")
        written = f"[{bare}]" if ":" in bare else bare
        return f"{written}:{port}" in self._named or (written in self._named and port in _WEB_PORTS)


def refused(registry: str) -> ForbiddenError:
    """The one answer about registries that are not asked."""
    return ForbiddenError(
        "image",
        f"registry {registry} is not on this machine's allow list",
        next_step="use a public registry; others are allowed by --registry of agentenv images serve, and by "
        "AGENTENV_REGISTRIES where tasks are run",
    )


@asynccontextmanager
async def guarded(store: Store, reach: Reach) -> AsyncIterator[Store]:
    """The store, its registries reached as ``reach`` says. Where the environment has a proxy, that one decides."""
    if urllib.request.getproxies().keys() & {"http", "https", "all"}:
        yield store
        return
    if not is_enforced():
        logger.warning("a registry may lead skopeo to ports of this machine itself: Linux before 6.7 cannot forbid it")
    async with EgressProxy(reach) as egress:
        url = URL(egress.url).with_user(egress.username).with_password(egress.password)
        yield store.by(Route(str(url), (url.port or 0, *reach.ports)))


async def ensured(store: Store, wanted: Reference, reach: Reach) -> StoredImage:
    """``store.ensure`` for a reference that a task or its Dockerfile has. Raises ForbiddenError for a registry that is
    not asked here, and what ``ensure`` raises."""
    known = await asyncio.to_thread(store.named, wanted) if wanted.kind == "docker" else None
    found = await asyncio.to_thread(store.used, known.digest) if known is not None else None
    if found is not None:
        return found
    if wanted.kind != "docker":
        return await asyncio.to_thread(store.ensure, wanted)
    await reach.check(wanted, store)
    async with guarded(store, reach) as reaching:
        return await asyncio.to_thread(reaching.ensure, wanted)


def _place(registry: str) -> tuple[str, tuple[int, ...]]:
    """The host of a registry, and its ports: the first is asked first."""
    host, colon, port = registry.rpartition(":")
    return (host, (int(port),)) if colon and port.isdecimal() else (registry, _WEB_PORTS)


def _is_loopback(host: str) -> bool:
    address = as_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)

"""Where a farm service may be reached: fixed addresses, and services that Nomad has registered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from agentenv.config import NomadSettings
from agentenv.errors import ConfigError, FarmUnreachableError, missing_extra

_NOMAD: Final = "nomad"
"""Scheme of a service's name: ``nomad://agentenv-farm``."""


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

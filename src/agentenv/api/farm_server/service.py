"""The farm as a service: settings, backend, farm and HTTP, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.api import serving
from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.audit import BY_FARM, FarmAudit
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.revocations import Revocations
from agentenv.api.farm_server.settings import FarmSettings, ImageSettings, Reloaded, SettingsFile
from agentenv.api.farm_server.tokens import DeniedFile, Right, TokenKeys
from agentenv.api.tool_server.auth import read_token
from agentenv.background import report_failure
from agentenv.errors import InfraError
from agentenv.farm_client.access import announced
from agentenv.image_placement.keepers import Keepers, keeper_at
from agentenv.listening import listen, url_of
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.wire.farm import PAGE_TOKEN_S

logger = logging.getLogger(__name__)

USER_TOKEN_S: Final = 86_400.0
"""Life of the token of the service's own user. It is replaced after half of it."""


@dataclass(frozen=True)
class Listening:
    """Where the service listens; with ``certificate`` and ``key`` it speaks TLS."""

    host: str = "127.0.0.1"
    port: int = 8700
    certificate: Path | None = None
    key: Path | None = None


class UserToken:
    """A token of every right for the service's own user, so that commands on this machine need none. It lives for
    ``life_s``, and is replaced in time; its id is logged, and in the audit log."""

    def __init__(self, keys: TokenKeys, audit: FarmAudit, life_s: float) -> None:
        self._keys = keys
        self._audit = audit
        self._life_s = life_s
        self._told: list[Callable[[str], None]] = []
        self.token = self._made()

    def tell(self, tell: Callable[[str], None]) -> None:
        """``tell`` is called with the token, now and whenever another replaces it."""
        self._told.append(tell)
        tell(self.token)

    async def renew(self) -> None:
        """Replace it again and again."""
        while True:
            await asyncio.sleep(self._life_s / 2)
            self.token = self._made()
            for tell in self._told:
                try:
                    tell(self.token)
                except OSError as error:
                    logger.error("commands on this machine get no new token: %s", error)

    def _made(self) -> str:
        token = self._keys.mint("*", "admin", expires_s=self._life_s)
        jti = self._keys.verify(token).jti
        logger.info("the token of this machine's user is %s, for %.0f s", jti, self._life_s)
        self._audit.token_minted(BY_FARM, "*", jti, scope="admin", cap=None, expires_s=self._life_s)
        return token


@dataclass(frozen=True)
class Service:
    """A farm service that listens. ``opening`` ends when the farm is open; until then it is a standby, or its
    containers are being looked for."""

    farm: Farm
    keys: TokenKeys
    access: Access
    url: str
    user: UserToken
    opening: asyncio.Task[Farm]

    @property
    def token(self) -> str:
        """For this user, for now: every run, and every right."""
        return self.user.token

    def right_of(self, token: str) -> Right:
        """What a token allows now. Raises UnauthorizedError."""
        return self.keys.verify(token, denied=self.access.denied)

    def page_token(self) -> str:
        """A token for the page: to look at every run, and at the output of their slots."""
        return self.keys.mint("*", "look", expires_s=PAGE_TOKEN_S)

    async def run(self) -> None:
        """Until the farm has to end. Raises what ended it."""
        await self.opening
        await self.farm.ended.wait()
        raise self.farm.fenced or InfraError("the farm has ended")


def backend_of(settings: FarmSettings, url: str, stand_by: Callable[[str, str], None]) -> ContainerBackend:
    """The backend of a farm, not opened yet. ``url`` is the farm's, and ``stand_by`` is called with the address and a
    description of another that has the containers. Raises ConfigError."""
    start_timeout_s = settings.pool.start_timeout_s
    if settings.backend == "local":
        from agentenv.slots.backends.local import LocalBackend

        return LocalBackend(
            settings.containers,
            detached=True,
            farm=settings.name,
            start_timeout_s=start_timeout_s,
            unattended_after_s=settings.unattended_after_s,
        )
    if settings.backend == "nomad":
        from agentenv.image import ensure_image
        from agentenv.slots.backends.nomad.backend import NomadBackend

        return NomadBackend(
            settings.containers,
            settings.nomad,
            start_timeout_s=start_timeout_s,
            ensure_image=ensure_image,
            url=url,
            standby=True,
            on_standby=stand_by,
        )
    return make_backend(
        settings.backend, settings.containers, nomad=settings.nomad, start_timeout_s=start_timeout_s, field="backend"
    )


@asynccontextmanager
async def farm_service(
    config: FarmSettings | SettingsFile,
    listening: Listening,
    *,
    url: str = "",
    around: Callable[[ContainerBackend], ContainerBackend] = lambda backend: backend,
    user_token_s: float = USER_TOKEN_S,
) -> AsyncIterator[Service]:
    """Run a farm service. ``config``: settings, or a file that is read again when it changes, and on SIGHUP. ``url``:
    its address for others, if that is not where it listens. ``around`` may put a layer around the backend.

    Raises ConfigError; SandboxUnavailableError when the backend cannot be opened.
    """
    file = config if isinstance(config, SettingsFile) else None
    settings = config.settings if isinstance(config, SettingsFile) else config
    keys = TokenKeys.read(settings.tokens.key_files, create=True)
    audit = FarmAudit(settings.audit_log)
    access = Access(keys, limits=settings.limits, public=settings.public)
    port = listen(listening.host, listening.port)
    address = url or url_of(port, listening.host, "https" if listening.certificate else "http")
    farm = Farm(
        around(backend_of(settings, address, lambda *told: farm.stand_by(*told))),  # noqa: PLW0108 - made here
        settings.pool,
        settings.containers,
        name=settings.name,
        relay_url=settings.relay_url,
        audit=audit,
        plain=settings.plain,
        keepers=_keepers(settings.images),
        copies_per_image=settings.images.copies_per_image,
    )
    revocations = Revocations(access, farm, DeniedFile(settings.tokens.key_files))
    _apply(settings, farm, access, revocations)
    app = farm_app(farm, access, revocations)
    opening: asyncio.Task[Farm] | None = None
    renewing: asyncio.Task[None] | None = None
    try:
        served = serving.served_on(
            port, app, "farm service", ending=farm.leave, certificate=listening.certificate, key=listening.key
        )
        async with served:
            opening = asyncio.create_task(farm.__aenter__(), name="farm opening")
            opening.add_done_callback(lambda _: revocations.read_again())  # a standby may have missed some
            user = UserToken(keys, audit, user_token_s)
            renewing = asyncio.create_task(user.renew(), name="token of the user")
            renewing.add_done_callback(report_failure)
            with announced(settings.name, address) as announce:
                user.tell(announce)
                async with _following(file, farm, access, revocations):
                    yield Service(farm, keys, access, address, user, opening)
    finally:
        if renewing is not None:
            renewing.cancel()
        if opening is not None:
            await _close(farm, opening)
        audit.close()


def _keepers(settings: ImageSettings) -> Keepers | None:
    """Those of the nodes. Raises ConfigError when their token cannot be read."""
    if settings.keeper_token_file is None:
        return None
    return Keepers(read_token(settings.keeper_token_file), keeper_at(settings.keeper_port))


async def _close(farm: Farm, opening: asyncio.Task[Farm]) -> None:
    """Close the farm, however far it was opened."""
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await farm.__aexit__(None, None, None)


@asynccontextmanager
async def _following(
    file: SettingsFile | None, farm: Farm, access: Access, revocations: Revocations
) -> AsyncIterator[None]:
    """Apply the settings file again whenever it changes."""
    if file is None:
        yield
        return

    async def follow() -> None:
        async for reloaded in file.reloads():
            _report(reloaded)
            farm.audit.settings_reloaded(reloaded.changed, reloaded.needs_restart, str(reloaded.error or ""))
            _apply(reloaded.settings, farm, access, revocations)

    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, RuntimeError, ValueError):  # only the main thread can
        loop.add_signal_handler(signal.SIGHUP, file.ask)
    following = asyncio.create_task(follow(), name="settings file")
    following.add_done_callback(report_failure)
    try:
        yield
    finally:
        following.cancel()
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGHUP)


def _apply(settings: FarmSettings, farm: Farm, access: Access, revocations: Revocations) -> None:
    table = settings.share_table
    farm.queue_policy.set_shares(table.default, table.runs, table.kinds, table.teams)
    farm.queue.limits = settings.leases
    farm.reclaim_after_s = settings.reclaim_after_s
    revocations.set_denied(settings.tokens.denied)
    access.limiter.set_limits(settings.limits)


def _report(reloaded: Reloaded) -> None:
    if reloaded.error is not None:
        logger.error("the settings are as before: %s", reloaded.error)
    if reloaded.changed:
        logger.info("settings changed: %s", ", ".join(reloaded.changed))
    if reloaded.needs_restart:
        logger.warning("changed settings that need a restart: %s", ", ".join(reloaded.needs_restart))

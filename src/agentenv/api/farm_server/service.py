"""The farm as a service: settings, backend, farm and HTTP, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.api import serving
from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.audit import FarmAudit
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.revocations import Revocations
from agentenv.api.farm_server.settings import FarmSettings, ImageSettings, Reloaded, SettingsFile
from agentenv.api.farm_server.tokens import DeniedFile, TokenKeys
from agentenv.api.listening import listen, url_of
from agentenv.api.tool_server.auth import read_token
from agentenv.errors import InfraError
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.slots.farm_access import announced
from agentenv.slots.keepers import Keepers, keeper_at
from agentenv.tasks import report_failure
from agentenv.wire.farm import LONGEST_TOKEN_S, PAGE_TOKEN_S

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listening:
    """Where the service listens; with ``certificate`` and ``key`` it speaks TLS."""

    host: str = "127.0.0.1"
    port: int = 8700
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Service:
    """A farm service that listens. ``opening`` ends when the farm is open; until then it is a standby, or its
    containers are being looked for."""

    farm: Farm
    keys: TokenKeys
    url: str
    token: str = field(repr=False)
    """For this user: every run, and every right."""
    opening: asyncio.Task[Farm]

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
        from agentenv.slots.backends.local_kept import LocalKeptBackend

        return LocalKeptBackend(
            settings.containers,
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
    try:
        served = serving.served_on(
            port, app, "farm service", ending=farm.leave, certificate=listening.certificate, key=listening.key
        )
        async with served:
            opening = asyncio.create_task(farm.__aenter__(), name="farm opening")
            opening.add_done_callback(lambda _: revocations.read_again())  # a standby may have missed some
            user = keys.mint("*", "admin", expires_s=LONGEST_TOKEN_S)
            with announced(settings.name, address, user):
                async with _following(file, farm, access, revocations):
                    yield Service(farm, keys, address, user, opening)
    finally:
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
    farm.line.set_shares(table.default, table.runs, table.kinds, table.teams)
    farm.desk.limits = settings.leases
    farm.reclaim_after_s = settings.reclaim_after_s
    revocations.set_denied(settings.tokens.denied)
    access.limiter.set_limits(settings.limits)


def _report(reloaded: Reloaded) -> None:
    if reloaded.error is not None:
        logger.error("the settings are as before: %s", reloaded.error)
    if reloaded.changed:
        logger.info("settings changed: %s", ", ".join(reloaded.changed))
    if reloaded.needs_restart:
        logger.warning("settings that apply after a restart: %s", ", ".join(reloaded.needs_restart))

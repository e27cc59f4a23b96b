"""Nomad's event stream, read with aiohttp: cancellable, and silence is detected. No decisions.

python-nomad reads it in a thread that ends only at the next event, and hides the heartbeats that distinguish a live
stream from a dead one.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from agentenv.config import NomadSettings
from agentenv.errors import ConfigError
from agentenv.slots.backends.nomad.explain import NomadError

SILENT_AFTER_S = 45.0
"""Nomad sends a heartbeat every 30 s (nomad/event_endpoint.go of 1.11.3)."""
_PATH = "/v1/event/stream"
_LINE_BYTES = 64 * 1024 * 1024
_CONNECT_S = 10.0


class EventStream:
    """Connects when entered; iterating gives each line as JSON, heartbeats as ``{}``."""

    def __init__(self, session: aiohttp.ClientSession, settings: NomadSettings, address: str) -> None:
        self._session = session
        self._settings = settings
        self._url = address + _PATH
        self._server_hostname = settings.tls_server_name if address.startswith("https:") else None

    async def lines(self, *, after: int, nodes: bool) -> AsyncGenerator[dict[str, Any], None]:
        """Events after an index of the cluster's log; the first item, ``{}``, means that it is connected.

        ``nodes``: include events of nodes, for which the token needs ``node:read``. Raises NomadError when the
        stream ends, is refused, or is silent for ``SILENT_AFTER_S``.
        """
        job = self._settings.job_id
        topics = [f"Allocation:{job}", f"Evaluation:{job}", f"Job:{job}", *(["Node"] if nodes else [])]
        params = [("namespace", self._settings.namespace), ("index", str(after)), *(("topic", one) for one in topics)]
        if self._settings.region:
            params.append(("region", self._settings.region))
        headers = {"X-Nomad-Token": self._settings.token} if self._settings.token else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=SILENT_AFTER_S)
        try:
            async with self._session.get(
                self._url,
                params=params,
                headers=headers,
                timeout=timeout,
                server_hostname=self._server_hostname,
                allow_redirects=False,  # the token is for this address only
            ) as response:
                if response.status != 200:
                    raise NomadError(response.status, (await response.text())[:500])
                yield {}
                async for line in response.content:
                    if line.strip():
                        yield json.loads(line)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise NomadError(0, f"the event stream was cut: {error or type(error).__name__}") from error
        raise NomadError(0, "Nomad ended the event stream")


def open_stream_session(settings: NomadSettings) -> aiohttp.ClientSession:
    """A session for the stream. Raises ConfigError for certificates that cannot be read."""
    connector = aiohttp.TCPConnector(limit=2, ssl=tls(settings))
    return aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=_LINE_BYTES)


def tls(settings: NomadSettings) -> ssl.SSLContext:
    """The same TLS settings as for the API. Raises ConfigError naming the field."""
    field = "ca_cert"
    try:
        context = ssl.create_default_context(cafile=settings.ca_cert)
        field = "client_cert"
        if settings.client_cert is not None:
            context.load_cert_chain(settings.client_cert, settings.client_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(field, f"cannot be used: {error}", next_step="a PEM file is needed") from error
    if settings.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def pause(seconds: float, alarm: asyncio.Event) -> None:
    """Sleep for a time, or until the event is set; then clear it."""
    try:
        async with asyncio.timeout(seconds):
            await alarm.wait()
    except TimeoutError:
        return
    finally:
        alarm.clear()

"""Requests to Nomad: python-nomad over HTTP, with deadlines and typed failures. Blocking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import nomad
import requests
from nomad.api.base import Requester
from nomad.api.exceptions import BaseNomadException, TimeoutNomadException
from requests.adapters import HTTPAdapter

from agentenv.config import NomadSettings
from agentenv.deadlines import scaled
from agentenv.slots.backends.nomad.explain import NomadError

Reply = TypeVar("Reply")

_TIMEOUT_S = scaled(10)


class NomadClient:
    """One cluster, one namespace. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, settings: NomadSettings, address: str, *, timeout_s: float = _TIMEOUT_S, connections: int = 1):
        self.address = address
        self._session = requests.Session()
        # Proxies and netrc are for the internet; and a redirect must not send a token elsewhere.
        self._session.trust_env = False
        self._session.mount("https://", _Adapter(settings.tls_server_name, connections))
        self._client = nomad.Nomad(
            address=address,
            token=settings.token,
            namespace=settings.namespace,
            region=settings.region,
            verify=_verify(settings),
            cert=_certificate(settings),
            timeout=timeout_s,
            session=self._session,
        )

    def ask(self, request: Callable[[nomad.Nomad], Reply], *, missing: bool = False) -> Any:
        """Call python-nomad and return its result. Raises NomadError; with ``missing``, 404 is answered by None."""
        try:
            return request(self._client)
        except (BaseNomadException, TimeoutNomadException, requests.RequestException, ValueError, KeyError) as error:
            failed = _failure(error)
            if missing and failed.status == 404:
                return None
            raise failed from error

    def service(self, name: str) -> list[dict[str, Any]]:
        """Where a service is registered, healthy or not. Raises NomadError."""
        found: list[dict[str, Any]] | None = self.ask(
            lambda nomad: (
                _Services(**nomad.requester_settings)
                .request(name, method="get", params={"namespace": nomad.requester_settings["namespace"]})
                .json()
            ),
            missing=True,
        )
        return found or []

    def close(self) -> None:
        """Close its connections. May be repeated."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Services(Requester):  # type: ignore[misc]  # untyped
    """What python-nomad has no method for: the services that Nomad itself registers."""

    ENDPOINT = "service"


class _Adapter(HTTPAdapter):
    """Verifies the server's certificate against a name other than its address (``NOMAD_TLS_SERVER_NAME``)."""

    def __init__(self, server_name: str | None, connections: int) -> None:
        self._server_name = server_name
        super().__init__(pool_maxsize=connections)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """See HTTPAdapter."""
        if self._server_name:
            options |= {"server_hostname": self._server_name, "assert_hostname": self._server_name}
        super().init_poolmanager(*args, **options)


def _verify(settings: NomadSettings) -> bool | str:
    if settings.skip_verify:
        return False
    return str(settings.ca_cert) if settings.ca_cert else True


def _certificate(settings: NomadSettings) -> tuple[str, ...]:
    given = (settings.client_cert, settings.client_key)
    return tuple(str(path) for path in given) if all(given) else ()


def _failure(error: Exception) -> NomadError:
    """The error python-nomad raised, by its HTTP status: the class alone does not distinguish a cut connection from
    a refusal."""
    reply = getattr(error, "nomad_resp", None)
    if isinstance(reply, requests.Response):
        return NomadError(reply.status_code, " ".join(reply.text.split())[:500] or f"status {reply.status_code}")
    if isinstance(error, (ValueError, KeyError)) and not isinstance(error, requests.RequestException):
        return NomadError(502, f"unexpected response of Nomad's API: {error!r}")
    cause = reply if isinstance(reply, Exception) else error
    while isinstance(inner := getattr(cause, "reason", None) or (cause.args or (None,))[0], Exception):
        cause = inner  # urllib3 wraps the cause in the place where it happened
    return NomadError(0, str(cause).rpartition("connection: ")[2] or repr(cause))

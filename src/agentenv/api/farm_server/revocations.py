"""Tokens that a farm accepts no longer, and all that ends with them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.tokens import DeniedFile
from agentenv.errors import ConfigError
from agentenv.wire.farm import Revoked

logger = logging.getLogger(__name__)


class Revocations:
    """The tokens that the settings deny, and those that were revoked while the farm ran, which ``file`` keeps (None:
    they are forgotten with this process). Raises ConfigError when the file cannot be read."""

    def __init__(self, access: Access, farm: Farm, file: DeniedFile | None = None) -> None:
        self._access = access
        self._farm = farm
        self._file = file
        self._by_settings = access.denied
        self._revoked = frozenset[str]() if file is None else file.read()
        self._apply()

    def set_denied(self, denied: Collection[str]) -> None:
        """Those of the settings from now on."""
        self._by_settings = frozenset(denied)
        self._apply()

    def read_again(self) -> None:
        """Another service of this farm may have revoked some."""
        if self._file is not None:
            try:
                self._revoked |= self._file.read()
            except ConfigError as error:
                logger.error("%s", error)
        self._apply()

    def revoke(self, jti: str, by: str, *, end_leases: bool) -> Revoked:
        """Accept the token no longer, nor those that it made: their streams end, their asks are withdrawn, their leases
        are not renewed, or end now. May be repeated. For the token ``by``."""
        kept = self._file is not None
        if self._file is not None and jti not in self._revoked:
            try:
                self._file.add(jti)
            except OSError as error:
                logger.error("the revocation of %s cannot be stored: %s", jti, error)
                kept = False
        self._revoked |= {jti}
        streams = self._access.streams(jti)
        asks, leases = self._apply(end_of=jti if end_leases else "")
        self._farm.audit.token_revoked(by, jti, streams=streams, asks=asks, leases=leases, ended=end_leases)
        return Revoked(jti=jti, streams=streams, asks=asks, leases=leases, ended=end_leases, kept=kept)

    def _apply(self, end_of: str = "") -> tuple[int, int]:
        denied = self._by_settings | self._revoked
        self._access.deny(denied)
        return self._farm.queue.deny(denied, end_of=end_of)

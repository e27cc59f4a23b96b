"""Audit log of a farm service: one JSON line per decision, without tokens, passes and lease keys."""

from __future__ import annotations

import time
from typing import Any

from agentenv.api.audit_file import AuditFile
from agentenv.errors import AgentEnvError
from agentenv.wire.farm import Ask, Grant, RunShare

BY_FARM = "farm"
"""Instead of a token's id: the farm itself decided."""


class FarmAudit(AuditFile):
    """The file of a farm service. ``by`` is the id (``jti``) of the token that asked for it, or :data:`BY_FARM`."""

    def ask_granted(self, by: str, run: str, ask: Ask, grants: tuple[Grant, ...]) -> None:
        """Slots were leased for an ask."""
        leases = {grant.trajectory: grant.lease for grant in grants}
        self._add("ask_granted", by, run, request_id=ask.request_id, tags=_tags(ask), leases=leases)

    def ask_refused(self, by: str, run: str, ask: Ask, error: AgentEnvError) -> None:
        """An ask was refused: waiting would not help."""
        details = {"slots": len(ask.trajectories), "error": error.code, "message": error.message}
        self._add("ask_refused", by, run, request_id=ask.request_id, tags=_tags(ask), **details)

    def lease_ended(self, by: str, run: str, lease: str, why: str) -> None:
        """A lease was ended by the farm: released for its client, ended by an administrator, or reclaimed. What
        clients release at containers, and what expires there, does not pass the farm."""
        self._add("lease_ended", by, run, lease=lease, why=why)

    def token_minted(self, by: str, run: str, jti: str, *, scope: str, cap: int | None, expires_s: float) -> None:
        """A token was made; ``jti`` denies it later."""
        self._add("token_minted", by, run, jti=jti, scope=scope, cap=cap, expires_s=expires_s)

    def token_revoked(self, by: str, jti: str, *, streams: int, asks: int, leases: int, ended: bool) -> None:
        """A token was revoked, and with it those that it made; ``leases`` are not renewed, or have ``ended``."""
        self._add("token_revoked", by, "", jti=jti, streams=streams, asks=asks, leases=leases, ended=ended)

    def container_drained(self, by: str, container: str, leases: int) -> None:
        """A container gets no new leases; ``leases``: those that it still has."""
        self._add("container_drained", by, "", container=container, leases=leases)

    def share_changed(self, by: str, run: str, share: RunShare | None) -> None:
        """A run's share was changed (None: it has none of its own any more)."""
        self._add("share_changed", by, run, share=None if share is None else share.model_dump())

    def settings_reloaded(self, changed: tuple[str, ...], needs_restart: tuple[str, ...], error: str = "") -> None:
        """The settings file was read again; ``error``: it was wrong, and nothing changed."""
        self._add("settings_reloaded", BY_FARM, "", changed=changed, needs_restart=needs_restart, error=error)

    def _add(self, event: str, by: str, run: str, **details: Any) -> None:
        if self.writes:
            self.write({"at_unix_s": round(time.time(), 3), "event": event, "by": by, "run": run, **details})


def _tags(ask: Ask) -> dict[str, str]:
    return {name: value for name, value in ask.tags.model_dump().items() if value}

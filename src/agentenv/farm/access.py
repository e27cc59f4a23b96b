"""Access to the farm that a verb is about."""

from __future__ import annotations

from agentenv.errors import ConfigError
from agentenv.farm.local import LocalFarm
from agentenv.farm.view import OperatorAccess
from agentenv.slots.backends.registry import Backend


def access_to(backend: Backend, job: str | None) -> OperatorAccess:
    """The farm of this backend. Raises ConfigError for a job that does not belong to Nomad, or invalid Nomad
    settings."""
    if backend is Backend.nomad:
        from agentenv.farm.nomad import NomadFarm  # late: needs python-nomad

        return NomadFarm.from_options(job)
    if job is not None:
        raise ConfigError("--job", f"is not valid with {backend}", next_step="add --backend nomad")
    return LocalFarm(backend)

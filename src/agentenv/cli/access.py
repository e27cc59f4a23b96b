"""Which farm a verb means."""

from __future__ import annotations

from agentenv.cli.local_farm import LocalFarm
from agentenv.cli.options import Backend
from agentenv.cli.sight import FarmAccess
from agentenv.errors import ConfigError


def access_to(backend: Backend, job: str | None) -> FarmAccess:
    """The farm of this backend. Raises ConfigError for a job that is not Nomad's, or wrong Nomad settings."""
    if backend is Backend.nomad:
        from agentenv.cli.nomad_farm import NomadFarm  # late: needs python-nomad

        return NomadFarm.from_options(job)
    if job is not None:
        raise ConfigError("--job", f"is not valid with {backend}", next_step="add --backend nomad")
    return LocalFarm(backend)

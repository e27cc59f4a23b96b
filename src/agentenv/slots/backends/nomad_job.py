"""The job: which file, with which variables. Pure but for reading the file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from agentenv import shipped
from agentenv.config import ContainerSettings, NomadSettings
from agentenv.errors import ConfigError

JOB_FILES = {
    "docker": "nomad/sandbox.nomad.hcl",
    "raw_exec": "nomad/sandbox-raw-exec.nomad.hcl",
    "apptainer": "nomad/sandbox-apptainer.nomad.hcl",
}
_DECLARED = re.compile(r'^\s*variable\s+"([^"]+)"', re.MULTILINE)


def job_text(settings: NomadSettings) -> str:
    """The job file's text. Raises ConfigError when it cannot be read."""
    try:
        path = settings.job_file or shipped.path(JOB_FILES[settings.driver])
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError("job_file", f"cannot be read: {error}", next_step="name a Nomad job file (HCL2)") from error


def job_variables(text: str, containers: ContainerSettings, settings: NomadSettings) -> str:
    """Values for the variables the job file declares, as the text of an HCL variables file.

    ``settings.variables`` come last and win. Raises ConfigError naming a setting that is not at its
    default and that the file has no variable for.
    """
    declared = set(_DECLARED.findall(text))
    defaults = _values(ContainerSettings(), NomadSettings())
    given = _values(containers, settings)
    for name, value in given.items():
        if name not in declared and value != defaults[name] and name not in ("job_id", "image"):
            raise ConfigError(name, f"is {value!r}, but the job file has no variable {name!r}", next_step=_cure(name))
    undeclared = set(settings.variables) - declared
    if undeclared:
        raise ConfigError(
            "variables",
            f"the job file has no variable {min(undeclared)!r}",
            next_step=f"it has {', '.join(sorted(declared))}",
        )
    values = {**given, "count": 0}
    expressions = {name: hcl(value) for name, value in values.items() if name in declared} | settings.variables
    return "".join(f"{name} = {expression}\n" for name, expression in expressions.items())


def _values(containers: ContainerSettings, settings: NomadSettings) -> dict[str, Any]:
    return {
        "job_id": settings.job_id,
        "namespace": settings.namespace,
        "datacenters": list(settings.datacenters),
        "image": settings.image,
        "cpu_mhz": settings.cpu_mhz,
        "memory_mib": settings.memory_mib,
        "slots": containers.slots_per_container,
        "isolation": containers.isolation,
        "allow_network": containers.allow_network,
        "limits": dataclasses.asdict(containers.limits),
        "binds": [dataclasses.asdict(bind) for bind in containers.binds],
        "env": containers.env,
        "output_bytes": containers.output_bytes,
        "spare_shells": containers.spare_shells,
    }


def _cure(name: str) -> str:
    if name == "binds":
        return "put what slots need into the image: a job's containers see no directories of their hosts"
    return "declare it in the job file, or leave the setting at its default"


def hcl(value: object) -> str:
    """A value as an HCL expression: JSON, with template markers made harmless."""
    return json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")

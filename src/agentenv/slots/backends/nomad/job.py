"""The job: which file, with which variables. Pure but for reading the file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv import shipped
from agentenv.config import ContainerSettings, NomadSettings
from agentenv.deadlines import TIME_FACTOR
from agentenv.errors import ConfigError
from agentenv.wire.spec import MIB, ContainerSpec, SlotLimits, check_machine

JOB_FILE = "nomad/sandbox.nomad.hcl"
SPEC = "spec"
"""The job file's variable that is a whole ContainerSpec, as JSON."""
SERVER_MIB = 512
"""Memory of a container besides its slots: waiting calls (256), the template tree (at most 128), the two processes."""
SERVER_PROCESSES = 512
"""Processes and threads of a container besides its slots: launcher, supervisor, server, their children."""
SLOT_OWN_PROCESSES = 10
"""Processes of a slot that its own limit does not count: agent, bwrap, and up to eight for its network."""
_LEAST_PIDS = 16_384
_FIELDS = frozenset(field.name for field in dataclasses.fields(ContainerSpec))
_SLOTS = re.compile(r'"slots":\s*(\d+)')
_SLOT_MEMORY = re.compile(r'"memory_bytes":\s*(\d+)')
_MAX_MEMORY = re.compile(r'"max_memory_bytes":\s*(\d+)')
_SLOT_PROCESSES = re.compile(r'"processes":\s*(\d+)')
_OF_IMAGE_SLOTS = ("image_volume", "image_store", "unpack_images", "loop_devices", "disk_volume")
_OPTIONAL = frozenset({"job_id", "image", "driver"})
"""Settings that a job file need not take: it may be of one image, one driver."""
_DECLARED = re.compile(r'^\s*variable\s+"([^"]+)"', re.MULTILINE)


def job_text(settings: NomadSettings) -> str:
    """The job file's text. Raises ConfigError when it cannot be read."""
    try:
        return Path(settings.job_file or shipped.path(JOB_FILE)).read_text()
    except OSError as error:
        raise ConfigError("job_file", f"cannot be read: {error}", next_step="name a Nomad job file (HCL2)") from error


def job_variables(text: str, containers: ContainerSettings, settings: NomadSettings) -> str:
    """Values for the variables the job file declares, as the text of an HCL variables file.

    A file without ``spec`` (written for an older agentenv) is given those settings of the container that it has
    variables for. ``settings.variables`` come last and win. Raises ConfigError naming a setting that is not at its
    default and that the file has no variable for.
    """
    declared = set(_DECLARED.findall(text))
    given = settings.variables
    spec = containers.spec()
    if SPEC in declared:
        spec, given = _overridden(spec, given, declared)
    if given.get("driver", hcl(settings.driver)) == hcl("vm"):
        _check_machine(spec, given, settings)
    values = _values(spec, settings, whole=SPEC in declared)
    defaults = _values(ContainerSpec(), NomadSettings(), whole=SPEC in declared) | {"time_factor": 1.0}
    for name, value in values.items():
        if name not in declared and value != defaults[name] and name not in _OPTIONAL | _computed(settings):
            raise ConfigError(name, f"is {value!r}, but the job file has no variable {name!r}", next_step=_cure(name))
    if undeclared := set(given) - declared:
        raise ConfigError(
            "variables",
            f"the job file has no variable {min(undeclared)!r}",
            next_step=f"it has {', '.join(sorted(declared))}",
        )
    expressions = {name: hcl(value) for name, value in values.items() if name in declared} | given
    return "".join(f"{name} = {expression}\n" for name, expression in expressions.items())


def _check_machine(spec: ContainerSpec, given: Mapping[str, str], settings: NomadSettings) -> None:
    """Before anything is registered: what every start of a container would be refused for, or what it would ignore."""
    check_machine(spec)
    for name in _OF_IMAGE_SLOTS:
        if given.get(name, '""') not in ('""', "false"):
            raise ConfigError("variables", f"{name}: a virtual machine has no image store", next_step="leave it out")
    image = given.get("image", hcl(settings.image))
    if not image.startswith('"/'):
        raise ConfigError(
            "image",
            f"is {image}, and a virtual machine's is a directory on every client",
            next_step="agentenv image machine /var/lib/agentenv/machine, and name that (sandbox_image, --image)",
        )


def _overridden(
    spec: ContainerSpec, variables: Mapping[str, str], declared: Set[str]
) -> tuple[ContainerSpec, dict[str, str]]:
    """With those of ``variables`` that are fields of it, as if the file declared each of them; and the others."""
    named = {name: text for name, text in variables.items() if name in _FIELDS and name not in declared}
    if not named:
        return spec, dict(variables)
    try:
        read = {name: json.loads(text) for name, text in named.items()}
    except ValueError as error:
        raise ConfigError(
            "variables", f"{', '.join(named)}: {error}", next_step="write what is a field of `spec` as JSON"
        ) from error
    whole = ContainerSpec.parse(json.loads(spec.to_json()) | read, "variables")
    return whole, {name: text for name, text in variables.items() if name not in named}


def enough_mib(slots: int, slot_memory_bytes: int) -> int:
    """Memory with which all slots of a container can use their full limit at once."""
    return slots * -(-slot_memory_bytes // MIB) + SERVER_MIB


def reserved_mib(spec: ContainerSpec, slot_memory_bytes: int) -> int:
    """The same, and as much as its checkpoints may take beside them."""
    return enough_mib(spec.slots, slot_memory_bytes) + -(-spec.checkpoint_bytes // MIB)


def enough_pids(slots: int, slot_processes: int) -> int:
    """Process limit with which all slots of a container can use their full limit at once."""
    return max(_LEAST_PIDS, slots * (slot_processes + SLOT_OWN_PROCESSES) + SERVER_PROCESSES)


@dataclass(frozen=True)
class JobShape:
    """Resources of a job's containers. ``slot_memory_bytes``: the most that a slot can have. ``memory_max_mib`` and
    ``pids_limit`` 0: no limit."""

    slots: int
    slot_memory_bytes: int
    memory_mib: int
    memory_max_mib: int
    slot_processes: int
    pids_limit: int

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> JobShape | None:
        """Of a job as Nomad parsed or registered it; None when it has no specification we can read."""
        tasks = [task for group in job.get("TaskGroups") or () for task in group.get("Tasks") or ()]
        for task in tasks:
            texts = [template.get("EmbeddedTmpl") or "" for template in task.get("Templates") or ()]
            spec = next((text for text in texts if _SLOTS.search(text)), None)
            if spec is not None and (slots := _SLOTS.search(spec)) is not None:
                memory, own = task.get("Resources") or {}, _SLOT_MEMORY.search(spec)
                most = _MAX_MEMORY.search(spec)
                processes = _SLOT_PROCESSES.search(spec)
                return cls(
                    slots=int(slots[1]),
                    slot_memory_bytes=max(
                        int(own[1]) if own else SlotLimits().memory_bytes, int(most[1]) if most else 0
                    ),
                    memory_mib=int(memory.get("MemoryMB") or 0),
                    memory_max_mib=int(memory.get("MemoryMaxMB") or 0),
                    slot_processes=int(processes[1]) if processes else SlotLimits().processes,
                    pids_limit=int((task.get("Config") or {}).get("pids_limit") or 0),
                )
        return None


def check_shape(shape: JobShape, containers: ContainerSettings, settings: NomadSettings) -> None:
    """Raises ConfigError when the job's containers differ from the settings, or are too small for their slots without
    having been set so."""
    if shape.slots != containers.slots_per_container:
        raise ConfigError(
            "slots_per_container",
            f"is {containers.slots_per_container}, but the job asks for {shape.slots} slots in each container",
            next_step="make them equal: set slots_per_container, and leave `slots` out of the job's variables",
        )
    pids = enough_pids(shape.slots, shape.slot_processes)
    if 0 < shape.pids_limit < pids:
        raise ConfigError(
            "pids_limit",
            f"a container of {shape.pids_limit} processes cannot hold {shape.slots} slots of {shape.slot_processes} "
            f"each and its server ({pids}): a slot could then be refused a process for what its neighbours have",
            next_step=f"leave the job variable `pids_limit` out (it is then {pids}), have fewer slots or slots of "
            "fewer processes",
        )
    enough = enough_mib(shape.slots, shape.slot_memory_bytes)
    if settings.memory_oversubscription or max(shape.memory_mib, shape.memory_max_mib) >= enough:
        return
    raise ConfigError(
        "memory_mib",
        f"a container of {shape.memory_mib} MiB cannot hold {shape.slots} slots of "
        f"{shape.slot_memory_bytes // MIB} MiB each and its server ({enough} MiB): a slot could then be killed for "
        "what its neighbours use",
        next_step=f"leave memory_mib out (at least {enough} MiB are then reserved), have fewer slots or smaller ones "
        "(limits.memory_bytes, limits.max_memory_bytes), "
        "or say memory_oversubscription=true (up --oversubscribe-memory)",
    )


def check_standing(standing: JobShape | None, wanted: JobShape, running: int, job_id: str) -> None:
    """Raises ConfigError when registering would replace containers that run by ones of another size."""
    if standing is None or not running or standing.slots == wanted.slots:
        return
    raise ConfigError(
        "slots_per_container",
        f"is {wanted.slots}, but the {running} containers of Nomad job {job_id!r} that run have {standing.slots} slots "
        "each, and would all be replaced",
        next_step=f"ask for {standing.slots}, give this run a sandbox_job_id of its own, or end that farm first "
        f"(`agentenv down --backend nomad --job {job_id}`, or purge_job_on_start)",
    )


def _values(spec: ContainerSpec, settings: NomadSettings, *, whole: bool) -> dict[str, Any]:
    """By the job file's variables. ``whole``: the container is one of them, else each of its settings is."""
    limits, oversubscribed = spec.limits, settings.memory_oversubscription
    enough = reserved_mib(spec, limits.most_memory_bytes)
    reserved = settings.memory_mib or (reserved_mib(spec, limits.memory_bytes) if oversubscribed else enough)
    return {
        "job_id": settings.job_id,
        "namespace": settings.namespace,
        "datacenters": list(settings.datacenters),
        "count": 0,
        "driver": settings.driver,
        "image": settings.image,
        "cpu_mhz": settings.cpu_mhz,
        "memory_mib": reserved,
        # Of use where the scheduler allows oversubscription; elsewhere Nomad ignores it.
        "memory_max_mib": enough if oversubscribed and enough > reserved else 0,
        "pids_limit": enough_pids(spec.slots, spec.limits.processes),
        "time_factor": TIME_FACTOR,
        **({SPEC: spec.to_json()} if whole else dataclasses.asdict(spec)),
    }


def _computed(settings: NomadSettings) -> Set[str]:
    """Values that the user did not set."""
    return {"memory_max_mib", "pids_limit", *(("memory_mib",) if settings.memory_mib is None else ())}


def _cure(name: str) -> str:
    if name == "binds":
        return "put what slots need into the image: a job's containers see no directories of their hosts"
    if name in _FIELDS:
        return (
            "declare the variable `spec` in the job file, as the shipped one does, or leave the setting at its default"
        )
    return "declare it in the job file, or leave the setting at its default"


def hcl(value: object) -> str:
    """A value as an HCL expression: JSON, with template markers made harmless."""
    return json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")

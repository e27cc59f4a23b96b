"""Farms of detached containers on this machine that nobody runs: what they have left."""

from __future__ import annotations

from pathlib import Path

from agentenv.deadlines import scaled
from agentenv.errors import ConfigError
from agentenv.farm.orphans import KEPT, Orphan
from agentenv.slots.backends.local import end_container
from agentenv.slots.backends.local_files import ContainerFiles, FarmFiles, containers_of, farms, is_run
from agentenv.slots.backends.local_process import LocalProcess

_GRACE_S = scaled(5.0)


async def collect(state: Path, ending: str | None, *, dry_run: bool) -> list[Orphan]:
    """Remove dead containers of farms that nobody runs, and such farms without containers. Living containers are
    left for the next process that opens their farm; those of farm ``ending`` are ended.

    Raises ConfigError when somebody runs ``ending``, or there is no such farm.
    """
    names = farms(state)
    if ending is not None and ending not in names:
        known = f"allowed: {', '.join(names)}" if names else "there is none on this machine"
        raise ConfigError("--kept", f"no kept farm is named {ending!r}", next_step=known)
    found: list[Orphan] = []
    for name in names:
        if dry_run:
            found += [] if is_run(state, name) else _judged(name, containers_of(state, name), end=name == ending)
        elif name == ending or not is_run(state, name):
            found += await _collect(state, name, end=name == ending)
    return found


async def _collect(state: Path, name: str, *, end: bool) -> list[Orphan]:
    try:
        farm = FarmFiles.open(state, name)
    except ConfigError:
        if end:
            raise
        return []  # somebody has just opened it
    found: list[Orphan] = []
    try:
        for container in farm.containers():
            [orphan] = _judged(name, [container], end=end)
            if not orphan.problem:
                await end_container(LocalProcess(container), farm, _GRACE_S)
                left = str(container.path) if container.path.exists() else ""
                orphan = Orphan(orphan.kind if not left else "container", orphan.name, orphan.why, not left, left)
            found.append(orphan)
        if not farm.containers():
            farm.remove()
            found.append(Orphan("kept farm", name, "it has no containers", removed=True))
    finally:
        farm.close()
    return found


def _judged(farm: str, containers: list[ContainerFiles], *, end: bool) -> list[Orphan]:
    why, cure = f"no process runs its farm {farm!r}", f"`agentenv gc --kept {farm}` ends it"
    return [
        Orphan(KEPT, container.id, why, problem="" if end else cure)
        if container.is_alive()
        else Orphan("kept files", container.id, "its container is dead")
        for container in containers
    ]

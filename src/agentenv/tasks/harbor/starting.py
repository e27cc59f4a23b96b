"""Starts the services beside the agent's machine, each once those that it waits for are as it waits for them."""

from __future__ import annotations

import asyncio
import posixpath
from dataclasses import dataclass
from typing import Final

from agentenv.errors import TaskError
from agentenv.sdk.processes import SlotProcess
from agentenv.sdk.slot_tools import SlotTools
from agentenv.tasks.harbor.machine import until_healthy
from agentenv.tasks.harbor.rewards import NoRewardError
from agentenv.tasks.harbor.task import Group, SideService
from agentenv.tasks.harbor.verifier import lay_mount
from agentenv.wire.image_config import ImageConfig

TIMEOUT_S: Final = 600.0
"""For all services of a task together: Harbor's for the start of an environment."""
_RESTART_PAUSE_S: Final = 1
_LATELY_CHARS: Final = 600


@dataclass(frozen=True)
class _Running:
    service: SideService
    slot: SlotTools
    process: SlotProcess

    async def check(self) -> None:
        """Raises TaskError when its program has failed."""
        if code := (await self.process.state()).exit_code:
            raise await self.failure(f"ended with {code}")

    async def failure(self, how: str) -> TaskError:
        """With what it printed last."""
        printed = (await self.process.read()).decode(errors="replace").strip()[-_LATELY_CHARS:]
        return TaskError(f"the service {self.service.name} {how}: {printed or 'it printed nothing'}")


async def start_services(machine: SlotTools, name: str, group: Group) -> None:
    """Start the services of the task ``name``, which run until the slot ends. Returns when each with a healthcheck is
    healthy, and what the machine waits for is completed. Raises TaskError when one fails, with what it printed, or when
    not all are ready in TIMEOUT_S; InfraError."""
    started: dict[str, _Running] = {}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for service in group.services:
                for other, condition in service.after.items():
                    await _until(started[other], condition)
                started[service.name] = await _start(machine, service)
            for other, condition in group.after.items():
                await _until(started[other], condition)
            for running in started.values():
                if running.service.healthcheck is not None:
                    await _until(running, "service_healthy")
                await running.check()
    except TimeoutError:
        raise TaskError(f"the services of {name} are not ready after {TIMEOUT_S:g} s") from None


async def _start(machine: SlotTools, service: SideService) -> _Running:
    slot = await machine.service(service.name)
    try:
        for mount in service.mounts:
            await lay_mount(slot, mount)
    except NoRewardError as error:
        raise TaskError(f"what the service {service.name} mounts cannot be copied: {error}") from error
    argv = argv_of(service, await slot.image_config())
    if not argv:
        raise TaskError(f"the service {service.name} has no command, and neither has its image")
    if service.restart != "no":
        again = "true" if service.restart == "always" else "[ $code != 0 ]"
        text = f'while "$@"; code=$?; {again}; do sleep {_RESTART_PAUSE_S}; done; exit $code'
        argv = ("bash", "-c", text, posixpath.basename(argv[0]), *argv)
    return _Running(service, slot, await slot.start(argv))


def argv_of(service: SideService, image: ImageConfig) -> tuple[str, ...]:
    """What is started, as Docker has it: a new entrypoint goes without the image's command. Pure."""
    if service.entrypoint is None:
        return (*image.entrypoint, *(image.cmd if service.command is None else service.command))
    return (*service.entrypoint, *(service.command or ()))


async def _until(running: _Running, condition: str) -> None:
    check = running.service.healthcheck
    if condition == "service_completed_successfully":
        if code := await running.process.wait():
            raise await running.failure(f"ended with {code}")
    elif condition == "service_healthy" and check is not None:
        try:
            await until_healthy(running.slot, check, user=None, name="its healthcheck")
        except TaskError as error:
            raise await running.failure(f"is not healthy: {error.message}; it has printed") from error

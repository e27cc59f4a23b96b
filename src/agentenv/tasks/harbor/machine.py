"""The machine that a task requests: limits within this machine's, an image (a Dockerfile's is built), a healthcheck."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.errors import DockerfileError, TaskError
from agentenv.sandbox.supervisor.cgroups import this_machine
from agentenv.sandbox.supervisor.limits import Machine as ThisMachine
from agentenv.sdk.image_builds import BuildLimits, SlotMachines, build_image
from agentenv.sdk.roots import store_directory
from agentenv.sdk.slot_tools import SlotTools
from agentenv.store import Store
from agentenv.store.reference import parse
from agentenv.tasks.harbor.task import HarborTask, Healthcheck, Machine, wrong
from agentenv.wire.network import NO_NETWORK, NetworkPolicy
from agentenv.wire.roots import Writable


@dataclass(frozen=True)
class Caps:
    """The most that a task gets, whatever it requests; None: what it requests."""

    cpus: float | None = None
    memory_mib: int | None = None

    def of(self, task: HarborTask) -> HarborTask:
        """The task with its limits, and those of its verifier's own machine, capped."""
        separate = task.separate and replace(
            task.separate, cpus=self._cpus(task.separate), memory_mib=self._memory_mib(task.separate)
        )
        steps = tuple(map(self.of, task.steps))
        return replace(task, cpus=self._cpus(task), memory_mib=self._memory_mib(task), separate=separate, steps=steps)

    def _cpus(self, machine: Machine) -> float | None:
        return machine.cpus if machine.cpus is None or self.cpus is None else min(machine.cpus, self.cpus)

    def _memory_mib(self, machine: Machine) -> int | None:
        requested = machine.memory_mib
        return requested if requested is None or self.memory_mib is None else min(requested, self.memory_mib)


def check_fits(task: HarborTask, this: ThisMachine) -> None:
    """Raises ConfigError, naming the task's field, when this machine has less than a slot is to have."""
    this_mib = this.memory_bytes // 2**20
    for machine in (task, *task.separates):
        if (machine.cpus or 0) > this.cores:
            requested, has, cap = f"{machine.cpus:g} cores", str(this.cores), f"max_cpus={this.cores}"
            problem = _too_much(requested, has, cap)
            raise wrong(task.directory, machine.cpus_field, *problem, file=machine.limits_file)
        if (machine.memory_mib or 0) > this_mib:
            requested, has, cap = f"{machine.memory_mib} MiB", str(this_mib), f"max_memory_mib={this_mib} or less"
            problem = _too_much(requested, has, cap)
            raise wrong(task.directory, machine.memory_field, *problem, file=machine.limits_file)


def _too_much(requested: str, has: str, cap: str) -> tuple[str, str]:
    return (
        f"requests {requested}, but this machine has {has}",
        f"cap what tasks get ({cap}), leave it out (only_tasks), or use a larger machine",
    )


def writes(storage: str, asked_mib: int | None, memory_mib: int | None) -> tuple[Writable, int | None]:
    """Where a slot writes, and how much. What is in memory counts as memory, so it has at most half of that. Pure."""
    half_mib = None if memory_mib is None else memory_mib // 2
    if storage == "disk" or (storage == "auto" and half_mib is not None and (asked_mib or 0) > half_mib):
        return "disk", asked_mib
    return "memory", asked_mib if half_mib is None else min(asked_mib or half_mib, half_mib)


class TaskImages:
    """What references of tasks mean, resolved once for any number of rollouts: those that ask for one image at the same
    time share its build, and all builds a container. A failed build is tried again by the next rollout; the steps
    before the one that failed are kept. To be closed."""

    def __init__(self, *, network: bool) -> None:
        """``network``: whether commands of Dockerfiles have one."""
        self._limits = BuildLimits(network=NetworkPolicy("public") if network else NO_NETWORK)
        self._digests: dict[str, str] = {}
        self._builds: dict[str, asyncio.Task[str]] = {}
        self._machines: tuple[Store, SlotMachines] | None = None
        self._opening = asyncio.Lock()
        self._at_once = asyncio.Semaphore(this_machine().cores)
        self._stack = AsyncExitStack()

    async def close(self) -> None:
        """End the builds, and their container. Repeatable."""
        for build in self._builds.values():
            build.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
        self._machines = None
        await self._stack.aclose()

    async def of(self, reference: str, timeout_s: float) -> str:
        """The digest of a Dockerfile's image; any other reference as it is.

        Raises: TaskError when the build takes longer than ``timeout_s``, and what ``build_image`` raises.
        """
        named = parse(reference)
        if named.kind != "dockerfile":
            return reference
        if reference not in self._digests:
            build = self._builds.get(reference)
            if build is None:
                build = self._builds[reference] = asyncio.create_task(self._built(Path(named.name), timeout_s))
                build.add_done_callback(lambda done: self._ended(reference, done))
            self._digests[reference] = await asyncio.shield(build)  # others may wait for it
        return self._digests[reference]

    def _ended(self, reference: str, build: asyncio.Task[str]) -> None:
        del self._builds[reference]
        if not build.cancelled():
            build.exception()  # whoever waited for it has got it

    async def _built(self, directory: Path, timeout_s: float) -> str:
        async with self._opening:
            if self._machines is None:
                store = await asyncio.to_thread(Store.open, store_directory())
                machines = await self._stack.enter_async_context(
                    SlotMachines(store, self._limits, builds=this_machine().cores)
                )
                self._machines = store, machines
        store, machines = self._machines
        try:
            async with self._at_once, asyncio.timeout(timeout_s):
                return (await build_image(directory, store, machines=machines)).image
        except TimeoutError:
            raise TaskError(
                f"building {directory} takes more than {timeout_s:g} s",
                next_step="raise environment.build_timeout_sec: finished steps are cached",
            ) from None
        except DockerfileError as error:  # as that of a failed command: in one line, and not scored
            raise TaskError(error.message, next_step=error.next_step) from None


async def until_healthy(
    slot: SlotTools, check: Healthcheck, *, user: str | None, name: str = "environment.healthcheck"
) -> None:
    """Run the check, the field ``name`` of the task, until it succeeds. Failures count after the start period, and
    ``retries`` of them in a row are too many. Raises TaskError then; InfraError."""
    arguments = {"command": check.command, **({} if user is None else {"user": user})}
    counted_from_s = time.monotonic() + check.start_period_s
    failures = 0
    while True:
        counts = time.monotonic() >= counted_from_s
        done = await slot.call_tool("bash", arguments, timeout_s=check.timeout_s)
        if done.exit_code == 0 and not done.timed_out:
            return
        failures += counts
        if failures >= check.retries and counts:
            output = (done.stderr or done.stdout).strip()[-300:] or "it printed nothing"
            raise TaskError(f"{name} failed {failures} times: {check.command}: {output}")
        await asyncio.sleep(check.interval_s if counts else check.start_interval_s)

"""What tasks ask of a machine: capped by settings, and refused where this machine does not have it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentenv.sandbox.supervisor.limits import Machine as ThisMachine
from examples.harbor.task import HarborTask, Machine, wrong


@dataclass(frozen=True)
class Caps:
    """The most that a task is given, whatever it asks for; None: what it asks for."""

    cpus: float | None = None
    memory_mib: int | None = None

    def of(self, task: HarborTask) -> HarborTask:
        """The task with its limits, and those of its verifier's own machine, capped."""
        separate = task.separate and replace(
            task.separate, cpus=self._cpus(task.separate), memory_mib=self._memory_mib(task.separate)
        )
        return replace(task, cpus=self._cpus(task), memory_mib=self._memory_mib(task), separate=separate)

    def _cpus(self, machine: Machine) -> float | None:
        return machine.cpus if machine.cpus is None or self.cpus is None else min(machine.cpus, self.cpus)

    def _memory_mib(self, machine: Machine) -> int | None:
        asked = machine.memory_mib
        return asked if asked is None or self.memory_mib is None else min(asked, self.memory_mib)


def check_fits(task: HarborTask, this: ThisMachine) -> None:
    """Raises ConfigError, naming the task's field, when this machine has less than a slot is to have."""
    this_mib = this.memory_bytes // 2**20
    for machine in (task, task.separate) if task.separate else (task,):
        if (machine.cpus or 0) > this.cores:
            asked, has, cap = f"{machine.cpus:g} cores", str(this.cores), f"max_cpus={this.cores}"
            raise wrong(task.directory, machine.cpus_field, *_too_much(asked, has, cap))
        if (machine.memory_mib or 0) > this_mib:
            asked, has, cap = f"{machine.memory_mib} MiB", str(this_mib), f"max_memory_mib={this_mib} or less"
            raise wrong(task.directory, machine.memory_field, *_too_much(asked, has, cap))


def _too_much(asked: str, has: str, cap: str) -> tuple[str, str]:
    return (
        f"asks for {asked}, and this machine has {has}",
        f"cap what tasks get ({cap}), leave it out (only_tasks), or use a larger machine",
    )

"""HarborEnv: task directories as they are, each in a slot whose root is the task's image.

    python -m agentenv.tasks.harbor.env process --env.tasks DIRECTORY \\
        --openai.base_url URL --openai.model_name MODEL ...

See ``docs/harbor.md``.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from agentenv import AgentEnv, AgentEnvConfig, AgentResult, AgentSettings, AsyncFarm, ImageRoot, ToolContext
from agentenv.env.farm_fields import Names
from agentenv.errors import ConfigError, PolicyRefusalError, TaskError, ToolCallError
from agentenv.sandbox.supervisor.cgroups import this_machine
from agentenv.sdk.roots import Service
from agentenv.tasks.harbor import steps
from agentenv.tasks.harbor.directories import Found, read_tasks
from agentenv.tasks.harbor.machine import Caps, TaskImages, check_fits, until_healthy, writes
from agentenv.tasks.harbor.rewards import NoRewardError
from agentenv.tasks.harbor.starting import start_services
from agentenv.tasks.harbor.task import HarborTask, Machine, Phase, Separate, SideService, from_dockerfiles
from agentenv.tasks.harbor.verifier import Judged, handed_over, judged, lay_mount
from agentenv.wire.network import NO_NETWORK

logger = logging.getLogger(__name__)

SYSTEM: Final = """\
You solve tasks on a Linux machine of your own by calling tools. You are {user} there; paths that are not absolute \
begin in {workdir}. Each bash call starts a new shell: files persist, variables and directory changes do not. The \
shell of the terminal tool is kept between calls. Work step by step, verify your result by running it, and when the \
task is done answer without calling a tool."""


class HarborConfig(AgentEnvConfig):
    """An environment's settings, and which tasks are played on which images."""

    tasks: str = Field(default="", description="A task directory, or a directory of task directories")
    only_tasks: Names = Field(default_factory=list, description="Tasks of these names")
    image: str = Field(default="", description="Image in place of each task's own; {task} in it is the task's name")
    image_from: Literal["image", "dockerfile"] = Field(
        default="image", description="Of a task that names an image and has a Dockerfile: which of them is used"
    )
    strict: bool = Field(
        default=False, description="Refuse to start when a task cannot be played, instead of leaving it out"
    )
    storage: Literal["auto", "memory", "disk"] = Field(
        default="auto",
        description="Where slots write: in memory (at most half of it), on the container's disk, or (auto) on the disk "
        "if the task requests more than that half",
    )
    max_cpus: float | None = Field(default=None, gt=0, description="Limit of the cores a task gets")
    max_memory_mib: int | None = Field(default=None, ge=1, description="Limit of the memory a task gets")
    host_env: Names = Field(
        default_factory=list, description="Variables of this machine that tasks may name in their templates"
    )


def found_tasks(config: HarborConfig, prepare: Callable[[HarborTask], HarborTask] = lambda task: task) -> Found:
    """The tasks that the settings name, as they are played, and why others are not. ``prepare``: what else is done with
    each; it may refuse one. Raises ConfigError when there are none."""
    if not config.tasks:
        raise ConfigError("tasks", "is not set", next_step="name a directory of task directories")
    offered = {name: os.environ[name] for name in config.host_env if name in os.environ}

    def as_played(task: HarborTask) -> HarborTask:
        return prepare(as_configured(task, config))

    return read_tasks(Path(config.tasks), offered, config.only_tasks, as_played)


def as_configured(task: HarborTask, config: HarborConfig) -> HarborTask:
    """A task as these settings play it. Raises ConfigError when they cannot."""
    if config.image_from == "dockerfile":
        task = from_dockerfiles(task)
    if task.group.services:
        _check_group(task, config)
    task = Caps(config.max_cpus, config.max_memory_mib).of(task)
    if config.tool_pool_mode == "local":
        check_fits(task, this_machine())
    elif task.separates:
        problem = f"task {task.name}: its verifier has a machine of its own"
        raise ConfigError("tool_pool_mode", problem, next_step="allowed: local")
    return task


def _check_group(task: HarborTask, config: HarborConfig) -> None:
    fields = ", ".join(f"services.{each.name}" for each in task.group.services)
    problem = f"task {task.name} has services beside the agent's machine ({fields} of its compose file)"
    if config.tool_pool_mode != "local":
        problem += ", which slots of this machine alone can have"
        raise ConfigError("tool_pool_mode", problem, next_step="allowed: local; leave the task out (only_tasks)")
    if config.verification == "sealed":
        problem += ", which end when its slot is sealed"
        raise ConfigError("verification", problem, next_step="allowed: live; leave the task out (only_tasks)")


class HarborEnv(AgentEnv):
    """Carry out the instruction; the score is the reward that the task's verifier writes."""

    name = "harbor"
    env_config_cls = HarborConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises: ConfigError naming the task and the field."""
        super().__init__(*args, **kwargs)
        config: HarborConfig = self.config
        if config.tool_pool_mode not in ("local", "nomad", "farm"):
            raise ConfigError(
                "tool_pool_mode", "tasks have images of their own", next_step="allowed: local, nomad, farm"
            )
        found = found_tasks(config, self.as_played)
        self.refused = found.refused
        if found.refused and (config.strict or not found.tasks):
            first, *others = found.refused.values()
            for error in others:
                logger.warning("refused: %s", error)
            raise first
        self.tasks: dict[str, HarborTask] = {task.name: task for task in found.tasks}
        self._order: Iterator[str] = itertools.cycle(self.tasks)
        self._images = TaskImages(network=config.allow_network)
        self._verifiers: AsyncFarm | None = None
        if any(task.separates for task in found.tasks):
            self._verifiers = AsyncFarm(self.build_backend(), slots=config.slots_per_container, start_timeout_s=600.0)
        machines: list[Machine] = [machine for task in found.tasks for machine in (task, *task.separates)]
        most_mib = max((machine.memory_mib or 0 for machine in machines), default=0)
        if most_mib > config.slot_memory_mib:
            config.slot_memory_mib = most_mib

    def as_played(self, task: HarborTask) -> HarborTask:
        """What else is done with a task before it is played; a ConfigError leaves it out."""
        return task

    def list_refused(self) -> None:
        """Log which tasks are left out, and why."""
        for error in self.refused.values():
            logger.warning("left out: %s", error)

    async def setup_agent_env(self) -> None:
        """Open the verifiers' containers, and log, once for all tasks, which are left out and which of their requests
        are not fulfilled."""
        if self._verifiers is not None:
            await self._verifiers.open()
        self.list_refused()
        for task in self.tasks.values():
            if task.unknown:
                logger.warning("task %s: unused fields: %s", task.name, ", ".join(task.unknown))
        asking = [
            task.name
            for task in self.tasks.values()
            if all(NO_NETWORK not in (part.agent.network, part.verifier.network) for part in task.parts)
        ]
        if asking and not self.config.allow_network:
            logger.warning("%d tasks request a network but get none (allow_network): %s", len(asking), asking[:10])

    async def get_next_item(self) -> dict[str, Any]:
        """The tasks, repeated endlessly."""
        return self.item_of(self.tasks[next(self._order)])

    def item_of(self, task: HarborTask) -> dict[str, Any]:
        """A task as the item in its transcripts."""
        return {"task_id": task.name, "image": self._image_of(task)}

    async def task_image(self, item: Any) -> ImageRoot:
        """The task's image with its limits; a Dockerfile's is built. Raises what :meth:`TaskImages.of` raises."""
        task = self.tasks[item["task_id"]]
        services = {each.name: await self._service(task, each) for each in task.group.services}
        root = await self._root(replace(task, image=self._image_of(task)), task.agent)
        return replace(root, services=services, hosts=task.group.hosts)

    async def _service(self, task: HarborTask, side: SideService) -> Service:
        image = await self._images.of(side.image, task.build_timeout_s)
        return Service(image, side.user, side.workdir, side.env, side.volumes)

    async def _root(self, machine: Machine, phase: Phase) -> ImageRoot:
        of_farm = self.config.tool_pool_mode == "farm"  # which has images and limits of its own
        memory_mib = machine.memory_mib or (None if of_farm else self.config.slot_memory_mib)
        storage, storage_mib = writes(self.config.storage, machine.storage_mib, memory_mib)
        return ImageRoot(
            machine.image if of_farm else await self._images.of(machine.image, machine.build_timeout_s),
            cpus=machine.cpus or None,
            memory_mib=memory_mib,
            storage_mib=storage_mib,
            storage=storage,
            user=phase.user,
            workdir=machine.workdir,
            env=machine.env,
            volumes=machine.volumes,
            network=phase.network if self.config.allow_network else NO_NETWORK,
        )

    def _image_of(self, task: HarborTask) -> str:
        return self.config.image.replace("{task}", task.name) or task.image

    def build_task(self, item: Any) -> str:
        """The instruction."""
        task = self.tasks[item["task_id"]]
        return f"[task:{task.name}]\n{task.instruction}"

    def build_agent_config(self, item: Any) -> AgentSettings:
        """As configured, and not longer than the task's time for the agent."""
        return self._agent_config(self.tasks[item["task_id"]])

    def _agent_config(self, task: HarborTask) -> AgentSettings:
        settings = self.config.agent_settings()
        prompt = settings.system_prompt
        if prompt is None:
            workdir = task.workdir or "the image's working directory"
            prompt = SYSTEM.format(user=task.agent.user or "root", workdir=workdir)
        max_s = min(task.agent.timeout_s, settings.max_s or math.inf)
        return replace(settings, system_prompt=prompt, max_s=max_s if max_s < math.inf else None)

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **_: Any) -> dict[str, Any]:
        """The directory of logs is made as Harbor does, what a compose file mounts is copied, the services
        beside it are started, and the task's healthcheck is waited for. Raises TaskError."""
        make = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/* && pwd"
        done = await exec_tool.terminal(make, user="root")
        if done.exit_code:
            raise TaskError(f"the image of {item['task_id']} cannot be used: {done.stderr.strip()[:300]}")
        task = self.tasks[item["task_id"]]
        try:
            for mount in task.mounts:
                await lay_mount(exec_tool, mount)
        except NoRewardError as error:
            raise TaskError(f"what {task.name} mounts cannot be copied: {error}") from error
        if task.group.services:
            await start_services(exec_tool, task.name, task.group)
        if task.healthcheck is not None:
            await until_healthy(exec_tool, task.healthcheck, user=task.other_user)
        workspace = {"workdir": done.stdout.strip(), "image": item["image"]}
        if task.steps and (problem := await self._begun(exec_tool, task.steps[0], workspace)):
            raise TaskError(f"{task.name}: {problem}")
        return workspace

    async def _begun(self, exec_tool: ToolContext, step: HarborTask, workspace: dict[str, Any]) -> str:
        """Begin a step. Returns why it cannot; empty if it has."""
        try:
            await steps.begin(exec_tool, step, workspace["workdir"])
            if step.healthcheck is not None:
                await until_healthy(exec_tool, step.healthcheck, user=None)
        except (OSError, TaskError, ToolCallError, PolicyRefusalError, NoRewardError) as error:
            return f"step {step.step} cannot begin: {error}"
        return ""

    async def continue_task(
        self, item: Any, *, exec_tool: ToolContext, workspace_meta: dict[str, Any], **_: Any
    ) -> tuple[str, AgentSettings] | None:
        """Of a task of several steps: judge the one that has ended, and begin the next, unless it has no reward or less
        than its ``min_reward``."""
        task = self.tasks[item["task_id"]]
        done = workspace_meta.setdefault(steps.DONE, []) if task.steps else []
        if len(done) + 1 >= len(task.steps):
            return None
        step, following = task.steps[len(done) : len(done) + 2]
        if self.config.verification == "sealed":
            await exec_tool.seal()
        found = await self._judged(exec_tool, step)
        done.append(steps.record(step, found))
        problem = steps.shortfall(step, found.rewards)
        if not problem:
            if self.config.allow_network and following.agent.network != step.verifier.network:
                await exec_tool.set_network(following.agent.network)
            if problem := await self._begun(exec_tool, following, workspace_meta):
                done.append(steps.record(following, Judged(reason=problem)))
        if problem:
            workspace_meta[steps.ENDED] = problem
            return None
        return following.instruction, self._agent_config(following)

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,  # noqa: ARG002 - what counts is what it did
        *,
        exec_tool: ToolContext,
        agent_result: AgentResult,
        workspace_meta: dict[str, Any],
        **_: Any,
    ) -> tuple[float, dict[str, Any]]:
        """Run the task's verifier, with the network of its phase; of several steps the last one's, whose score is that
        of all of them."""
        task = self.tasks[item["task_id"]]
        kept: dict[str, Any] = {"model faults": agent_result.model_faults}
        if task.steps:
            done = [*workspace_meta.get(steps.DONE, [])]
            if steps.ENDED in workspace_meta:
                kept[steps.ENDED] = workspace_meta[steps.ENDED]
            else:
                done.append(steps.record(task.steps[len(done)], await self._judged(exec_tool, task.steps[len(done)])))
            kept[steps.DONE] = done
            found = steps.all_together(task, done)
        else:
            found = await self._judged(exec_tool, task)
        return found.score, {**found.details(), **kept}

    async def _judged(self, exec_tool: ToolContext, part: HarborTask) -> Judged:
        """What the verifier of a task, or of one of its steps, finds."""
        if part.separate:
            return await self._judged_apart(exec_tool, part, part.separate)
        if self.config.allow_network and part.verifier.network != part.agent.network:
            await exec_tool.set_network(part.verifier.network)
        return await judged(exec_tool, part)

    async def _judged_apart(self, exec_tool: ToolContext, task: HarborTask, separate: Separate) -> Judged:
        """Run the verifier in a slot of its own, which no rollout can take: rollouts have their own."""
        assert self._verifiers is not None  # there is such a task
        async with self._verifiers.sandbox(await self._root(separate, task.verifier)) as slot:
            if problem := await handed_over(exec_tool, slot, separate):
                return Judged(reason=problem)
            return await judged(slot, task)

    async def close(self) -> None:
        """See AgentEnv; the containers of verifiers and builds end too."""
        await super().close()
        await self._images.close()
        if self._verifiers is not None:
            await self._verifiers.close()


class EveryTask(HarborEnv):
    """Its ``evaluate`` plays each task once, unless ``eval_items`` is set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises: ConfigError naming the task and the field."""
        super().__init__(*args, **kwargs)
        self.config.eval_items = self.config.eval_items or len(self.tasks)


if __name__ == "__main__":
    HarborEnv.cli()

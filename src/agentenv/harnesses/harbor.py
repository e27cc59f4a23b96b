"""Harbor's environment in slots: ``harbor run -e agentenv.harnesses.harbor:AgentEnvEnvironment`` (docs/harnesses.md).

A trial is a slot: in a container of its own, in one that the trials of this process share (``slots``), or of a farm
service. What Harbor asks of a running environment is here; what a task asks for is read in
:mod:`agentenv.harnesses.harbor_machine`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, Self

from harbor.environments.base import (
    BaseEnvironment,
    ExecResult,
    SandboxBuildFailedError,
    ServiceOperationsUnsupportedError,
)
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.options import EnvironmentOptions
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.config import ResourceMode
from pydantic import Field, model_validator

from agentenv import AsyncFarm, AsyncSandbox, SharedFarm, SlotLimits, shared_farm
from agentenv.errors import ConfigError, DockerfileError, TaskError
from agentenv.harnesses.harbor_machine import Definition, Limits, chosen_image, read_definition, root_of
from agentenv.harnesses.limits import this_machines_mib
from agentenv.harnesses.programs import run
from agentenv.tasks.harbor.rewards import NoRewardError
from agentenv.tasks.harbor.starting import start_services
from agentenv.tasks.harbor.verifier import lay_mount
from agentenv.wire.spec import MIB

_ROOT: Final = "root"
"""Whose Harbor's own files are, whatever user the image has."""
_MAX_OUTPUT_BYTES: Final = 64 * 2**20
"""Of each output of a command: of more, its beginning and its end."""
_CLUSTER_SLOT_MIB: Final = 4096
"""What a cluster reserves for each slot of shared containers, unless an option says how much."""
_STOP: Final = "kill -KILL -1"
_NETWORKS: Final = {NetworkMode.NO_NETWORK: "none", NetworkMode.PUBLIC: "public"}


class Options(EnvironmentOptions):
    """``--ek NAME=VALUE``."""

    backend: Literal["local", "nomad", "farm"] = Field(
        default="local", description="Where slots are: this machine, a Nomad cluster, a farm service."
    )
    slots: int = Field(
        default=0, ge=0, description="Trials of this process that share containers; 0: each has a container of its own."
    )
    slot_memory_mb: int | None = Field(
        default=None,
        ge=1024,
        description="Most memory that a task of shared containers may have; by default what this machine has, on a "
        "cluster 4096.",
    )
    memory_mb: int = Field(default=2048, ge=64, description="Memory of a trial for which nothing names a limit.")
    storage: Literal["auto", "memory", "disk"] = Field(
        default="auto", description="Where a trial writes; auto: on disk what is more than half of its memory."
    )
    image: str = Field(default="", description="In place of each task's own; {task} in it is the task's name.")
    host_env: list[str] = Field(
        default_factory=list, description="Variables of this machine that compose files of tasks may name."
    )
    start_timeout_s: float = Field(default=600.0, gt=0, description="How long a trial waits for its slot.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.slots and self.backend == "farm":
            raise ValueError("slots are the farm service's: leave slots out with backend=farm")
        return self


class AgentEnvEnvironment(BaseEnvironment):
    """A trial's slot. Raises ConfigError, which names the field, for what slots cannot have, before anything starts;
    SandboxBuildFailedError when an image cannot be built or a service does not start; InfraError."""

    options_model = Options
    options: Options
    _definition: Definition
    _own: AsyncFarm | None = None
    _box: AsyncSandbox | None = None

    # -- what Harbor asks before it starts one ---------------------------------------------------------

    @staticmethod
    def type() -> str:
        """Its name in results."""
        return "agentenv"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What slots can do; several services are of this machine's slots only."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
            docker_compose=self.options.backend == "local",
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Limits, and no reservations."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Raises ValueError for wrong options, SystemExit when no farm service is configured."""
        super().preflight(kwargs)
        if (kwargs or {}).get("backend") == "farm":
            try:
                AsyncFarm("farm")
            except ConfigError as error:
                raise SystemExit(str(error)) from error

    def _validate_definition(self) -> None:
        if self.extra_docker_compose_paths:
            raise ConfigError("extra_docker_compose", "is not read", next_step="write it into the task's compose file")
        if self._host_mounts:
            mounted = ", ".join(str(mount.get("target")) for mount in self._host_mounts)
            raise ConfigError(
                "mounts", f"{mounted}: slots have no mounts of this machine", next_step="upload the files"
            )
        offered = {name: os.environ[name] for name in self.options.host_env if name in os.environ}
        self._definition = read_definition(self.environment_dir, {**offered, **self._startup_env()})
        if self._definition.unused:
            self.logger.warning("not read: %s", ", ".join(self._definition.unused))
        if self._definition.group.services and self.options.backend != "local":
            beside = ", ".join(each.name for each in self._definition.group.services)
            raise ConfigError("services", f"{beside}: slots have some on this machine only", next_step="backend=local")
        if not self.options.image:
            chosen_image(self._definition, self.task_env_config.docker_image or "", build=False)
        asked_mib = self._limits().memory_mib or 0
        if self.options.slots and asked_mib > self._most_mib():
            problem = f"{asked_mib} are requested, and slots of the shared farm have at most {self._most_mib()}"
            raise ConfigError("memory_mb", problem, next_step=f"--ek slot_memory_mb={asked_mib}, or without slots")

    def _most_mib(self) -> int:
        if self.options.slot_memory_mb is not None:
            return self.options.slot_memory_mb
        return this_machines_mib() if self.options.backend == "local" else _CLUSTER_SLOT_MIB

    def _limits(self) -> Limits:
        memory_mib = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        if memory_mib is None and self.options.backend != "farm":  # which has limits of its own
            memory_mib = self.options.memory_mb
        return Limits(
            cpus=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT) or None,
            memory_mib=memory_mib,
            storage_mib=self.task_env_config.storage_mb or None,
            storage=self.options.storage,
        ).of(self._definition)

    # -- from its start to its end ---------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Lease the slot, its image fetched or built, and start the services of a compose file."""
        try:
            await self._open(force_build)
            await self._prepare()
        except BaseException as error:
            await self._close()
            if isinstance(error, (DockerfileError, TaskError, NoRewardError)):
                raise SandboxBuildFailedError(str(error)) from error
            raise

    async def _open(self, force_build: bool) -> None:
        image = self.options.image.replace("{task}", self.environment_name) or chosen_image(
            self._definition, self.task_env_config.docker_image or "", build=force_build
        )
        root = root_of(
            self._definition,
            image,
            self._limits(),
            workdir=self.task_env_config.workdir or "",
            network=_network(self.network_policy),
        )
        box = (await self._farm(root.memory_mib or 0)).sandbox(root)
        await box.open()
        self._box = box

    async def _farm(self, memory_mib: int) -> AsyncFarm | SharedFarm:
        options = self.options
        if options.backend == "farm":
            return shared_farm("farm", start_timeout_s=options.start_timeout_s)
        limits = SlotLimits(max_memory_bytes=MIB * (self._most_mib() if options.slots else memory_mib))
        if options.slots:
            return shared_farm(
                options.backend,
                slots=options.slots,
                start_timeout_s=options.start_timeout_s,
                limits=limits,
                allow_network=True,
            )
        self._own = AsyncFarm(
            options.backend, slots=1, start_timeout_s=options.start_timeout_s, limits=limits, allow_network=True
        )
        return await self._own.open()

    async def _prepare(self) -> None:
        box, group = self._running(), self._definition.group
        for mount in self._definition.compose.main.mounts():
            await lay_mount(box, mount)
        if group.services:
            await start_services(box, self.environment_name, group)
        made = await self.ensure_dirs(self._mount_targets(writable_only=True))
        if made is not None and made.return_code:
            raise TaskError(f"the image of {self.environment_name} cannot be used: {(made.stderr or '').strip()[:300]}")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Give the slot back. Repeatable."""
        if not delete and self._box is not None:
            self.logger.warning("the slot is wiped: nothing of it is kept, as if it was to be deleted")
        await self._close()

    async def _close(self) -> None:
        box, own, self._box, self._own = self._box, self._own, None, None
        try:
            if box is not None:
                await box.close()
        finally:
            if own is not None:
                await own.close()

    def _running(self) -> AsyncSandbox:
        if self._box is None:
            raise RuntimeError("the environment has not been started, or has ended")
        return self._box

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        await self._running().set_network(_network(network_policy))

    # -- commands and files ----------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run it, beside others. Raises RuntimeError at its timeout, as Harbor's own environments do."""
        return await self._exec(
            self._running(), command, cwd, self._merge_env(env), timeout_sec, self._resolve_user(user)
        )

    async def _exec(
        self,
        slot: AsyncSandbox,
        command: str,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | int | None,
    ) -> ExecResult:
        ran = await run(
            slot,
            command,
            cwd=cwd,
            env=env,
            user=None if user is None else str(user),
            timeout_s=timeout_sec or None,
            first_bytes=_MAX_OUTPUT_BYTES // 2,
            last_bytes=_MAX_OUTPUT_BYTES // 2,
            on_text=self._output_callback(),
        )
        if ran.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=ran.stdout.text, stderr=ran.stderr.text, return_code=ran.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """As root's."""
        await self._running().upload(source_path, str(target_path), user=_ROOT)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """What is in it, as root's, beside what is there."""
        await self._running().upload(source_dir, str(target_dir), user=_ROOT)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Whoever may read it in the slot."""
        await self._running().download(str(source_path), target_path, user=_ROOT)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """What is in it. Pipes, devices and sockets are left out."""
        await self._running().download(str(source_dir), target_dir, user=_ROOT)

    # -- services beside the agent's machine -----------------------------------------------------------

    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run it in a service, with that service's own user, directory and variables."""
        if service is None or self.is_main_service(service):
            return await self.exec(command, cwd=cwd, env=env, timeout_sec=timeout_sec, user=user)
        async with self._service(service) as slot:
            return await self._exec(slot, command, cwd, env, timeout_sec, user)

    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        """Of a service."""
        async with self._service(service) as slot:
            await slot.download(str(source_path), target_path, user=_ROOT)

    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        """Of a service."""
        async with self._service(service) as slot:
            await slot.download(str(source_dir), target_dir, user=_ROOT)

    async def stop_service(self, service: str) -> None:
        """End all programs of a service, or of the agent's machine. Its files can still be read."""
        await self.service_exec(_STOP, service=service, user=_ROOT)

    @asynccontextmanager
    async def _service(self, service: str | None) -> AsyncIterator[AsyncSandbox]:
        if service is None or self.is_main_service(service):
            yield self._running()
            return
        if service not in {each.name for each in self._definition.group.services}:
            raise ServiceOperationsUnsupportedError(f"there is no service {service!r} beside {self.environment_name}")
        async with await self._running().service(service) as slot:
            yield slot


def _network(policy: NetworkPolicy) -> Any:
    if policy.network_mode == NetworkMode.ALLOWLIST:
        return list(policy.allowed_hosts) or "none"
    return _NETWORKS[policy.network_mode]

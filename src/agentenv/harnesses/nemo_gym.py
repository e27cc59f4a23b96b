"""Slots as a sandbox provider of NeMo Gym, which finds it by the entry point of this package: a block
``{agentenv: {slots: 20}}`` of its configuration (docs/harnesses.md)."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from agentenv import AsyncSandbox, ImageRoot, SharedFarm, shared_farm
from agentenv.errors import AgentEnvError, ConfigError, PoolClosedError, SlotDestroyedError
from agentenv.harnesses.limits import local_limits
from agentenv.harnesses.programs import run

_OUTPUT_BYTES: Final = 64 * 2**20
"""Of each output: of more, its beginning and its end."""
_STATUS_S: Final = 30.0
_TIMED_OUT: Final = 124
_NOT_RUN: Final = 125
_NO_PROGRAM: Final = (126, 127)
_OPTIONS: Final = frozenset({"user", "network", "storage_mib"})
"""What a specification may give besides, in ``provider_options``."""


@dataclass
class _Started:
    """What a handle of ours holds."""

    box: AsyncSandbox
    env: dict[str, str] = field(default_factory=dict)
    """Of a slot without an image; an image's slot has it itself."""
    ending: asyncio.Task[None] | None = None


class AgentEnvProvider:
    """``backend``: ``local``, ``nomad``, or ``farm``, a farm service. All providers of a process with equal settings
    share its farm, which ends with it. ``network``: of sandboxes with an image. Without an image, a sandbox has this
    machine's programs, and one user."""

    name = "agentenv"

    def __init__(
        self,
        backend: Literal["local", "nomad", "farm"] = "local",
        *,
        slots: int = 10,
        network: str | list[str] = "public",
        start_timeout_s: float = 600.0,
        **containers: Any,
    ) -> None:
        """``containers``: fields of :class:`agentenv.ContainerSettings`. Raises ConfigError."""
        self._network = network
        self._backend = backend
        self._start_timeout_s = start_timeout_s
        self._settings: dict[str, Any] = dict(containers)
        if backend != "farm":
            of_farm = {"slots": slots, "allow_network": network != "none", "limits": local_limits(backend)}
            self._settings = {**of_farm, **containers}
        self._farm()

    def _farm(self) -> SharedFarm:
        return shared_farm(self._backend, start_timeout_s=self._start_timeout_s, **self._settings)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """A slot; its directory is made if it is missing. Raises SandboxCreateError."""
        try:
            root = self._root(spec)
            box = self._farm().sandbox(root) if root is not None else self._farm().sandbox(workdir=spec.workdir or "")
            async with asyncio.timeout(spec.ready_timeout_s):
                await box.open()
            try:
                await _start(box, spec.entrypoint)
            except BaseException:
                await box.close()
                raise
        except AgentEnvError as error:
            raise SandboxCreateError(str(error)) from error
        except TimeoutError as error:
            raise SandboxCreateError(f"no slot within {spec.ready_timeout_s:g} s (ready_timeout_s)") from error
        started = _Started(box, {} if root is not None else dict(spec.env))
        if spec.ttl_s:
            started.ending = asyncio.create_task(_end_after(box, spec.ttl_s))
        return SandboxHandle(f"agentenv-{secrets.token_hex(6)}", self.name, started)

    def _root(self, spec: SandboxSpec) -> ImageRoot | None:
        """Raises ConfigError naming what a slot does not have."""
        asked, options = spec.resources, spec.provider_options
        if asked.gpu or asked.gpu_type:
            raise ConfigError("resources.gpu", "slots have no GPU", next_step="leave it out")
        if unknown := sorted(options.keys() - _OPTIONS):
            allowed = f"allowed: {', '.join(sorted(_OPTIONS))}"
            raise ConfigError(f"provider_options.{unknown[0]}", "is not known", next_step=allowed)
        if not spec.image:
            given = {"resources.cpu": asked.cpu, "resources.memory_mib": asked.memory_mib}
            given |= {"resources.disk_gib": asked.disk_gib, "provider_options": options}
            if named := [name for name, value in given.items() if value]:
                raise ConfigError(
                    named[0], "is for sandboxes with an image", next_step="name an image, or leave it out"
                )
            return None
        return ImageRoot(
            spec.image,
            cpus=asked.cpu,
            memory_mib=asked.memory_mib,
            storage_mib=asked.disk_gib * 1024 if asked.disk_gib else options.get("storage_mib"),
            storage="disk" if asked.disk_gib else "memory",
            workdir=spec.workdir or "",
            env=spec.env,
            user=str(options.get("user", "")),
            network=options.get("network", self._network),
        )

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run bash text beside what else runs in the sandbox. ``error_type`` is ``timeout`` (124), or ``sandbox`` (125)
        when what ran in the slot has destroyed it. A failure of the farm is raised: it is no answer to a model, and no
        reward. Raises InfraError, InvalidArgumentsError (UserUnsupportedError without an image)."""
        started: _Started = handle.raw
        try:
            done = await run(
                started.box,
                command,
                cwd=cwd,
                env={**started.env, **(env or {})},
                user=None if user is None else str(user),
                timeout_s=timeout_s,
                first_bytes=_OUTPUT_BYTES // 2,
                last_bytes=_OUTPUT_BYTES // 2,
            )
        except SlotDestroyedError as error:
            return SandboxExecResult(None, str(error), _NOT_RUN, "sandbox")
        if done.timed_out:
            return SandboxExecResult(done.stdout.text, done.stderr.text, _TIMED_OUT, "timeout")
        return SandboxExecResult(done.stdout.text, done.stderr.text, done.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """As the sandbox's user; directories above it are made. Raises OSError, InfraError."""
        await handle.raw.box.upload(source_path, target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Of any size. Raises OSError, InfraError."""
        await handle.raw.box.download(source_path, target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Whether a program can be run in it."""
        started: _Started = handle.raw
        if not started.box.is_open:
            return SandboxStatus.STOPPED
        try:
            await run(started.box, "true", timeout_s=_STATUS_S, last_bytes=0)
        except PoolClosedError:
            return SandboxStatus.STOPPED
        except AgentEnvError:
            return SandboxStatus.ERROR
        return SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        """Give the slot back. Repeatable."""
        started: _Started = handle.raw
        if started.ending is not None:
            started.ending.cancel()
        await started.box.close()

    async def aclose(self) -> None:
        """Nothing: the farm is of all providers of this process, and ends with it."""


async def _start(box: AsyncSandbox, entrypoint: list[str] | None) -> None:
    """In the background, until the slot ends. Raises ConfigError when there is no such program."""
    if entrypoint:
        process = await box.start(entrypoint)
        if (await process.state()).exit_code in _NO_PROGRAM:
            raise ConfigError(
                "entrypoint", f"{entrypoint[0]} cannot be started", next_step="name a program of the image"
            )


async def _end_after(box: AsyncSandbox, ttl_s: float) -> None:
    await asyncio.sleep(ttl_s)
    await box.close()

"""Slots as the sandboxes of inspect_ai, which finds them by an entry point of agentenv: ``sandbox="agentenv"``,
``("agentenv", "compose.yaml")``, ``("agentenv", "Dockerfile")``, and :class:`AgentEnvSandboxConfig`
(docs/harnesses.md).

The samples of a process share its farm. A sample has one slot; the other services of its compose file are further roots
of that slot, and sandboxes by their names.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shlex
import tempfile
from pathlib import Path
from typing import Any, Final, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from agentenv import AsyncSandbox
from agentenv.errors import SlotDestroyedError, UserUnsupportedError
from agentenv.harnesses.inspect_config import SLOTS, AgentEnvSandboxConfig, planned, sample_variables
from agentenv.harnesses.programs import run
from agentenv.tasks.harbor.starting import start_services
from agentenv.tasks.harbor.verifier import lay_mount
from agentenv.wire.base import MAX_FILE_BYTES

__all__ = ["AgentEnvSandbox", "AgentEnvSandboxConfig"]

logger = logging.getLogger(__name__)
_NOT_EXECUTABLE: Final = 126
_DENIED: Final = ("{}: cannot start: Permission denied\n", "slotas: {}: Permission denied\n")
"""All that is said of a program that the sandbox's user may not execute; the second where that user is not root."""


@sandboxenv(name="agentenv")
class AgentEnvSandbox(SandboxEnvironment):
    """The slot of a sample, or one of its services."""

    def __init__(self, box: AsyncSandbox, slot: AsyncSandbox) -> None:
        """``slot``: the sandbox that is to be closed, of which ``box`` is the whole or a service."""
        super().__init__()
        self.box = box
        self._slot = slot

    @classmethod
    def config_files(cls) -> list[str]:
        """What inspect looks for beside a task."""
        return ["compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml", "Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """A configuration object from a log."""
        return AgentEnvSandboxConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        """As many as a farm has slots, unless its configuration says otherwise."""
        return SLOTS

    @classmethod
    async def task_init_environment(cls, config: BaseModel | str | None, metadata: dict[str, str]) -> dict[str, str]:
        """Samples whose metadata a compose file names are prepared apart from each other."""
        if not isinstance(config, str):
            return {}
        text = await asyncio.to_thread(Path(config).read_text)
        return {name: value for name, value in sample_variables(metadata).items() if name in text}

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Start the farm, and have the images fetched or built once, before many samples ask for them. Raises
        ConfigError naming what slots do not have."""
        plan = planned(config, {})
        if plan.unused:
            logger.warning("%s: unused fields of its compose file: %s", task_name, ", ".join(plan.unused))
        async with plan.farm().sandbox(plan.root()):
            pass

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """A slot for the sample, with its services started."""
        plan = planned(config, metadata)
        slot = await plan.farm().sandbox(plan.root()).open()
        try:
            for mount in plan.mounts:
                await lay_mount(slot, mount)
            found: dict[str, SandboxEnvironment] = {plan.main: cls(slot, slot)}
            if plan.services:
                await start_services(slot, task_name, plan.group)
            for name in plan.services:
                found[name] = cls(await slot.service(name), slot)
        except BaseException:
            await slot.close()
            raise
        return found

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Give the slot back. The farm is of all tasks of this process, and ends with it."""
        for environment in environments.values():
            await environment.as_type(cls)._slot.close()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program beside the others of the sandbox. ``timeout_retry`` and ``concurrency`` mean nothing here: a
        time limit is exact, and nothing of it is a process of this machine."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
        try:
            done = await run(
                self.box,
                cmd,
                stdin=input,
                cwd=cwd,
                env=env,
                user=user,
                timeout_s=timeout,
                last_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except UserUnsupportedError as error:
            raise SandboxUserUnsupportedError(str(error)) from error
        except SlotDestroyedError as error:  # by what ran in it; a failure of the farm's is no answer to a model
            raise SandboxUnavailableError(str(error)) from error
        stdout, stderr = done.stdout.text, done.stderr.text
        if done.timed_out:
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            late.truncated_output = stdout + stderr  # type: ignore[attr-defined]  # where inspect looks for it
            raise late
        if done.stdout.dropped_bytes or done.stderr.dropped_bytes:
            raise OutputLimitExceededError(limit, stdout if done.stdout.dropped_bytes else stderr)
        if done.exit_code == _NOT_EXECUTABLE and stderr in (text.format(cmd[0]) for text in _DENIED):
            raise PermissionError(errno.EACCES, "Permission denied", cmd[0])
        return ExecResult(done.exit_code == 0, done.exit_code, stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """As the sandbox's user; directories above it are made."""
        data = contents.encode() if isinstance(contents, str) else contents
        if len(data) <= MAX_FILE_BYTES:
            await self.box.write_file(file, data)
            return
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "file"
            await asyncio.to_thread(place.write_bytes, data)
            await self.box.upload(place, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """As the sandbox's user. Raises OutputLimitExceededError before more than inspect's limit is read."""
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        entry = await self.box.stat(file)
        if entry.kind == "file" and entry.size_bytes > limit_bytes:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        if entry.kind != "file" or entry.size_bytes <= MAX_FILE_BYTES:
            data = await self.box.read_file(file, binary=True)
        else:
            with tempfile.TemporaryDirectory() as directory:
                place = Path(directory) / "file"
                await self.box.download(file, place, max_bytes=limit_bytes)
                data = await asyncio.to_thread(place.read_bytes)
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """A command for a terminal in the sandbox, for this user on this machine, until its sample has ended. Raises
        SandboxUserUnsupportedError where it has one user."""
        try:
            command = await self.box.shell_command(user=user)
        except UserUnsupportedError as error:
            raise SandboxUserUnsupportedError(str(error)) from error
        return SandboxConnection(type="agentenv", command=shlex.join(command))

"""Slots as a deployment of SWE-ReX (docs/harnesses.md):

deployment = SlotDeployment("python:3.12")
await deployment.start()
await deployment.runtime.create_session(CreateBashSessionRequest())
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

from swerex import exceptions
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.runtime import abstract as rex

from agentenv import AsyncSandbox, shared_farm
from agentenv.errors import InfraError, ToolCallError

_WAIT_S = 600.0


class SlotRuntime(rex.AbstractRuntime):
    """No server of SWE-ReX's runs in the slot, and the image needs no Python: sessions are those of the ``terminal``
    tool. A failure of the farm is raised as an InfraError."""

    def __init__(self, box: AsyncSandbox) -> None:
        self.logger = logging.getLogger("rex-runtime")
        self._box = box
        self._sessions: set[str] = set()

    async def is_alive(self, *, timeout: float | None = None) -> rex.IsAliveResponse:
        try:
            done = await self._box.exec(["true"], timeout_s=timeout or math.inf)
        except InfraError as error:
            return rex.IsAliveResponse(is_alive=False, message=str(error))
        return rex.IsAliveResponse(is_alive=not done.timed_out)

    async def create_session(self, request: rex.CreateBashSessionRequest) -> rex.CreateBashSessionResponse:
        if request.session in self._sessions:
            raise exceptions.SessionExistsError(f"session {request.session} already exists")
        command = " ; ".join(f"source {path}" for path in request.startup_source) or ":"
        done = await self._typed(request.session, max(request.startup_timeout, 60), command=command, pty=True)
        self._sessions.add(request.session)
        return rex.CreateBashSessionResponse(output=done.output)

    async def run_in_session(self, action: Any) -> rex.BashObservation:
        self._known(action.session)
        if isinstance(action, rex.BashInterruptAction):
            return await self._interrupt(action)
        if action.expect or action.is_interactive_command or action.is_interactive_quit:
            raise NotImplementedError("expect and interactive commands: slots have none of SWE-ReX's")
        checked = await self._box.exec(["bash", "-n"], stdin=action.command)
        if checked.exit_code:
            told = {"bash_stdout": checked.stdout, "bash_stderr": checked.stderr}
            raise exceptions.BashIncorrectSyntaxError(f"{action.command!r}: {checked.stderr}", extra_info=told)
        seen = await self._typed(action.session, action.timeout, command=action.command)
        if seen.exit_code and action.check == "raise":
            failed = f"Command {action.command!r} failed with exit code {seen.exit_code}: {seen.output!r}"
            raise exceptions.NonZeroExitCodeError(": ".join(filter(None, [action.error_msg, failed])))
        return seen if action.check != "ignore" else seen.model_copy(update={"exit_code": None})

    async def _interrupt(self, action: rex.BashInterruptAction) -> rex.BashObservation:
        for key in [*["C-c"] * action.n_retry, "C-\\"]:
            try:
                seen = await self._typed(action.session, max(action.timeout, 1), keys=[key])
            except exceptions.CommandTimeoutError:
                continue
            return seen.model_copy(update={"exit_code": 0})
        raise exceptions.CommandTimeoutError("Failed to interrupt session")

    async def _typed(self, session: str, timeout_s: float | None, **asked: Any) -> rex.BashObservation:
        """Until it has ended: a program that waits for input is waited for as well, as SWE-ReX does."""
        until_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        output = ""
        while True:
            left_s = min(max(until_s - time.monotonic(), 0), _WAIT_S)
            try:
                given = {"session": session, "timeout_s": left_s, **asked}
                done = await self._box.call_tool("terminal", given, timeout_s=left_s + _WAIT_S)
            except ToolCallError as error:
                raise exceptions.SwerexException(str(error)) from error
            output += done.printed
            if not done.timed_out:
                return rex.BashObservation(output=output, exit_code=done.exit_code)
            if time.monotonic() >= until_s:
                raise exceptions.CommandTimeoutError(f"timeout after {timeout_s} seconds while running {asked}")
            asked = {"command": ""}
            await asyncio.sleep(0.2)  # a program that waits for input is told at once

    async def close_session(self, request: rex.CloseBashSessionRequest) -> rex.CloseBashSessionResponse:
        self._known(request.session)
        await self._box.call_tool("terminal", {"session": request.session, "reset": True})
        self._sessions.remove(request.session)
        return rex.CloseBashSessionResponse()

    def _known(self, session: str) -> None:
        if session not in self._sessions:
            raise exceptions.SessionDoesNotExistError(f"session {session!r} does not exist")

    async def execute(self, command: rex.Command) -> rex.CommandResponse:
        """``env`` is added to that of the slot."""
        words = [command.command] if isinstance(command.command, str) else command.command
        argv = ["sh", "-c", *words] if command.shell else words
        if command.merge_output_streams:
            argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *argv]
        limit_s = math.inf if command.timeout is None else command.timeout
        done = await self._box.exec(argv, cwd=command.cwd, env=command.env, timeout_s=limit_s, output_bytes=64 * 2**20)
        if done.timed_out:
            raise exceptions.CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        if done.truncated:
            lost = done.stdout_dropped_bytes + done.stderr_dropped_bytes
            raise exceptions.SwerexException(f"{lost} bytes are missing from the output of {command.command!r}")
        if command.check and done.exit_code:
            failed = f"Command {command.command!r} failed with exit code {done.exit_code}: {done.stdout} {done.stderr}"
            raise exceptions.NonZeroExitCodeError(": ".join(filter(None, [command.error_msg, failed])))
        stdout, stderr = (data.decode(errors="backslashreplace") for data in (done.stdout_bytes, done.stderr_bytes))
        return rex.CommandResponse(stdout=stdout, stderr=stderr, exit_code=done.exit_code)

    async def read_file(self, request: rex.ReadFileRequest) -> rex.ReadFileResponse:
        data = await self._box.read_file(request.path, binary=True)
        return rex.ReadFileResponse(content=data.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: rex.WriteFileRequest) -> rex.WriteFileResponse:
        await self._box.write_file(request.path, request.content)
        return rex.WriteFileResponse()

    async def upload(self, request: rex.UploadRequest) -> rex.UploadResponse:
        await self._box.upload(request.source_path, request.target_path)
        return rex.UploadResponse()

    async def close(self) -> rex.CloseResponse:
        await self._box.close()
        return rex.CloseResponse()


class SlotDeployment(AbstractDeployment):
    """A slot of the farm of this process, which has ``slots`` of them. ``image`` None: this machine's programs.
    ``root``: arguments of ``sandbox()``, such as ``memory_mib``, ``network`` or ``workdir``."""

    def __init__(self, image: str | None = None, *, slots: int = 10, start_timeout_s: float = 600, **root: Any) -> None:
        self.logger = logging.getLogger("rex-deploy")
        self._farm: dict[str, Any] = {"slots": slots, "start_timeout_s": start_timeout_s, "allow_network": True}
        self._root = (image, {"network": "public", **root} if image else root)
        self._hooks = CombinedDeploymentHook()
        self._runtime: SlotRuntime | None = None

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    @property
    def runtime(self) -> SlotRuntime:
        if self._runtime is None:
            raise exceptions.DeploymentNotStartedError
        return self._runtime

    async def is_alive(self, *, timeout: float | None = None) -> rex.IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        self._hooks.on_custom_step("Starting runtime")
        image, root = self._root
        self._runtime = SlotRuntime(await shared_farm(**self._farm).sandbox(image, **root).open())

    async def stop(self) -> None:
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None

"""The bash tool: the shell of a call, and the spare shell that makes most calls start at once.

Every shell is ``bash -c BOOTSTRAP`` (:mod:`agentenv.sandbox.slotagent.bootstrap`), which reads the script from
descriptor 9 and evaluates it: scripts of any size fit, and none shows in a command line. A script that could detect
the difference gets a plain ``bash -c`` if it fits in an argument; this depends only on its text, so that the same
script always behaves the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import InfraError, InvalidArgumentsError
from agentenv.sandbox.server.agent_link import TooManyRunsError
from agentenv.sandbox.server.inbox import Attached
from agentenv.sandbox.server.process import Command, Outcome, Process, SlotIo
from agentenv.sandbox.slotagent.bootstrap import BOOTSTRAP, encode_script, needs_cold_shell
from agentenv.sandbox.slotagent.protocol import SpawnStep
from agentenv.sessions.head_tail import seam
from agentenv.sessions.start_errors import not_started
from agentenv.wire.base import LARGE_BYTES
from agentenv.wire.tools import BashArguments

MAX_SPARE_SCRIPT_BYTES = 2048
"""bash reads a pipe byte by byte; and a script this small always fits in an empty pipe."""
MAX_ARGV_SCRIPT_BYTES = 32 * 1024
CANNOT_START = 126
"""Exit code of a call whose shell could not be started (the shell convention for commands that cannot run)."""


@dataclass
class Shells:
    """Starts the shells of one slot; keeps at most one spare."""

    io: SlotIo
    env: Mapping[str, str]
    cap_bytes: int
    keep_spare: bool
    program: str = ""
    """A faster build of the slot's own bash (docs/decisions/0009), for scripts run through BOOTSTRAP."""
    _spare: Process | None = None
    _spare_spawn: tuple[bytes, int] = field(init=False)

    def __post_init__(self) -> None:
        self._spare_spawn = Command(
            ["bash", "-c", BOOTSTRAP], self.env, self.io.paths.workspace, self.program
        ).payload()

    def run(
        self, arguments: BashArguments, on_end: Callable[[Process], None], stdin: Attached | None = None
    ) -> tuple[Process, bool]:
        """Start the call; the second value tells whether a spare shell was used. ``stdin`` replaces the argument if
        it was attached. Raises InvalidArgumentsError when ``env`` does not fit in a packet."""
        script = encode_script(arguments.command)
        literal = len(script) <= MAX_ARGV_SCRIPT_BYTES and needs_cold_shell(arguments.command)
        plain = arguments.cwd is None and arguments.stdin is None and not arguments.env and not literal
        if plain and len(script) <= MAX_SPARE_SCRIPT_BYTES and (spare := self._take_spare()) is not None:
            spare.on_end = on_end
            if spare.feed(script):
                return spare, True
            spare.on_end = None
        # A spare older than this call would be reported as the parent of processes the call leaves behind.
        self.dismiss_spare()
        return self._run_cold(arguments, script, literal, on_end, stdin), False

    def start_spare(self) -> None:
        """Start a spare shell for the next call. No effect when there is one."""
        if self.keep_spare and self._spare is None:
            spare = Process(self.io, self.cap_bytes)
            spare.on_end = self._spare_ended
            try:
                spare.start_waiting(*self._spare_spawn)
            except TooManyRunsError:
                return  # the next call reports it, should it fail as well
            self._spare = spare

    def dismiss_spare(self) -> None:
        """Let the spare end. Repeatable."""
        if (spare := self._take_spare()) is not None:
            spare.dismiss()

    def _take_spare(self) -> Process | None:
        spare, self._spare = self._spare, None
        return spare

    def _spare_ended(self, process: Process) -> None:
        # Killed by a program in the slot, or not started: the next call starts its own.
        if self._spare is process:
            self._spare = None
            process.refused_from_above()  # not a failure of any call

    def _run_cold(
        self,
        arguments: BashArguments,
        script: bytes,
        literal: bool,
        on_end: Callable[[Process], None],
        attached: Attached | None,
    ) -> Process:
        argv = ["bash", "-c", arguments.command if literal else BOOTSTRAP]
        env = {**self.env, **arguments.env} if arguments.env else self.env
        cwd = self.io.paths.directory(arguments.cwd)
        stdin = attached or (None if arguments.stdin is None else arguments.stdin.encode())
        process = Process(self.io, self.cap_bytes, on_end)
        try:
            command = Command(argv, env, cwd, "" if literal else self.program)
            process.start(command, stdin=stdin, script=None if literal else script)
        except TooManyRunsError as error:
            raise InvalidArgumentsError(f"bash: {error}") from error
        except ValueError as error:
            raise InvalidArgumentsError(f"bash: env is too large: {error}") from error
        return process


def output(process: Process, arguments: BashArguments) -> dict[str, Any]:
    """Fields of the CallResult for an ended process (``exited`` or ``failed``), without those at their default.

    Raises InfraError when the shell could not be started for lack of a resource that the slot has not used up.
    """
    if process.outcome is Outcome.failed:
        above = process.refused_from_above()
        if above:
            raise InfraError(above)
        return _not_started(process.error, process.step, arguments)
    code = os.waitstatus_to_exitcode(process.status)
    fields: dict[str, Any] = {"exit_code": code if code >= 0 else 128 - code}
    for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
        if pipe is not None and pipe.kept.total_bytes:
            if pipe.kept.kept_bytes > LARGE_BYTES:
                pieces, dropped = pipe.kept.pieces()
                fields[name] = (pieces[0], memoryview(seam(dropped).encode()), *pieces[1:]) if dropped else pieces
            else:
                fields[name], dropped = pipe.kept.text()
            if dropped:
                fields[f"{name}_dropped_bytes"] = dropped
                fields["truncated"] = True
    return fields


def _not_started(error: int, step: SpawnStep | None, arguments: BashArguments) -> dict[str, Any]:
    """The slot could not start the shell because of the command itself: an ordinary result, as from a shell."""
    in_cwd = arguments.cwd is not None and step is SpawnStep.CWD
    why = not_started(error, cwd=arguments.cwd if in_cwd else None)
    return {"exit_code": 1 if in_cwd else CANNOT_START, "stderr": f"bash: {why}\n"}

"""The bash tool: the shell of a call, and the spare shell that makes most calls start at once.

Every shell is ``bash -c BOOTSTRAP``, which waits for a script on descriptor 9 (:func:`encode_script`), then behaves as
``bash -c script`` started at that moment: scripts of any size fit, and none shows in a command line. A script that
could detect the difference gets a plain ``bash -c`` if it fits in an argument; this depends only on its text, so that
the same script always behaves the same.

The remaining differences, all on standard error or in rarely used features: a syntax error is reported by ``bash:
eval:`` instead of ``bash: -c:``; the last command is a child of the shell instead of replacing it, so when a signal
ends it bash reports that (the exit code is 128 + n where ``bash -c`` would die of the signal itself); and the features
that :func:`needs_cold_shell` looks for.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.errors import InfraError, InvalidArgumentsError
from agentenv.sandbox.server.agent_link import TooManyRunsError
from agentenv.sandbox.server.calls import Content
from agentenv.sandbox.server.process import Outcome, Process, SlotIo, command_of
from agentenv.sandbox.server.uploads import Upload
from agentenv.sandbox.slotagent.protocol import SpawnStep
from agentenv.sessions.head_tail import seam
from agentenv.sessions.start_errors import not_started
from agentenv.wire.base import LARGE_BYTES
from agentenv.wire.tools import BashArguments, BashReply

BOOTSTRAP = (
    "TMOUT= IFS= read -r -d '' -u 9 BASH_EXECUTION_STRING || exit; "
    "exec 9<&-; "
    "SECONDS=0; "
    ': "$0"; '
    'eval "$BASH_EXECUTION_STRING"'
)
"""The script a waiting shell is started with, piece by piece:

- ``BASH_EXECUTION_STRING`` is the variable in which ``bash -c`` shows its script: reading into it
  leaves no variable of ours behind and gives it the right value. (``bash -c`` forgets it after use:
  the bootstrap itself is not read from there.)
- ``TMOUT=`` and ``IFS=`` hold for the ``read`` only. With TMOUT in the environment bash would stop
  waiting; without the empty IFS it would trim the script.
- ``-d ''`` reads up to a NUL, which no script can hold. End of file before it means that the sender
  died halfway: ``|| exit``, never run half a script.
- ``SECONDS=0``: it counts from the shell's start, which was long ago.
- ``: "$0"`` makes ``$_`` what it is at the start of ``bash -c``.
- ``eval`` comes last and as a list element of its own, so ``set -e``, traps, ``exit``, ``return`` and
  ``$?`` mean what they mean at top level. LINENO counts from 1 in it.
"""

MAX_SPARE_SCRIPT_BYTES = 2048
"""bash reads a pipe byte by byte; and a script this small always fits in an empty pipe."""
MAX_ARGV_SCRIPT_BYTES = 32 * 1024
CANNOT_START = 126
"""Exit code of a call whose shell could not be started (the shell convention for commands that cannot run)."""
NOT_FOUND = 127
"""Exit code of a program that is not there (the shell convention)."""

_SPECIAL = frozenset({"cwd", "env", "stdin", "stdin_data", "user", "output_bytes"})
"""Arguments that a shell has to be started with."""

# Matched in time linear in the script, which comes from a slot: none of these begins with what it may repeat.
_COLD = re.compile(
    r"xtrace|PS4|SHELLOPTS|BASH_XTRACEFD"
    r"|-[A-Za-z]*o[ \t]+verbose"
    r"|PIPESTATUS|\bcompgen\b|\benable\b"  # set by the bootstrap's own commands; unset in a new shell
)
_BETWEEN = re.compile(r"[\n;&|]")
_SET = re.compile(r"\bset\b")
_TRACE = re.compile(r"[ \t][-+][A-Za-z]*[xv]")


def needs_cold_shell(script: str) -> bool:
    """Whether the text mentions a feature by which it could distinguish BOOTSTRAP from ``bash -c``.

    Errs on the side of True. Such a script is run as ``["bash", "-c", script]`` where it fits into a packet; a
    longer one goes through BOOTSTRAP all the same.
    """
    return _COLD.search(script) is not None or ("set" in script and _sets_a_trace(script))


def _sets_a_trace(script: str) -> bool:
    """``set`` and, later in the same command, an option with x or v: eval is one level deeper, so that ``+ cmd`` is
    traced as ``++ cmd``. Searched after the first ``set`` only: whatever follows another also follows the first."""
    for command in _BETWEEN.split(script):
        match = _SET.search(command)
        if match and _TRACE.search(command, match.end()):
            return True
    return False


def encode_script(script: str) -> bytes:
    """The bytes to put on descriptor 9. Raises ValueError when the script holds a NUL.

    Two NULs end it: when the script ends in the middle of a UTF-8 character, bash's ``read`` takes
    the first NUL for the rest of that character.
    """
    if "\0" in script:
        raise ValueError("a script must not contain NUL bytes")
    return script.encode("utf-8", "surrogateescape") + b"\0\0"


@dataclass
class ShellPool:
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
        argv = ["bash", "-c", BOOTSTRAP]
        self._spare_spawn = command_of(self.io, argv, self.env, self.io.paths.start, self.program).spawned()

    def run(
        self, arguments: BashArguments, on_end: Callable[[Process], None], stdin: Upload | None = None
    ) -> tuple[Process, bool]:
        """Start the call; the second value is whether a spare shell was used. ``stdin``: the argument of that name, if
        it was uploaded. Raises InvalidArgumentsError when too much runs, UserUnsupportedError."""
        argv: Sequence[str]
        program, script = "", None
        if arguments.argv is not None:
            argv = arguments.argv
        else:
            script = encode_script(arguments.command)
            literal = len(script) <= MAX_ARGV_SCRIPT_BYTES and needs_cold_shell(arguments.command)
            plain = not literal and not _SPECIAL.intersection(arguments.model_fields_set)
            if plain and len(script) <= MAX_SPARE_SCRIPT_BYTES and (spare := self._spare) is not None:
                self._spare, spare.on_end = None, on_end
                if spare.feed(script):
                    return spare, True
                spare.on_end = None
            if literal:
                argv, script = ("bash", "-c", arguments.command), None
            else:
                argv, program = ("bash", "-c", BOOTSTRAP), self.program
        # A spare older than this call would be reported as the parent of processes the call leaves behind.
        self.dismiss_spare()
        return self._start(arguments, argv, program, script, on_end, stdin), False

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
        if self._spare is not None:
            self._spare.dismiss()
            self._spare = None

    def _spare_ended(self, process: Process) -> None:
        # Killed by a program in the slot, or not started: the next call starts its own.
        if self._spare is process:
            self._spare = None
            process.refused_from_above()  # not a failure of any call

    def _start(
        self,
        arguments: BashArguments,
        argv: Sequence[str],
        program: str,
        script: bytes | None,
        on_end: Callable[[Process], None],
        upload: Upload | None,
    ) -> Process:
        cwd = self.io.paths.directory(arguments.cwd)
        stdin = upload or (arguments.stdin_data if arguments.stdin is None else arguments.stdin.encode())
        process = Process(self.io, arguments.output_bytes or self.cap_bytes, on_end)
        try:
            command = command_of(
                self.io, argv, self.env, cwd, program, user=arguments.user, call_env=arguments.env or {}
            )
            process.start(command, stdin=stdin, script=script)
        except ValueError as error:  # TooManyRunsError among them
            raise InvalidArgumentsError(f"bash: {error}") from error
        return process


def result_of(process: Process, arguments: BashArguments) -> dict[str, Any]:
    """Fields of the CallResult for an ended process (``exited`` or ``failed``), without those at their default.

    Raises InfraError when the shell could not be started for lack of a resource that the slot has not used up.
    """
    if process.outcome is Outcome.failed:
        above = process.refused_from_above()
        if above:
            raise InfraError(above)
        return _not_started(process, arguments)
    code = os.waitstatus_to_exitcode(process.status)
    fields: dict[str, Any] = {"exit_code": code if code >= 0 else 128 - code}
    if arguments.binary:
        return fields
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


def binary_output(process: Process, fields: dict[str, Any]) -> Content:
    """The reply to a call with ``binary``; what is missing of its output is counted in ``fields``."""
    if process.stdout is None or process.stderr is None:
        return _as_json(BashReply())
    parts = (*process.stdout.kept.parts(), *process.stderr.kept.parts())
    for name, kept in (("stdout", process.stdout.kept), ("stderr", process.stderr.kept)):
        if dropped := kept.total_bytes - kept.kept_bytes:
            fields |= {f"{name}_dropped_bytes": dropped, "truncated": True}
    out_head, out_tail, err_head, err_tail = map(len, parts)
    lengths = (out_head, out_tail, err_head, err_tail)
    if sum(lengths) <= LARGE_BYTES:
        return _as_json(BashReply(data=b"".join(parts), parts=lengths))
    return replace(_as_json(BashReply(parts=lengths)), raw={"content.data": parts})


def _as_json(reply: BashReply) -> Content:
    return Content((reply.model_dump_json().encode(),))


def _not_started(process: Process, arguments: BashArguments) -> dict[str, Any]:
    """The slot could not start the shell because of the command itself: an ordinary result, as from a shell."""
    error, step = process.error, process.step
    in_cwd = step is SpawnStep.CWD
    why = not_started(error, cwd=(arguments.cwd or process.usual_directory) if in_cwd else None)
    if arguments.argv is not None and step is SpawnStep.EXEC:
        code = NOT_FOUND if error == errno.ENOENT else CANNOT_START
        return {"exit_code": code, "stderr": f"{arguments.argv[0]}: {os.strerror(error)}\n"}
    return {"exit_code": 1 if in_cwd else CANNOT_START, "stderr": f"bash: {why}\n"}

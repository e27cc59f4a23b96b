"""An agent program that somebody else has written, as it is started in a slot in the place of the agent loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from agentenv.agent.protocols import Handle, Model
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.agent.token_sequences import TokenSequence
from agentenv.errors import ConfigError

LAST_MESSAGE: Final = "last_message"
STDOUT: Final = "stdout"
TurnHeaders = Callable[[int], dict[str, str]]
_PLACES: Final = re.compile(r"(\{[a-z_]+\})")


@dataclass(frozen=True)
class AgentProgram:
    """How a program is started that asks a model for its turns: once per rollout, in the rollout's slot.

    ``argv``, the values of ``env`` and the texts of ``files`` (by absolute path, written before it starts) may contain
    ``{url}`` (of the model's API, with ``/v1``), ``{root}`` (without), ``{key}``, ``{model}``, ``{task}``,
    ``{task_json}`` (in quotation marks, for JSON), ``{context_tokens}`` (the longest conversation) and
    ``{turn_tokens}`` (the longest answer), which are replaced; other braces are left as they are. ``plain_files`` are
    written as they are: sources of programs may have such names in braces. ``cwd`` and ``user`` are those of the
    program, by default as for commands of the slot: /workspace, or what an image says. It is killed after ``timeout_s``
    (None: the environment's ``program_timeout_s``). ``answer``: what of it is the final response: the model's
    ``"last_message"``, the program's ``"stdout"``, or the path of a file that it writes.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    plain_files: Mapping[str, str | bytes] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    answer: str = LAST_MESSAGE
    name: str = ""
    """For records; by default the first word of ``argv``."""

    def __post_init__(self) -> None:
        if isinstance(self.argv, str) or not self.argv or not all(isinstance(word, str) for word in self.argv):
            raise ConfigError(
                "agent program", f"argv is {self.argv!r}", next_step="give a list of words: the program first"
            )
        for what, texts in (("env", self.env), ("files", self.files)):
            if not all(isinstance(name, str) and isinstance(text, str) for name, text in texts.items()):
                raise ConfigError("agent program", f"{what} has other things than text", next_step="use str() of them")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError("agent program", f"timeout_s is {self.timeout_s!r}", next_step="use more than 0, or None")
        if not all(isinstance(content, str | bytes) for content in self.plain_files.values()):
            raise ConfigError(
                "agent program", "plain_files has other things than text and bytes", next_step="read them"
            )
        for what, path in [("cwd", self.cwd), *(("files", path) for path in [*self.files, *self.plain_files])]:
            if path is not None and not path.startswith("/"):
                raise ConfigError("agent program", f"{what}: {path!r} is no absolute path", next_step="begin it with /")
        if self.answer not in (LAST_MESSAGE, STDOUT) and not self.answer.startswith("/"):
            raise ConfigError(
                "agent program",
                f"answer is {self.answer!r}",
                next_step=f"use {LAST_MESSAGE!r}, {STDOUT!r}, or the absolute path of a file",
            )

    @property
    def title(self) -> str:
        """Its name in records and messages."""
        return self.name or self.argv[0].rpartition("/")[2]

    def filled(self, known: Mapping[str, str]) -> AgentProgram:
        """The same with these values in the place of their names in braces."""
        return replace(
            self,
            argv=[_filled(word, known) for word in self.argv],
            env={name: _filled(value, known) for name, value in self.env.items()},
            files={path: _filled(text, known) for path, text in self.files.items()},
        )


class ProgramRun(Protocol):
    """One run of a program in a slot."""

    result: AgentResult
    """Always up to date."""

    def sequences(self) -> list[TokenSequence]:
        """Those that are trained on, so far."""

    async def run(self, task: str) -> AgentResult:
        """Run it until it ends, or a limit is met. Raises: InfraError, SlotDestroyedError, TaskError, ConfigError."""


class ProgramRunner(Protocol):
    """Runs agent programs. It is given to rollouts, which know neither slots nor HTTP."""

    def __call__(
        self,
        program: AgentProgram,
        handle: Handle,
        model_for: Callable[[], Model],
        settings: AgentSettings,
        timeline: Timeline,
        turn_headers: TurnHeaders | None,
        /,
    ) -> ProgramRun:
        """A run of this program in the slot of ``handle``, with a model for each of its conversations."""


def _filled(text: str, known: Mapping[str, str]) -> str:
    """In one pass, since a task may contain such names itself."""
    return "".join(known.get(part[1:-1], part) if part[:1] == "{" else part for part in _PLACES.split(text))

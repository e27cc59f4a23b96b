"""The instructions of a Dockerfile as data."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.builder.statements import Heredoc
from agentenv.errors import DockerfileError

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Place:
    """Where an instruction is: a file as its user named it, the line where it starts (0: the file itself is meant),
    its keyword, its text."""

    file: str
    line: int
    keyword: str
    text: str = ""

    def wrong(self, message: str, *, next_step: str) -> DockerfileError:
        """The error that names this place."""
        return DockerfileError(
            f"{self.file}:{self.line}" if self.line else self.file,
            f"{self.keyword}: {message}",
            next_step=next_step,
            file=self.file,
            line=self.line,
            instruction=self.keyword,
        )


@dataclass(frozen=True)
class Command:
    """What RUN, CMD or ENTRYPOINT was given: an argv (``in_shell=False``), or one text for the stage's shell."""

    words: tuple[str, ...]
    in_shell: bool
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True)
class Instruction:
    """What all instructions have."""

    place: Place


@dataclass(frozen=True)
class Unsupported(Instruction):
    """Docker knows this, building on slots does not. An error only if the stage that has it is built."""

    error: DockerfileError


@dataclass(frozen=True)
class Noted(Instruction):
    """Has no effect on what is built here; ``note`` is the warning for the user."""

    note: str


@dataclass(frozen=True)
class Run(Instruction):
    """RUN."""

    command: Command


@dataclass(frozen=True)
class Copy(Instruction):
    """COPY and ADD. ``origin`` names a stage or an image (``--from``), empty: the build context. ``unpack``: local
    tar archives are unpacked, as ADD does."""

    sources: tuple[str, ...]
    destination: str
    inline: tuple[Heredoc, ...] = ()
    origin: str = ""
    chown: str = ""
    chmod: str = ""
    unpack: bool = False


@dataclass(frozen=True)
class Env(Instruction):
    """ENV."""

    pairs: Pairs


@dataclass(frozen=True)
class Label(Instruction):
    """LABEL."""

    pairs: Pairs


@dataclass(frozen=True)
class Arg(Instruction):
    """ARG; a default of None is no default, which is not the empty one."""

    defaults: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Workdir(Instruction):
    """WORKDIR."""

    path: str


@dataclass(frozen=True)
class User(Instruction):
    """USER."""

    user: str


@dataclass(frozen=True)
class StopSignal(Instruction):
    """STOPSIGNAL."""

    signal: str


@dataclass(frozen=True)
class Cmd(Instruction):
    """CMD."""

    command: Command


@dataclass(frozen=True)
class Entrypoint(Instruction):
    """ENTRYPOINT."""

    command: Command


@dataclass(frozen=True)
class Shell(Instruction):
    """SHELL."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Expose(Instruction):
    """EXPOSE; ports as written."""

    ports: tuple[str, ...]


@dataclass(frozen=True)
class Volume(Instruction):
    """VOLUME."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """FROM and what follows it. ``image`` and ``platform`` are as written; ``name`` is in lower case, or empty."""

    place: Place
    image: str
    name: str = ""
    platform: str = ""
    instructions: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Dockerfile:
    """A parsed Dockerfile. ``arguments``: the ARG instructions before the first FROM."""

    file: str
    escape: str
    arguments: tuple[Arg, ...]
    stages: tuple[Stage, ...]

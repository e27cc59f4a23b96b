"""What a Dockerfile does, step by step, with variables substituted. Pure.

Follows BuildKit's ``frontend/dockerfile/dockerfile2llb/convert.go``:

- Variables are substituted in ADD, COPY, ENV, EXPOSE, FROM, LABEL, STOPSIGNAL, USER, VOLUME, WORKDIR and in defaults
  of ARG; RUN, CMD and ENTRYPOINT leave them to the shell, SHELL and ``--from`` have none. All words of one ENV see the
  variables from before it.
- ARG and ENV share one set of variables, in which the later wins; a stage built from another inherits both, and there
  ENV wins. An ARG
  before the first FROM counts in FROM lines, and in a stage that names it by an ARG without default.
- Arguments for proxies (``HTTP_PROXY``, …) reach RUN without an ARG, and no cache key.

buildah (openshift/imagebuilder) differs in that an ENV wins over an ARG of its name that follows it.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from agentenv.builder.instructions import (
    Arg,
    Cmd,
    Command,
    Copy,
    Dockerfile,
    Entrypoint,
    Env,
    Expose,
    Instruction,
    Label,
    Noted,
    Place,
    Run,
    Shell,
    Stage,
    StopSignal,
    Unsupported,
    User,
    Volume,
    Workdir,
)
from agentenv.builder.machine import DEFAULT_PATH, DEFAULT_SHELL, ImageConfig
from agentenv.builder.parser import url_refused
from agentenv.builder.statements import heredoc_of
from agentenv.builder.steps import CopyStep, InlineFile, RunStep, Step, WorkdirStep
from agentenv.builder.substitution import Lexer, SubstitutionError
from agentenv.errors import ConfigError
from agentenv.store.reference import is_of_this_machine, parse

SCRATCH: Final = "scratch"

_OF_SCRATCH: Final = ImageConfig(env=(("PATH", DEFAULT_PATH),))
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy"})
_PORT: Final = re.compile(r"(\d+)(?:-(\d+))?(?:/(tcp|udp|sctp))?", re.IGNORECASE | re.ASCII)
_REAL_TIME: Final = re.compile(r"RTMIN(\+\d+)?|RTMAX(-\d+)?", re.ASCII)
_SIGNALS: Final = frozenset(known.name.removeprefix("SIG") for known in signal.Signals)


@dataclass(frozen=True)
class StagePlan:
    """A stage's ``base`` (a stage's number, an image, or None for ``scratch``), its steps and its configuration."""

    name: str
    base: int | str | None
    steps: tuple[Step, ...]
    config: ImageConfig


@dataclass(frozen=True)
class Plan:
    """The stages by their numbers, only those that the target needs; the last step of ``target`` makes the image."""

    stages: Mapping[int, StagePlan]
    target: int
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(len(stage.steps) for stage in self.stages.values())


@dataclass(frozen=True)
class Options:
    """What a build gets besides its Dockerfile. ``target`` is a stage's name or number, empty: the last one.
    ``platform`` is the machines', as ``os/architecture``."""

    target: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    platform: str = "linux/amd64"


def base_images(dockerfile: Dockerfile, options: Options) -> tuple[str, ...]:
    """The images whose configurations ``plan`` needs, each once. Raises DockerfileError."""
    outline = _Outline(dockerfile, options)
    found = [base for number in outline.reached if isinstance(base := outline.bases[number], str)]
    return tuple(dict.fromkeys(found))


def copied_images(plan: Plan) -> tuple[str, ...]:
    """The images that COPY takes files from, each once."""
    steps = (step for stage in plan.stages.values() for step in stage.steps)
    origins = (step.origin for step in steps if isinstance(step, CopyStep))
    return tuple(dict.fromkeys(origin for origin in origins if isinstance(origin, str)))


def plan(dockerfile: Dockerfile, options: Options, configs: Mapping[str, ImageConfig]) -> Plan:
    """The steps to the target. ``configs`` has what ``base_images`` names. Raises DockerfileError."""
    outline = _Outline(dockerfile, options)
    done: dict[int, _StageState] = {}
    notes: list[str] = []
    for number in outline.reached:
        base = outline.bases[number]
        if isinstance(base, int):
            state = done[base].child()
        else:
            state = _StageState.of(_OF_SCRATCH if base is None else configs[base], dockerfile.stages[number])
        _perform(state, outline, number, notes)
        done[number] = state
    stages = {
        number: StagePlan(outline.names[number], outline.bases[number], tuple(state.steps), state.config)
        for number, state in done.items()
    }
    unused = sorted(set(options.arguments) - outline.used - {name for name in options.arguments if _is_proxy(name)})
    notes += [f"no ARG declares the build argument {name}" for name in unused]
    return Plan(stages, outline.target, tuple(notes))


class _Outline:
    """What is known of the stages before the configuration of any image is: bases, names, which are reached."""

    def __init__(self, dockerfile: Dockerfile, options: Options) -> None:
        self.stages = dockerfile.stages
        self.options = options
        self.lexer = Lexer(escape=dockerfile.escape)
        self.used: set[str] = set()
        self.names = {number: stage.name or f"stage-{number}" for number, stage in enumerate(self.stages)}
        self._by_name = {stage.name: number for number, stage in enumerate(self.stages) if stage.name}
        self.target = self._target(dockerfile.file)
        self.variables = self._variables(dockerfile.arguments)
        self.bases: dict[int, int | str | None] = {}
        self.reached: list[int] = self._reached()

    def origin(self, number: int, copy: Copy) -> int | str | None:
        """Where a COPY of this stage takes its files from."""
        if not copy.origin:
            return None
        if "$" in copy.origin:
            raise copy.place.wrong(
                "--from takes no variables",
                next_step="declare a stage with FROM and the variable, and copy from that stage",
            )
        stage = int(copy.origin) if copy.origin.isdecimal() else self._by_name.get(copy.origin.lower())
        if stage is not None and stage >= number:
            raise copy.place.wrong(
                f"the stage {copy.origin} is not before this one", next_step="move it up, or correct the name"
            )
        return _image(copy.place, copy.origin) if stage is None else stage

    def _target(self, file: str) -> int:
        wanted = self.options.target
        if not wanted:
            return len(self.stages) - 1
        number = self._by_name.get(wanted.lower(), int(wanted) if wanted.isdecimal() else len(self.stages))
        if number < len(self.stages):
            return number
        known = ", ".join(self._by_name) or "none has a name"
        raise Place(file, 1, "FROM").wrong(f"there is no stage {wanted}", next_step=f"the stages: {known}")

    def _variables(self, arguments: Iterable[Arg]) -> dict[str, str]:
        """The variables of FROM lines: the platform's, and the ARG instructions before the first FROM."""
        build_arguments = self.options.arguments
        variables = {**_platform_variables(self.options), "TARGETSTAGE": self.options.target or "default"}
        variables |= {name: value for name, value in build_arguments.items() if name in variables}
        self.used |= variables.keys() & build_arguments.keys()
        for arg in arguments:
            for name, default in arg.defaults:
                if name in build_arguments:
                    self.used.add(name)
                    variables[name] = build_arguments[name]
                elif default is not None:
                    variables[name] = substituted(arg.place, self.lexer, default, variables)
        return variables

    def _reached(self) -> list[int]:
        """The stages that the target needs, in order of the file. Also finds the base of each."""
        waiting, found = [self.target], set()
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            stage = self.stages[number]
            self.bases[number] = self._base(number, stage)
            needed = [self.bases[number], *(self.origin(number, copy) for copy in _copies(stage))]
            waiting += [other for other in needed if isinstance(other, int)]
        return sorted(found)

    def _base(self, number: int, stage: Stage) -> int | str | None:
        image = substituted(stage.place, self.lexer, stage.image, self.variables)
        if not image:
            raise stage.place.wrong(f"{stage.image} is empty", next_step="give its ARG a default, or the build a value")
        self._check_platform(stage)
        before = [other for other in range(number) if self.stages[other].name == image]
        if before:
            return before[-1]
        return None if image == SCRATCH else _image(stage.place, image)

    def _check_platform(self, stage: Stage) -> None:
        platform = substituted(stage.place, self.lexer, stage.platform, self.variables)
        if stage.platform and _normal(platform) != _normal(self.options.platform):
            raise stage.place.wrong(
                f"--platform={platform or stage.platform} is not this machine's {self.options.platform}",
                next_step="build it on such a machine, or leave the flag out",
            )


def _image(place: Place, name: str) -> str:
    """The reference of an image that a Dockerfile names, of a registry or a store. The author of the Dockerfile may be
    a stranger, so files and engines of this machine are not read for it. Raises DockerfileError."""
    try:
        reference = parse(name)
    except ConfigError as error:
        raise place.wrong(error.message, next_step=error.next_step) from error
    if is_of_this_machine(reference):
        raise place.wrong(
            f"{name} is an image of this machine, which a Dockerfile may not name",
            next_step="fetch it first (agentenv images pull), and name it by the digest that is printed (sha256:…)",
        )
    return name


@dataclass
class _StageState:
    """A stage while its instructions are read. ``variables`` are those of ENV and ARG."""

    config: ImageConfig
    variables: dict[str, str]
    steps: list[Step] = field(default_factory=list)
    has_cmd: bool = False

    @classmethod
    def of(cls, config: ImageConfig, stage: Stage) -> _StageState:
        """The start of a stage on an image."""
        if config.on_build:
            raise stage.place.wrong(
                f"{stage.image} has ONBUILD instructions ({config.on_build[0]}, …), which are not run on slots",
                next_step="write them into this Dockerfile, or build where docker is installed",
            )
        config = replace(config, workdir=config.workdir or "/")
        return cls(config, dict(config.env))

    def child(self) -> _StageState:
        """The start of a stage on this one: its ARGs count on, but no longer in front of an ENV of their name."""
        return _StageState(self.config, self.variables | dict(self.config.env))


def _perform(state: _StageState, outline: _Outline, number: int, notes: list[str]) -> None:
    for instruction in outline.stages[number].instructions:
        match instruction:
            case Unsupported(error=error):
                raise error.copy()
            case Noted(note=note):
                notes.append(note)
            case Arg():
                _arg(state, outline, instruction)
            case Run(place, command):
                state.steps.append(_run_step(state, place, command, outline.options.arguments))
            case Copy():
                state.steps.append(_copy_step(state, outline, number, instruction))
            case Volume(place):
                notes.append(f"line {place.line}: VOLUME is ignored: its directories are part of the image")
            case _:
                _configure(state, outline, instruction)


def _configure(state: _StageState, outline: _Outline, instruction: Instruction) -> None:
    """The instructions that change the configuration. Their words are substituted before any takes effect."""

    def word(text: str) -> str:
        return substituted(instruction.place, outline.lexer, text, state.variables)

    config = state.config
    match instruction:
        case Env(pairs=pairs):
            for name, value in [(word(name), word(value)) for name, value in pairs]:
                config = config.with_env(name, value)
                state.variables[name] = value
        case Label(pairs=pairs):
            for name, value in pairs:
                config = config.with_label(word(name), word(value))
        case Workdir(place, path):
            config = replace(config, workdir=posixpath.normpath(posixpath.join(config.workdir, word(path))))
            config = replace(config, workdir="/" + config.workdir.lstrip("/"))
            if config.workdir != "/":
                state.steps.append(WorkdirStep(place, config.workdir, config.user))
        case User(user=user):
            config = replace(config, user=word(user))
        case Shell(words=words):
            config = replace(config, shell=words)
        case Cmd(command=command):
            config, state.has_cmd = replace(config, cmd=_argv(config, command)), True
        case Entrypoint(command=command):
            entrypoint = _argv(config, command)
            config = replace(config, entrypoint=entrypoint, cmd=config.cmd if state.has_cmd else None)
        case Expose():
            config = replace(config, ports=tuple(dict.fromkeys((*config.ports, *_ports(state, outline, instruction)))))
        case StopSignal(place, written):
            config = replace(config, stop_signal=_signal(place, word(written)))
    state.config = config


def substituted(place: Place, lexer: Lexer, text: str, variables: Mapping[str, str]) -> str:
    """``text`` as one word. Raises DockerfileError."""
    try:
        return lexer.word(text, variables)
    except SubstitutionError as error:
        raise place.wrong(f"{text}: {error}", next_step="correct the quotes, braces or variables") from error


def _arg(state: _StageState, outline: _Outline, arg: Arg) -> None:
    build_arguments = outline.options.arguments
    for name, default in arg.defaults:
        if name in build_arguments:
            outline.used.add(name)
            state.variables[name] = build_arguments[name]
        elif default is not None:
            state.variables[name] = substituted(arg.place, outline.lexer, default, state.variables)
        elif name in outline.variables:
            state.variables[name] = outline.variables[name]


def _argv(config: ImageConfig, command: Command) -> tuple[str, ...]:
    if not command.in_shell:
        return command.words
    return (*(config.shell or DEFAULT_SHELL), " ".join(command.words))


def _run_step(state: _StageState, place: Place, command: Command, arguments: Mapping[str, str]) -> RunStep:
    hidden = {
        spelling: value
        for name, value in sorted(arguments.items())
        if _is_proxy(name)
        for spelling in (name.lower(), name.upper())
    }
    env = {"PATH": DEFAULT_PATH, **state.variables}
    return RunStep(
        place,
        _with_heredocs(state.config, command),
        tuple(env.items()),
        state.config.user,
        state.config.workdir,
        tuple((name, value) for name, value in hidden.items() if name not in env),
    )


def _with_heredocs(config: ImageConfig, command: Command) -> tuple[str, ...]:
    """A heredoc alone is the script itself, run by its interpreter if it names one, else by the stage's shell;
    heredocs in a longer command are left to the shell.

    BuildKit mounts a script with an interpreter at ``/dev/pipes``; here the shell hands it over as descriptor 3.
    """
    if not command.heredocs:
        return _argv(config, command)
    text, first = " ".join(command.words), command.heredocs[0]
    if heredoc_of(text) is None:
        parts = [text, *(f"{heredoc.content}{heredoc.name}" for heredoc in command.heredocs)]
        return _argv(config, Command(("\n".join(parts),), in_shell=True))
    if not first.text.startswith("#!"):
        return _argv(config, Command((first.text,), in_shell=True))
    interpreter = first.text[2:].partition("\n")[0].strip().split(maxsplit=1)
    end = "EOF"
    while f"\n{end}\n" in f"\n{first.text}":
        end += "_"
    script = f"exec {shlex.join(interpreter)} /dev/fd/3 3<<'{end}'\n{first.text}{end}\n"
    return (*DEFAULT_SHELL, script)


def _copy_step(state: _StageState, outline: _Outline, number: int, copy: Copy) -> CopyStep:
    def word(text: str) -> str:
        return substituted(copy.place, outline.lexer, text, state.variables)

    sources = tuple(word(source) for source in copy.sources)
    for source in sources:
        refused = url_refused(copy.place, source)
        if refused is not None:
            raise refused
    content = Lexer(plain_quotes=True)
    inline = tuple(
        InlineFile(
            heredoc.name,
            substituted(copy.place, content, heredoc.text, state.variables) if heredoc.expand else heredoc.text,
        )
        for heredoc in copy.inline
    )
    return CopyStep(
        copy.place,
        sources,
        _destination(state.config.workdir, word(copy.destination)),
        inline,
        outline.origin(number, copy),
        word(copy.chown),
        word(copy.chmod),
        copy.unpack,
    )


def _destination(workdir: str, path: str) -> str:
    """Absolute, with a slash at the end if the path names a directory by one."""
    directory = path in ("", ".") or path.endswith(("/", "/."))
    whole = "/" + posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
    return whole + "/" if directory and whole != "/" else whole


def _ports(state: _StageState, outline: _Outline, expose: Expose) -> list[str]:
    found = []
    for written in expose.ports:
        try:
            words = outline.lexer.words(written, state.variables)
        except SubstitutionError as error:
            raise expose.place.wrong(f"{written}: {error}", next_step="correct the variables") from error
        for word in words:
            match = _PORT.fullmatch(word.rpartition(":")[2])
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if match is None or not first <= last <= 65535:
                raise expose.place.wrong(f"{word} is not a port", next_step="write 80, 80/udp or 8000-8010")
            found += [f"{port}/{(match[3] or 'tcp').lower()}" for port in range(first, last + 1)]
    return found


def _signal(place: Place, written: str) -> str:
    name = written.upper().removeprefix("SIG")
    number = int(name) if name.isdecimal() else 0
    if not number and name not in _SIGNALS and not _REAL_TIME.fullmatch(name):
        raise place.wrong(f"{written} is not a signal", next_step="write SIGTERM or 15")
    return written


def _copies(stage: Stage) -> list[Copy]:
    return [instruction for instruction in stage.instructions if isinstance(instruction, Copy)]


def _is_proxy(name: str) -> bool:
    return name.lower() in _PROXIES


_ARCHITECTURES: Final = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}


def _normal(platform: str) -> str:
    system, _, architecture = platform.lower().partition("/")
    if not architecture:  # "amd64" or "linux" alone
        system, architecture = ("linux", system) if system != "linux" else (system, "")
    architecture = architecture.removesuffix("/v1" if "amd64" in architecture else "/v8")
    return f"{system}/{_ARCHITECTURES.get(architecture, architecture)}"


def _platform_variables(options: Options) -> dict[str, str]:
    system, _, rest = options.platform.partition("/")
    architecture, _, variant = rest.partition("/")
    parts = {"PLATFORM": options.platform, "OS": system, "OSVERSION": "", "ARCH": architecture, "VARIANT": variant}
    return {f"{side}{name}": value for side in ("BUILD", "TARGET") for name, value in parts.items()}

"""The statements of a Dockerfile as instructions and stages.

Follows BuildKit's ``frontend/dockerfile/instructions`` (``parse.go``, ``bflag.go``): numbers of arguments, names of
flags, names of stages. A Dockerfile that Docker would refuse raises; what Docker accepts and building on slots does not
becomes an ``Unsupported`` instruction, which stops the build only of the stages that have it. HEALTHCHECK and
MAINTAINER change nothing that is built and are noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NoReturn

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
    Pairs,
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
from agentenv.builder.statements import Heredoc, Statement, StatementError, heredoc_of, read
from agentenv.errors import DockerfileError

_STAGE_NAME: Final = re.compile(r"[a-z][a-z0-9\-_.]*")
_URLS: Final = ("http://", "https://", "git://", "ssh://", "git@", "github.com/")
_WITH_DOCKER: Final = "build it where docker or buildah is installed, or leave this out"

_FLAGS: Final = {
    "ADD": ("chown", "chmod", "link"),
    "COPY": ("chown", "chmod", "from", "link"),
    "FROM": ("platform",),
}
_DOCKERS_FLAGS: Final = {
    "ADD": ("checksum", "exclude", "keep-git-dir", "unpack"),
    "COPY": ("exclude", "parents"),
    "RUN": ("device", "mount", "network", "security"),
}
"""Flags that Docker has in addition to those of _FLAGS."""


def parse(text: str, file: str = "Dockerfile") -> Dockerfile:
    """The Dockerfile as data. ``file`` is its name for messages. Raises DockerfileError."""
    try:
        statements = read(text)
    except StatementError as error:
        place = Place(file, error.line, error.keyword or "Dockerfile")
        raise place.wrong(str(error), next_step="correct the Dockerfile") from error
    arguments: list[Arg] = []
    stages: list[tuple[Stage, list[Instruction]]] = []
    for statement in statements.found:
        place = Place(file, statement.line, statement.keyword, statement.text)
        if statement.keyword == "FROM":
            stages.append(_stage(statement, place))
            continue
        instruction = _instruction(statement, place)
        if stages:
            stages[-1][1].append(instruction)
        elif isinstance(instruction, Arg):
            arguments.append(instruction)
        else:
            raise place.wrong("no build stage has started", next_step="start with FROM; only ARG may come before it")
    if not stages:
        raise Place(file, 1, "Dockerfile").wrong("FROM is missing", next_step="start with FROM and a base image")
    return Dockerfile(
        file,
        statements.escape,
        tuple(arguments),
        tuple(_finished(stage, instructions) for stage, instructions in stages),
    )


def _finished(stage: Stage, instructions: list[Instruction]) -> Stage:
    return Stage(stage.place, stage.image, stage.name, stage.platform, tuple(instructions))


def _stage(statement: Statement, place: Place) -> tuple[Stage, list[Instruction]]:
    words = statement.arguments
    if len(words) != 1 and not (len(words) == 3 and words[1].lower() == "as"):
        _refuse(place, "takes an image, or an image, AS and a name")
    name = words[-1].lower() if len(words) > 1 else ""
    if name and not _STAGE_NAME.fullmatch(name):
        _refuse(place, f"{words[-1]} cannot be a stage's name: it starts with a letter and has letters, digits, - _ .")
    flags = _flags(statement, place)
    if isinstance(flags, DockerfileError):  # FROM has no such flags
        raise flags
    return Stage(place, words[0], name, flags.get("platform", "")), []


def _instruction(statement: Statement, place: Place) -> Instruction:
    make = _MAKERS.get(statement.keyword)
    copies = statement.keyword in ("ADD", "COPY")
    if make is None and not copies:
        _refuse(place, "is not a Dockerfile instruction", "correct the spelling, or the end of the line before it")
    flags = _flags(statement, place)
    if isinstance(flags, DockerfileError):
        return Unsupported(place, flags)
    return make(statement, place) if make else _copy(statement, place, flags)


def _refuse(place: Place, message: str, next_step: str = "correct the Dockerfile") -> NoReturn:
    raise place.wrong(message, next_step=next_step)


def _flags(statement: Statement, place: Place) -> dict[str, str] | DockerfileError:
    """The flags with their values; the error to keep for one that only Docker has. Raises for an unknown one."""
    found: dict[str, str] = {}
    known = _FLAGS.get(statement.keyword, ())
    missing = None
    if statement.keyword == "HEALTHCHECK":
        return found
    for flag in statement.flags:
        name, equals, value = flag[2:].partition("=")
        if name in _DOCKERS_FLAGS.get(statement.keyword, ()):
            missing = place.wrong(f"--{name} is not supported when building on slots", next_step=_WITH_DOCKER)
            continue
        if name not in known:
            _refuse(place, f"unknown flag --{name}")
        if name in found:
            _refuse(place, f"--{name} is given twice")
        if name == "link":
            if (equals and not value) or value.lower() not in ("", "true", "false"):
                _refuse(place, "--link is true or false")
        elif not equals:
            _refuse(place, f"--{name} has no value")
        found[name] = value
    return missing or found


def _exactly_one(statement: Statement, place: Place) -> str:
    if len(statement.arguments) != 1:
        _refuse(place, "takes exactly one argument")
    return statement.arguments[0]


def _at_least_one(statement: Statement, place: Place) -> tuple[str, ...]:
    if not statement.arguments:
        _refuse(place, "takes at least one argument")
    return statement.arguments


def _command(statement: Statement) -> Command:
    """The command as written. Shell form without arguments is an empty text, as in Docker."""
    return Command(statement.arguments, not statement.exec_form, statement.heredocs)


def _run(statement: Statement, place: Place) -> Instruction:
    if not any(statement.arguments):
        _refuse(place, "has no command")
    return Run(place, _command(statement))


def _copy(statement: Statement, place: Place, flags: dict[str, str]) -> Instruction:
    if len(statement.arguments) < 2:
        _refuse(place, "takes at least one source, and a destination as its last argument")
    *sources, destination = statement.arguments
    if heredoc_of(destination) is not None:
        _refuse(place, "the destination cannot be a heredoc")
    contents = {heredoc.name: heredoc for heredoc in statement.heredocs}
    inline: list[Heredoc] = []
    paths = []
    for source in sources:
        announced = heredoc_of(source)
        if announced is None:
            paths.append(source)
        elif announced.name in contents:
            inline.append(contents[announced.name])
        else:
            _refuse(place, f"the heredoc {announced.name} has no content")
    wrong = next((wrong for path in paths if (wrong := url_refused(place, path)) is not None), None)
    if wrong is not None:
        return Unsupported(place, wrong)
    return Copy(
        place,
        tuple(paths),
        destination,
        tuple(inline),
        flags.get("from", ""),
        flags.get("chown", ""),
        flags.get("chmod", ""),
        unpack=statement.keyword == "ADD",
    )


def url_refused(place: Place, source: str) -> DockerfileError | None:
    """The error for a source of ADD or COPY that is a URL; None if it is not."""
    if not source.startswith(_URLS):
        return None
    return place.wrong(
        f"{source} is a URL, which is not fetched when building on slots",
        next_step="fetch it with RUN (curl, git clone), or put the file into the build context",
    )


def _pairs(statement: Statement, place: Place) -> Pairs:
    words = _at_least_one(statement, place)
    pairs = tuple(zip(words[::2], words[1::2], strict=True))
    if not all(name for name, _ in pairs):
        _refuse(place, "a name is empty")
    return pairs


def _arg(statement: Statement, place: Place) -> Instruction:
    defaults: list[tuple[str, str | None]] = []
    for word in _at_least_one(statement, place):
        name, equals, value = word.partition("=")
        if not name:
            _refuse(place, "a name is empty")
        defaults.append((name, value if equals else None))
    return Arg(place, tuple(defaults))


def _shell(statement: Statement, place: Place) -> Instruction:
    if not statement.exec_form or not statement.arguments:
        _refuse(place, "takes a JSON array with at least one string", 'write it as SHELL ["/bin/bash", "-c"]')
    return Shell(place, statement.arguments)


def _volume(statement: Statement, place: Place) -> Instruction:
    paths = tuple(path.strip() for path in _at_least_one(statement, place))
    if not all(paths):
        _refuse(place, "a path is empty")
    return Volume(place, paths)


def _onbuild(statement: Statement, place: Place) -> Instruction:
    _at_least_one(statement, place)
    wrong = place.wrong("images that run instructions in later builds are not supported", next_step=_WITH_DOCKER)
    return Unsupported(place, wrong)


def _noted(note: str) -> Callable[[Statement, Place], Instruction]:
    def make(statement: Statement, place: Place) -> Instruction:
        _at_least_one(statement, place)
        return Noted(place, f"line {place.line}: {place.keyword} {note}")

    return make


_MAKERS: Final[dict[str, Callable[[Statement, Place], Instruction]]] = {
    "ARG": _arg,
    "CMD": lambda statement, place: Cmd(place, _command(statement)),
    "ENTRYPOINT": lambda statement, place: Entrypoint(place, _command(statement)),
    "ENV": lambda statement, place: Env(place, _pairs(statement, place)),
    "EXPOSE": lambda statement, place: Expose(place, tuple(sorted(_at_least_one(statement, place)))),
    "HEALTHCHECK": _noted("is ignored: nothing checks a slot's services"),
    "LABEL": lambda statement, place: Label(place, _pairs(statement, place)),
    "MAINTAINER": _noted("is ignored"),
    "ONBUILD": _onbuild,
    "RUN": _run,
    "SHELL": _shell,
    "STOPSIGNAL": lambda statement, place: StopSignal(place, _exactly_one(statement, place)),
    "USER": lambda statement, place: User(place, _exactly_one(statement, place)),
    "VOLUME": _volume,
    "WORKDIR": lambda statement, place: Workdir(place, _exactly_one(statement, place)),
}

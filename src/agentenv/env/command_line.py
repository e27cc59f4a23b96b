"""The command line of an environment: atropos' ``serve``, ``process`` and ``evaluate`` with flags of ours, and how they
end."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import ValidationError

from agentenv.agent.failure_log import authors_traceback
from agentenv.config import explain, no_such_setting
from agentenv.env.older_names import with_flags_of_here
from agentenv.env.progress import set_up_logging, silence_atropos
from agentenv.errors import AgentEnvError, ConfigError, TaskError
from agentenv.tools.schema import closest

_USAGE = """\
usage: {program} serve|process|evaluate [--SETTING VALUE ...]

  serve     feed a trainer, through atropos' run-api
  process   roll out --env.total_steps groups into --env.data_path_to_save_groups
  evaluate  score --env.eval_items items

--dry-run (process, evaluate) checks everything up to the first rollout and starts none.
--json prints the results as one JSON document; AGENTENV_DEBUG=1 shows every setting and message.
`{program} process --help` lists every setting; --config FILE.yaml has them in sections env and openai."""


@dataclass(frozen=True)
class Invocation:
    """A command as a user has started it."""

    words: Sequence[str]
    """Program, verb and flags, without those that have secrets."""
    omitted: Sequence[str] = ()
    """The flags with secrets, without their values."""
    secrets: Collection[str] = ()
    """Their values."""
    given: frozenset[str] = frozenset()
    """The environment's settings that the command or its ``--config`` names."""
    resume: Path | None = None
    """The directory of the run to resume."""

    def has_directory(self, config: Any) -> bool:
        """Whether its run has a directory."""
        return bool(config.runs_dir) or self.resume is not None


def program_words() -> list[str]:
    """The words that started this program, up to its own arguments: the interpreter with its options, and the file or
    ``-m MODULE``."""
    arguments = len(sys.argv) - 1
    whole = list(sys.orig_argv)
    if len(whole) > arguments and whole[len(whole) - arguments :] == sys.argv[1:]:
        words = whole[: len(whole) - arguments]
        if words[-1:] == sys.argv[:1] or "-m" in words:
            return [sys.executable, *words[1:]]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, sys.argv[0]]


_USER_IN_URL = re.compile(r"://[^/@\s]+:[^/@\s]+@")


def invocation_of(
    program: Sequence[str], arguments: Sequence[str], secret: Collection[str], resume: Path | None
) -> Invocation:
    """The invocation of ``program`` with these arguments, of which each flag has its value in the next word, or after
    ``=``. ``secret``: the environment's settings that are never written down."""
    words, given = list(program), set()
    omitted: list[str] = []
    secrets = [os.environ.get("OPENAI_API_KEY", "")]
    rest = list(arguments)
    while rest:
        flag, equals, value = (word := rest.pop(0)).partition("=")
        taken = [word]
        if flag.startswith("--") and not equals and rest and not rest[0].startswith("--"):
            taken.append(value := rest.pop(0))
        name = flag.removeprefix("--env.")
        if name != flag:
            given.add(name)
        hidden = flag == "--openai.api_key" or (name != flag and name in secret)
        if (hidden and not value.startswith("file:")) or _USER_IN_URL.search(value):
            omitted.append(flag)
            secrets.append(value)
        else:
            words += taken
        if flag == "--config":
            given |= {name for section in _sections(value, "env") for name in section}
            secrets += _secrets_in(value, secret)
    return Invocation(words, omitted, [each for each in secrets if each], frozenset(given), resume)


def _sections(path: str, name: str) -> list[dict[str, Any]]:
    """A section of a file of settings: one of ``openai`` may be a list."""
    section = (yaml.safe_load(Path(path).read_text()) or {}).get(name)
    return [each for each in (section if isinstance(section, list) else [section]) if isinstance(each, dict)]


def _secrets_in(path: str, secret: Collection[str]) -> list[str]:
    found = [env.get(name) for env in _sections(path, "env") for name in secret]
    found += [server.get("api_key") for server in _sections(path, "openai")]
    return [str(each) for each in found if each]


FLAGS = ("--json", "--dry-run")
"""Of the commands themselves; atropos' command line has none of them."""


def taken_flags(arguments: Sequence[str]) -> tuple[set[str], list[str]]:
    """Those of :data:`FLAGS` that are given, and the other arguments. Raises: ConfigError for a command without one."""
    flags = set(FLAGS) & set(arguments)
    if "--dry-run" in flags and "serve" in arguments[:1]:
        raise ConfigError("--dry-run", "is for process and evaluate", next_step="use it with one of them")
    return flags, [argument for argument in arguments if argument not in flags]


def taken_value(flag: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of a flag of the commands themselves, and the other arguments. Raises: ConfigError without a value."""
    kept, value = list(arguments), None
    for at, word in enumerate(arguments):
        name, equals, given = word.partition("=")
        if name != flag:
            continue
        if not equals and (at + 1 == len(arguments) or arguments[at + 1].startswith("--")):
            raise ConfigError(flag, "has no value")
        value = given if equals else arguments[at + 1]
        kept[at : at + 2 - bool(equals)] = []
        break
    return value, kept


def joined_negatives(arguments: Sequence[str]) -> list[str]:
    """``--name -1`` as ``--name=-1``: atropos takes the former for a flag without a value, hence for 1."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.fullmatch(r"-\.?\d\S*|-inf", argument) and re.fullmatch(r"--[^=]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


CONFIG_SECTIONS = ("env", "openai", "slurm", "testing")
"""What atropos reads of a ``--config`` file."""


def check_arguments(arguments: Sequence[str], fields: Collection[str]) -> None:
    """Raises ConfigError for what atropos answers with a traceback or without a hint: a flag of no setting, a
    ``--config`` that is no file, cannot be read, or has an unknown section. ``fields``: the settings after
    ``--env.``."""
    for given, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = given.partition("=")
        if flag == "--config":
            _check_config_file(value if equals else following)
        if flag.startswith("--env.") and flag.removeprefix("--env.") not in fields:
            raise no_such_setting(flag, [f"--env.{name}" for name in fields])


def _check_config_file(path: str) -> None:
    if not Path(path).is_file():
        raise ConfigError("--config", f"no such file: {path!r}")
    try:
        read = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("--config", f"{path} cannot be read: {error}") from error
    if read is not None and not isinstance(read, dict):
        raise ConfigError("--config", f"{path} has no sections", next_step="put settings below 'env:'")
    for section in read or {}:
        if section not in CONFIG_SECTIONS:
            meant = closest(str(section), CONFIG_SECTIONS)
            sections = ", ".join(CONFIG_SECTIONS)
            raise ConfigError(
                "--config",
                f"{path} has a section {section!r}, which nothing reads",
                next_step=f"did you mean {meant!r}?" if meant else f"sections: {sections}",
            )


def run_command(kind: Any, of_atropos: Callable[[], None]) -> NoReturn:
    """The command in ``sys.argv``, for a class of environments; ``of_atropos`` runs it. See ``AgentEnv.cli``."""
    program = program_words()
    sys.argv[1:] = joined_negatives(sys.argv[1:])
    if not sys.argv[1:]:
        sys.exit(_USAGE.format(program=Path(sys.argv[0]).name))
    set_up_logging()
    silence_atropos()
    APIServerConfig.model_fields["api_key"].repr = False  # atropos prints the settings it starts with
    try:
        resume, sys.argv[1:] = taken_value("--resume", sys.argv[1:])
        flags, sys.argv[1:] = taken_flags(sys.argv[1:])
        kind.as_json, kind.dry_run = "--json" in flags, "--dry-run" in flags
        sys.argv[1:] = with_flags_of_here(sys.argv[1:])
        check_arguments(sys.argv[1:], kind.env_config_cls.model_fields)
        kind.invocation = (
            None
            if kind.dry_run
            else invocation_of(program, sys.argv[1:], kind.env_config_cls.secrets(), Path(resume) if resume else None)
        )
        of_atropos()
    except ValidationError as error:
        _exit_with(explain(error), 2)
    except ConfigError as error:
        _exit_with(error, 2)
    except AgentEnvError as error:
        _exit_with(error, 2 if kind.dry_run else 1)
    except KeyboardInterrupt:  # everything is closed by now
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _exit_with(error: AgentEnvError, status: int) -> NoReturn:
    if isinstance(error, TaskError) and error.__cause__ is not None and (frames := authors_traceback(error.__cause__)):
        sys.stderr.write(f"{frames}\n")
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.exit(status)

"""The command line of an environment: atropos' ``serve``, ``process`` and ``evaluate`` with flags of ours, and how they
end."""

from __future__ import annotations

import io
import itertools
import json
import re
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import yaml
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import ValidationError

from agentenv.agent.failure_log import authors_traceback
from agentenv.config import explain, no_such_setting
from agentenv.env.invocation import invocation_of, program_words
from agentenv.env.older_names import with_flags_of_here
from agentenv.env.progress import print_models, set_up_logging, silence_atropos
from agentenv.errors import AgentEnvError, ConfigError, TaskError
from agentenv.runs.directory import FoundRun
from agentenv.tools.schema import closest

_USAGE = """\
usage: {program} serve|process|evaluate [--SETTING VALUE ...]

  serve     feed a trainer, through atropos' run-api
  process   roll out --env.total_steps groups into --env.data_path_to_save_groups
  evaluate  score --env.eval_items items, each --epochs times, with --models A,B one model after the other

--dry-run (process, evaluate) checks everything up to the first rollout and starts none.
--json prints the results as one JSON document; AGENTENV_DEBUG=1 shows every setting and message.
`{program} process --help` lists every setting; --config FILE.yaml has them in sections env and openai."""


_FLAGS = """\
flags beside the settings:
  --json        print the results as one JSON document
  --dry-run     check everything up to the first rollout, and start none (process, evaluate)
  --epochs K    attempt every item K times: pass@1 to pass@K, and the error of the mean (evaluate)
  --models A,B  one run per model, one after the other, and a table of them (evaluate)
  --resume DIR  go on with the run in this directory: `agentenv runs resume RUN` gives it
"""

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


def with_epochs(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--epochs K``, of ``evaluate``, by the name of its setting. Raises: ConfigError."""
    epochs, kept = taken_value("--epochs", arguments)
    if epochs is None:
        return kept
    if "evaluate" not in arguments[:1]:
        raise ConfigError("--epochs", "is for evaluate", next_step="process has --env.group_size")
    return [*kept, "--env.eval_epochs", epochs]


def commands_of_models(models: str, arguments: Sequence[str], name: str) -> list[list[str]]:
    """The arguments of one command per model, which end with its name. Raises: ConfigError."""
    wanted = [model.strip() for model in models.split(",") if model.strip()]
    if "evaluate" not in arguments[:1]:
        raise ConfigError("--models", "is for evaluate", next_step="run process once per model")
    if not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError("--models", f"got {models!r}", next_step="name each model once, with commas between them")
    single, kept = taken_value("--openai.model_name", arguments)
    if single is not None:
        raise ConfigError("--models", "and --openai.model_name name models both", next_step="give one of them")
    given, kept = taken_value("--env.run_name", kept)
    return [[*kept, "--env.run_name", f"{given or name}-{model}", "--openai.model_name", model] for model in wanted]


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
    flag without a value, a ``--config`` that is no file, cannot be read, or has an unknown section. ``fields``: the
    settings after ``--env.``."""
    for given, following in itertools.zip_longest(arguments, arguments[1:]):
        flag, equals, value = given.partition("=")
        if flag.startswith("--env.") and flag.removeprefix("--env.") not in fields:
            raise no_such_setting(flag, [f"--env.{name}" for name in fields])
        if not flag.startswith("--") or flag == "--help":
            continue
        if not equals and (following is None or following.startswith("--")):
            raise ConfigError(flag, "has no value", next_step="give one; true or false for a switch")
        if flag == "--config":
            _check_config_file(value if equals else str(following))


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
    if "--help" in sys.argv[2:]:
        sys.stdout.write(f"{_FLAGS}\n")
    set_up_logging()
    silence_atropos()
    APIServerConfig.model_fields["api_key"].repr = False  # atropos prints the settings it starts with
    try:
        resume, sys.argv[1:] = taken_value("--resume", sys.argv[1:])
        models, sys.argv[1:] = taken_value("--models", sys.argv[1:])
        flags, sys.argv[1:] = taken_flags(sys.argv[1:])
        kind.as_json, kind.dry_run = "--json" in flags, "--dry-run" in flags
        sys.argv[1:] = with_flags_of_here(with_epochs(sys.argv[1:]))
        check_arguments(sys.argv[1:], kind.env_config_cls.model_fields)
        commands = [sys.argv[1:]] if models is None else commands_of_models(models, sys.argv[1:], str(kind.name))
    except ConfigError as error:
        _exit_with(error, 2)
    if models is None:
        sys.exit(_run(kind, of_atropos, program, commands[0], Path(resume) if resume else None)[0])
    sys.exit(_run_models(kind, of_atropos, program, commands))


def _run(
    kind: Any, of_atropos: Callable[[], None], program: Sequence[str], arguments: list[str], resume: Path | None = None
) -> tuple[int, list[FoundRun]]:
    """One command: its status, and its run if it had one."""
    invocation = invocation_of(program, arguments, kind.env_config_cls.secrets(), resume)
    kind.invocation, sys.argv[1:] = invocation, arguments
    status = 0
    try:
        of_atropos()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except ValidationError as error:
        status = _printed(explain(error), 2)
    except ConfigError as error:
        status = _printed(error, 2)
    except AgentEnvError as error:
        status = _printed(error, 2 if kind.dry_run else 1)
    except KeyboardInterrupt:  # everything is closed by now
        status = 128 + signal.SIGINT
    return status, invocation.ended


def _run_models(
    kind: Any, of_atropos: Callable[[], None], program: Sequence[str], commands: Sequence[list[str]]
) -> int:
    """``--models``: one run after the other, and a table of all of them. The highest status."""
    statuses, rows = [0], []
    for arguments in commands:
        with redirect_stdout(io.StringIO()) if kind.as_json else nullcontext():
            status, ended = _run(kind, of_atropos, program, arguments)
        statuses.append(status)
        rows.append({"model": arguments[-1], "status": status, **_compared(ended)})
        if status > 128:  # by a signal: the others are not wanted either
            break
    if kind.as_json:
        sys.stdout.write(f"{json.dumps({'models': rows})}\n")
    elif not kind.dry_run:
        print_models(rows)
    return max(statuses)


def _compared(ended: Sequence[FoundRun]) -> dict[str, Any]:
    if not ended:
        return {"run": None, "state": "not started"}
    run = ended[-1]
    return {**run.manifest.results, "run": run.name, "state": run.manifest.state}


def _exit_with(error: AgentEnvError, status: int) -> NoReturn:
    sys.exit(_printed(error, status))


def _printed(error: AgentEnvError, status: int) -> int:
    """Print an error; returns ``status``."""
    if isinstance(error, TaskError) and error.__cause__ is not None and (frames := authors_traceback(error.__cause__)):
        sys.stderr.write(f"{frames}\n")
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return status

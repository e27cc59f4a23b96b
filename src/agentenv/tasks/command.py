"""``agentenv tasks``: task directories of Harbor and Terminal-Bench, checked, played by a model, listed."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from agentenv.cli.options import JsonOption, group
from agentenv.cli.output import err, escape, out, print_json, verb
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.tasks.harbor.task import HarborTask

ABOUT: Final = "Task directories of Harbor and Terminal-Bench: list, check and play them."
tasks = group(ABOUT)


class Agent(StrEnum):
    """A scripted agent of a check."""

    oracle = "oracle"
    empty = "empty"


class ImageFrom(StrEnum):
    """What a task's image is, where it names one and has a Dockerfile."""

    image = "image"
    dockerfile = "dockerfile"


class Storage(StrEnum):
    """Where slots write."""

    auto = "auto"
    memory = "memory"
    disk = "disk"


TasksArgument = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="A task directory, or a directory of task directories.")
]
OnlyOption = Annotated[
    str, typer.Option("--only-tasks", metavar="NAMES", help="Only these tasks: names, separated by commas.")
]
ImageOption = Annotated[
    str, typer.Option("--image", help="An image in place of each task's own; {task} in it is the task's name.")
]
ImageFromOption = Annotated[
    ImageFrom, typer.Option("--image-from", help="Of a task that names an image and has a Dockerfile: which is used.")
]
HostEnvOption = Annotated[
    str,
    typer.Option(
        "--host-env", metavar="NAMES", help="Variables of this machine that tasks may name, separated by commas."
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse all of them when one of the tasks is refused.")]
NetworkOption = Annotated[bool, typer.Option("--network", help="Give tasks the network they request.")]
StorageOption = Annotated[Storage, typer.Option("--storage", help="Where slots write.")]
MaxCpusOption = Annotated[
    float | None, typer.Option("--max-cpus", min=0.001, help="Cores that a task gets at most, whatever it requests.")
]
MaxMemoryOption = Annotated[
    int | None, typer.Option("--max-memory-mib", min=1, help="Memory that a task gets at most, whatever it requests.")
]
SealedOption = Annotated[bool, typer.Option("--sealed", help="Kill the agent's processes before the verifier runs.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Keep rollouts.jsonl in this directory.")]


def _fields(*, network: bool, sealed: bool, **settings: Any) -> dict[str, Any]:
    """The environment's settings that the options of a verb mean."""
    names = {name: _names(settings.pop(name)) for name in ("only_tasks", "host_env")}
    fields = {name: str(value) if isinstance(value, (StrEnum, Path)) else value for name, value in settings.items()}
    return {**fields, **names, "allow_network": network, "verification": "sealed" if sealed else "live"}


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@tasks.command("check")
@verb
def check(
    directory: TasksArgument,
    agent: Annotated[Agent | None, typer.Option("--agent", help="Only this one plays; both by default.")] = None,
    only_tasks: OnlyOption = "",
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Tasks that are played at once; by default as many as cores."),
    ] = None,
    image: ImageOption = "",
    image_from: ImageFromOption = ImageFrom.image,
    host_env: HostEnvOption = "",
    network: NetworkOption = False,
    strict: StrictOption = False,
    storage: StorageOption = Storage.auto,
    max_cpus: MaxCpusOption = None,
    max_memory_mib: MaxMemoryOption = None,
    sealed: SealedOption = False,
    times: Annotated[
        bool, typer.Option("--times", help="Also the seconds of each part: image, slot, agent, verifier.")
    ] = False,
    records: OutOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the check that --out has the records of, and play the rest.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check tasks: the known solution must score 1, doing nothing must score 0.

    Each task is played by two scripted agents. The oracle runs the task's own solution; the empty agent changes
    nothing. A row is printed for each task as it ends. Tasks that cannot be played are listed with their file and
    field, and the others are played. Exit code 1: a task fails this check; 2: a setting is malformed, or no task can be
    played (with --strict: one cannot).

    \b
    Examples:
      agentenv tasks check examples/tasks --network
      agentenv tasks check my-tasks/one-task --agent oracle --out out
      agentenv tasks check my-tasks --jobs 1 --times     # one at a time
      agentenv report out/rollouts.jsonl --open          # what happened there
      agentenv tasks check my-tasks --out out --resume   # the rest
    """
    from agentenv.tasks import scripted
    from agentenv.tasks.harbor import players

    if resume and records is None:
        raise ConfigError("resume", "needs the records of a check", next_step="name their directory (--out)")
    fields = _fields(
        tasks=directory, only_tasks=only_tasks, image=image, image_from=image_from, host_env=host_env, network=network,
        strict=strict, storage=storage, max_cpus=max_cpus, max_memory_mib=max_memory_mib, sealed=sealed,
    )  # fmt: skip
    table = scripted.Table([agent] if agent else list(scripted.EXPECTED), times=times, as_json=as_json)
    code = scripted.played(
        table, lambda place, rows: players.check(place, rows, jobs=jobs, **fields), records, resume=resume
    )
    if code:
        raise typer.Exit(code)


@tasks.command("play", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@verb
def play(
    context: typer.Context,
    directory: TasksArgument,
    model: Annotated[str, typer.Option("--model", "-m", help="The model's name at its server.")],
    base_url: Annotated[str, typer.Option("--base-url", help="An OpenAI-style server: http://…/v1.")],
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="The server's key.")
    ] = "unused",
    only_tasks: OnlyOption = "",
    image: ImageOption = "",
    image_from: ImageFromOption = ImageFrom.image,
    host_env: HostEnvOption = "",
    network: NetworkOption = False,
    strict: StrictOption = False,
    storage: StorageOption = Storage.auto,
    max_cpus: MaxCpusOption = None,
    max_memory_mib: MaxMemoryOption = None,
    sealed: SealedOption = False,
    records: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a model play tasks, each once, and print its mean score.

    This is `evaluate` of the environment (docs/harbor.md); other settings of it follow as flags (--env.NAME VALUE).
    Tasks that cannot be played are logged and left out.

    \b
    Examples:
      agentenv tasks play examples/tasks -m qwen3-8b --base-url http://gpu:8000/v1
      agentenv tasks play mine -m NAME --base-url URL --env.agent_max_steps 100
    """
    from agentenv.tasks.harbor.env import EveryTask

    fields = _fields(
        tasks=directory, only_tasks=only_tasks, image=image, image_from=image_from, host_env=host_env, network=network,
        strict=strict, storage=storage, max_cpus=max_cpus, max_memory_mib=max_memory_mib, sealed=sealed,
        rollouts_path=records and records / "rollouts.jsonl",
    )  # fmt: skip
    arguments = [f"--openai.base_url={base_url}", f"--openai.model_name={model}", f"--openai.api_key={api_key}"]
    for name, value in fields.items():
        if value not in (None, "", []):
            arguments.append(f"--env.{name}={','.join(value) if isinstance(value, list) else value}")
    if records:
        records.mkdir(parents=True, exist_ok=True)
    sys.argv = ["agentenv tasks play", "evaluate", *arguments, *context.args, *(["--json"] if as_json else [])]
    EveryTask.cli()


@tasks.command("list")
@verb
def list_tasks(
    directory: TasksArgument,
    only_tasks: OnlyOption = "",
    image: ImageOption = "",
    image_from: ImageFromOption = ImageFrom.image,
    host_env: HostEnvOption = "",
    strict: StrictOption = False,
    max_cpus: MaxCpusOption = None,
    max_memory_mib: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks: what each requests, and which cannot be played and why.

    Nothing is built or started. Exit code 1 with --strict when a task is refused.

    \b
    Examples:
      agentenv tasks list examples/tasks
      agentenv tasks list my-tasks --max-cpus 2 --json
    """
    from agentenv.tasks.harbor.env import HarborConfig, found_tasks

    found = found_tasks(
        HarborConfig(
            **_fields(
                tasks=directory, only_tasks=only_tasks, image=image, image_from=image_from, host_env=host_env,
                network=False, sealed=False, max_cpus=max_cpus, max_memory_mib=max_memory_mib,
            )
        )
    )  # fmt: skip
    rows = [_row(task) for task in found.tasks]
    refused = {name: str(error) for name, error in found.refused.items()}
    if as_json:
        print_json({"tasks": rows, "refused": refused})
    else:
        _print_list(rows, refused)
    if refused and strict:
        raise typer.Exit(1)


def _row(task: HarborTask) -> dict[str, Any]:
    """What a task is and requests."""
    return {
        "name": task.name,
        "format": "terminal-bench" if task.script == "run-tests.sh" else "harbor",
        "image": task.image,
        "cpus": task.cpus,
        "memory_mib": task.memory_mib,
        "storage_mib": task.storage_mib,
        "network": [task.agent.network.kind, task.verifier.network.kind],
        "agent_timeout_s": None if task.agent.timeout_s == float("inf") else task.agent.timeout_s,
        "verifier": "separate" if task.separates else "shared",
        "steps": [step.step for step in task.steps],
        "services": [service.name for service in task.group.services],
        "unused": list(task.unknown),
    }


def _print_list(rows: list[dict[str, Any]], refused: dict[str, str]) -> None:
    width = max((len(name) for name in [*(row["name"] for row in rows), *refused]), default=0)
    for row in rows:
        asks = [
            *(f"{row[name]:g} {unit}" for name, unit in (("cpus", "cores"), ("memory_mib", "MiB")) if row[name]),
            *([f"{len(row['steps'])} steps"] if row["steps"] else []),
            *([f"services: {', '.join(row['services'])}"] if row["services"] else []),
            *(["own verifier"] if row["verifier"] == "separate" else []),
        ]
        image = "Dockerfile" if row["image"].startswith("dockerfile:") else row["image"]
        out().print(escape(f"{row['name']:{width}}  {row['format']:14}  {', '.join([image, *asks])}"), soft_wrap=True)
    for name, reason in refused.items():
        out().print(escape(f"{name:{width}}  refused: {' '.join(reason.split())}"), soft_wrap=True)
    err().print(f"{len(rows)} tasks can be played, {len(refused)} cannot", soft_wrap=True)

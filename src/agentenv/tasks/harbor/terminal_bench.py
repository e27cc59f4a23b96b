"""Terminal-Bench 1's format: ``task.yaml``, a Dockerfile, and a compose file with one service.

It is read as Harbor's ``task migrate`` maps it (https://github.com/laude-institute/terminal-bench is the format's
home), but nothing is written: it becomes the same task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentenv.tasks.harbor.compose import Compose, Service, loaded, read_compose
from agentenv.tasks.harbor.rewards import PRINTED, Results
from agentenv.tasks.harbor.services import read_group, total
from agentenv.tasks.harbor.task import TESTS, HarborTask, Phase, inside, named, wrong
from agentenv.wire.base import MAX_TIMEOUT_S

FILE: Final = "task.yaml"
SCRIPT: Final = "run-tests.sh"
COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml")
AGENTS: Final = "client"
"""The service in which the agent works, of several."""
VARIABLES: Final[Mapping[str, str]] = {
    "T_BENCH_TEST_DIR": TESTS,
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
"""What compose files may name in addition to the variables that this machine offers."""
_OF_PEOPLE: Final = frozenset(
    {"author_name", "author_email", "difficulty", "category", "tags", "estimated_duration_sec", "disable_asciinema"}
    | {"expert_time_estimate_min", "junior_time_estimate_min"}
)
"""Fields of task.yaml that describe the task, and are not needed to play it."""


class TaskYaml(BaseModel):
    """The fields of a ``task.yaml`` that mean something here, with Terminal-Bench's defaults."""

    model_config = ConfigDict(extra="allow")

    instruction: str = Field(min_length=1)
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = Field(default=360.0, gt=0)
    max_test_timeout_sec: float = Field(default=60.0, gt=0, le=MAX_TIMEOUT_S)
    run_tests_in_same_shell: bool = False
    """Left out, as ``harbor task migrate`` does: the verifier has a shell of its own."""


def read_task_file(directory: Path, host_env: Mapping[str, str]) -> HarborTask:
    """The task of a directory with a ``task.yaml``. ``host_env``: what templates may name. Raises ConfigError naming
    the task and the field."""
    task = _task_yaml(directory)
    script, tests, keys = (inside(directory, name) for name in (SCRIPT, "tests", "solution.yaml"))
    if script is None:
        raise wrong(directory, SCRIPT, "is missing", "a task is scored by it")
    compose = _compose(directory, {**VARIABLES, **host_env})
    service = compose.main
    solution = inside(directory, "solution.sh") or keys or directory / "solution.sh"
    network, user = service.network(), service.text("user")
    unread = (task.model_extra or {}).keys() - _OF_PEOPLE
    unread |= {"run_tests_in_same_shell"} if task.run_tests_in_same_shell else set()
    return HarborTask(
        name=named(directory),
        directory=directory,
        instruction=task.instruction,
        image=service.image(),
        tests=(tests, script) if tests is not None and tests.is_dir() else (script,),
        script=SCRIPT,
        solution=solution,
        results=_results(directory, task),
        agent=Phase(task.max_agent_timeout_sec, user, network),
        verifier=Phase(task.max_test_timeout_sec, user, network),
        cpus=total(service.cpus(), (each.cpus() for each in compose.beside)),
        memory_mib=total(service.memory_mib(), (each.memory_mib() for each in compose.beside)),
        cpus_field=f"{service.at}.cpus",
        memory_field=f"{service.at}.mem_limit",
        limits_file=service.file,
        workdir=service.workdir(),
        env={"TEST_DIR": TESTS, **service.env()},
        mounts=service.mounts(),
        volumes=service.volumes(),
        group=read_group(compose),
        unknown=(*sorted(unread), *(name for each in (service, *compose.beside) for name in each.unknown())),
    )


def _compose(directory: Path, offered: Mapping[str, str]) -> Compose:
    file = next((name for name in COMPOSE if inside(directory, name)), "")
    if not file:
        return Compose(Service(directory, "", AGENTS, {"build": "."}, offered))
    return read_compose(directory, file, offered, AGENTS)


def _task_yaml(directory: Path) -> TaskYaml:
    try:
        return TaskYaml.model_validate(loaded(directory, FILE))
    except ValidationError as error:
        first = error.errors()[0]
        raise wrong(directory, ".".join(map(str, first["loc"])) or FILE, first["msg"], file=FILE) from error


def _results(directory: Path, task: TaskYaml) -> Results:
    for known in ("pytest", "swebench"):
        if task.parser_name == known:
            return known
    raise wrong(directory, "parser_name", f"got {task.parser_name!r}", f"allowed: {', '.join(PRINTED)}", file=FILE)

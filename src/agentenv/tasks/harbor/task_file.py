"""Harbor's format: ``task.toml`` and the files next to it, read strictly.

The format is Harbor's (https://harborframework.com/docs/tasks), with the older spellings that Terminal-Bench 2 still
uses. A field that means something a slot cannot do is refused by name; one that is not known at all is left out and
named in ``HarborTask.unknown``, as Harbor leaves it out too.
"""

from __future__ import annotations

import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from agentenv.errors import ConfigError
from agentenv.tasks.harbor.compose import Compose, Service, read_compose
from agentenv.tasks.harbor.rewards import REWARD
from agentenv.tasks.harbor.services import read_group, total
from agentenv.tasks.harbor.task import (
    DEFAULT_TIMEOUT_S,
    TESTS,
    HarborTask,
    Healthcheck,
    Phase,
    Separate,
    absolute,
    image_reference,
    inside,
    named,
    not_offered,
    text_of,
    wrong,
)
from agentenv.wire.base import MAX_TIMEOUT_S
from agentenv.wire.network import NO_NETWORK, NetworkPolicy

FILE: Final = "task.toml"
SCRIPT: Final = "test.sh"
COMPOSE: Final = "docker-compose.yaml"
"""The only name by which Harbor knows such a file."""
MAIN: Final = "main"
"""The service in which the agent works; Harbor describes it itself."""
VARIABLES: Final[Mapping[str, str]] = {"CONTEXT_DIR": ".", "TEST_DIR": TESTS}
"""What compose files may name in addition to the variables that this machine offers."""
NETWORKS: Final[Mapping[str, Literal["none", "public", "allow"]]] = {
    "no-network": "none",
    "public": "public",
    "allowlist": "allow",
}
_MACHINE: Final = (
    "build_timeout_sec docker_image cpus memory_mb storage_mb memory storage gpus gpu_types env workdir os tpu "
    "healthcheck mcp_servers network_mode allowed_hosts allow_internet"
)
_KNOWN: Final[Mapping[str, str]] = {
    "": "version schema_version task metadata agent verifier solution environment steps source artifacts "
    "multi_step_reward_strategy",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "verifier": "timeout_sec user env network_mode allowed_hosts environment_mode environment collect",
    "solution": "env",
    "environment": _MACHINE,
    "verifier.environment": _MACHINE,
    "environment.healthcheck": "command interval_sec timeout_sec start_period_sec start_interval_sec retries",
}
"""The fields of each table, separated by spaces; of the file itself those without a table."""
ARTIFACTS: Final = "/logs/artifacts"
"""Where an agent may leave what a verifier on another machine is to get."""
_LACKING: Final = (
    ("environment", "tpu", "slots have no TPU"),
    ("environment", "mcp_servers", "the agent has the slot's own tools"),
    ("verifier.environment", "tpu", "slots have no TPU"),
    ("verifier.environment", "mcp_servers", "a verifier has no agent"),
    ("verifier.environment", "healthcheck", "the verifier waits itself for what it starts"),
    ("verifier", "collect", "nothing is collected from services"),
)
STRATEGIES: Final[tuple[Literal["mean"], Literal["final"]]] = ("mean", "final")
"""Table, field, and why slots cannot do what it requests."""
_STEP: Final = ("name", "agent", "verifier", "min_reward", "healthcheck", "artifacts")
_NOT_IN_NAMES: Final = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE: Final = re.compile(r"CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³]", re.IGNORECASE)
_TEMPLATE: Final = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_MIB_OF: Final = {"K": 1 / 1024, "M": 1, "G": 1024}


def read_task_file(directory: Path, host_env: Mapping[str, str]) -> HarborTask:
    """The task of a directory with a ``task.toml``. ``host_env``: what templates may name. Raises ConfigError naming
    the task and the field."""
    named(directory)
    text = text_of(directory, FILE)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(directory, FILE, f"is not valid: {error}") from error
    steps = step_tables(directory, raw)
    if not steps:
        return _Reader(directory, raw, host_env).task()
    return _of_steps(directory, raw, host_env, steps)


def _of_steps(
    directory: Path, raw: Mapping[str, Any], host_env: Mapping[str, str], tables: Sequence[Mapping[str, Any]]
) -> HarborTask:
    """A task of several steps: each with what is its own in place of the task's. Raises ConfigError."""
    whole = _Reader(directory, {**raw, "steps": []}, host_env)
    steps = tuple(_Reader(directory, step_alone(directory, raw, table), host_env, table).task() for table in tables)
    for step in steps:
        if step.agent.user != steps[0].agent.user:
            problem = f"is {step.agent.user or 'nobody by name'!r}, and {steps[0].agent.user!r} in the first step"
            raise wrong(directory, f"steps.{step.step}.agent.user", problem, "a slot's agent is one user", file=FILE)
    strategy = raw.get("multi_step_reward_strategy") or "mean"
    if strategy not in STRATEGIES:
        problem = f"got {strategy!r}"
        raise wrong(directory, "multi_step_reward_strategy", problem, f"allowed: {', '.join(STRATEGIES)}", file=FILE)
    unknown = dict.fromkeys(name for step in steps for name in step.unknown)
    return replace(
        steps[0],
        steps=steps,
        step="",
        workdir_files=None,
        min_reward={},
        healthcheck=whole.healthcheck(),
        reward_of_steps=strategy,
        unknown=tuple(unknown),
    )


def instruction_of(text: str) -> str:
    """An instruction without its first lines that mark it as a benchmark's, which no model may be trained on, and
    without blank lines before it; as Harbor gives it to an agent. Pure."""
    lines = text.split("\n")
    marks = next((number for number, line in enumerate(lines) if not _is_canary(line.strip().lower())), len(lines))
    begin = next((number for number in range(marks, len(lines)) if lines[number].strip()), len(lines))
    return "\n".join(lines[begin:])


def _is_canary(line: str) -> bool:
    """``<!-- … canary … -->``, ``# … canary …``."""
    inside = (
        line[1:] if line.startswith("#") else line[4:-3] if line.startswith("<!--") and line.endswith("-->") else ""
    )
    return "canary" in inside


class _Reader:
    """Reads the fields of one task.toml."""

    def __init__(
        self,
        directory: Path,
        raw: Mapping[str, Any],
        host_env: Mapping[str, str],
        step: Mapping[str, Any] | None = None,
    ) -> None:
        """``step``: the table of the step, whose fields are in ``raw`` already (:func:`step_alone`)."""
        self._directory = directory
        self._raw = raw
        self._host_env = host_env
        self._step = step
        self._place = f"steps/{step['name']}/" if step else ""
        self._files: dict[str, Compose] = {}
        """The compose files that were read."""
        self._unused: list[str] = []
        """Fields of compose files."""

    def task(self) -> HarborTask:
        self._refuse_what_slots_lack()
        separate = self._separate()
        tests = dict.fromkeys(("tests", f"{self._place}tests"))
        script = any(self._existing(f"{name}/{SCRIPT}") for name in tests)
        if not (separate and separate.has_tests) and not script:
            raise self._error(f"{self._place}tests/{SCRIPT}", "is missing", "a task is scored by it")
        solution = (self._existing(f"{place}solution") for place in dict.fromkeys((self._place, "")))
        limits = self._limits("environment", "environment")
        return HarborTask(
            name=self._directory.name,
            directory=self._directory,
            instruction=self._instruction(),
            **self._agents_image(),
            tests=tuple(found for name in tests if (found := self._existing(name))) or (self._directory / "tests",),
            script=SCRIPT,
            solution=next((found for found in solution if found), self._directory / "solution"),
            agent=self._phase("agent", "environment", math.inf, math.inf),
            verifier=self._phase("verifier", self._verifiers_environment(), DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S),
            verifier_env=self._env("verifier"),
            solution_env=self._env("solution"),
            healthcheck=self.healthcheck(),
            group=read_group(self._compose("environment")),
            separate=separate,
            unknown=(*self._unknown(separate), *self._unused),
            **self._of_step(),
            **limits,
        )

    def _of_step(self) -> dict[str, Any]:
        """The fields that only a step has."""
        if self._step is None:
            return {}
        least = self._step.get("min_reward")
        least = {REWARD: least} if least is not None and not isinstance(least, dict) else least or {}
        numbers = {name: _as_number(value) for name, value in least.items()}
        found = {name: value for name, value in numbers.items() if value is not None}
        if len(found) < len(numbers):
            raise self._error("min_reward", f"got {self._step['min_reward']!r}", "allowed: a number, or some by name")
        files = self._existing(f"{self._place}workdir")
        return {"step": self._step["name"], "workdir_files": files, "min_reward": found}

    def _instruction(self) -> str:
        name = f"{self._place}instruction.md"
        instruction = instruction_of(text_of(self._directory, name))
        if not instruction.strip():
            raise wrong(self._directory, name, "is empty")
        return instruction

    def _limits(self, section: str, place: str) -> dict[str, Any]:
        """The fields of a machine except its image; ``place`` may have a compose file."""
        compose = self._compose(place)
        service = compose.main
        return {
            "cpus": total(self._number(section, "cpus"), (each.cpus() for each in compose.beside)),
            "memory_mib": total(
                self._mib(section, "memory_mb", "memory"), (each.memory_mib() for each in compose.beside)
            ),
            "storage_mib": self._mib(section, "storage_mb", "storage"),
            "cpus_field": f"{section}.cpus",
            "memory_field": f"{section}.memory_mb",
            "workdir": self._workdir(section) or service.workdir(),
            "build_timeout_s": self._seconds(section, "build_timeout_sec", DEFAULT_TIMEOUT_S, math.inf),
            "env": {**service.env(), **self._env(section)},
            "mounts": service.mounts(),
            "volumes": service.volumes(),
        }

    def _compose(self, place: str) -> Compose:
        """What the compose file of a directory adds to its machine, and has beside it."""
        name = f"{place}/{COMPOSE}"
        if not self._existing(name):
            return Compose(Service(self._directory, name, MAIN, {}, {}))
        if name not in self._files:
            offered = {**VARIABLES, **self._host_env}
            compose = self._files[name] = read_compose(self._directory, name, offered, MAIN, always=True)
            compose.main.check_is_main()
            if place != "environment" and compose.beside:
                problem = f"has services beside the verifier: {', '.join(each.name for each in compose.beside)}"
                raise wrong(self._directory, name, problem, "allowed: main only")
            self._unused += [field for each in (compose.main, *compose.beside) for field in each.unknown()]
        return self._files[name]

    def _separate(self) -> Separate | None:
        """The verifier's own machine. Its image is what it names, or that of a Dockerfile next to the tests (which both
        have the tests in them), else the agent's."""
        own = self._has_verifiers_environment()
        mode = self._text("verifier", "environment_mode") or ("separate" if own else "shared")
        if mode == "shared" and not own:
            return None
        if mode != "separate":
            allowed = "allowed: separate" + ("" if own else ", shared")
            raise self._error("verifier.environment_mode", f"got {mode!r}", allowed)
        section = self._verifiers_environment()
        own_tests = f"{self._place}tests"
        context = own_tests if self._existing(f"{own_tests}/Dockerfile") else "tests"
        own_image = self._image("verifier.environment", context)
        has_tests = bool(own_image["image"])
        return Separate(
            **(own_image if has_tests else self._agents_image()),
            has_tests=has_tests,
            artifacts=self._artifacts(),
            **self._limits(section, context),
        )

    def _has_verifiers_environment(self) -> bool:
        return self._section("verifier").get("environment") is not None

    def _verifiers_environment(self) -> str:
        return "verifier.environment" if self._has_verifiers_environment() else "environment"

    def _artifacts(self) -> tuple[str, ...]:
        """What the agent leaves for a verifier elsewhere: the declared paths, and Harbor's usual one."""
        artifacts = self._raw.get("artifacts", [])
        entries = [{"source": entry} if isinstance(entry, str) else entry for entry in artifacts]
        for entry in entries:
            path = entry.get("source") if isinstance(entry, dict) else None
            if not isinstance(path, str) or not path.startswith("/") or ".." in path.split("/"):
                raise self._error("artifacts", f"got {entry!r}", "allowed: absolute paths, without '..'")
            if entry.get("service") not in (None, "main"):
                raise self._error("artifacts", f"{path}: nothing is collected from services")
            if entry.get("exclude"):
                raise self._error("artifacts", f"{path}: exclude is not supported", "give the path to copy")
        return tuple(dict.fromkeys((ARTIFACTS, *(entry["source"] for entry in entries))))

    def _unknown(self, separate: Separate | None) -> Iterable[str]:
        for section, known in _KNOWN.items():
            for name in self._section(section):
                if name not in known.split():
                    yield f"{section}.{name}".lstrip(".")
        if self._raw.get("artifacts") and separate is None:
            yield "artifacts"
        for name in self._step or ():
            if name not in _STEP:
                yield f"steps.{name}"

    def _refuse_what_slots_lack(self) -> None:
        for section in ("environment", "verifier.environment"):
            if self._number(section, "gpus"):
                raise self._error(f"{section}.gpus", "slots have no GPU")
            if (os := self._text(section, "os")) and os.lower() != "linux":
                raise self._error(f"{section}.os", f"got {os!r}: slots have Linux")
        for section, name, why in _LACKING:
            if self._section(section).get(name):
                raise self._error(f"{section}.{name}", f"is not supported: {why}")

    def _section(self, name: str) -> Mapping[str, Any]:
        if not name:
            return self._raw
        found: Mapping[str, Any] = self._raw
        for part in name.split("."):
            value = found.get(part, {})
            if not isinstance(value, dict):
                raise self._error(name, f"got {value!r}", "allowed: a table")
            found = value
        return found

    def _image(self, section: str, context: str) -> dict[str, Any]:
        """A machine's: what the section names, else that of the Dockerfile; empty if there is neither."""
        built = self._built(context)
        return {"image": self._named_image(section) or built, "dockerfile": built}

    def _agents_image(self) -> dict[str, Any]:
        image = self._image("environment", "environment")
        if image["image"]:
            return image
        raise self._error("environment.docker_image", "is missing, and there is no environment/Dockerfile")

    def _built(self, context: str) -> str:
        """The image of a directory's Dockerfile; empty if it has none."""
        return f"dockerfile:{self._existing(context)}" if self._existing(f"{context}/Dockerfile") else ""

    def _existing(self, name: str) -> Path | None:
        return inside(self._directory, name)

    def _named_image(self, section: str) -> str:
        image = self._text(section, "docker_image")
        return image_reference(self._directory, f"{section}.docker_image", image, FILE) if image else ""

    def healthcheck(self) -> Healthcheck | None:
        """That of the environment; of a step its own."""
        section = "environment.healthcheck"
        if "healthcheck" not in self._section("environment"):
            return None
        if not (command := self._text(section, "command")):
            raise self._error(f"{section}.command", "is missing")
        fields = {
            name: self._number(section, f"{name.removesuffix('_s')}_sec" if name.endswith("_s") else name)
            for name in ("interval_s", "timeout_s", "start_period_s", "start_interval_s", "retries")
        }
        return Healthcheck(command, **{name: value for name, value in fields.items() if value is not None})  # type: ignore[arg-type]  # retries too is a number

    def _workdir(self, section: str) -> str:
        return absolute(self._directory, f"{section}.workdir", self._text(section, "workdir"), FILE)

    def _phase(self, section: str, environment: str, usual_s: float, most_s: float) -> Phase:
        user = self._section(section).get("user", "")
        if isinstance(user, bool) or not isinstance(user, (str, int)):
            raise self._error(f"{section}.user", f"got {user!r}", "allowed: a name or a uid")
        timeout_s = self._seconds(section, "timeout_sec", usual_s, most_s)
        return Phase(timeout_s, str(user), self._network(section, environment))

    def _network(self, section: str, environment: str) -> NetworkPolicy:
        """The policy of a phase: its own, else its environment's, else Harbor's default."""
        own = self._section(section)
        if "allowed_hosts" in own and "network_mode" not in own:
            raise self._error(f"{section}.allowed_hosts", "are there without a network_mode", "allowed: allowlist")
        at = section if "network_mode" in own else environment
        table = self._section(at)
        hosts = table.get("allowed_hosts") or []
        if "network_mode" in table:
            mode = table["network_mode"]
        else:
            mode = "no-network" if self._flag(environment, "allow_internet") is False and not hosts else "public"
        if mode not in NETWORKS:
            raise self._error(f"{at}.network_mode", f"got {mode!r}", f"allowed: {', '.join(NETWORKS)}")
        if hosts and mode != "allowlist":
            raise self._error(f"{at}.allowed_hosts", f"do not go with network_mode {mode!r}", "allowed: allowlist")
        if mode == "allowlist" and not hosts:
            return NO_NETWORK
        try:
            return NetworkPolicy.parse({"kind": NETWORKS[mode], "hosts": hosts})
        except ConfigError as error:
            raise self._error(f"{at}.allowed_hosts", error.message, error.next_step) from error

    def _text(self, section: str, name: str) -> str:
        value = self._section(section).get(name) or ""
        if not isinstance(value, str):
            raise self._error(f"{section}.{name}", f"got {value!r}", "allowed: text")
        return value

    def _flag(self, section: str, name: str) -> bool | None:
        value = self._section(section).get(name)
        if value is not None and not isinstance(value, bool):
            raise self._error(f"{section}.{name}", f"got {value!r}", "allowed: true or false")
        return value

    def _number(self, section: str, name: str) -> float | None:
        value = self._section(section).get(name)
        if value is None:
            return None
        number = _as_number(value)
        if number is None or not 0 <= number < 10**9:
            raise self._error(f"{section}.{name}", f"got {value!r}", "allowed: a number, 0 or more")
        return number

    def _seconds(self, section: str, name: str, usual: float, most: float) -> float:
        """A time limit. Harbor accepts 0 as well, in which nothing can be done."""
        value = self._section(section).get(name)
        number = usual if value is None else _as_number(value)
        if number is None or not 0 < number <= most:
            allowed = "allowed: more than 0" + (f", at most {most:g}" if most < math.inf else "")
            raise self._error(f"{section}.{name}", f"got {value!r}", f"{allowed}; or leave it out")
        return number

    def _mib(self, section: str, name: str, older: str) -> int | None:
        """A size in MiB; ``older`` is the field of Harbor's first version, text such as ``2G``."""
        value = self._number(section, name)
        if value is not None and value % 1:
            raise self._error(f"{section}.{name}", f"got {value!r}", "allowed: a whole number")
        text = self._text(section, older)
        amount = text.strip().upper()
        if not amount:
            return None if value is None else int(value) or None
        size = _as_number(amount[:-1])
        if amount[-1] not in _MIB_OF or size is None or not 0 <= size < 10**9:
            raise self._error(f"{section}.{older}", f"got {text!r}", "allowed: 512M, 2G, 1.5G and the like")
        found = int(size * _MIB_OF[amount[-1]])
        if value is not None and value != found:
            raise self._error(f"{section}.{older}", f"is {found} MB, and {name} is {value:g}", "leave one out")
        return max(1, found)

    def _env(self, section: str) -> dict[str, str]:
        value = self._section(section).get("env", {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self._error(f"{section}.env", f"got {value!r}", "allowed: a table of texts")
        return {name: self._filled(f"{section}.env.{name}", text) for name, text in value.items()}

    def _filled(self, name: str, text: str) -> str:
        """A text, or its value if all of it is a template (``${NAME}``, ``${NAME:-default}``). A task is
        a stranger's file: it gets only what was offered by name."""
        template = _TEMPLATE.fullmatch(text)
        if template is None:
            return text
        variable, default = template[1], template[2]
        if variable not in self._host_env and default is None:
            raise not_offered(self._directory, name, variable, FILE)
        return self._host_env.get(variable, default)

    def _error(self, name: str, problem: str, next_step: str = "") -> ConfigError:
        at = f"steps.{self._step['name']}.{name}" if self._step and "/" not in name else name
        return wrong(self._directory, at, problem, next_step, file="" if "/" in name else FILE)


def step_tables(directory: Path, raw: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tables of a task's steps, with names that are directories of their own. Raises ConfigError."""
    tables = raw.get("steps") or []
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise wrong(directory, "steps", f"got {tables!r:.100}", "allowed: tables, each with a name", file=FILE)
    seen: set[str] = set()
    for table in tables:
        name = table.get("name")
        if not isinstance(name, str) or not is_step_name(name):
            raise wrong(directory, "steps.name", f"got {name!r}", "allowed: the name of its directory", file=FILE)
        if (key := unicodedata.normalize("NFC", name).casefold()) in seen:
            raise wrong(directory, "steps.name", f"{name!r} is there twice", file=FILE)
        seen.add(key)
        for part in ("agent", "verifier"):
            if not isinstance(table.get(part, {}), dict):
                raise wrong(directory, f"steps.{name}.{part}", f"got {table[part]!r:.100}", "allowed: a table")
        if inside(directory, f"steps/{name}") is None:
            raise wrong(directory, f"steps/{name}", "is missing", "a step has a directory with its instruction.md")
    return tables


def is_step_name(name: str) -> bool:
    """Whether Harbor takes it: the name of one directory, on any system. Pure."""
    device = _DEVICE.fullmatch(name.partition(".")[0].rstrip(" "))
    odd = not name.strip() or name in (".", "..") or name.endswith((".", " ")) or _NOT_IN_NAMES.search(name)
    return not odd and not device and len(name.encode()) <= 255


def step_alone(directory: Path, raw: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``task.toml`` of a task that has only this step: what the step says goes before what the task says, except
    that a verifier's time limit is the step's alone, as in Harbor."""
    agent, verifier = (_merged(raw.get(name), step.get(name)) for name in ("agent", "verifier"))
    own, all_steps = step.get("verifier", {}), raw.get("verifier", {})
    verifier.pop("timeout_sec", None)
    if "timeout_sec" in own:
        verifier["timeout_sec"] = own["timeout_sec"]
    if isinstance(verifier.get("env"), dict) and isinstance(all_steps.get("env"), dict):
        verifier["env"] = {**all_steps["env"], **verifier["env"]}
    if own.get("environment") is not None and "environment_mode" not in own:
        verifier["environment_mode"] = "separate"
    if own.get("environment_mode") == "shared" and own.get("environment") is None:
        verifier.pop("environment", None)
    if isinstance(verifier.get("environment"), dict) and isinstance(all_steps.get("environment", {}), dict):
        image = (own.get("environment") or {}).get("docker_image")
        if not image and inside(directory, f"steps/{step['name']}/tests/Dockerfile") is None:
            image = all_steps.get("environment", {}).get("docker_image")
        verifier["environment"] = {**verifier["environment"], "docker_image": image or ""}
    environment = {**raw["environment"]} if isinstance(raw.get("environment"), dict) else {}
    environment.pop("healthcheck", None)
    if step.get("healthcheck") is not None:
        environment["healthcheck"] = step["healthcheck"]
    artifacts = [*(raw.get("artifacts") or []), *(step.get("artifacts") or [])]
    return {
        **raw, "agent": agent, "verifier": verifier, "environment": environment, "artifacts": artifacts, "steps": [],
    }  # fmt: skip


def _merged(task: object, step: object) -> dict[str, Any]:
    """Two tables of a phase: the step's fields first. A network is one thing: its hosts are those of its mode."""
    whole, own = (dict(table) if isinstance(table, dict) else {} for table in (task, step))
    if "network_mode" in own or "allowed_hosts" in own:
        whole = {name: value for name, value in whole.items() if name not in ("network_mode", "allowed_hosts")}
    return {**whole, **{name: value for name, value in own.items() if value is not None}}


def _as_number(value: object) -> float | None:
    """A number, or text that is one, as Harbor reads it too; None: it is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return None

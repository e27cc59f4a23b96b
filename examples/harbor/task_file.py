"""Harbor's format: ``task.toml`` and the files beside it, read strictly.

The format is Harbor's (https://harborframework.com/docs/tasks), with the older spellings that Terminal-Bench 2 still
uses. A field that means something a slot cannot do is refused by name; one that is not known at all is left out and
named in ``HarborTask.unknown``, as Harbor leaves it out too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from agentenv.errors import ConfigError
from agentenv.wire.network import NetworkPolicy
from examples.harbor.task import (
    DEFAULT_TIMEOUT_S,
    HarborTask,
    Healthcheck,
    Phase,
    Separate,
    absolute,
    filled,
    image_reference,
    named,
    wrong,
)

FILE: Final = "task.toml"
SCRIPT: Final = "test.sh"
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
    ("verifier", "collect", "there are no other services to collect from"),
)
"""Table, field, and why slots cannot do what it asks for."""
_SIZE: Final = re.compile(r"(\d+)([KMG])", re.IGNORECASE)
_MIB_OF: Final = {"K": 1 / 1024, "M": 1, "G": 1024}


def read_task_file(directory: Path, host_env: Mapping[str, str]) -> HarborTask:
    """The task of a directory with a ``task.toml``. ``host_env``: what templates may name. Raises ConfigError naming
    the task and the field."""
    named(directory)
    try:
        raw = tomllib.loads((directory / FILE).read_text(encoding="utf-8"))
        instruction = (directory / "instruction.md").read_text(encoding="utf-8")
    except OSError as error:
        raise wrong(directory, FILE, f"cannot be read: {error}") from error
    except ValueError as error:
        raise wrong(directory, FILE, f"is not valid: {error}") from error
    if not instruction.strip():
        raise wrong(directory, "instruction.md", "is empty")
    if not (directory / "tests" / SCRIPT).is_file():
        raise wrong(directory, f"tests/{SCRIPT}", "is missing", "a task is scored by it")
    return _Reader(directory, raw, host_env).task(instruction)


class _Reader:
    """Reads the fields of one task.toml."""

    def __init__(self, directory: Path, raw: Mapping[str, Any], host_env: Mapping[str, str]) -> None:
        self._directory = directory
        self._raw = raw
        self._host_env = host_env

    def task(self, instruction: str) -> HarborTask:
        self._refuse_what_slots_lack()
        separate = self._separate()
        return HarborTask(
            name=self._directory.name,
            directory=self._directory,
            instruction=instruction,
            image=self._image(),
            tests=(self._directory / "tests",),
            script=SCRIPT,
            solution=self._directory / "solution",
            agent=self._phase("agent", "environment"),
            verifier=self._phase("verifier", self._verifiers_environment()),
            verifier_env=self._env("verifier"),
            solution_env=self._env("solution"),
            healthcheck=self._healthcheck(),
            separate=separate,
            unknown=tuple(self._unknown(separate)),
            **self._limits("environment"),
        )

    def _limits(self, section: str) -> dict[str, Any]:
        """The fields of a machine beside its image."""
        return {
            "cpus": self._number(section, "cpus"),
            "memory_mib": self._mib(section, "memory_mb", "memory"),
            "storage_mib": self._mib(section, "storage_mb", "storage"),
            "workdir": self._workdir(section),
            "build_timeout_s": self._number(section, "build_timeout_sec") or DEFAULT_TIMEOUT_S,
            "env": self._env(section),
        }

    def _separate(self) -> Separate | None:
        """The verifier's own machine. Its image is what it names, or that of a Dockerfile beside the tests (which both
        have the tests in them), else the agent's."""
        own = self._section("verifier.environment")
        mode = self._text("verifier", "environment_mode") or ("separate" if own else "shared")
        if mode == "shared" and not own:
            return None
        if mode != "separate":
            allowed = "allowed: separate" + ("" if own else ", shared")
            raise self._error("verifier.environment_mode", f"got {mode!r}", allowed)
        section, tests = self._verifiers_environment(), self._directory / "tests"
        image = self._named_image("verifier.environment")
        if not image and (tests / "Dockerfile").is_file():
            image = f"dockerfile:{tests}"
        return Separate(
            image=image or self._image(),
            has_tests=bool(image),
            artifacts=self._artifacts(),
            **self._limits(section),
        )

    def _verifiers_environment(self) -> str:
        return "verifier.environment" if self._section("verifier.environment") else "environment"

    def _artifacts(self) -> tuple[str, ...]:
        """What the agent leaves for a verifier elsewhere: the declared paths, and Harbor's usual one."""
        given = self._raw.get("artifacts", [])
        entries = [{"source": entry} if isinstance(entry, str) else entry for entry in given]
        for entry in entries:
            path = entry.get("source") if isinstance(entry, dict) else None
            if not isinstance(path, str) or not path.startswith("/") or ".." in path.split("/"):
                raise self._error("artifacts", f"got {entry!r}", "allowed: absolute paths, without '..'")
            if entry.get("service") not in (None, "main"):
                raise self._error("artifacts", f"{path}: there are no other services to collect from")
            if entry.get("exclude"):
                raise self._error("artifacts", f"{path}: exclude is not supported", "name what is to be copied")
        return tuple(dict.fromkeys((ARTIFACTS, *(entry["source"] for entry in entries))))

    def _unknown(self, separate: Separate | None) -> Iterable[str]:
        for section, known in _KNOWN.items():
            for name in self._section(section):
                if name not in known.split():
                    yield f"{section}.{name}".lstrip(".")
        if self._raw.get("artifacts") and separate is None:
            yield "artifacts"

    def _refuse_what_slots_lack(self) -> None:
        for section in ("environment", "verifier.environment"):
            if self._number(section, "gpus"):
                raise self._error(f"{section}.gpus", "slots have no GPU")
            if (os := self._text(section, "os")) and os.lower() != "linux":
                raise self._error(f"{section}.os", f"got {os!r}: slots have Linux")
        for section, name, why in _LACKING:
            if self._section(section).get(name):
                raise self._error(f"{section}.{name}", f"is not supported: {why}")
        if self._raw.get("steps"):
            raise self._error("steps", "tasks of several steps are not supported")
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            for place in ("environment", "tests"):
                if (self._directory / place / name).exists():
                    raise self._error(f"{place}/{name}", "tasks of several containers are not supported")

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

    def _image(self) -> str:
        if given := self._named_image("environment"):
            return given
        if not (self._directory / "environment/Dockerfile").is_file():
            raise self._error("environment.docker_image", "is missing, and there is no environment/Dockerfile")
        return f"dockerfile:{self._directory / 'environment'}"

    def _named_image(self, section: str) -> str:
        given = self._text(section, "docker_image")
        return image_reference(self._directory, f"{section}.docker_image", given) if given else ""

    def _healthcheck(self) -> Healthcheck | None:
        section = "environment.healthcheck"
        if not self._section(section):
            return None
        if not (command := self._text(section, "command")):
            raise self._error(f"{section}.command", "is missing")
        given = {
            name: self._number(section, f"{name.removesuffix('_s')}_sec" if name.endswith("_s") else name)
            for name in ("interval_s", "timeout_s", "start_period_s", "start_interval_s", "retries")
        }
        return Healthcheck(command, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # retries too is a number

    def _workdir(self, section: str) -> str:
        return absolute(self._directory, f"{section}.workdir", self._text(section, "workdir"))

    def _phase(self, section: str, environment: str) -> Phase:
        user = self._section(section).get("user", "")
        if isinstance(user, bool) or not isinstance(user, (str, int)):
            raise self._error(f"{section}.user", f"got {user!r}", "allowed: a name or a uid")
        timeout_s = self._number(section, "timeout_sec") or DEFAULT_TIMEOUT_S
        return Phase(timeout_s, str(user), self._network(section, environment))

    def _network(self, section: str, environment: str) -> NetworkPolicy:
        """The policy of a phase: its own, else its environment's, else Harbor's default."""
        own = self._section(section)
        at = section if "network_mode" in own or "allowed_hosts" in own else environment
        given = self._section(at)
        if "network_mode" in given:
            mode = given["network_mode"]
        elif self._flag(environment, "allow_internet") is False:
            mode = "no-network"
        else:
            mode = "allowlist" if given.get("allowed_hosts") else "public"
        if mode not in NETWORKS:
            raise self._error(f"{at}.network_mode", f"got {mode!r}", f"allowed: {', '.join(NETWORKS)}")
        hosts = given.get("allowed_hosts") or []
        if bool(hosts) != (mode == "allowlist"):
            raise self._error(f"{at}.allowed_hosts", f"do not go with network_mode {mode!r}")
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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 10**9:
            raise self._error(f"{section}.{name}", f"got {value!r}", "allowed: a number, 0 or more")
        return value

    def _mib(self, section: str, name: str, older: str) -> int | None:
        """A size in MiB; ``older`` is the field of Harbor's first version, text such as ``2G``."""
        value = self._number(section, name)
        if value is not None:
            return int(value) or None
        given = self._text(section, older)
        if not given:
            return None
        size = _SIZE.fullmatch(given)
        if size is None:
            raise self._error(f"{section}.{older}", f"got {given!r}", "allowed: 512M, 2G and the like")
        return max(1, int(int(size[1]) * _MIB_OF[size[2].upper()]))

    def _env(self, section: str) -> dict[str, str]:
        value = self._section(section).get("env", {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self._error(f"{section}.env", f"got {value!r}", "allowed: a table of texts")
        return {
            name: filled(self._directory, f"{section}.env.{name}", text, self._host_env) for name, text in value.items()
        }

    def _error(self, name: str, problem: str, next_step: str = "") -> ConfigError:
        return wrong(self._directory, name, problem, next_step)

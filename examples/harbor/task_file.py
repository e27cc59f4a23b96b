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
from agentenv.store.reference import parse as parse_reference
from agentenv.wire.network import NetworkPolicy
from examples.harbor.task import DEFAULT_TIMEOUT_S, HarborTask, Healthcheck, Phase, filled, named, wrong

FILE: Final = "task.toml"
SCRIPT: Final = "test.sh"
NETWORKS: Final[Mapping[str, Literal["none", "public", "allow"]]] = {
    "no-network": "none",
    "public": "public",
    "allowlist": "allow",
}
_KNOWN: Final[Mapping[str, str]] = {
    "": "version schema_version task metadata agent verifier solution environment steps source "
    "multi_step_reward_strategy",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "verifier": "timeout_sec user env network_mode allowed_hosts environment_mode environment collect",
    "solution": "env",
    "environment": "build_timeout_sec docker_image cpus memory_mb storage_mb memory storage gpus gpu_types env workdir "
    "os tpu healthcheck mcp_servers network_mode allowed_hosts allow_internet",
    "environment.healthcheck": "command interval_sec timeout_sec start_period_sec start_interval_sec retries",
}
"""The fields of each table, separated by spaces; of the file itself those without a table."""
_LACKING: Final = (
    ("environment", "tpu", "slots have no TPU"),
    ("environment", "mcp_servers", "the agent has the slot's own tools"),
    ("verifier", "environment", "the verifier runs in the agent's slot"),
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
        memory_mib = self._mib("memory_mb", "memory")
        return HarborTask(
            name=self._directory.name,
            directory=self._directory,
            instruction=instruction,
            image=self._image(),
            tests=(self._directory / "tests",),
            script=SCRIPT,
            solution=self._directory / "solution",
            agent=self._phase("agent"),
            verifier=self._phase("verifier"),
            cpus=self._number("environment", "cpus"),
            memory_mib=memory_mib,
            storage_mib=self._mib("storage_mb", "storage"),
            workdir=self._workdir(),
            build_timeout_s=self._number("environment", "build_timeout_sec") or DEFAULT_TIMEOUT_S,
            env=self._env("environment"),
            verifier_env=self._env("verifier"),
            solution_env=self._env("solution"),
            healthcheck=self._healthcheck(),
            unknown=tuple(self._unknown()),
        )

    def _unknown(self) -> Iterable[str]:
        for section, known in _KNOWN.items():
            for name in self._section(section):
                if name not in known.split():
                    yield f"{section}.{name}".lstrip(".")

    def _refuse_what_slots_lack(self) -> None:
        if self._number("environment", "gpus"):
            raise self._error("environment.gpus", "slots have no GPU")
        if (os := self._text("environment", "os")) and os.lower() != "linux":
            raise self._error("environment.os", f"got {os!r}: slots have Linux")
        for section, name, why in _LACKING:
            if self._section(section).get(name):
                raise self._error(f"{section}.{name}", f"is not supported: {why}")
        if (self._text("verifier", "environment_mode") or "shared") != "shared":
            raise self._error("verifier.environment_mode", "only 'shared' is supported: the verifier runs in the slot")
        if self._raw.get("steps"):
            raise self._error("steps", "tasks of several steps are not supported")
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (self._directory / "environment" / name).exists():
                raise self._error(f"environment/{name}", "tasks of several containers are not supported")

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
        given = self._text("environment", "docker_image")
        if not given:
            if not (self._directory / "environment/Dockerfile").is_file():
                raise self._error("environment.docker_image", "is missing, and there is no environment/Dockerfile")
            return f"dockerfile:{self._directory / 'environment'}"
        try:
            parse_reference(given)
        except ConfigError as error:
            raise self._error("environment.docker_image", error.message, error.next_step) from error
        return given

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

    def _workdir(self) -> str:
        workdir = self._text("environment", "workdir")
        if workdir and not workdir.startswith("/"):
            raise self._error("environment.workdir", f"got {workdir!r}", "allowed: an absolute path")
        return workdir

    def _phase(self, section: str) -> Phase:
        user = self._section(section).get("user", "")
        if isinstance(user, bool) or not isinstance(user, (str, int)):
            raise self._error(f"{section}.user", f"got {user!r}", "allowed: a name or a uid")
        timeout_s = self._number(section, "timeout_sec") or DEFAULT_TIMEOUT_S
        return Phase(timeout_s, str(user), self._network(section))

    def _network(self, section: str) -> NetworkPolicy:
        """The policy of a phase: its own, else the environment's, else Harbor's default."""
        own = self._section(section)
        at = section if "network_mode" in own or "allowed_hosts" in own else "environment"
        given = self._section(at)
        if "network_mode" in given:
            mode = given["network_mode"]
        elif self._flag("environment", "allow_internet") is False:
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

    def _mib(self, name: str, older: str) -> int | None:
        """A size in MiB; ``older`` is the field of Harbor's first version, text such as ``2G``."""
        value = self._number("environment", name)
        if value is not None:
            return int(value) or None
        given = self._text("environment", older)
        if not given:
            return None
        size = _SIZE.fullmatch(given)
        if size is None:
            raise self._error(f"environment.{older}", f"got {given!r}", "allowed: 512M, 2G and the like")
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

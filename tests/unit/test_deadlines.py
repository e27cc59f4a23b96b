"""Deadlines on slow machines: which factor the environment may give, and where it arrives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv import deadlines
from agentenv.errors import ConfigError

_SHOWN = """
import inspect, json
from agentenv import ExecutorSettings, PoolSettings
from agentenv.config import launch_environment
from agentenv.farm.open import open_executor, open_farm
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.sandbox.server import call_queue
from agentenv.sandbox.supervisor import server_process, slot_process
from agentenv.slots.backends.nomad.job import job_variables
from agentenv.config import ContainerSettings, NomadSettings
variables = job_variables('variable "time_factor" {}\\nvariable "spec" {}', ContainerSettings(), NomadSettings())
STARTS = (open_executor, open_farm, LocalBackend, NomadBackend, make_backend)
print(json.dumps({
    "start": PoolSettings().start_timeout_s,
    "commands": [inspect.signature(one).parameters["start_timeout_s"].default for one in STARTS],
    "call": ExecutorSettings().default_timeout_s,
    "kill": call_queue.KILL_GRACE_S,
    "hello": slot_process.HELLO_DEADLINE_S,
    "container": launch_environment().get("AGENTENV_TIME_FACTOR"),
    "server": server_process.environment().get("AGENTENV_TIME_FACTOR"),
    "job": "time_factor = 3.0" in variables.splitlines(),
}))
"""


@pytest.mark.parametrize(("text", "factor"), [(None, 1), ("", 1), ("1", 1), ("10", 10), ("2.5", 2.5), ("100", 100)])
def test_a_factor(text: str | None, factor: float) -> None:
    assert deadlines.time_factor(text) == factor


@pytest.mark.parametrize("wait", deadlines.ORDERED)
def test_whoever_is_nearer_to_the_cause_gives_up_first(wait: str) -> None:
    """In every process that waits: else a client sees a lost connection, and tries again."""
    inner = deadlines.ORDERED[wait]
    assert list(inner) == sorted(set(inner))
    assert len(inner) > 1


def test_every_deadline_that_is_ordered_is_in_use_as_it_stands_there() -> None:
    """None is stated again in its process."""
    sources = Path(deadlines.__file__).parent.rglob("*.py")
    texts = {path: path.read_text() for path in sources if path != Path(deadlines.__file__)}
    values = {value for wait in deadlines.ORDERED.values() for value in wait}
    names = [name for name, value in vars(deadlines).items() if name.endswith("_S") and value in values]
    for name in names:
        importers = [text for text in texts.values() if re.search(rf"deadlines import [^\n]*\b{name}\b", text)]
        assert importers, name
        assert not [path for path, text in texts.items() if re.search(rf"^_?{name}\b[^=\n]*= ", text, re.MULTILINE)]


@pytest.mark.parametrize("text", ["0", "0.99", "-3", "101", "nan", "inf", "ten", "10s", "1,5"])
def test_no_factor(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^AGENTENV_TIME_FACTOR: .* is not a number of 1 to 100"):
        deadlines.time_factor(text)


def test_it_reaches_settings_and_containers_and_their_servers() -> None:
    environment = {**os.environ, "AGENTENV_TIME_FACTOR": "3"}
    done = subprocess.run([sys.executable, "-c", _SHOWN], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "start": 180, "commands": [180] * 5, "call": 180, "kill": 45, "hello": 30,
        "container": "3", "server": "3", "job": True
    }  # fmt: skip


def test_a_job_file_that_cannot_take_it_is_refused() -> None:
    program = (
        "from agentenv.config import ContainerSettings, NomadSettings\n"
        "from agentenv.slots.backends.nomad.job import job_variables\n"
        "job_variables('variable \"spec\" {}', ContainerSettings(), NomadSettings())"
    )
    environment = {**os.environ, "AGENTENV_TIME_FACTOR": "3"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "ConfigError: time_factor: is 3.0, but the job file has no variable 'time_factor'" in done.stderr


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_command_refuses_another_without_a_traceback(more: list[str]) -> None:
    environment = {**os.environ, "AGENTENV_TIME_FACTOR": "slow"}
    command = [sys.executable, "-c", "from agentenv.cli import main; main()", "exec", *more, "--", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "AGENTENV_TIME_FACTOR: 'slow' is not a number of 1 to 100" in (done.stdout if more else done.stderr)
    assert "Traceback" not in done.stderr

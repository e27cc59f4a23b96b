"""A farm kept by ``agentenv up``, and every verb from another process: on this machine, fake and real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.farm import look
from agentenv.metrics.scrape import Samples, parse
from tests import cli
from tests.waiting import START_S, wait_for

REAL = ("local", "--isolation", "full" if os.geteuid() == 0 else "user")
"""An ordinary user has to ask for less by name."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks of this process wait for every container; those of other processes, 3 s."""
    monkeypatch.setattr(look, "ANSWER_TIMEOUT_S", START_S)


class Farm(cli.Command):
    """The command with a state directory of its own. Only the verbs that stay are processes of their own: `up` is."""

    def __init__(self, state: Path, backend: str, *options: str) -> None:
        self.state = state
        self.backend = backend
        self.options = options
        super().__init__({"AGENTENV_STATE_DIR": str(state), "AGENTENV_BACKEND": backend})

    def leased(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.told("slots", "--state", "leased")
        return found

    @contextmanager
    def up(self, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
        """``up --json`` until every container answers: the process that stays, and what it said."""
        with self.started("up", "--port", "0", *self.options, *arguments, "--json") as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line == "}\n":
                    break
            assert lines, process.communicate()
            yield process, json.loads("".join(lines))
        self.run("down")  # ends containers that outlived it

    def left(self) -> list[str]:
        """What is in the state directory but the log."""
        containers = list((self.state / "containers").glob("*"))
        return sorted(p.name for p in (*self.state.glob("farm-*"), *containers) if p.suffix not in (".log", ".1"))


@pytest.fixture(params=[("fake",), REAL], ids=["fake", "local"])
def farm(request: pytest.FixtureRequest, tmp_path: Path) -> Farm:
    return Farm(tmp_path / "state", *request.param)


@pytest.fixture
def fake(tmp_path: Path) -> Farm:
    return Farm(tmp_path / "state", "fake")


def test_every_verb_finds_the_farm_another_process_keeps(farm: Farm) -> None:
    with farm.up("--containers", "2", "--slots", "2", "--metrics-port", "0") as (process, said):
        answered = sum(one["answers"] for one in said["containers"])  # on a loaded machine, not all in time
        assert (len(said["containers"]), said["answering_containers"]) == (2, answered)
        assert said["slots"].get("free", 0) == 2 * answered
        status = farm.told("status")
        assert (status["answering_containers"], status["slots"]) == (2, {"free": 4})
        assert status["well"] is True
        assert {container["node"] for container in status["containers"]} == {"this machine"}
        assert len(farm.told("slots")) == 4

        with farm.started("exec", "echo $((6 * 7)); exit 3") as process_of_exec:
            stdout, _ = process_of_exec.communicate(timeout=START_S)
        assert (process_of_exec.returncode, stdout) == (3, "42\n")
        code, text, _ = farm.run("status")
        assert code == 0
        assert "healthy" in text

        def whole() -> Samples | None:
            found = scraped(status["metrics_url"])
            called = sum(found.by("agentenv_sandbox_calls_total", "container").values()) > 0 or farm.backend == "fake"
            return found if called and found.one("agentenv_pool_slots", state="free") == 4 else None

        samples = wait_for(whole)
        assert samples.one("agentenv_pool_containers", state="ready") == 2
        assert samples.one("agentenv_pool_slots", state="free") == 4
        if farm.backend == "local":
            assert sum(samples.by("agentenv_sandbox_calls_total", "container").values()) == 1
            assert sum(samples.by("agentenv_sandbox_call_seconds_count", "container").values()) == 1
            first = status["containers"][0]["id"]
            _, log, _ = farm.run("logs", "0")
            assert first in log
            assert status["containers"][1]["id"] not in log

        code, _, stderr = farm.run("down")
        assert code == 0
        assert f"ended process {process.pid}" in stderr
        assert process.wait(START_S) == 0
    assert farm.left() == []
    assert farm.run("status")[0] == 1


def test_status_counts_by_the_goal_that_a_farm_has_grown_to(fake: Farm) -> None:
    with fake.up("--slots", "1", "--set", "max_containers=2"):
        assert "1 of 1 ready" in fake.run("status")[1]
        with fake.started("exec", "--", "sleep", "60"), fake.started("exec", "--", "sleep", "60"):
            assert wait_for(lambda: "2 of 2 ready" in fake.run("status")[1], START_S)


def scraped(url: str) -> Samples:
    return parse(httpx.get(url, timeout=START_S, trust_env=False).raise_for_status().text)


def test_a_command_holds_the_only_slot_of_a_farm_until_it_ends_however_it_ends(fake: Farm) -> None:
    with fake.up("--slots", "1"):
        with fake.started("exec", "--", "sleep", "60") as running:
            (leased,) = wait_for(fake.leased, START_S)
            assert leased["trajectory"] == "agentenv-exec"
            assert leased["in_state_s"] >= 0
            code, stdout, _ = fake.run("exec", "--own", "echo alone")
            assert (code, stdout) == (0, "alone\n")
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=START_S)
            assert [slot["state"] for slot in fake.told("slots")] == ["free"]

        with fake.started("exec", "--", "sleep", "60") as killed:
            wait_for(fake.leased, START_S)
            killed.kill()
        found = fake.told("gc", "--observe", "4", "--end-leases")
        (orphan,) = found["orphans"]
        assert (orphan["kind"], orphan["removed"]) == ("lease", True)
        code, stdout, _ = fake.run("exec", "echo mine")
        assert (code, stdout) == (0, "mine\n")


def test_there_is_one_farm_at_a_time_and_watching_it_writes_lines_until_ctrl_c(fake: Farm) -> None:
    with fake.up() as (process, _):
        code, _, stderr = fake.run("up")
        assert code == 2
        assert f"process {process.pid}" in stderr
        assert "agentenv down" in stderr

        with fake.started("status", "--watch", "--interval", "0.2", "--json") as watching:
            assert watching.stdout is not None
            lines = (json.loads(line) for line in watching.stdout)
            for _ in range(3):
                wait_for(lambda: next(lines).get("well"))
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=START_S)
            assert watching.returncode == 0


def test_a_killed_farm_leaves_nothing_gc_does_not_find(farm: Farm) -> None:
    with farm.up() as (process, _):
        process.kill()
        process.communicate(timeout=START_S)
        status = farm.told("status")
        assert status["exists"] is False
        if farm.backend == "local":
            assert "1 of its containers still run" in status["next_step"]
        dry = farm.told("gc", "--dry-run")
        assert f"farm-{farm.backend}" in [orphan["name"] for orphan in dry["orphans"]]
        assert f"farm-{farm.backend}" in farm.left()

        def swept() -> bool:  # the container's last process may still be ending
            assert farm.told("gc")["left"] == []
            return not farm.left()

        if farm.backend == "local":
            assert farm.run("down")[2].startswith("ended the 1 container of a farm that no process ran")
        wait_for(swept, START_S)
    with farm.up():
        assert farm.told("status")["well"] is True


def test_containers_and_leases_outlive_the_farm_s_process(tmp_path: Path) -> None:
    farm = Farm(tmp_path / "state", *REAL)
    holder = """
import sys
from agentenv import Sandbox
with Sandbox(backend="farm") as box:
    box.run("echo kept > file")
    print("holds", flush=True)
    sys.stdin.readline()
    print(box.run("cat file").stdout, end="", flush=True)
"""
    command = [sys.executable, "-c", holder]
    with ExitStack() as stack:
        process, said = stack.enter_context(farm.up("--slots", "1"))
        trainer = stack.enter_context(
            subprocess.Popen(command, env=farm.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(trainer.kill)
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=START_S)
        assert process.returncode == 0
        assert "unless `agentenv down` ends them, containers and leases stay" in told

        _, again = stack.enter_context(farm.up("--slots", "1"))
        assert again["containers"][0]["id"] == said["containers"][0]["id"]
        assert [lease["trajectory"][:7] for lease in farm.leased()] == ["sandbox"]
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "kept\n"
        assert farm.run("down")[0] == 0
    assert farm.left() == []


def test_a_container_that_dies_is_a_fault_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ANSWER_TIMEOUT_S", 3.0)  # so long the dead one is asked
    farm = Farm(tmp_path / "state", *REAL)
    with farm.up("--slots", "1") as (_, said):
        lost = said["containers"][0]["id"]
        _kill_container(farm.state, lost)

        def replaced() -> Any:
            status = farm.told("status")
            return status if status["well"] and status["containers"][0]["id"] != lost else None

        assert any(lost in fault for fault in wait_for(replaced, START_S)["faults"])


def _kill_container(state: Path, container: str) -> None:
    """SIGKILL to the process that was started with the container's spec file."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                if any(str(state) in one and container in one for one in arguments):
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
    raise AssertionError(f"{container} does not run")

"""However a container ends, or fails to begin, nothing of it is left and the reason is one clear event."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import sweep
from agentenv.wire.spec import Bind
from tests.integration.supervisor_harness import (
    Container,
    assert_nothing_left,
    cgroups_of,
    processes_with,
    wait_for_death,
)
from tests.waiting import START_S, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="full isolation is root's; user mode has its own tests")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")  # below a directory only root can enter, as pytest makes it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_it_in_order(place: Path, number: signal.Signals) -> None:
    with Container(place) as container:
        container.ready()
        container.bash(0, "setsid sleep 1000 > /dev/null 2>&1 & echo x > file")
        assert container.stop(number) == 0
        container.event("stopped")
        assert_nothing_left(container)


def test_ctrl_c_reaches_the_whole_group_and_still_stops_in_order(place: Path) -> None:
    with Container(place, prefix=("setsid", "-w")) as container:
        ready = container.ready()
        os.killpg(os.getpgid(ready["pid"]), signal.SIGINT)
        assert container.process.wait(START_S) == 0
        container.event("stopped")
        assert_nothing_left(container)


def test_the_end_of_the_lifeline_stops_it(place: Path) -> None:
    with Container(place, lifeline=True) as container:
        container.ready()
        assert container.process.stdin is not None
        container.process.stdin.close()
        assert container.process.wait(START_S) == 0
        assert_nothing_left(container)


@pytest.mark.parametrize("delay_ms", [0, 40, 80, 110, 140, 170, 200, 250])
def test_a_signal_at_any_moment_of_the_start(place: Path, delay_ms: int) -> None:
    with Container(place, slots=4) as container:
        threading.Event().wait(delay_ms / 1000)
        container.process.send_signal(signal.SIGTERM)
        assert container.process.wait(START_S) in (0, -signal.SIGTERM)  # -TERM: before it began to do anything
        assert_nothing_left(container)


@pytest.mark.parametrize("delay_ms", [60, 100, 130, 160, 200])
def test_sigkill_at_any_moment_of_the_start_leaves_only_what_the_next_start_sweeps(place: Path, delay_ms: int) -> None:
    with Container(place, slots=4) as container:
        threading.Event().wait(delay_ms / 1000)
        container.process.kill()
        container.process.wait(START_S)
        wait_for_death(container)
        sweep.sweep(place / "state")
        assert_nothing_left(container)


@pytest.mark.parametrize("victim", ["launcher", "supervisor"])
def test_sigkill_ends_everything_and_the_next_start_sweeps(place: Path, victim: str) -> None:
    marker = f"98763.{os.getpid()}"
    with Container(place, container=f"killed{os.getpid()}") as container:
        ready = container.ready()
        container.bash(0, f"setsid sleep {marker} > /dev/null 2>&1 & sleep 0.05")
        wait_for(lambda: processes_with(marker))
        os.kill(container.process.pid if victim == "launcher" else ready["pid"], signal.SIGKILL)
        container.process.wait(START_S)
        wait_for(lambda: not processes_with(marker), explain="the slot's daemon died with its container")
        wait_for_death(container)
        if victim == "supervisor":  # the launcher lived to tidy up
            assert_nothing_left(container)
            return
        assert container.state.exists()
        with Container(place, container=f"next{os.getpid()}") as following:
            following.ready()
            assert not container.state.exists()
            assert cgroups_of(container.spec.container) == []
            assert following.stop() == 0


def test_the_sweep_command_tells_what_it_removed(place: Path) -> None:
    with Container(place) as container:
        container.ready()
        container.process.kill()
        container.process.wait(START_S)
        wait_for_death(container)
        command = [sys.executable, "-m", "agentenv.sandbox.supervisor.sweep", str(place / "state")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S)
        told = json.loads(done.stdout)
        assert told["container"] == container.spec.container
        assert told["left"] == []
        assert str(container.state) in told["removed"]
        assert_nothing_left(container)


def test_the_sweep_leaves_a_living_container_alone(place: Path) -> None:
    with Container(place) as container:
        container.ready()
        assert sweep.sweep(place / "state") == []
        assert container.bash(0, "echo alive") == "alive\n"


def failed(container: Container) -> dict[str, str]:
    """The one event of a container that could not start."""
    event = container.event("failed")
    assert container.process.wait(START_S) == 2
    assert container.events.next() is None
    assert len(container.events.seen) == 1
    assert event["message"]
    return event


def path_without(directory: Path, *missing: str) -> dict[str, str]:
    """A PATH with everything of the real one but some programs."""
    directory.mkdir()
    for entry in reversed(os.environ["PATH"].split(":")):
        for program in Path(entry).iterdir() if Path(entry).is_dir() else ():
            link = directory / program.name
            if program.name not in missing and not link.is_symlink():
                link.symlink_to(program)
    return {"PATH": str(directory)}


def test_bubblewrap_missing(place: Path) -> None:
    with Container(place, env=path_without(place / "bin", "bwrap")) as container:
        event = failed(container)
        assert event["code"] == "sandbox_unavailable"
        assert "bwrap" in event["message"]
        assert "apt-get install bubblewrap" in event["next_step"]
        assert_nothing_left(container)


def test_the_network_tool_missing_is_a_refusal_not_an_offline_slot(place: Path) -> None:
    with Container(place, allow_network=True, env=path_without(place / "bin", "slirp4netns")) as container:
        event = failed(container)
        assert "slirp4netns" in event["message"]
        assert "slirp4netns" in event["next_step"]
        assert_nothing_left(container)


@pytest.fixture
def fake_programs() -> Iterator[Path]:
    """A directory every uid can reach, put in front of the PATH."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_bubblewrap_that_may_not_make_namespaces(place: Path, fake_programs: Path) -> None:
    """A bwrap that fails as it does where user namespaces are forbidden (its words, its exit code)."""
    fake = fake_programs / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    with Container(place, env={"PATH": f"{fake_programs}:{os.environ['PATH']}"}) as container:
        event = failed(container)
        assert "setting up uid map" in event["message"]
        assert "AppArmor" in event["next_step"]
        assert_nothing_left(container)


def test_a_slot_that_says_nothing_sensible_is_a_refusal(place: Path, fake_programs: Path) -> None:
    (fake_programs / "bwrap").symlink_to(shutil.which("true") or "/usr/bin/true")
    with Container(place, env={"PATH": f"{fake_programs}:{os.environ['PATH']}"}) as container:
        assert "before its agent sent HELLO" in failed(container)["message"]
        assert_nothing_left(container)


def test_a_server_that_cannot_start(place: Path) -> None:
    with Container(place, fake=("--no-such-option",)) as container:
        event = failed(container)
        assert "the server did not start: exit code 2" in event["message"]
        assert_nothing_left(container)


def test_the_port_is_taken(place: Path, tmp_path: Path) -> None:
    with Container(place) as first:
        port = first.ready()["port"]
        with Container(tmp_path, port=port) as second:
            event = failed(second)
            assert (event["code"], "port" in event["message"]) == ("config", True)


def test_the_same_name_twice(place: Path) -> None:
    name = f"twice{os.getpid()}"
    with Container(place, container=name) as first:
        first.ready()
        with Container(place, container=name) as second:
            assert "is running" in failed(second)["message"]
        assert first.bash(0, "echo unharmed") == "unharmed\n"


def test_the_same_name_in_another_state_directory(place: Path, tmp_path: Path) -> None:
    name = f"else{os.getpid()}"
    with Container(place, container=name) as first:
        first.ready()
        with Container(tmp_path, container=name) as second:
            assert "another container named" in failed(second)["message"]
        assert first.bash(0, "echo unharmed") == "unharmed\n"


def test_the_data_directory_cannot_be_written(place: Path) -> None:
    (place / "file").write_text("")
    with Container(place, data_dir=str(place / "file")) as container:
        event = failed(container)
        assert event["code"] == "config"
        assert "data_dir" in event["message"]


def test_the_disk_is_full(place: Path) -> None:
    full = place / "full"
    full.mkdir()
    mount = ["unshare", "-m", "--propagation", "private", "sh", "-c"]
    script = f'mount -t tmpfs -o size=4k,nr_inodes=1 x {full} && exec "$@"'
    with Container(place, data_dir=str(full), prefix=(*mount, script, "-")) as container:
        event = failed(container)
        assert "No space left" in event["message"]
        assert "free some space" in event["next_step"]


def test_a_token_others_can_read(place: Path) -> None:
    token = place / "token"
    token.write_text("a-token-for-tests-only")
    token.chmod(0o644)
    with Container(place) as container:
        assert "chmod 600" in failed(container)["next_step"]


def test_a_bind_that_does_not_exist(place: Path) -> None:

    with Container(place, binds=(Bind("/no/such/thing", "/opt/x"),)) as container:
        event = failed(container)
        assert (event["code"], "binds[0]" in event["message"]) == ("config", True)
        assert_nothing_left(container)


def test_user_isolation_is_refused_to_root(place: Path) -> None:
    with Container(place, isolation="user") as container:
        assert "never run as uid 0" in failed(container)["message"]


def test_a_lifeline_that_can_never_end_is_refused(place: Path) -> None:
    with Container(place, lifeline=True, prefix=("sh", "-c", 'exec "$@" < /dev/null', "-")) as container:
        assert "--lifeline" in failed(container)["message"]


def test_the_server_says_that_nobody_uses_the_container(place: Path) -> None:
    with Container(place, unattended_after_s=5) as container:
        container.ready()
        container.send(op="unattended")
        assert container.event("unattended")["after_s"] == 5
        assert container.process.wait(START_S) == 0
        container.event("stopped")
        assert_nothing_left(container)


def test_a_container_that_may_be_unattended_does_not_end(place: Path) -> None:
    with Container(place) as container:
        container.ready()
        container.send(op="unattended")
        container.send(op="reset", slot=0)
        container.packet("slot_ready", slot=0)
        assert container.process.poll() is None


def test_a_container_that_leaves_its_starter_needs_a_file_for_its_log(place: Path) -> None:
    command = [sys.executable, "-m", "agentenv.sandbox", str(place / "spec.json"), "--detach"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    failed = json.loads(done.stdout)
    assert (failed["event"], failed["code"]) == ("failed", "config")
    assert "standard error" in failed["message"]

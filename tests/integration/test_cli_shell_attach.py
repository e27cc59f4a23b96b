"""``agentenv shell --attach``: a terminal in a slot of this process, opened by another one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv import AsyncFarm, Sandbox
from agentenv.api.farm_server.relay import serve_relay
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import UserUnsupportedError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.leases import OWN_RUN
from agentenv.wire.passes import run_of_pass
from tests.farm_service import Served, served
from tests.integration.window import Window
from tests.small_image import small_image

IMAGES = pytest.param("image", marks=pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root"))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of this process and of those that it starts."""
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "state"


@pytest.fixture(params=["plain", IMAGES])
def box(request: pytest.FixtureRequest, state: Path, tmp_path: Path) -> Iterator[Sandbox]:
    if request.param == "image":
        opened = Sandbox(image=small_image(tmp_path / "layout"), memory_mib=256, storage_mib=64)
    else:
        opened = Sandbox(isolation="full" if os.geteuid() == 0 else "user")
    with opened:
        yield opened


@contextmanager
def window(state: Path, command: list[str], *more: str) -> Iterator[Window]:
    opened = Window(state, [*command, *more])
    try:
        yield opened
    finally:
        opened.close()


def refused(command: list[str], *more: str) -> str:
    """What it says that it is refused for."""
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    return " ".join(done.stderr.split())


def file_of(command: list[str]) -> Path:
    return Path(command[command.index("--attach") + 1])


def test_it_is_a_terminal_beside_a_call_that_runs(box: Sandbox, state: Path) -> None:
    command = box.shell_command()
    assert box.shell_command() == command, "one file per sandbox"
    calling = threading.Thread(target=box.run, args=(">begun; until [ -e go ]; do sleep 0.1; done; echo over >done",))
    with window(state, command) as shell:
        calling.start()
        assert "ends this shell, and nothing else" in " ".join(shell.until_prompt().split())
        shell.type("until [ -e begun ]; do sleep 0.1; done; echo said >said; stty size; echo first''\r")
        assert "30 100\r\n" in shell.until(r"first\r\n")  # after what readline prints before a command
        shell.until_prompt()
        shell.resize(41, 133)
        shell.type("until [[ $(stty size) == '41 133' ]]; do sleep 0.1; done; echo re''sized\r")
        shell.until(r"resized\r\n")
        shell.until_prompt()
        assert calling.is_alive(), "the call still runs"
        shell.type(">go; exit 7\r")
        assert shell.end() == 7
        assert shell.is_as_before()
    calling.join(60)
    left = box.run("cat said done; echo /tmp/.agentenv-tty*")
    assert left.stdout.split() == ["said", "over", "/tmp/.agentenv-tty*"], (
        "the slot goes on, without a file of the shell"
    )


def test_the_file_is_this_users_and_has_no_control_token(box: Sandbox, state: Path) -> None:
    file = file_of(box.shell_command())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    (control,) = (path.read_text() for path in state.glob("launch-*/*/token"))
    assert run_of_pass(control, json.loads(file.read_text())["container"]["token"]) == OWN_RUN
    box.close()
    assert not file.parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root")
def test_a_user_of_the_image(state: Path, tmp_path: Path) -> None:
    with Sandbox(image=small_image(tmp_path / "layout"), memory_mib=256, storage_mib=64) as box:
        with window(state, box.shell_command(user="app"), "--quiet") as shell:
            shell.until_prompt()
            shell.resize(41, 133)
            shell.type("until [[ $(stty size) == '41 133' ]]; do sleep 0.1; done; id -un\r")
            shell.until(r"\napp\r\n")
            shell.type("exit\r")
            assert shell.end() == 0
        with window(state, box.shell_command(user="nobody"), "--quiet") as shell:
            assert shell.end() == 210
            assert "no such user: nobody" in shell.shown
            assert shell.is_as_before()


@pytest.fixture
def fake(state: Path) -> Iterator[Sandbox]:
    with Sandbox("fake", require_sandbox=False) as opened:
        yield opened


def test_a_window_that_is_closed_ends_its_shell_alone(fake: Sandbox, state: Path) -> None:
    with window(state, fake.shell_command(), "--quiet") as shell:
        shell.until_prompt()
        shell.run("exec sleep 601")
        shell.process.send_signal(signal.SIGHUP)
        assert shell.end() == 128 + signal.SIGHUP
        assert shell.is_as_before()
    assert fake.run("echo alive").stdout == "alive\n"


def test_the_end_of_the_slot_ends_it_and_the_command_is_refused_then(fake: Sandbox, state: Path) -> None:
    command = fake.shell_command()
    with window(state, command, "--quiet") as shell:
        shell.until_prompt()
        fake.close()
        assert shell.end() == 125
        assert shell.is_as_before()
    assert "the sandbox was closed" in refused(command)


def test_what_is_refused(fake: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(UserUnsupportedError, match="one user"):
        fake.shell_command(user="app")
    command = fake.shell_command()
    assert "needs a terminal" in refused(command)
    assert "excludes --image" in refused(command, "--image", "debian")
    left = tmp_path / "of a killed process"
    shutil.copytree(file_of(command).parent, left)
    assert "has ended" in refused([*command[: command.index("--attach") + 1], str(left / "said.json")])
    (left / "said.json").write_text("{}")
    assert "is not a file of" in refused([*command[: command.index("--attach") + 1], str(left / "said.json")])


async def test_a_farm_services_slot_behind_its_relay(state: Path) -> None:
    found: list[Served] = []

    async def lookup(asked: str) -> str | None:
        handles = [link.handle for farm in found for link in farm.farm.manager.links.values()]
        return next((handle.base_url for handle in handles if handle.id == asked), None)

    def typed(command: list[str]) -> None:
        with window(state, command, "--quiet") as shell:
            shell.until_prompt()
            shell.type("echo by''relay; exit 3\r")
            shell.until(r"byrelay\r\n")
            assert shell.end() == 3

    async with (
        serve_relay(lookup) as url,
        served(FakeBackend(ContainerSettings()), PoolSettings(min_containers=1), relay_url=url) as farm,
        AsyncFarm("farm", farm=replace(farm.access(), route="relay")) as client,
    ):
        found.append(farm)
        async with client.sandbox() as box:
            command = await box.shell_command()
            assert json.loads(file_of(command).read_text())["container"]["base_url"].startswith(url)
            await asyncio.to_thread(typed, command)

"""OpenEnv on slots of this machine, by examples/harnesses/openenv_slots.py: the environment that ``openenv init``
writes, in an image that has its server. Run in an environment that has openenv (scripts/harnesses makes it)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from agentenv.errors import InfraError
from examples.harnesses.openenv_slots import SlotProvider
from tests.harnesses.lost_container import kill_container_of

DOCKERFILE = """FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3
COPY packages /opt/packages
COPY echo_env /opt/echo_env
ENV PYTHONPATH=/opt/packages:/opt COLOUR=blue
{command}
"""
SERVES = 'CMD ["python3", "-m", "uvicorn", "echo_env.server.app:app", "--port", "8000"]'


@pytest.fixture(scope="module")
def echo_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The image's name, and the package. The slot's Python is Debian 12's 3.11, and has this one's packages."""
    assert sys.version_info[:2] == (3, 11)
    directory = tmp_path_factory.mktemp("image")
    openenv = Path(sys.executable).parent / "openenv"
    subprocess.run([openenv, "init", "echo_env"], cwd=directory, check=True, capture_output=True)
    shutil.copytree(sysconfig.get_path("purelib"), directory / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "Dockerfile").write_text(DOCKERFILE.format(command=SERVES))
    sys.path.insert(0, str(directory))
    yield f"dockerfile:{directory}", import_module("echo_env")
    sys.path.remove(str(directory))


def dockerfile(directory: Path, command: str) -> str:
    (directory / "Dockerfile").write_text(f"FROM debian:bookworm-slim\n{command}\n")
    return f"dockerfile:{directory}"


def test_an_episode(echo_env: tuple[str, Any]) -> None:
    image, package = echo_env
    env = package.EchoEnv.from_docker_image(image, provider=SlotProvider(memory_mib=1024)).sync()
    with env:
        env.reset()
        seen = env.step(package.EchoAction(message="hello"))
        assert (seen.observation.echoed_message, seen.reward) == ("hello", 0.5)
        assert env.state().step_count == 1


async def test_an_episode_in_an_event_loop(echo_env: tuple[str, Any]) -> None:
    image, package = echo_env
    env = await package.EchoEnv.from_docker_image(image, provider=SlotProvider(memory_mib=1024))
    await env.reset()
    assert (await env.step(package.EchoAction(message="again"))).observation.message_length == 5
    await env.close()


def test_a_lost_container_is_raised(echo_env: tuple[str, Any]) -> None:
    image, package = echo_env
    env = package.EchoEnv.from_docker_image(image, provider=SlotProvider(slots=2)).sync()
    env.reset()
    kill_container_of("python3", "-m", "uvicorn", "echo_env.server.app:app", "--port", "8000")
    with pytest.raises((ConnectionError, ConnectionClosed)):
        _step_for_long(env, package.EchoAction(message="hello"))
    env.close()


def _step_for_long(env: Any, action: Any) -> None:
    for _ in range(600):  # a kill takes a moment
        env.step(action)
        time.sleep(0.05)


def test_a_server_that_ends(tmp_path: Path) -> None:
    provider = SlotProvider()
    url = provider.start_container(dockerfile(tmp_path, 'CMD echo "$NAME is missing"; exit 3'), env_vars={"NAME": "it"})
    with pytest.raises(RuntimeError, match="exit code 3: it is missing"):
        provider.wait_for_ready(url)
    provider.stop_container()


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    provider = SlotProvider()
    image = dockerfile(tmp_path, "CMD exec sleep 300.125")
    url = provider.start_container(image)
    with pytest.raises(RuntimeError, match="has a container already"):
        provider.start_container(image)
    with pytest.raises(TimeoutError, match="not ready after 1 s"):
        provider.wait_for_ready(url, 1)
    kill_container_of("sleep", "300.125")
    with pytest.raises(InfraError):
        provider.wait_for_ready(url, 60)
    provider.stop_container()


def test_slots_are_given_back(tmp_path: Path) -> None:
    for _ in range(3):
        provider = SlotProvider(slots=1, start_timeout_s=60)
        provider.start_container(dockerfile(tmp_path, "CMD exec sleep 300"))
        provider.stop_container()


def test_options_that_slots_do_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="gpus"):
        SlotProvider().start_container(dockerfile(tmp_path, "CMD true"), gpus="all")

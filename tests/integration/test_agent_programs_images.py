"""Agent programs in slots with images: as root of the image or another user of its own, with both kinds of model."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv import ImageRoot
from agentenv.agent.program import AgentProgram
from agentenv.agent.transcript import Transcript
from agentenv.testing import Call, Reply
from tests.image_sources import member, oci_layout
from tests.integration.test_agent_programs import PROGRAM, check_sampled
from tests.integration.test_env_managed import records
from tests.small_root import PROGRAMS, PYTHON, RUNTIME, files, programs
from tests.unit.env.env_stubs import AnswerEnv, environment
from tests.unit.env.managed_stubs import managed
from tests.waiting import START_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")
PASSWD = "root:x:0:0::/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n"
LOCAL: dict[str, Any] = {
    "tool_pool_mode": "local",
    "max_containers": 1,
    "slots_per_container": 2,
    "group_size": 2,
    "acquire_timeout_s": START_S,
}
TURNS = [
    Reply("", (Call("bash", {"command": 'id -u; echo "HOME=$HOME"; echo 42 > answer; cat answer'}),)),
    Reply("done"),
]


class ImageEnv(AnswerEnv):
    reference = ""
    user: str | None = None
    directory = "/tmp/below/none"

    def task_image(self, item: Any) -> ImageRoot:
        return ImageRoot(self.reference, memory_mib=256, storage_mib=64)

    def agent_program(self, item: Any) -> AgentProgram:
        return AgentProgram(
            [PYTHON.name, f"{self.directory}/small_agent.py", "rewriting", "{task}"],
            env={"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"},
            plain_files={f"{self.directory}/small_agent.py": PROGRAM.read_text()},
            user=self.user,
        )


def python_image(directory: Path) -> str:
    """A reference to an image with Python and a user without a home, whose layout is made in ``directory``."""
    passwd = member("etc/passwd", PASSWD.encode(), mode=0o644)
    work = member("work", type=tarfile.DIRTYPE, mode=0o777)
    oci_layout(directory, programs(*PROGRAMS), files(passwd, work), tag="t", config=RUNTIME)
    return f"oci:{directory}:t"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(place / "cache"))
        patch.setenv("AGENTENV_STATE_DIR", str(place / "state"))
        yield python_image(place / "layout")


def playing(image: str, **changed: Any) -> type[ImageEnv]:
    return type("Playing", (ImageEnv,), {"reference": image, **changed})


def check_record(one: Transcript, uid: int, home: str) -> None:
    assert (one.error, one.score, one.finish_reason, one.attempt) == ("", 1.0, "stop", 1), one
    (call,) = one.steps[0].tool_calls
    assert call.shown == f"exit code 0\n{uid}\nHOME={home}\n42\n"


USERS = [(None, 0, "/root"), ("agent", 1000, "/home/agent")]


@pytest.mark.parametrize(("user", "uid", "home"), USERS)
async def test_every_token_is_exact_there(tmp_path: Path, image: str, user: str | None, uid: int, home: str) -> None:
    async with managed(playing(image, user=user), tmp_path, {"*": [TURNS]}, **LOCAL) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        found = records(tmp_path)[-1].trajectories
        assert group is not None, found[0].error
        assert check_sampled(voice, group) == 4
    for one in found:
        check_record(one, uid, home)


@pytest.mark.parametrize(("user", "uid", "home"), USERS)
async def test_a_chat_server_answers_there(tmp_path: Path, image: str, user: str | None, uid: int, home: str) -> None:
    async with environment(playing(image, user=user), tmp_path, {"*": [TURNS]}, **LOCAL) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    found = records(tmp_path)[-1].trajectories
    assert group is not None, found[0].error
    for one in found:
        check_record(one, uid, home)


async def test_files_below_a_home_that_does_not_exist_are_written_by_who_may(tmp_path: Path, image: str) -> None:
    kind = playing(image, directory="/home/agent/.small")
    async with managed(kind, tmp_path, {"*": [TURNS]}, **LOCAL) as (env, _):
        group, _again = await env.collect_trajectories({"id": "x"})
        assert group is not None
    async with managed(type("Other", (kind,), {"user": "agent"}), tmp_path, **LOCAL) as (env, _):
        await env.collect_trajectories({"id": "x"})
    one = records(tmp_path)[-1].trajectories[0]
    assert (one.score, one.fault, one.earlier_attempts) == (None, "task", [])
    assert f"the file /home/agent/.small/small_agent.py of {PYTHON.name} cannot be written" in one.error

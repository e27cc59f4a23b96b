"""``prepare = "once"`` on real slots: others begin with the files of the one that prepared, also in later groups."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv import ImageRoot
from agentenv.agent.transcript import GroupRecord
from agentenv.errors import ConfigError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.testing import Call, Reply
from tests.small_image import small_image
from tests.unit.env.env_stubs import IDLE, SOLVE, AnswerEnv, environment, settings
from tests.waiting import START_S

LOCAL: dict[str, Any] = {"tool_pool_mode": "local", "max_containers": 1, "slots_per_container": 3}
SPOIL = [Reply("", (Call("bash", {"command": "rm made; echo 41 > answer"}),)), Reply("done")]

SCRIPT: dict[str, Any] = {"*": [SOLVE, IDLE, SPOIL, SOLVE]}
NO_IDS = "image slots need root, or ids of its own"


class PreparedEnv(AnswerEnv):
    """Each rollout sees what one of them has prepared, and that alone."""

    image: str
    prepared: list[str]

    def task_image(self, item: Any) -> ImageRoot | None:
        return ImageRoot(self.image, memory_mib=256, storage_mib=64) if self.image else None

    async def prepare(self, item: Any, *, exec_tool: Any) -> dict[str, Any]:
        self.prepared.append(item["id"])
        await exec_tool.write_file("made", "the same for all\n")
        await exec_tool.terminal("chmod 640 made; sleep 1000 >/dev/null 2>&1 &")
        return {"by": exec_tool.trajectory_id}

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
        seen = await exec_tool.terminal("cat made; stat -c %a made; ls answer mine; echo $$ > mine")
        return {"seen": seen.stdout.split("\n")}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_image(tmp_path_factory.mktemp("layout"))


@asynccontextmanager
async def opened(directory: Path, image: str, script: Any, **changed: Any) -> AsyncIterator[PreparedEnv]:
    chosen = {**LOCAL, "prepare": "once", "acquire_timeout_s": START_S, **changed}
    async with environment(PreparedEnv, directory, script, **chosen) as env:
        env.image, env.prepared = image, []
        yield env


def kill_containers(backend: LocalBackend | FakeBackend) -> None:
    if isinstance(backend, LocalBackend):
        for pid in backend.pids.values():
            os.kill(pid, signal.SIGKILL)
    else:
        for handle in backend.containers:
            backend.kill(handle.id)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "slots", [pytest.param("image", marks=pytest.mark.skipif(os.geteuid() != 0, reason=NO_IDS)), "plain", "fake"]
)
async def test_a_group_is_prepared_once_and_so_are_the_epochs_until_the_container_is_gone(
    tmp_path: Path, image: str, slots: str
) -> None:
    changed = {"tool_pool_mode": "fake"} if slots == "fake" else {}
    async with opened(tmp_path, image if slots == "image" else "", SCRIPT, **changed) as env:
        for epoch in range(2):
            group, _ = await env.collect_trajectories({"id": "x"})
            assert group is not None
            assert group["scores"] == [1.0, 0.0, 0.0, 1.0]
            assert env.prepared == ["x"], epoch
        assert env.counts["prepared_count"] == 1
        assert env.counts["prepared_reused"] == 7
        kill_containers(env.backend)
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert group["scores"] == [1.0, 0.0, 0.0, 1.0]
        assert env.prepared == ["x", "x"]
    records = [GroupRecord.model_validate_json(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    metas = [one.workspace_meta for record in records for one in record.trajectories]
    assert len(metas) == 12
    assert {tuple(meta["seen"]) for meta in metas} == {("the same for all", "640", "")}
    assert len({meta["by"] for meta in metas}) == 2


async def test_no_container_prepares_an_item_twice_however_full_it_is(tmp_path: Path) -> None:
    busy = [Reply("", (Call("bash", {"command": "sleep 1.2; echo 42 > answer"}),)), Reply("done")]
    few = {"tool_pool_mode": "fake", "min_containers": 2, "max_containers": 2, "slots_per_container": 2}
    async with opened(tmp_path, "", {"*": [busy]}, **few, group_size=12) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert group["scores"] == [1.0] * 12
        assert 1 <= env.counts["prepared_count"] <= 2
        assert env.counts["prepared_count"] + env.counts["prepared_reused"] == 12


async def test_once_without_a_preparation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prepare: 'once', but there is no prepare"):
        AnswerEnv(settings(tmp_path, prepare="once"), [])

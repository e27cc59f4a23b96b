"""Which image a task's slot gets, under each backend."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from agentenv import AgentEnv
from agentenv.builder.build import Built
from agentenv.env.farm_fields import OF_THE_FARM
from agentenv.errors import ConfigError, TaskError
from agentenv.sdk.image_builds import BuildLimits, SlotMachines
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.tasks.harbor import machine
from agentenv.tasks.harbor.directories import read_tasks
from agentenv.tasks.harbor.env import HarborConfig, HarborEnv
from agentenv.tasks.harbor.machine import TaskImages, writes
from agentenv.tasks.swe.image_env import SweImageConfig, SweImageEnv
from tests.unit.env.env_stubs import settings

TASKS = Path(__file__).parents[3] / "examples/tasks"
DIGEST = "sha256:" + 64 * "a"
SERVER = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="none", api_key="unused")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, BuildLimits]]:
    """What was built. A directory called slow takes for ever, one called bad fails."""
    found: list[tuple[Path, BuildLimits]] = []

    async def build(directory: Path, _store: object, *, machines: SlotMachines) -> Any:
        found.append((directory, machines.limits))
        await (asyncio.Event().wait() if directory.name == "slow" else asyncio.sleep(0))
        if directory.name == "bad":
            raise TaskError("broken")
        return Built(DIGEST, None, 1, 0)  # type: ignore[arg-type]  # nobody looks at its plan

    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "build_image", build)
    return found


async def test_a_dockerfile_is_built_once_however_many_ask(builds: list[tuple[Path, BuildLimits]]) -> None:
    made = TaskImages(network=True)
    assert await asyncio.gather(*(made.of("dockerfile:/t/environment", 60.0) for _ in range(5))) == [DIGEST] * 5
    assert [(str(directory), limits.network.kind) for directory, limits in builds] == [("/t/environment", "public")]


async def test_other_references_are_left_as_they_are(builds: list[tuple[Path, BuildLimits]]) -> None:
    assert await TaskImages(network=False).of("registry.example/a:1", 60.0) == "registry.example/a:1"
    assert builds == []


async def test_a_failed_build_is_tried_again_and_a_slow_one_is_the_tasks_fault(
    builds: list[tuple[Path, BuildLimits]],
) -> None:
    made = TaskImages(network=False)
    for _ in range(2):
        with pytest.raises(TaskError, match="broken"):
            await made.of("dockerfile:/t/bad", 60.0)
    with pytest.raises(TaskError, match=r"takes more than 0.01 s.*build_timeout_sec"):
        await made.of("dockerfile:/t/slow", 0.01)
    assert [limits.network.kind for _, limits in builds] == ["none"] * 3


def harbor(tmp_path: Path, **changed: Any) -> HarborEnv:
    task = tmp_path / "tasks/count-requests"
    shutil.copytree(TASKS / "count-requests", task)
    return HarborEnv(HarborConfig(**values(tmp_path, changed), tasks=str(task)), [SERVER])


def values(tmp_path: Path, changed: dict[str, Any]) -> dict[str, Any]:
    """Settings of any environment; those of containers are not a farm's client's to say."""
    found = settings(tmp_path).model_dump(exclude_unset=True)
    if changed.get("tool_pool_mode") == "farm":
        found = {name: value for name, value in found.items() if name not in OF_THE_FARM}
    return {**found, **changed}


@pytest.mark.parametrize("mode", ["local", "nomad", "farm"])
async def test_images_are_built_where_the_pool_does_not_fetch_them(
    tmp_path: Path, builds: list[tuple[Path, BuildLimits]], mode: str
) -> None:
    env = harbor(tmp_path, tool_pool_mode=mode)
    root = await env.task_image(await env.get_next_item())
    reference = f"dockerfile:{tmp_path}/tasks/count-requests/environment"
    assert root.image == (reference if mode == "farm" else DIGEST)
    assert (root.memory_mib, root.storage_mib, root.cpus) == (1024, 512, 1)
    assert len(builds) == (mode != "farm")


async def test_the_image_of_the_setting_takes_the_place_of_the_tasks(tmp_path: Path) -> None:
    env = harbor(tmp_path, tool_pool_mode="farm", image="registry.example/tasks/{task}:2")
    root = await env.task_image(await env.get_next_item())
    assert root.image == "registry.example/tasks/count-requests:2"


async def test_slots_of_a_farm_have_its_own_limits_where_the_task_has_none(tmp_path: Path) -> None:
    env = harbor(tmp_path, tool_pool_mode="farm")
    toml = tmp_path / "tasks/count-requests/task.toml"
    toml.write_text(toml.read_text().replace("memory_mb = 1024", "").replace("storage_mb = 512", ""))
    env.tasks = {task.name: task for task in read_tasks(toml.parent, {}).tasks}
    root = await env.task_image(await env.get_next_item())
    assert (root.memory_mib, root.storage_mib) == (None, None)


@pytest.mark.parametrize(
    ("storage", "asked_mib", "memory_mib", "written"),
    [
        ("auto", 1024, 2048, ("memory", 1024)),
        ("auto", 10240, 2048, ("disk", 10240)),
        ("auto", None, 2048, ("memory", 1024)),
        ("auto", 10240, None, ("memory", 10240)),
        ("memory", 10240, 2048, ("memory", 1024)),
        ("disk", 512, 2048, ("disk", 512)),
        ("disk", None, 2048, ("disk", None)),
    ],
)
def test_what_is_more_than_half_the_memory_lies_on_the_disk(
    storage: str, asked_mib: int | None, memory_mib: int | None, written: tuple[str, int | None]
) -> None:
    assert writes(storage, asked_mib, memory_mib) == written


CLUSTER = {"tool_pool_mode": "nomad", "nomad_address": "http://nomad.example:4646", "slots_per_container": 7}


def swe(tmp_path: Path, **changed: Any) -> SweImageEnv:
    return SweImageEnv(SweImageConfig(**values(tmp_path, changed), dataset_name="records.jsonl"), [SERVER])


@pytest.mark.parametrize("made", [harbor, swe])
def test_settings_of_a_cluster_are_the_backends(tmp_path: Path, made: Callable[..., AgentEnv[Any]]) -> None:
    backend = made(tmp_path, allow_network=True, **CLUSTER).build_backend()
    assert isinstance(backend, NomadBackend)
    assert "nomad.example:4646" in repr(backend)


@pytest.mark.parametrize("mode", ["nomad", "farm"])
def test_a_verifier_with_a_machine_of_its_own_is_of_this_machine(tmp_path: Path, mode: str) -> None:
    config = HarborConfig(**values(tmp_path, {"tool_pool_mode": mode}), tasks=str(TASKS / "merge-hosts"))
    with pytest.raises(ConfigError, match=r"tool_pool_mode: .*a machine of its own.*allowed: local"):
        HarborEnv(config, [SERVER])


@pytest.mark.parametrize("made", [harbor, swe])
def test_there_is_no_stand_in_for_a_root_of_ones_own(tmp_path: Path, made: Callable[..., AgentEnv[Any]]) -> None:
    with pytest.raises(ConfigError, match="tool_pool_mode"):
        made(tmp_path, tool_pool_mode="fake")

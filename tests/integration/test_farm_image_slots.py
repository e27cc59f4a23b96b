"""Sandboxes with images on a farm service: the service, its containers and the keeper of their node are processes of
their own, and the slots are real. As root: image slots have ids of their own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentenv import AsyncFarm, AsyncSandbox, ImageRoot
from agentenv.errors import (
    AgentEnvError,
    BadImageError,
    CheckpointError,
    ConfigError,
    ForbiddenError,
    ImageUnavailableError,
)
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.client import FarmClient
from agentenv.farm_client.pool import FarmPool
from agentenv.wire import images as wire
from agentenv.wire.spec import MIB
from tests.farm_process import COMMAND, SETTINGS, FarmProcess
from tests.image_sources import member, oci_layout, tar_of
from tests.integration.test_agent_programs import check_sampled
from tests.integration.test_agent_programs_images import TURNS, playing, python_image
from tests.integration.test_env_prepared import PreparedEnv
from tests.plain_http import plain_http
from tests.ports import promised_port
from tests.small_image import small_image
from tests.unit.env.env_stubs import SOLVE, AnswerEnv, environment
from tests.unit.env.managed_stubs import managed
from tests.waiting import START_S, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give image slots their ids"),
]


class KeeperProcess:
    """`agentenv images serve` over the store that the containers of this machine see."""

    def __init__(self, directory: Path, port: int) -> None:
        self.port = port
        self.token_file = directory / "keeper.token"
        self.token_file.write_text(secrets.token_hex(32))
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it listens."""
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND, "images", "serve", "--json", "--token-file", str(self.token_file), "--port", str(self.port),
            "--allow-path", str(self._directory / "images"), "--patience", "1",
            "--registry", "127.0.0.1:9", "--registry", "docker.io", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert json.loads(await asyncio.wait_for(self._process.stdout.readline(), START_S))["event"] == "ready"

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.communicate()  # its pipe is closed with it


class Shared:
    """The farm, the keeper, and who asks."""

    def __init__(self, directory: Path, farm: FarmProcess, keeper: KeeperProcess, token: str) -> None:
        self.directory = directory
        self.farm = farm
        self.keeper = keeper
        self.token = token

    @property
    def access(self) -> FarmAccess:
        return FarmAccess((self.farm.url,), self.token)

    def image(self, name: str) -> str:
        """A reference to an image that has the name in /etc/issue, in a directory that the keeper reads."""
        return small_image(self.directory / "images" / name, tar_of(member("etc/issue", name.encode(), mode=0o644)))

    def box(self, image: str) -> AsyncSandbox:
        return AsyncSandbox(
            "farm", farm=self.access, image=image, memory_mib=256, storage_mib=64, start_timeout_s=START_S
        )

    async def where(self) -> list[wire.NodeImages]:
        async with FarmClient(self.access.urls, self.token) as client:
            return list((await client.image_map()).nodes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    directory = tmp_path_factory.mktemp("farm")
    (directory / "images").mkdir()
    with pytest.MonkeyPatch.context() as patch, promised_port() as port:
        patch.setenv("AGENTENV_CACHE_DIR", str(directory / "cache"))
        keeper = KeeperProcess(directory, port)
        told = f'[images]\nkeeper_token_file = "{keeper.token_file}"\nkeeper_port = {keeper.port}\n'
        farm = FarmProcess(directory, told, settings=SETTINGS.replace("max_containers = 2", "max_containers = 1"))
        async with AsyncExitStack() as stack:
            await keeper.start()
            stack.push_async_callback(keeper.kill)
            await farm.start()
            stack.push_async_callback(farm.end)
            yield Shared(directory, farm, keeper, await farm.token("tests"))


async def test_a_sandbox_is_root_in_an_image_that_the_node_fetched(shared: Shared) -> None:
    async with shared.box(shared.image("first")) as box:
        told = await box.run("id -u; cat /etc/issue; echo mine > /etc/issue; cat /etc/issue; ls -d /work")
        assert told.stdout.split() == ["0", "firstmine"]
        assert (await box.exec(["id", "-un"], user="app")).stdout == "app\n"
        await box.write_file("/opt/f", "data")
        assert await box.read_file("/opt/f") == "data"


async def test_slots_of_one_container_have_different_images_and_are_wiped(shared: Shared) -> None:
    one, two = shared.image("one"), shared.image("two")
    async with AsyncFarm("farm", farm=shared.access, start_timeout_s=START_S) as farm:
        async with farm.sandbox(one) as first, farm.sandbox(two) as second:
            await first.run("echo changed > /etc/issue; echo own > /opt/own")
            assert (await second.run("cat /etc/issue; ls /opt")).stdout == "two"
            containers = {box._usable().lease.container.id for box in (first, second)}
            assert len(containers) == 1
        async with farm.sandbox(one) as again, farm.sandbox() as plain:
            assert (await again.run("cat /etc/issue; ls /opt")).stdout == "one"
            assert (await plain.run("id -u")).stdout != "0\n"


async def test_what_is_prefetched_is_on_the_node_before_anybody_leases(shared: Shared) -> None:
    image = shared.image("ahead")
    async with FarmPool(shared.access) as pool:
        pool.images.prefetch([image])
        digest = (await pool.images.resolve(image)).digest

    async def there() -> bool:
        (node,) = await shared.where()
        return digest in node.stored

    await eventually(there)


async def test_images_are_prefetched_by_the_command(shared: Shared) -> None:
    image = shared.image("asked")
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "images", "prefetch", "--json", "--farm", shared.farm.url, "--token", shared.access.token,
        image, "oci:/nowhere", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told = json.loads((await process.communicate())[0])["images"]
    assert process.returncode == 1
    assert (told[0]["place"], told[0]["error"], told[1]["digest"]) == (shared.farm.url, None, None)
    (node,) = await shared.where()
    assert told[0]["digest"] in node.stored


async def test_an_image_that_cannot_be_fetched_is_told_with_the_reason(shared: Shared) -> None:
    images = shared.directory / "images"
    oci_layout(images / "broken", b"this is no tar" * 100, how="")
    (images / "empty").mkdir()
    elsewhere = small_image(shared.directory / "elsewhere")
    wrong: list[tuple[str, type[AgentEnvError], str]] = [
        (f"oci:{images}/none", ConfigError, "does not exist"),
        (f"oci:{images}/empty", BadImageError, "index.json is missing"),
        (f"oci:{images}/broken", BadImageError, "the layer's tar is broken at byte 0"),
        (elsewhere, ForbiddenError, "outside the directories that keepers read"),
        ("127.0.0.1:9/team/app:1", ImageUnavailableError, "connection refused"),
        ("127.0.0.1:10/team/app:1", ForbiddenError, "is not on this machine's allow list"),
        ("Not A Name", ConfigError, "white space"),
    ]
    async with AsyncFarm("farm", farm=shared.access) as farm:
        for reference, kind, said in wrong:
            with pytest.raises(kind, match=said):
                await farm.sandbox(reference).open()


async def test_checkpoints_forks_and_images_of_a_sandbox_of_the_farm(shared: Shared) -> None:
    async with AsyncFarm("farm", farm=shared.access, start_timeout_s=START_S) as farm:
        root = ImageRoot(shared.image("forked"), memory_mib=256, storage_mib=64)
        async with farm.sandbox(root) as box:
            await box.run("echo one > /opt/f; rm /etc/group")
            checkpoint = await box.checkpoint()
            await box.run("echo two > /opt/f")
            (fork,) = await box.fork()
            assert await fork.read_file("/opt/f") == "two\n"
            await fork.write_file("/opt/f", "three")
            await fork.close()
            await box.restore(checkpoint)
            assert await box.read_file("/opt/f") == "one\n"
            await box.drop(checkpoint)
            digest = await box.commit("named:1")
            await box.run("echo four > /opt/f")
            with pytest.raises(ConfigError, match="give a name like a registry's"):
                await box.commit("Named")
        for image in (digest, "committed:named:1"):
            async with farm.sandbox(replace(root, image=image)) as other:
                assert (await other.run("cat /opt/f; ls /etc/group; cat /etc/issue")).stdout == "one\nforked"
        async with farm.sandbox(replace(root, image=digest)) as other:
            assert digest != await other.commit()
        lost = AsyncFarm("farm", farm=shared.access)
        async with lost, lost.sandbox(root) as box:
            pool = box._usable().pool
            assert isinstance(pool, FarmPool)
            with pytest.raises(CheckpointError, match="which has ended"):
                await pool.images.commit("nowhere", "0" * 32, digest)
            with pytest.raises(CheckpointError, match="has no checkpoint"):
                await pool.images.commit(box._usable().container_id, "0" * 32, digest)


async def test_a_group_is_prepared_once_and_nothing_of_it_stays_on_the_farm(shared: Shared, tmp_path: Path) -> None:
    image = shared.image("prepared")
    of_the_farm = {"tool_pool_mode": "farm", "farm_url": shared.farm.url, "farm_token": shared.token}
    script = {"*": [SOLVE]}
    async with environment(PreparedEnv, tmp_path, script, prepare="once", require_sandbox=False, **of_the_farm) as env:
        env.image, env.prepared = image, []
        for _ in range(2):
            group, _ = await env.collect_trajectories({"id": "x"})
            assert group is not None
            assert group["scores"] == [1.0] * 4
        assert env.prepared == ["x"]
        preparations = env._opened().preparations
        assert preparations is not None
        ((state,),) = preparations._states.by_container().values()
    async with FarmPool(shared.access) as pool:
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            await pool.lease("t", root=state.checkpoint.root, container=state.checkpoint.container)


class ImageEnv(AnswerEnv):
    """Each item has an image of its own, whose name the verifier looks for."""

    def task_image(self, item: Any) -> str:
        return str(item["image"])

    async def verify_and_score_trajectory(
        self, item: Any, final_response: str, *, exec_tool: Any, **_: Any
    ) -> tuple[float, dict[str, Any]]:
        result = await exec_tool.terminal("cat answer /etc/issue; id -u")
        return float(result.stdout == f"42\n{item['id']}0\n"), {}


async def test_an_environments_items_have_images_which_are_fetched_ahead(shared: Shared, tmp_path: Path) -> None:
    of_the_farm = {"tool_pool_mode": "farm", "farm_url": shared.farm.url, "farm_token": shared.token}
    async with environment(
        ImageEnv, tmp_path, {"*": [SOLVE]}, require_sandbox=False, group_size=2, **of_the_farm
    ) as env:
        env.items = [{"id": name, "image": shared.image(name)} for name in ("item-a", "item-b", "item-c")]
        before = len((await shared.where())[0].stored)
        first = await env.get_next_item()
        second = await env.get_next_item()

        async def all_there() -> bool:
            return len((await shared.where())[0].stored) == before + 3

        await eventually(all_there)  # the last is not even drawn by anybody
        for item in (first, second, await env.get_next_item()):
            group, _ = await env.collect_trajectories(item)
            assert group is not None
            assert group["scores"] == [1.0, 1.0]
        assert await env.get_next_item() is None


async def test_an_agent_program_plays_in_an_image_that_the_node_fetched(shared: Shared, tmp_path: Path) -> None:
    of_the_farm = {"tool_pool_mode": "farm", "farm_url": shared.farm.url, "farm_token": shared.token}
    kind = playing(python_image(shared.directory / "images" / "python"), user="agent")
    changed: dict[str, Any] = {**of_the_farm, "require_sandbox": False, "group_size": 2, "acquire_timeout_s": START_S}
    async with managed(kind, tmp_path, {"*": [TURNS]}, **changed) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert check_sampled(voice, group) == 4
    assert group["scores"] == [1.0, 1.0]


@pytest.mark.parametrize("reference", ["dockerfile:.", "docker-daemon:task:1"])
async def test_what_only_this_machine_could_have_is_refused_with_what_to_do(shared: Shared, reference: str) -> None:
    with pytest.raises(ConfigError, match="the nodes of this farm fetch their images") as told:
        await shared.box(reference).open()
    assert "registry" in told.value.next_step


async def test_slots_outlive_the_farm_and_images_the_keeper(shared: Shared) -> None:
    kept, late = shared.image("kept"), shared.image("late")
    async with AsyncFarm("farm", farm=shared.access, start_timeout_s=START_S) as farm, farm.sandbox(kept) as box:
        await box.run("echo mine > /opt/own")
        await shared.keeper.kill()
        async with farm.sandbox(kept) as other:  # the node has it, and nobody is asked
            assert (await other.run("cat /etc/issue")).stdout == "kept"
        await shared.farm.kill(signal.SIGKILL)
        await shared.farm.start()
        assert (await box.run("cat /opt/own")).stdout == "mine\n"
        opening = asyncio.create_task(farm.sandbox(late).open())
        await shared.keeper.start()
        async with await opening as other:
            assert (await other.run("cat /etc/issue")).stdout == "late"
        assert (await box.run("cat /opt/own")).stdout == "mine\n"


async def test_a_trajectory_over_plain_http_has_an_image_also_after_the_farm_was_killed(shared: Shared) -> None:
    named: dict[str, Any] = {"image": shared.image("plain"), "root": {"memory_bytes": 256 * MIB, "writable_bytes": MIB}}
    async with plain_http(shared.farm.url, shared.token) as http:
        first = await http.bash("t", "id -u; cat /etc/issue; echo mine > /opt/own", **named)
        assert first.output.split() == ["0", "plain"]
        full = await http.bash("t", "head -c 2000000 /dev/zero > /opt/large")
        assert (full.status, full.body["success"]) == (200, False)
        await shared.farm.kill(signal.SIGKILL)
        await shared.farm.start()
        again = await http.bash("t", "cat /opt/own /etc/issue", **named)
        assert (again.output, again.body["lease"]) == ("mine\nplain", first.body["lease"])
        assert (await http.bash("t", "true", image=shared.image("another"))).refusal == (409, "protocol")
        assert await http.release("t")
        assert (await http.bash("t", "id -u")).output != "0\n", "a plain slot"
        assert await http.release("t")

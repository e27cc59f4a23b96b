"""NeMo Gym's sandboxes on slots of this machine. Run in an environment that has nemo-gym (scripts/harnesses makes
it)."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.sandbox import AsyncSandbox, Sandbox, SandboxSpec, SandboxStatus
from nemo_gym.sandbox.providers.base import SandboxCreateError
from nemo_gym.sandbox.providers.registry import list_providers
from responses_api_agents.mini_swe_agent_2.sandbox_environment import MiniSWESandboxEnvironment, Submitted

from agentenv.errors import ConfigError, UserUnsupportedError

IMAGE = f"dockerfile:{Path(__file__).parent / 'inspect_ai'}"
PROVIDER = {"agentenv": {"slots": 8}}


def spec(**fields: Any) -> SandboxSpec:
    return SandboxSpec(image=IMAGE, **{"workdir": "/made", **fields})


def test_the_provider_is_found_by_its_entry_point() -> None:
    assert "agentenv" in list_providers()


def test_a_blocking_sandbox(tmp_path: Path) -> None:
    with Sandbox(PROVIDER) as box:
        resources = {"cpu": 1, "memory_mib": 3072, "disk_gib": 1}
        box.start(spec(env={"A": "1"}, files={"/etc/x": "hi"}, resources=resources))
        done = box.exec("pwd; echo $A; cat /etc/x; id -un; exit 4")
        assert (done.stdout, done.return_code, done.error_type) == ("/made\n1\nhiroot\n", 4, None)
        assert box.exec("id -un", user="app").stdout == "app\n"
        assert box.exec("id -u", user=0).stdout == "0\n"
        assert box.exec("echo $B", env={"B": "2"}, cwd="/tmp").stdout == "2\n"
        late = box.exec("echo so far; sleep 60", timeout_s=1)
        assert (late.stdout, late.return_code, late.error_type) == ("so far\n", 124, "timeout")
        (tmp_path / "f").write_bytes(b"\xff\0")
        box.upload(tmp_path / "f", "/d/e/f")
        box.download("/d/e/f", tmp_path / "g")
        assert (tmp_path / "g").read_bytes() == b"\xff\0"
        assert box.status() == SandboxStatus.RUNNING
    assert box.status() == SandboxStatus.STOPPED


def test_twenty_at_once_in_eight_slots() -> None:
    async def one(number: int) -> int:
        async with AsyncSandbox(PROVIDER) as box:
            await box.start(spec())
            done = await box.exec(f"echo {number} > x; sleep 0.2; cat x")
            return int(done.stdout or "")

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(one, range(20)))

    assert asyncio.run(all_of_them()) == list(range(20))


def test_from_many_threads() -> None:
    """Each blocking sandbox has an event loop of its own."""

    def one(number: int) -> int:
        with Sandbox(PROVIDER) as box:
            box.start(spec())
            return int(box.exec(f"echo {number}").stdout or "")

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(one, range(24))) == list(range(24))


def test_without_an_image() -> None:
    with Sandbox(PROVIDER) as box:
        box.start(SandboxSpec(env={"A": "b"}, workdir="/workspace/made"))
        assert box.exec("pwd; echo $A").stdout == "/workspace/made\nb\n"
        with pytest.raises(UserUnsupportedError):
            box.exec("true", user="root")


def test_an_entrypoint_runs_beside_commands() -> None:
    with Sandbox(PROVIDER) as box:
        box.start(spec(entrypoint=["bash", "-c", "echo $PWD > /ready; exec sleep infinity"]))
        text = "until [ -s /ready ]; do sleep 0.1; done; cat /ready; ps | grep -c '^sleep infinity'"
        assert box.exec(text, timeout_s=60).stdout == "/made\n1\n"
    with pytest.raises(SandboxCreateError, match="entrypoint"):
        Sandbox(PROVIDER).start(spec(entrypoint=["nosuch"]))


def test_a_long_command_is_no_failure_of_its_sandbox() -> None:
    async def status_meanwhile() -> SandboxStatus:
        async with AsyncSandbox(PROVIDER) as box:
            await box.start(spec())
            running = asyncio.create_task(box.exec("until [ -e /go ]; do sleep 0.1; done"))
            found = await box.status()
            await box.exec("touch /go")
            assert (await running).return_code == 0
            return found

    assert asyncio.run(status_meanwhile()) == SandboxStatus.RUNNING


def test_its_time_to_live() -> None:
    with Sandbox(PROVIDER) as box:
        box.start(spec(ttl_s=1))
        until_s = time.monotonic() + 60
        while box.status() != SandboxStatus.STOPPED:
            assert time.monotonic() < until_s
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"resources": {"gpu": 1}}, "resources.gpu"),
        ({"provider_options": {"volumes": []}}, "provider_options.volumes"),
        ({"image": None, "resources": {"cpu": 1}}, "resources.cpu"),
        ({"image": "committed:nosuch:1"}, "nosuch"),
    ],
)
def test_what_slots_cannot_have_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(SandboxCreateError, match=named):
        Sandbox(PROVIDER).start(SandboxSpec(**{"image": IMAGE, **asked}))


def test_a_setting_that_is_none() -> None:
    with pytest.raises(ConfigError):
        Sandbox({"agentenv": {"slot": 8}})


def test_the_environment_of_mini_swe_agent() -> None:
    box = MiniSWESandboxEnvironment(image=IMAGE, provider=PROVIDER, cwd="/repo", env={"PAGER": "cat"})
    try:
        assert box.execute("pwd; echo $PAGER")["output"] == "/repo\ncat\n"
        assert box.execute("exit 3")["returncode"] == 3
        with pytest.raises(Submitted):
            box.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo patch"})
    finally:
        box.cleanup() if hasattr(box, "cleanup") else box.close()

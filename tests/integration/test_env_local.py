"""The same environment on the real sandbox: slots under bubblewrap, and what is left when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.testing import Call, Reply, ScriptedPolicy, Turn
from tests.integration.test_env_commands import FOREVER, flags, running
from tests.unit.env.env_stubs import IDLE, SOLVE, WRITE, AnswerEnv, environment
from tests.waiting import START_S, until

LOCAL: dict[str, Any] = {"tool_pool_mode": "local", "max_containers": 1, "slots_per_container": 3}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


def leftovers(directory: Path) -> list[str]:
    """Processes of containers whose state is below ``directory``, and mounts there."""
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if str(directory) in line]
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
        except OSError:
            continue
        if "agentenv.sandbox" in command and str(directory) in command:
            found.append(f"{entry.name} {command}")
    return found


async def test_a_group_on_real_slots(tmp_path: Path) -> None:
    async with environment(AnswerEnv, tmp_path, {"*": [SOLVE, IDLE]}, **LOCAL) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
        assert scored is not None
        assert scored["scores"] == [1.0, 0.0, 1.0, 0.0]
    assert leftovers(tmp_path) == []


async def test_files_travel_both_ways(tmp_path: Path) -> None:
    (tmp_path / "up" / "sub").mkdir(parents=True)
    (tmp_path / "up" / "sub" / "a.txt").write_text("alpha\n")
    (tmp_path / "up" / "b.bin").write_bytes(bytes(range(256)))

    class Travelling(AnswerEnv):
        async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
            await exec_tool.upload(tmp_path / "up", "in")
            await exec_tool.upload(tmp_path / "up" / "b.bin", "deep/copy.bin")

        async def verify_and_score_trajectory(
            self, item: Any, final_response: str, *, exec_tool: Any, **_: Any
        ) -> tuple[float, dict[str, Any]]:
            assert await exec_tool.read_file("deep/copy.bin", binary=True) == bytes(range(256))
            found = await exec_tool.search("alp.a", "in")
            assert [(match.path, match.line, match.text) for match in found.matches] == [("in/sub/a.txt", 1, "alpha")]
            assert (await exec_tool.search("nothing like it")).matches == ()
            await exec_tool.download("in", tmp_path / "down")
            await exec_tool.download("in/b.bin", tmp_path / "single.bin")
            with pytest.raises(FileNotFoundError):
                await exec_tool.read_file("missing")
            listed = await exec_tool.list_files("in", depth=2)
            return 1.0, {"paths": [entry.path for entry in listed.entries]}

    async with environment(Travelling, tmp_path, {"*": [IDLE]}, group_size=1, **LOCAL) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
    record = GroupRecord.model_validate_json((tmp_path / "rollouts.jsonl").read_text())
    assert scored is not None, record.trajectories[0].error
    assert (tmp_path / "down" / "sub" / "a.txt").read_text() == "alpha\n"
    assert (tmp_path / "single.bin").read_bytes() == bytes(range(256))


@pytest.mark.parametrize(("verification", "alive"), [("live", True), ("sealed", False)])
async def test_what_the_policy_left_running_lives_on_only_in_a_live_verification(
    tmp_path: Path, verification: str, alive: bool
) -> None:
    class Looking(AnswerEnv):
        async def verify_and_score_trajectory(
            self, item: Any, final_response: str, *, exec_tool: Any, **_: Any
        ) -> tuple[float, dict[str, Any]]:
            result = await exec_tool.terminal("cat kept; kill -0 $(cat pid)")
            return float(result.exit_code == 0), {"stdout": result.stdout}

    leave = [Reply("", (Call("bash", {"command": "echo kept > kept; sleep 100 & echo $! > pid"}),)), Reply("left")]
    changed = {"verification": verification, "group_size": 1, **LOCAL}
    async with environment(Looking, tmp_path, {"*": [leave]}, **changed) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
    record = GroupRecord.model_validate_json((tmp_path / "rollouts.jsonl").read_text())
    assert scored is not None, record.trajectories[0].error
    assert scored["scores"] == [float(alive)]
    assert record.trajectories[0].verification == {"stdout": "kept\n"}


async def test_a_real_container_killed_in_mid_rollout_costs_a_retry_and_no_score(tmp_path: Path) -> None:
    begun: list[int] = []

    def player(turn: Turn) -> Reply:
        if turn.step > 0:
            return WRITE[turn.step - 1]
        begun.append(turn.member)
        command = "sleep 300" if len(begun) <= 2 else "echo waited"  # the first two end with the container
        return Reply("", (Call("bash", {"command": command}),))

    changed = {**LOCAL, "group_size": 2, "acquire_timeout_s": 60.0}
    async with environment(AnswerEnv, tmp_path, {"*": [player]}, **changed) as env:
        group = asyncio.create_task(env.collect_trajectories({"id": "x"}))
        executor: Any = env._opened().sessions
        await until(lambda: executor.statistics().running_now == 2)
        (pid,) = env.backend.pids.values()
        os.kill(pid, signal.SIGKILL)
        scored, _ = await group
    assert scored is not None
    assert scored["scores"] == [1.0, 1.0]
    assert env.counts["infra_retries"] == 2
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_signal_in_mid_rollout_leaves_no_container_behind(tmp_path: Path, number: int) -> None:
    reached = asyncio.Event()

    def player(turn: Any) -> Any:
        if turn.step == 1:
            reached.set()
        return FOREVER[0] if turn.step else Reply("", (Call("bash", {"command": "true"}),))

    async with (
        ScriptedPolicy({"*": [player]}) as policy,
        running(
            tmp_path,
            "process",
            *flags(tmp_path, policy, env__tool_pool_mode="local"),
            own_interpreter=number == signal.SIGTERM,
        ) as process,
    ):
        async with asyncio.timeout(START_S):
            await reached.wait()
        process.send_signal(number)
        async with asyncio.timeout(START_S):
            await process.wait()
    await until(lambda: leftovers(tmp_path) == [], deadline_s=START_S)

"""What may go wrong in a group, one at a time: no fault becomes a score, no slot stays taken.

``environment`` itself proves at its end that every slot is free again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.errors import ContainerLostError
from agentenv.executor.pending_call import encode_call
from agentenv.testing import Call, Failure, Reply, ScriptedPolicy
from tests.unit.env.env_stubs import SOLVE, WRITE, AnswerEnv, all_free, environment, server_of, settings
from tests.waiting import until


def last_record(directory: Path) -> GroupRecord:
    return GroupRecord.model_validate_json((directory / "rollouts.jsonl").read_text().splitlines()[-1])


async def test_a_container_killed_in_mid_rollout_costs_a_retry_and_no_score(tmp_path: Path) -> None:
    killed = tmp_path / "killed"  # outside of the slots: those of the fake see it
    wait = f"[ -e {killed} ] || {{ touch {tmp_path}/waits.$$; sleep 600; }}"
    script = {"*": [[Reply("", (Call("bash", {"command": wait}),)), *WRITE]]}
    async with environment(AnswerEnv, tmp_path, script, group_size=3, tool_timeout_s=100) as env:
        group = asyncio.create_task(env.collect_trajectories({"id": "x"}))
        await until(lambda: len(list(tmp_path.glob("waits.*"))) == 3)
        killed.touch()
        env.backend.kill(env.backend.containers[0].id)
        scored, again = await group
    assert again == []
    assert scored is not None
    assert scored["scores"] == [1.0, 1.0, 1.0]
    record = last_record(tmp_path)
    assert record.outcome == "complete"
    assert all("ContainerLostError" in transcript.earlier_attempts[0] for transcript in record.trajectories)
    assert env.counts["infra_retries"] == 3


async def test_a_container_killed_while_verifying_is_no_zero(tmp_path: Path) -> None:
    class KillsOnce(AnswerEnv):
        killed = False

        async def verify_and_score_trajectory(
            self, item: Any, final_response: str, *, exec_tool: Any, **more: Any
        ) -> tuple[float, dict[str, Any]]:
            if not self.killed:
                self.killed = True
                self.backend.kill(self.backend.containers[0].id)
            try:
                return await super().verify_and_score_trajectory(item, final_response, exec_tool=exec_tool, **more)
            except Exception:
                return 0.0, {"swallowed": True}

    async with environment(KillsOnce, tmp_path, group_size=1) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
    assert scored is not None
    assert scored["scores"] == [1.0]
    assert last_record(tmp_path).trajectories[0].attempt == 2


@pytest.mark.parametrize("hook", ["setup_trajectory_workspace", "verify_and_score_trajectory"])
async def test_a_hook_raising_for_one_member_leaves_a_partial_group(tmp_path: Path, hook: str) -> None:
    class Raising(AnswerEnv):
        pass

    original = getattr(AnswerEnv, hook)

    async def raising(self: AnswerEnv, *args: Any, trajectory_id: str, **more: Any) -> Any:
        if trajectory_id.endswith("-1"):
            raise ValueError("a bug in the task")
        value = original(self, *args, trajectory_id=trajectory_id, **more)
        return await value if asyncio.iscoroutine(value) else value

    setattr(Raising, hook, raising)
    async with environment(Raising, tmp_path) as env:
        scored, again = await env.collect_trajectories({"id": "x"})
    assert again == []
    assert scored is not None
    assert scored["scores"] == [1.0, 1.0, 1.0]
    assert len(scored["tokens"]) == scored["group_overrides"]["group_size"] == 3
    record = last_record(tmp_path)
    assert record.outcome == "partial"
    assert record.trajectories[1].score is None
    assert (record.trajectories[1].fault, record.trajectories[1].attempt) == ("task", 1)
    assert "ValueError: a bug in the task" in record.trajectories[1].error
    assert env.counts["fault_task"] == 1


async def test_a_partial_group_passes_atropos_own_checks(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    changed = {
        "data_path_to_save_groups": str(path),
        "ensure_scores_are_not_same": False,
        "num_rollouts_per_group_for_logging": -1,
        "infra_retries": 0,
    }
    script = {"*": [SOLVE, SOLVE, [Failure(503)], SOLVE]}
    async with environment(AnswerEnv, tmp_path, script, **changed) as env:
        env.max_token_len = 100_000
        scored, _ = await env.collect_trajectories({"id": "x"})
        await env.handle_send_to_api(scored, {"id": "x"}, do_send_to_api=False)
    assert path.read_text().count("\n") == 1
    assert len(env.readable_rollouts) == 4, "also the one without a score"


async def test_a_model_server_failing_for_a_while_is_ridden_out(tmp_path: Path) -> None:
    failures = [Failure(500), Failure(503)]

    def flaky(turn: Any) -> Any:
        if turn.step == 1 and failures:
            return failures.pop()
        return WRITE[turn.step]

    async with environment(AnswerEnv, tmp_path, {"*": [flaky]}, group_size=1) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
    assert scored is not None
    assert scored["scores"] == [1.0]
    assert env.counts["infra_retries"] == 0


async def test_a_model_server_that_only_fails_gives_the_item_back_and_then_drops_it_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = {"infra_retries": 0, "item_retries": 1, "group_size": 2}
    async with environment(AnswerEnv, tmp_path, {"*": [[Failure(500)]]}, **changed) as env:
        for server in env.server.servers:
            server.openai = server.openai.with_options(max_retries=0)
        assert await env.collect_trajectories({"id": "x"}) == (None, [{"id": "x"}])
        assert await env.collect_trajectories({"id": "x"}) == (None, [])
    assert env.counts["items_dropped"] == 1
    assert "item x dropped" in caplog.text
    record = last_record(tmp_path)
    assert record.outcome == "retry"
    assert all("ModelServerError" in transcript.error for transcript in record.trajectories)
    assert all(transcript.score is None for transcript in record.trajectories)


async def test_a_member_raising_cancelled_error_loses_no_sibling(tmp_path: Path) -> None:
    class Cancelling(AnswerEnv):
        async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
            await exec_tool.terminal("true")
            if trajectory_id.endswith("-0"):
                raise asyncio.CancelledError
            if trajectory_id.endswith("-1"):
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)

    async with environment(Cancelling, tmp_path) as env:
        scored, again = await env.collect_trajectories({"id": "x"})
    assert again == []
    assert scored is not None
    assert scored["scores"] == [1.0, 1.0]
    assert [transcript.score for transcript in last_record(tmp_path).trajectories] == [None, None, 1.0, 1.0]


async def test_all_members_failing_returns_the_item(tmp_path: Path) -> None:
    class Broken(AnswerEnv):
        def setup_trajectory_workspace(self, item: Any, **_: Any) -> Any:
            raise ContainerLostError("as if the container had gone")

    async with environment(Broken, tmp_path, infra_retries=1) as env:
        item = {"id": "x"}
        assert await env.collect_trajectories(item) == (None, [item])
    assert env.counts["infra_retries"] == 4
    assert env.counts["fault_infra"] == 4


async def test_cancelling_a_group_at_any_moment_frees_every_slot(tmp_path: Path) -> None:
    script = {"*": [[Reply("", (Call("bash", {"command": "sleep 0.05"}),)), *WRITE]]}
    async with environment(AnswerEnv, tmp_path, script) as env:
        for wait_s in (0.0, 0.005, 0.02, 0.05, 0.08, 0.12, 0.2):
            group = asyncio.create_task(env.collect_trajectories({"id": "x"}))
            await asyncio.wait({group}, timeout=wait_s)
            group.cancel()
            await asyncio.wait({group})
            assert group.cancelled() or group.result()[0] is not None  # it may have finished in time
            await all_free(env)


async def test_a_record_that_cannot_be_written_costs_no_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with environment(AnswerEnv, tmp_path, rollouts_path="/dev/full", group_size=1) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
    assert scored is not None
    assert env.counts["records_lost"] == 1
    assert "a record cannot be written to /dev/full: No space left on device" in caplog.text


async def test_setup_that_fails_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    from agentenv.errors import SandboxUnavailableError, TaskError

    class NoSlots(AnswerEnv):
        def build_backend(self) -> Any:
            backend: Any = super().build_backend()
            backend.fail_next_start("bubblewrap is missing", permanent=True, next_step="apt install bubblewrap")
            return backend

    class BadSetup(AnswerEnv):
        def setup_agent_env(self) -> None:
            raise KeyError("dataset")

    async with ScriptedPolicy({}) as policy:
        for kind, error in ((NoSlots, SandboxUnavailableError), (BadSetup, TaskError)):
            env = kind(settings(tmp_path), server_of(policy))
            try:
                with pytest.raises(error):
                    await env.setup()
                assert env.backend.containers == []
            finally:
                await env.close()


MANGLED: dict[str, Callable[[str], str]] = {
    "malformed": lambda data: f"{data}!",
    "other_bytes": lambda data: base64.b64encode(data.encode()).decode(),
}


@pytest.mark.parametrize("way", MANGLED)
@pytest.mark.parametrize("hook", ["setup", "verify"])
async def test_bytes_of_a_hook_that_we_garble_are_ours_even_if_it_catches_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, way: str
) -> None:
    def garbled(key: Any, tool: str, arguments: Any, timeout_s: float) -> bytes:
        changed = {name: MANGLED[way](value) if name == "data" else value for name, value in arguments.items()}
        return encode_call(key, tool, changed, timeout_s)

    class Uploads(AnswerEnv):
        async def setup_trajectory_workspace(self, item: Any, *, exec_tool: Any, **_: Any) -> None:
            if hook == "setup":
                await exec_tool.write_file("tests.bin", bytes(range(256)))

        async def verify_and_score_trajectory(
            self, item: Any, final_response: str, *, exec_tool: Any, **_: Any
        ) -> tuple[float, dict[str, Any]]:
            with suppress(Exception):
                await exec_tool.write_file("tests.bin", bytes(range(256)))
            return 0.0, {}

    monkeypatch.setattr("agentenv.executor.pending_call.encode_call", garbled)
    async with environment(Uploads, tmp_path, group_size=1, item_retries=0) as env:
        scored, again = await env.collect_trajectories({"id": "x"})
    assert (scored, again) == (None, [])
    [transcript] = last_record(tmp_path).trajectories
    assert (transcript.fault, transcript.score) == ("infra", None)
    assert transcript.error.startswith("ProtocolError: ")
    assert len(transcript.earlier_attempts) == (env.config.infra_retries if hook == "setup" else 0)

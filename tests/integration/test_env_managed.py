"""Groups on a managed server: exact tokens, masks and logprobs from end to end, on fake slots and real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from agentenv.agent.parsers import PARSERS
from agentenv.agent.protocols import opened
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.env.models import EnvModels
from agentenv.errors import ConfigError
from agentenv.testing import Call, Reply, ScriptedPolicy, TokenSpeaker
from tests.integration.test_env_commands import flags, run
from tests.unit.env.env_stubs import IDLE, SOLVE, WRITE, AnswerEnv, environment, settings
from tests.unit.env.managed_stubs import managed, tokenizer_of

TWO_STEPS = [
    Reply("<think>first look</think>\nlooking", (Call("bash", {"command": 'ls -la "$PWD" # ü'}),)),
    Reply("", (Call("bash", {"command": "echo 42 > answer"}), Call("read_file", {"path": "answer"}))),
    Reply("done"),
]


KEPT = [
    Reply("<think>a shell that stays</think>", (Call("terminal", {"command": "mkdir d; cd d; half=21"}),)),
    Reply("", (Call("terminal", {"command": "echo $((2 * half)) > ../answer"}),)),
    Reply("done"),
]


def records(directory: Path) -> list[GroupRecord]:
    return [GroupRecord.model_validate_json(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]


def runs(masks: list[int]) -> list[tuple[int, int]]:
    """Where the policy's tokens begin and end."""
    edges, inside = [], False
    for at, mask in enumerate([*masks, -100]):
        if (mask != -100) != inside:
            inside = not inside
            edges.append(at)
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_exact(env: Any, voice: TokenSpeaker, group: dict[str, Any]) -> int:
    """Every sequence is what the policy said, token by token; the number of the policy's turns found."""
    turns = 0
    rows = zip(group["overrides"], group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
    for override, tokens, masks, logprobs in rows:
        member = int(override["trajectory"].rpartition("-")[2])
        assert len(tokens) == len(masks) == len(logprobs)
        for token, mask, logprob in zip(tokens, masks, logprobs, strict=True):
            assert mask in (-100, token)
            assert (logprob == 1.0) == (mask == -100)
        for begin, end in runs(masks):
            (said,) = [said for said in voice.said if (said.turn.member, said.prompt) == (member, tokens[:begin])]
            assert tokens[begin:end] == said.tokens
            assert logprobs[begin:end] == said.logprobs
            assert env.tokenizer.decode(tokens[begin:end], skip_special_tokens=False) == said.text
            turns += 1
    return turns


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_a_group_carries_what_the_policy_said_token_by_token(tmp_path: Path, server_type: str) -> None:
    script = {"item-0": [TWO_STEPS, IDLE, SOLVE]}
    async with managed(AnswerEnv, tmp_path, script, server_type=server_type, group_size=3) as (env, voice):
        group, again = await env.collect_trajectories(await env.get_next_item())
        assert group is not None
        assert check_exact(env, voice, group) == 3 + 1 + 2 == len(voice.said)
    assert again == []
    assert group["scores"] == [1.0, 0.0, 1.0]
    assert group["group_overrides"] == {"group_size": 3}
    assert [override["sequences"] for override in group["overrides"]] == [1, 1, 1]
    text = env.tokenizer.decode(group["tokens"][0])
    assert text.count("<think>first look</think>") == 1
    assert '"name": "bash"' in text.split("<|start|>system")[0], "the template shows the tools"
    json.dumps(group)
    (record,) = records(tmp_path)
    first = record.trajectories[0]
    assert [step.outcome for step in first.steps] == ["tool_calls", "tool_calls", "answer"]
    assert first.steps[0].reasoning == "first look"
    assert first.steps[0].raw is not None
    assert "<tool_call>" in first.steps[0].raw
    assert [message["role"] for message in first.messages[2:]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert first.messages[2]["content"] == "looking"
    usage = first.steps[1].usage
    assert usage is not None
    assert usage["total_tokens"] < len(group["tokens"][0])
    assert (first.sequences[0].tokens, first.sequences[0].first_step) == (len(group["tokens"][0]), 0)
    assert first.sequences[0].trained == sum(mask != -100 for mask in group["masks"][0])
    assert "token_sequences" not in (tmp_path / "rollouts.jsonl").read_text()


async def test_the_same_on_real_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    changed: dict[str, Any] = {
        "tool_pool_mode": "local",
        "max_containers": 1,
        "slots_per_container": 2,
        "verification": "sealed",
        "group_size": 3,
    }
    script = {"*": [KEPT, IDLE, TWO_STEPS]}
    async with managed(AnswerEnv, tmp_path, script, parser="qwen3_coder", **changed) as (env, voice):
        group, again = await env.collect_trajectories({"id": "x"})
        assert group is not None, records(tmp_path)[0].trajectories[0].error
        assert check_exact(env, voice, group) == 3 + 1 + 3 == len(voice.said)
    assert again == []
    assert group["scores"] == [1.0, 0.0, 1.0]
    (record,) = records(tmp_path)
    kept = record.trajectories[0].steps[1].tool_calls[0].result
    assert kept is not None
    assert (kept.exit_code, kept.content["cwd"]) == (0, "/workspace/d")  # type: ignore[index,call-overload]


@pytest.mark.parametrize("parser", PARSERS)
async def test_every_family_works_with_tools_in_its_own_format(tmp_path: Path, parser: str) -> None:
    command = "printf '%s\\n' 'ünï {\"a\": [1, 2]}' > note; echo 42 > answer"
    solve = [Reply("I write", (Call("bash", {"command": command}), Call("read_file", {"path": "note"}))), Reply("done")]
    async with managed(AnswerEnv, tmp_path, {"*": [solve]}, parser=parser, group_size=1) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert check_exact(env, voice, group) == 2
    assert group["scores"] == [1.0]
    (record,) = records(tmp_path)
    calls = record.trajectories[0].steps[0].tool_calls
    assert calls[0].arguments == {"command": command}
    assert calls[1].shown == 'ünï {"a": [1, 2]}\n'


async def test_an_unreadable_call_is_answered_counted_and_trained_on_as_written(tmp_path: Path) -> None:
    broken = Reply('<tool_call>\n{"name": "bash", "arguments": {"command": "ls",}}\n</tool_call>')
    async with managed(AnswerEnv, tmp_path, {"*": [[broken, *TWO_STEPS]]}, group_size=1) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert check_exact(env, voice, group) == 4
    assert (len(group["tokens"]), group["scores"]) == (1, [1.0])
    (record,) = records(tmp_path)
    member = record.trajectories[0]
    assert member.model_faults == 1
    assert member.steps[0].outcome == "malformed"
    (unreadable,) = member.steps[0].tool_calls
    assert unreadable.result is not None
    assert (unreadable.result.fault, unreadable.result.error) == ("model", "malformed_call")
    assert member.messages[3]["role"] == "user"
    assert "not valid JSON" in member.messages[3]["content"]
    assert "No tool was run" in member.messages[3]["content"]


async def test_a_cut_generation_runs_nothing_of_its_open_call_and_ends_or_goes_on(tmp_path: Path) -> None:
    wordy = Reply("", (Call("bash", {"command": "echo 42 > answer; " + "true; " * 100}),))
    script = {"*": [[wordy, *WRITE], [Reply("x" * 900)]]}
    changed: dict[str, Any] = {"agent_max_tokens": 300, "group_size": 2}
    async with managed(AnswerEnv, tmp_path, script, **changed) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        check_exact(env, voice, group)
    (record,) = records(tmp_path)
    went_on, ended = record.trajectories
    assert went_on.steps[0].outcome == "truncated"
    assert "cut off" in went_on.steps[0].problem
    assert (went_on.finish_reason, went_on.score) == ("stop", 1.0)
    assert (ended.finish_reason, ended.steps[0].outcome, ended.score) == ("length", "truncated", 0.0)
    assert len(group["tokens"]) == 2, "both continue in one sequence"


@pytest.mark.parametrize("where", ["here", "server"])
async def test_a_conversation_too_long_ends_the_rollout_and_is_scored(tmp_path: Path, where: str) -> None:
    flood = [Reply("", (Call("bash", {"command": "echo 42 > answer; seq 3000"}),)), Reply("never")]
    limit = 6000
    changed: dict[str, Any] = {"agent_context_tokens": limit} if where == "here" else {}
    said = {"context_tokens": limit} if where == "server" else {}
    async with managed(
        AnswerEnv, tmp_path, {"*": [flood]}, speaker=said, group_size=1, enabled_toolsets=["bash"], **changed
    ) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert check_exact(env, voice, group) == 1
    (record,) = records(tmp_path)
    assert record.trajectories[0].finish_reason == "context_overflow"
    assert group["scores"] == [1.0]


async def test_shortened_outputs_begin_a_new_sequence_and_none_is_lost(tmp_path: Path) -> None:
    loud = [Reply(f"step {n}", (Call("bash", {"command": "echo 42 > answer; seq 600"}),)) for n in range(5)]
    changed: dict[str, Any] = {
        "agent_context_tokens": 9000,
        "agent_keep_tool_outputs": 1,
        "agent_max_tokens": 500,
        "group_size": 2,
    }
    changed["enabled_toolsets"] = ["bash"]
    async with managed(AnswerEnv, tmp_path, {"*": [[*loud, Reply("done")], SOLVE]}, **changed) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        turns = check_exact(env, voice, group)
    (record,) = records(tmp_path)
    long, short = record.trajectories
    assert long.finish_reason == "stop"
    assert long.shortenings
    assert sum(one.bytes_removed for one in long.shortenings) > 1000
    assert len(long.sequences) == len(long.shortenings) + 1
    assert [one.first_step for one in long.sequences][1:] == [one.step for one in long.shortenings]
    assert group["group_overrides"]["group_size"] == len(group["tokens"]) == len(long.sequences) + 1
    assert group["scores"] == [1.0] * len(group["tokens"])
    assert {override["trajectory"] for override in group["overrides"]} == {long.trajectory, short.trajectory}
    assert turns >= len(voice.said), "each turn is in one sequence at least"
    assert all("removed to save context" not in call.shown for step in long.steps for call in step.tool_calls)


async def test_members_without_the_trajectory_s_name_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"send_trajectory_id": False, "group_size": 3}
    async with managed(AnswerEnv, tmp_path, {"*": [SOLVE, IDLE, SOLVE]}, **changed) as (env, _):
        group, _again = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert sorted(group["scores"]) == [0.0, 1.0, 1.0]


async def test_the_model_s_server_failing_is_retried_and_never_scored(tmp_path: Path) -> None:
    from agentenv.testing import Failure

    script = {"*": [[Failure(400, "unknown sampling parameter")]]}
    async with managed(AnswerEnv, tmp_path, script, group_size=1, infra_retries=1) as (env, _):
        group, again = await env.collect_trajectories({"id": "x"})
    assert (group, again) == (None, [{"id": "x"}])
    (record,) = records(tmp_path)
    member = record.trajectories[0]
    assert (member.fault, member.score, len(member.earlier_attempts)) == ("infra", None, 1)
    assert "unknown sampling parameter" in member.error


async def test_atropos_own_managed_server_agrees_where_it_extends(tmp_path: Path) -> None:
    """The same conversation through atropos' ManagedServer alone, its prompts written out by hand."""
    async with managed(AnswerEnv, tmp_path, {"*": [SOLVE]}, group_size=1) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        prompts = [list(said.prompt) for said in voice.said]

        class Verbatim:
            prompt = ""

            def apply_chat_template(self, *_: Any, **__: Any) -> str:
                return self.prompt

            def encode(self, text: str, **_: Any) -> Any:
                return env.tokenizer.encode(text, add_special_tokens=False)

            def decode(self, tokens: Any, **_: Any) -> Any:
                return env.tokenizer.decode(tokens, skip_special_tokens=False)

        tokenizer = Verbatim()
        async with env.server.managed_server(tokenizer=tokenizer) as server:
            for prompt in prompts:
                tokenizer.prompt = tokenizer.decode(prompt)
                await server.chat_completion(messages=[], max_tokens=4000)
            (node,) = server.get_state()["nodes"]
            assert (group["tokens"][0], group["masks"][0]) == (node.tokens, node.masked_tokens)
            assert group["inference_logprobs"][0] == node.logprobs


async def test_an_openai_server_is_never_trainable_whatever_atropos_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    async with environment(AnswerEnv, tmp_path, tool_call_parser="hermes", group_size=2) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert "inference_logprobs" not in group
    assert all(set(masks) == {-100} for masks in group["masks"])
    assert all(override["trainable"] is False for override in group["overrides"])


async def test_run_agent_and_evaluate_work_too(tmp_path: Path) -> None:
    async with managed(AnswerEnv, tmp_path, eval_items=1, data_dir_to_save_evals=str(tmp_path / "evals")) as (env, _):
        assert (await env.run_agent("[task:x] do it")).final_response == "done"
        assert (await env.evaluate())["mean_score"] == 1.0


def server(**changed: Any) -> APIServerConfig:
    return APIServerConfig(
        **{"base_url": "http://127.0.0.1:9/v1", "model_name": "m", "api_key": "x", "server_type": "vllm", **changed}
    )


@pytest.mark.parametrize(
    ("servers", "changed", "field", "said"),
    [
        ([server()], {}, "tool_call_parser", "is not set"),
        ([server(server_type="trl")], {"tool_call_parser": "hermes"}, "server_type", "allowed: openai, vllm, sglang"),
        ([server(), server(server_type="openai")], {"tool_call_parser": "hermes"}, "server_type", "cannot be mixed"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, servers: list[APIServerConfig], changed: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        AnswerEnv(settings(tmp_path, **changed), servers)
    assert caught.value.field == field


def test_a_transcript_s_tokens_stay_out_of_its_record() -> None:
    assert "token_sequences" not in Transcript(trajectory="t", item_id="i", began_unix_s=0).model_dump()


async def test_the_command_line_trains_on_a_managed_server_too(tmp_path: Path) -> None:
    voice = TokenSpeaker(tokenizer_of(tmp_path), "qwen")
    async with ScriptedPolicy({"*": [SOLVE, IDLE]}, speaker=voice) as policy:
        changed = {
            "openai__server_type": "sglang",
            "env__tool_call_parser": "qwen",
            "env__total_steps": 1,
            "env__data_path_to_save_groups": tmp_path / "groups.jsonl",
        }
        status, log = await run(tmp_path, "process", *flags(tmp_path, policy, **changed))
    assert status == 0, log
    (group,) = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert group["scores"] == [1.0, 0.0]
    assert [len(tokens) for tokens in group["tokens"]] == [len(probs) for probs in group["inference_logprobs"]]
    assert set(group["masks"][0]) - {-100}


def test_atropos_proxy_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_PROXY_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="unset ATROPOS_PROXY_URL"):
        AnswerEnv(settings(tmp_path, tool_call_parser="hermes"), [server(tokenizer_name=str(tmp_path / "tokenizer"))])


async def test_a_server_whose_tokens_are_made_up_is_refused_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    async with environment(AnswerEnv, tmp_path, tool_call_parser="hermes", group_size=1) as env:
        models = EnvModels(env.config, "vllm", env.server, env.tokenizer, lambda: None)  # whatever it says it is
        with pytest.warns(UserWarning, match="NOT suitable for training"), pytest.raises(ConfigError, match="Dummy"):
            async with opened(models.of("t")):
                raise AssertionError("it must not open")

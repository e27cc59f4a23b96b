"""Agent programs in the place of the built-in loop: every token of theirs is found as it was sampled, whatever they do
to their history, and how each of them ends is told apart. On fake slots; what depends on a real slot on those."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentenv.agent.models.chat_template import ChatRenderer
from agentenv.agent.program import AgentProgram
from agentenv.agent.transcript import Transcript
from agentenv.errors import ConfigError, HookError
from agentenv.testing import Call, Failure, Reply, TokenSpeaker
from tests.integration.test_env_managed import records, runs
from tests.unit.env.env_stubs import AnswerEnv, environment, settings
from tests.unit.env.managed_stubs import managed

PROGRAM = Path(__file__).parent.parent / "small_agent.py"
LOOK = Reply("<think>first look</think>\nI  look. ", (Call("bash", {"command": 'ls -la "$PWD" # ü', "zeta": 1.0}),))
WRITE = Reply("", (Call("bash", {"command": "echo 42 > answer"}), Call("bash", {"command": "cat answer"})))
SOLVE = [LOOK, WRITE, Reply("done\n")]


class ProgramEnv(AnswerEnv):
    behaviour = "plain"
    changed: ClassVar[dict[str, Any]] = {}

    def agent_program(self, item: Any) -> AgentProgram:
        return AgentProgram(
            ["python3", "small_agent.py", self.behaviour, "{task}"],
            env={"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"},
            plain_files={"/workspace/small_agent.py": PROGRAM.read_text()},
            name="small agent",
            **self.changed,
        )


def playing(behaviour: str, **changed: Any) -> type[ProgramEnv]:
    return type("Playing", (ProgramEnv,), {"behaviour": behaviour, "changed": changed})


def check_sampled(voice: TokenSpeaker, group: dict[str, Any]) -> int:
    """Every trained run of tokens is an answer of the policy, with its logprobs, after exactly the prompt that it was
    sampled from. Returns how many there are."""
    turns = 0
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        for begin, end in runs(masks):
            assert masks[begin:end] == tokens[begin:end]
            answers = [(said.prompt, said.tokens, said.logprobs) for said in voice.said]
            assert (tokens[:begin], tokens[begin:end], logprobs[begin:end]) in answers
            turns += 1
    return turns


async def played(
    tmp_path: Path, behaviour: str, script: Any = None, *, program: dict[str, Any] | None = None, **changed: Any
) -> tuple[Transcript, dict[str, Any] | None]:
    """The record of a group of one, and the group, whose tokens have been checked."""
    script = {"*": [SOLVE]} if script is None else script
    async with managed(playing(behaviour, **(program or {})), tmp_path, script, group_size=1, **changed) as made:
        env, voice = made
        group, _ = await env.collect_trajectories(await env.get_next_item())
        (one,) = records(tmp_path)[-1].trajectories
        if group is not None:
            said = len(voice.said)
            trained = {each.index for each in one.steps if one.program.conversations[each.conversation].trained}  # type: ignore[union-attr]
            assert check_sampled(voice, group) == len(trained) <= said
    return one, group


@pytest.mark.parametrize(
    ("behaviour", "turns", "sequences", "behind"),
    [
        ("plain", 3, 1, [None]),
        ("rewriting", 3, 1, [None]),
        ("retrying", 3, 1, [None]),
        ("titled", 4, 2, [None, None]),
        ("twins", 6, 2, [None, None]),
        ("forking", 7, 3, [None, 0, 0]),
        ("compacting", 5, 2, [None, None]),
        ("editing", 3, 2, [None, None]),
        ("noisy", 3, 1, [None]),
    ],
)
async def test_each_trained_token_is_found_as_sampled(
    tmp_path: Path, behaviour: str, turns: int, sequences: int, behind: list[int | None]
) -> None:
    one, group = await played(tmp_path, behaviour, agent_max_steps=20)
    assert (one.error, one.score, one.finish_reason) == ("", 1.0, "stop")
    assert len(one.steps) == turns
    assert group is not None
    assert len(group["tokens"]) == sequences == len(one.sequences)
    assert one.program is not None
    assert [conversation.behind for conversation in one.program.conversations] == behind
    assert {step.dialect for step in one.steps} == {"chat"}
    assert one.program.exit_code == 0
    assert one.program.refused == []


async def test_a_fork_shares_its_tokens_and_trains_none_of_them_twice(tmp_path: Path) -> None:
    one, group = await played(tmp_path, "forking", agent_max_steps=20)
    assert group is not None
    shared = len(one.steps[0].raw or "")
    assert shared
    first, *forks = ((tokens, masks) for tokens, masks in zip(group["tokens"], group["masks"], strict=True))
    begins, ends = runs(first[1])[0]
    for tokens, masks in forks:
        assert tokens[:ends] == first[0][:ends]
        assert set(masks[:ends]) == {-100}
        assert runs(masks)[0][0] > ends > begins
    assert [sequence.first_step for sequence in one.sequences] == [0, 3, 5]


async def test_a_record_has_what_the_program_did_and_showed(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "titled", agent_max_steps=20, program={"answer": "stdout"})
    assert one.final_response == "done\n\n"
    assert one.program is not None
    (title,) = (n for n, each in enumerate(one.program.conversations) if not each.tools)
    assert one.program.main == 1 - title
    assert [message["role"] for message in one.program.conversations[title].messages] == ["user", "assistant"]
    assert one.program.conversations[1 - title].messages == []
    assert [message["role"] for message in one.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"
    ]  # fmt: skip
    main = [step for step in one.steps if step.conversation == 1 - title]
    calls = [call for step in main for call in step.tool_calls]
    assert [call.shown.splitlines()[0] for call in calls] == ["exit code 0"] * 3
    assert all(call.result is None and call.started_s <= call.ended_s for call in calls)
    assert [(step.after, step.outcome) for step in main[1:]] == [
        (main[0].index, "tool_calls"),
        (main[1].index, "answer"),
    ]
    assert one.tools == ["bash"]


async def test_output_is_kept_from_both_ends_and_the_rest_is_counted(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "noisy", program_output_bytes=1000)
    assert one.program is not None
    assert one.program.stdout.startswith("begin\nxxx")
    assert one.program.stdout.endswith("xxx\nend\n")
    assert one.program.stdout_dropped_bytes == 3_000_011 - 1000


@pytest.mark.parametrize(("answer", "final"), [("last_message", "done\n"), ("/workspace/answer", "42\n"), ("/x/y", "")])
async def test_the_final_response_is_what_the_program_names(tmp_path: Path, answer: str, final: str) -> None:
    one, _ = await played(tmp_path, "plain", program={"answer": answer})
    assert one.final_response == final


async def test_titles_are_not_trained_where_only_the_main_conversations_are(tmp_path: Path) -> None:
    one, group = await played(tmp_path, "titled", program_train="main", agent_max_steps=20)
    assert group is not None
    assert len(group["tokens"]) == 1
    assert one.program is not None
    assert [each.trained for each in one.program.conversations] == [
        bool(each.tools) for each in one.program.conversations
    ]


async def test_a_hook_chooses_the_conversations_that_are_trained_on(tmp_path: Path) -> None:
    class Choosing(playing("titled")):  # type: ignore[misc]
        async def trains_conversation(self, conversation: Any) -> bool:
            return not conversation.tools

    async with managed(Choosing, tmp_path, {"*": [SOLVE]}, group_size=1, agent_max_steps=20) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert (check_sampled(voice, group), len(group["tokens"])) == (1, 1)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [(ValueError("boom"), "raised ValueError: boom"), (None, "must return bool, got None")],
)
async def test_a_wrong_choice_of_conversations_is_the_hooks_fault(tmp_path: Path, returned: Any, problem: str) -> None:
    class Wrong(playing("plain")):  # type: ignore[misc]
        def trains_conversation(self, conversation: Any) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    async with managed(Wrong, tmp_path, {"*": [SOLVE]}, group_size=1) as (env, _):
        group, _ = await env.collect_trajectories(await env.get_next_item())
    (one,) = records(tmp_path)[-1].trajectories
    assert (group, one.fault, one.error) == (None, "task", f"TaskError: trains_conversation {problem}")


async def test_an_openai_server_gives_answers_and_no_tokens(tmp_path: Path) -> None:
    script = {"*": [[Reply("I look", LOOK.calls), WRITE, Reply("done")]]}
    for behaviour, turns in (("rewriting", 3), ("forking", 7), ("twins", 6)):
        async with environment(playing(behaviour), tmp_path, script, group_size=2, agent_max_steps=20) as env:
            group, _ = await env.collect_trajectories(await env.get_next_item())
            assert group is not None
            assert group["scores"] == [1.0, 1.0]
            assert group["overrides"] == [{"trainable": False, "set_advantage_to_zero": True}] * 2
        for one in records(tmp_path)[-1].trajectories:
            assert len(one.steps) == turns


# -- how it ends ------------------------------------------------------------------------------------------------------


async def test_a_program_that_ends_before_its_first_turn_is_the_tasks_fault(tmp_path: Path) -> None:
    one, group = await played(tmp_path, "silent")
    assert (group, one.score, one.fault, one.earlier_attempts) == (None, None, "task", [])
    assert "small agent ended with 3 before its first turn: no such module" in one.error


async def test_a_program_that_does_not_exist_is_the_tasks_fault(tmp_path: Path) -> None:
    class Missing(ProgramEnv):
        def agent_program(self, item: Any) -> AgentProgram:
            return AgentProgram(["/no/such/program"])

    async with managed(Missing, tmp_path, group_size=1) as (env, _):
        await env.collect_trajectories(await env.get_next_item())
    (one,) = records(tmp_path)[-1].trajectories
    assert (one.score, one.fault) == (None, "task")
    assert "program ended with 126 before its first turn" in one.error
    assert "/no/such/program" in one.error


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"argv": []}, r"argv is \[\]"),
        ({"argv": ["sleep", 5]}, r"argv is \['sleep', 5\]"),
        ({"env": {"LIMIT": 5}}, "env has other things than text"),
        ({"files": {"/x": b"bytes"}}, "files has other things than text"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_a_program_with_other_types_is_refused_where_it_is_written(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentProgram(**{"argv": ["true"], **changed})


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"argv": ["python3", "a\0b"]}, "cannot be started: .*NUL"),
        ({"argv": ["python3", "\ud800"]}, "cannot be started: .*surrogate"),
        ({"env": {"A=B": "1"}}, "cannot be started: .*'A=B' is not a valid environment variable"),
        ({"user": "nobody", "files": {}}, "cannot be started: .*'nobody' cannot be another"),
        ({"user": "nobody"}, "the file /workspace/x of python3 cannot be written: .*'nobody'"),
        ({"files": {"/etc/x": ""}}, "the file /etc/x of python3 cannot be written"),
        ({"timeout_s": 0.01, "argv": ["python3", "-c", "import time; time.sleep(9)"]}, "was killed at its time limit"),
    ],
)
async def test_a_program_that_cannot_be_started_is_the_tasks_fault(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    class Wrong(ProgramEnv):
        def agent_program(self, item: Any) -> AgentProgram:
            return AgentProgram(**{"argv": ["python3"], "files": {"/workspace/x": ""}, **changed})

    async with managed(Wrong, tmp_path, group_size=1) as (env, _):
        await env.collect_trajectories(await env.get_next_item())
    (one,) = records(tmp_path)[-1].trajectories
    assert (one.score, one.fault, one.attempt) == (None, "task", 1)
    assert re.search(problem, one.error), one.error


async def test_an_answer_that_leads_out_of_the_slot_is_none(tmp_path: Path) -> None:
    link = Reply("", (Call("bash", {"command": "echo 42 >answer; ln -s /etc/shadow final"}),))
    one, _ = await played(tmp_path, "plain", {"*": [[link, Reply("done")]]}, program={"answer": "/workspace/final"})
    assert (one.error, one.score, one.final_response) == ("", 1.0, "")


async def test_another_exit_code_after_turns_is_recorded_and_verified(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "failing")
    assert (one.score, one.finish_reason) == (1.0, "program_failed")
    assert one.program is not None
    assert one.program.exit_code == 7


async def test_at_the_limit_of_turns_it_is_killed_and_verified(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "endless", agent_max_steps=4)
    assert (one.score, one.finish_reason, len(one.steps)) == (0.0, "max_steps", 4)
    assert one.program is not None
    assert one.program.exit_code is None
    assert one.program.refused[0] == "this rollout is over: it has had its 4 turns"


async def test_requests_that_are_refused_count_as_turns(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "pestering", agent_max_steps=5)
    assert (one.score, one.finish_reason, len(one.steps)) == (0.0, "max_steps", 1)
    assert one.program is not None
    assert len(one.program.refused) >= 4
    assert one.program.refused[0] == "messages: has to be a list, not a number"


async def test_at_the_limit_of_conversations_it_is_killed_and_verified(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "endless", agent_max_steps=9, program_max_conversations=2)
    assert (one.score, one.finish_reason, len(one.steps)) == (0.0, "max_conversations", 2)


async def test_when_its_time_is_over_it_is_killed_and_verified(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "hanging", {"*": [[WRITE]]}, program={"timeout_s": 20.0}, program_timeout_s=500)
    assert (one.score, one.finish_reason) == (1.0, "max_time")
    assert one.program is not None
    assert (one.program.exit_code, one.program.stdout) == (None, "hanging\n")


async def test_a_slot_is_given_up_when_no_turn_ends_for_its_lifetime(tmp_path: Path) -> None:
    one, group = await played(tmp_path, "hanging", {"*": [[WRITE]]}, terminal_lifetime=5.0)
    assert (group, one.score, one.fault, one.earlier_attempts) == (None, None, "infra", [])
    assert "LeaseLostError: the slot was released after 5 s without a turn" in one.error
    assert len(one.steps) <= 1


async def test_a_slot_whose_turns_follow_each_other_within_its_lifetime_is_kept(tmp_path: Path) -> None:
    wait = Reply("", (Call("bash", {"command": "sleep 3.5; echo 42 > answer"}),))
    one, _ = await played(tmp_path, "plain", {"*": [[wait, wait, wait, wait, Reply("done")]]}, terminal_lifetime=12.0)
    assert (one.score, one.finish_reason) == (1.0, "stop")
    assert one.program is not None
    assert one.program.duration_s > 12.0


async def test_a_model_server_that_fails_is_no_turn_and_the_rollout_is_played_again(tmp_path: Path) -> None:
    failed: list[int] = []

    def player(turn: Any) -> Any:
        if turn.step == 1 and len(failed) < 3:  # as often as the request is sent
            failed.append(1)
            return Failure(500)
        return SOLVE[turn.step]

    one, group = await played(tmp_path, "plain", {"*": [player]})
    assert group is not None
    assert (one.score, one.attempt) == (1.0, 2)
    assert "ModelServerError" in one.earlier_attempts[0]


@pytest.mark.parametrize("status", [400, 422])
async def test_what_a_command_sends_to_the_gateway_is_no_reason_for_another_attempt(
    tmp_path: Path, status: int
) -> None:
    def player(turn: Any) -> Any:
        return Failure(status) if "stray" in turn.messages[0]["content"] else SOLVE[turn.step]

    one, group = await played(tmp_path, "straying", {"*": [player]})
    assert (group, one.score, one.fault, one.attempt) == (None, None, "infra", 1)
    assert f"DoubtfulTurnError: the model's server refuses the conversation: Refused: HTTP {status}" in one.error


async def test_a_conversation_that_the_template_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = ChatRenderer._render

    def needs_a_user(self: ChatRenderer, messages: Any, *others: Any, **options: Any) -> str:
        if not any(message["role"] == "user" for message in messages):
            raise ValueError("no user query found in messages")
        return render(self, messages, *others, **options)

    monkeypatch.setattr(ChatRenderer, "_render", needs_a_user)
    one, _ = await played(tmp_path, "straying")
    assert (one.score, one.finish_reason, len(one.steps)) == (1.0, "stop", 3)
    assert one.program is not None
    (refused,) = one.program.refused
    assert "no user query found in messages" in refused


async def test_a_first_prompt_that_does_not_fit_is_a_wrong_setting(tmp_path: Path) -> None:
    one, group = await played(tmp_path, "plain", agent_context_tokens=300)
    assert (group, one.score) == (None, None)
    assert "ConfigError: agent_context_tokens: the first prompt does not fit" in one.error


async def test_a_program_that_ends_for_want_of_room_is_verified(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "plain", agent_context_tokens=1000)
    assert (one.finish_reason, one.score, len(one.steps)) == ("context_overflow", 1.0, 2)
    assert one.program is not None
    assert "prompt is too long" in one.program.stderr
    assert "context_length_exceeded" in one.program.stderr


async def test_what_cannot_be_read_as_a_call_is_shown_as_the_model_wrote_it(tmp_path: Path) -> None:
    one, _ = await played(tmp_path, "plain", {"*": [[Reply('<tool_call>\n{"name": "bash"')]]})
    assert one.steps[0].outcome == "malformed"
    assert one.model_faults == 1
    assert one.program is not None
    assert '<tool_call>\n{"name": "bash"' in one.program.stdout


async def test_a_limit_of_its_own_goes_with_no_further_task(tmp_path: Path) -> None:
    class Both(ProgramEnv):
        def continue_task(self, item: Any) -> None:
            return None

    with pytest.raises(HookError, match=r"Both.continue_task: goes with the built-in loop only"):
        Both(settings(tmp_path), [])

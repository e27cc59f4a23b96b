"""Spans of real runs, at a real collector: their tree, names, attributes and ids."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.runs.spans import span_id, trace_id, turn_key
from agentenv.testing import Call, Failure, Reply, ScriptedPolicy
from tests.collector import Collector, Span, collecting
from tests.integration import test_env_commands as commands
from tests.unit.env.env_stubs import IDLE, SOLVE

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
WRONG = [Reply("hm", (Call("no_such_tool", {}), Call("bash", {"command": "exit 3"}))), Reply("wrong")]


class Recorded(ScriptedPolicy):
    """Keeps the headers of each request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parents: list[str] = []

    async def _complete(self, request: web.Request) -> web.Response:
        self.parents += request.headers.getall("traceparent", [])
        return await super()._complete(request)


@pytest.fixture(autouse=True)
def no_variables_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", CONTENT):
        monkeypatch.delenv(name, raising=False)


async def play(directory: Path, script: Any, verb: str = "process", **changed: Any) -> tuple[int, str, Recorded]:
    settings: dict[str, Any] = {"env__total_steps": 2, "env__data_path_to_save_groups": directory / "g.jsonl"}
    if verb == "evaluate":
        settings = {"env__eval_items": 2}
    async with Recorded(script) as policy:
        status, log = await commands.run(directory, verb, *commands.flags(directory, policy, **(settings | changed)))
    return status, log, policy


def recorded(directory: Path) -> list[GroupRecord]:
    lines = (directory / "rollouts.jsonl").read_text().splitlines()
    return [GroupRecord.model_validate_json(line) for line in lines]


async def test_a_run_is_a_tree_of_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
        status, log, policy = await play(tmp_path, {"*": [SOLVE, WRONG]})
    assert status == 0, log
    assert "WARNING" not in log
    groups = recorded(tmp_path)
    (run,) = collector.named("run command")
    assert run.resource["service.name"] == "agentenv"
    assert run.resource["team"] == "blue"
    assert groups[0].run is not None
    assert run.attributes["agentenv.run.id"] == groups[0].run.id
    assert run.attributes["agentenv.verb"] == "process"
    assert (run.attributes["agentenv.run.rollouts"], run.attributes["agentenv.score.mean"]) == (4, 0.5)
    assert not run.parent
    assert {span.attributes["agentenv.group"] for span in collector.named("group")} == {g.group for g in groups}
    for record in groups:
        check_group(collector, run, record)
    assert len({(span.raw.trace_id, span.id) for span in collector.spans}) == len(collector.spans), "no id twice"
    sent = {f"00-{s.raw.trace_id.hex()}-{s.id.hex()}-01" for s in collector.spans if s.name == "chat scripted"}
    assert set(policy.parents) == sent, "every request bore the id of its span"


def check_group(collector: Collector, run: Span, record: GroupRecord) -> None:
    (group,) = [s for s in collector.named("group") if s.attributes["agentenv.group"] == record.group]
    assert not group.parent
    assert group.raw.trace_id == trace_id(record.group).to_bytes(16)
    (link,) = group.raw.links
    assert (link.trace_id, link.span_id) == (run.raw.trace_id, run.id)
    assert group.attributes["agentenv.group.outcome"] == "complete"
    rollouts = {span.attributes["gen_ai.conversation.id"]: span for span in collector.children(group)}
    assert rollouts.keys() == {member.trajectory for member in record.trajectories}
    for member in record.trajectories:
        check_rollout(collector, rollouts[member.trajectory], member)


def check_rollout(collector: Collector, rollout: Span, member: Transcript) -> None:
    assert rollout.name == "invoke_agent command"
    about = rollout.attributes
    assert about["gen_ai.operation.name"] == "invoke_agent"
    assert about["gen_ai.agent.name"] == "command"
    assert about["gen_ai.provider.name"] == "openai"
    assert about["gen_ai.request.model"] == "scripted"
    assert about["agentenv.score"] == member.score
    assert about["agentenv.fault"] == "none"
    usage = [step.usage or {} for step in member.steps]
    assert about["gen_ai.usage.input_tokens"] == sum(one["prompt_tokens"] for one in usage)
    parts = collector.children(rollout)
    assert {span.name for span in parts} == {"slot_wait", "prepare", "turn", "verify", "release"}
    turns = [span for span in parts if span.name == "turn"]
    assert [span.attributes["agentenv.turn"] for span in turns] == [1, 2]
    for turn, step in zip(turns, member.steps, strict=True):
        chat, *calls = collector.children(turn)
        assert chat.name == "chat scripted"
        assert chat.id == span_id(turn_key(member.trajectory, step.index)).to_bytes(8)
        assert chat.raw.kind == 3, "CLIENT"
        assert chat.attributes["gen_ai.operation.name"] == "chat"
        assert chat.attributes["server.address"] == "127.0.0.1"
        assert chat.attributes["gen_ai.usage.output_tokens"] == (step.usage or {})["completion_tokens"]
        took = (chat.times[1] - chat.times[0]) / 1e9
        assert took == pytest.approx(step.model_ended_s - step.model_started_s, abs=1e-5)
        assert [span.attributes["gen_ai.tool.call.id"] for span in calls] == [call.call_id for call in step.tool_calls]
        for span, call in zip(calls, step.tool_calls, strict=True):
            assert call.result is not None
            assert span.name == f"execute_tool {call.tool}"
            assert span.attributes["gen_ai.tool.name"] == call.tool
            assert span.attributes["agentenv.call.batch_wait_s"] == call.batch_wait_s
            assert span.attributes["agentenv.call.queue_s"] == call.result.queue_s
            assert span.attributes["agentenv.call.run_s"] == call.result.duration_s
            assert span.attributes.get("process.exit.code") == call.result.exit_code
            assert span.failed is (call.tool == "no_such_tool"), "a command that fails is data"
            assert span.attributes.get("error.type") == ("unknown_tool" if span.failed else None)
    texts = [name for span in collector.spans for name in span.attributes if "messages" in name or "arguments" in name]
    assert texts == [], "no content unless it is asked for"


async def test_content_is_sent_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv(CONTENT, "true")
        status, log, _ = await play(tmp_path, {"*": [SOLVE]}, "evaluate")
    assert status == 0, log
    assert {span.resource["service.name"] for span in collector.spans} == {"mine"}
    rollout = collector.named("invoke_agent command")[0]
    system, user = json.loads(rollout.attributes["gen_ai.input.messages"])
    assert (system["role"], user["role"]) == ("system", "user")
    assert "write 42" in user["parts"][0]["content"]
    (said,) = json.loads(rollout.attributes["gen_ai.output.messages"])
    assert said == {"role": "assistant", "parts": [{"type": "text", "content": "done"}], "finish_reason": "stop"}
    first = collector.children(rollout)
    (turn, *_) = [span for span in first if span.name == "turn"]
    chat, call = collector.children(turn)
    (said,) = json.loads(chat.attributes["gen_ai.output.messages"])
    assert [part["type"] for part in said["parts"]] == ["text", "tool_call"]
    assert json.loads(call.attributes["gen_ai.tool.call.arguments"]) == {"command": "echo 42 > answer"}
    assert "exit code: 0" in call.attributes["gen_ai.tool.call.result"]
    assert {span.attributes["agentenv.group.kind"] for span in collector.named("group")} == {"eval"}


async def test_a_failed_model_is_an_error_of_the_request_the_rollout_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [SOLVE[0], Failure(status=400, message="no")]  # type: ignore[index]
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        status, log, _ = await play(tmp_path, {"*": [broken]}, "evaluate", env__infra_retries=0)
    assert status == 1, log
    rollout = collector.named("invoke_agent command")[0]
    assert rollout.failed
    assert rollout.attributes["agentenv.fault"] == "infra"
    assert rollout.attributes["error.type"] == "DoubtfulTurnError"
    assert "agentenv.score" not in rollout.attributes
    parts = collector.children(rollout)
    (request,) = [span for span in parts if span.name == "chat scripted"]
    assert request.failed
    assert request.attributes["error.type"] == "DoubtfulTurnError"
    assert "no" in request.raw.status.message
    assert all(span.failed for span in collector.named("group"))


async def test_a_dead_collector_neither_fails_nor_slows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, and nobody listens
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{held.getsockname()[1]}")
        status, log, _ = await play(tmp_path, {"*": [SOLVE, IDLE]}, env__total_steps=5)
    assert status == 0, log
    assert "scored   10 of 10 rollouts" in log
    warnings = [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]
    assert len(warnings) == 1
    assert "spans are not accepted by http://127.0.0.1" in warnings[0]
    assert warnings[0].endswith("/v1/traces: Connection refused; the run goes on")


async def test_a_collector_that_refuses_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        collector.status = 401
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        status, log, _ = await play(tmp_path, {"*": [SOLVE]})
    assert status == 0, log
    (warning,) = [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]
    assert "401" in warning
    assert collector.requests


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin_of_ours"}, "no package with the exporter 'zipkin_of_ours' is installed"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'otlp_proto_grpc'"),
    ],
)
async def test_an_exporter_that_is_missing_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, log, policy = await play(tmp_path, {"*": [SOLVE]}, "evaluate")
    assert status == 0, log
    (warning,) = [line for line in log.splitlines() if "WARNING" in line]
    assert text in warning
    assert "pip install 'agentenv[otel]'" in warning
    assert policy.parents == []


async def test_what_a_sampler_leaves_out_is_marked_so_in_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        status, log, policy = await play(tmp_path, {"*": [SOLVE]}, "evaluate")
    assert status == 0, log
    assert collector.spans == []
    assert policy.parents
    assert all(parent.endswith("-00") for parent in policy.parents)

"""Spans of records of every sort, and collectors of every sort."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentenv.agent.results import Results
from agentenv.agent.transcript import GroupRecord, Phase, RunRecord, Transcript
from agentenv.config import TraceVariables
from agentenv.runs import tracing as module
from agentenv.runs.spans import GroupSpans, Served, turn_key
from agentenv.runs.tracing import Tracing
from tests import programs_played
from tests.browser import synthetic
from tests.collector import Collector, collecting
from tests.golden.atif_cases import RUN, group, played
from tests.waiting import START_S, until


@pytest.fixture(autouse=True)
def only_these_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def traced(monkeypatch: pytest.MonkeyPatch, url: str, served: Served | None = None) -> AsyncIterator[Tracing]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    tracing = Tracing(RUN, served or Served("openai", "http://model:8000/v1"))
    tracing.open()
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close, "process", Results(), None)


def add(tracing: Tracing, record: GroupRecord) -> None:
    tracing.add(record.group, record.item_id, "train", 1_750_000_000.0, record.trajectories)


async def test_every_sort_of_record_arrives_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(START_S))
    monkeypatch.setattr("agentenv.runs.tracing.CLOSE_S", START_S)
    records = [*synthetic.few(), *synthetic.many(400), group()]
    async with collecting() as collector:
        async with traced(monkeypatch, collector.url) as tracing:
            for record in records:
                add(tracing, record)
        assert [entry.message for entry in caplog.records if entry.levelno >= logging.WARNING] == []
        made = GroupSpans(RUN, Served("openai"), content=True)
        expected = sum(len([*made.of(r.group, r.item_id, "train", 1.0, r.trajectories)]) for r in records)
        assert len(collector.spans) == expected + 1, "and the run's"
        assert len({(span.raw.trace_id, span.id) for span in collector.spans}) == len(collector.spans)
    check_played(collector)


def check_played(collector: Collector) -> None:
    (rollout,) = [
        span for span in collector.spans if span.attributes.get("gen_ai.conversation.id") == played().trajectory
        and span.name == "invoke_agent answer"
    ]  # fmt: skip
    assert rollout.attributes["agentenv.earlier_attempts"] == ["ContainerLostError: it died"]
    assert rollout.attributes["agentenv.attempt"] == 2
    assert rollout.attributes["gen_ai.usage.cache_read.input_tokens"] == 1
    first, second, _ = [span for span in collector.children(rollout) if span.name == "turn"]
    calls = [span for span in collector.children(first) if span.name.startswith("execute_tool")]
    assert {span.name: span.failed for span in calls} == {"execute_tool bash": True, "execute_tool bsh": True}
    assert sum(span.failed for span in calls) == 2, "the first call did its work"
    assert {span.name for span in collector.children(second)} == {"chat Qwen/Qwen3-4B"}, "nothing was executed"
    assert {event.name for event in second.raw.events} == {"agentenv.malformed_call", "agentenv.shortening"}


def test_a_request_that_failed_bears_the_id_that_was_sent() -> None:
    member = Transcript(
        trajectory="g-0",
        item_id="i",
        attempt=2,
        began_unix_s=1.0,
        phases=[Phase(name="model", label="step 1", started_s=0.1, ended_s=0.5)],
        finish_reason="fault",
        fault="infra",
        error="ModelServerError: HTTP 500",
    )
    spans = [*GroupSpans(RUN, Served("vllm")).of("g", "i", "train", 1.0, [member])]
    (request,) = [span for span in spans if span.client]
    assert request.key == turn_key("g-0-try2", 0)
    assert request.error == "ModelServerError: HTTP 500"
    assert request.attributes["error.type"] == "ModelServerError"


def test_a_program_s_spans_name_its_conversations_and_no_call_of_it_has_failed() -> None:
    record = programs_played.group()
    spans = [*GroupSpans(RUN, Served("vllm"), content=True).of("g", "i", "train", 1.0, record.trajectories)]
    assert len({span.key for span in spans}) == len(spans)
    rollouts = [span for span in spans if span.name == "invoke_agent answer"]
    assert [span.attributes.get("process.exit.code") for span in rollouts] == [0, 7, None]
    assert rollouts[0].attributes["agentenv.program.name"] == "small-agent"
    assert (rollouts[0].attributes["agentenv.program.conversations"], rollouts[0].error) == (3, None)
    assert "Repaired." in str(rollouts[0].attributes["gen_ai.output.messages"]), "of the main conversation"
    turns = [span for span in spans if span.name == "turn" and span.parent == rollouts[0].key]
    named = [(turn.attributes["agentenv.conversation"], turn.attributes["agentenv.dialect"]) for turn in turns]
    assert named == [(0, "messages"), (1, "chat"), (1, "chat"), (2, "chat"), (1, "chat")]
    assert [span for span in spans if span.error is not None] == []
    assert sum(span.client for span in spans) == 7, "no request but those of the turns"


async def test_a_collector_that_never_answers_holds_up_nothing_and_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    monkeypatch.setattr(module, "FAILED_CLOSE_S", 0.1)
    monkeypatch.setattr(module, "WAITING_ROLLOUTS", 20)
    connected: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connected.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with traced(monkeypatch, f"http://127.0.0.1:{port}") as tracing:
            records = synthetic.many(200)
            add(tracing, records[0])
            await until(lambda: connected)
            for record in records[1:]:
                add(tracing, record)
    finally:
        for writer in connected:
            writer.close()
        server.close()
    (warning,) = [entry.message for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert "slower than the run" in warning


async def test_one_that_comes_back_gets_what_comes_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with collecting() as collector:
        collector.status = 403
        async with traced(monkeypatch, collector.url) as tracing:
            first, second = synthetic.many(8)
            add(tracing, first)
            await until(lambda: any("403" in entry.message for entry in caplog.records))
            collector.status = 200
            add(tracing, second)
        assert {span.attributes["agentenv.group"] for span in collector.named("group")} == {second.group}
        ours = [entry for entry in caplog.records if entry.name.startswith("agentenv")]  # exporters log, too
        assert len([entry for entry in ours if entry.levelno >= logging.WARNING]) == 1


async def test_a_model_of_the_environment_s_own_is_sent_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector, traced(monkeypatch, collector.url, Served("")) as tracing:
        assert tracing.turn_headers("g") is None


@pytest.mark.parametrize(
    ("variables", "exporters"),
    [
        ({}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("otlp_proto_http",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, ("otlp_proto_http",)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp,console"}, ("otlp_proto_http", "console")),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("otlp_proto_grpc",)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c", "OTEL_SERVICE_NAME": "x"}, ()),
    ],
)
def test_the_variables_decide(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], exporters: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert TraceVariables.from_environment().exporters == exporters


def test_without_them_nothing_of_it_is_imported() -> None:
    program = (
        "import sys; from agentenv.runs.tracing import Tracing; from agentenv.runs.spans import Served\n"
        "t = Tracing(None, Served('')); t.open(); assert t.turn_headers('g') is None; t.close('', None, None)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_url_without_a_host_has_no_address() -> None:
    assert Served("openai", "").address() == {}
    assert Served("openai", "http://[::1/v1").address() == {}
    assert Served("openai", "https://m.example/v1").address() == {"server.address": "m.example", "server.port": 443}


def test_a_run_without_a_model_names_none() -> None:
    run = RunRecord(id="r", environment="e", model="", settings="s", agentenv="1", began_unix_s=1.0)
    (_, rollout, *_) = GroupSpans(run, Served("")).of("g", "i", "train", 1.0, [played()])
    assert rollout.attributes["gen_ai.provider.name"] == "agentenv"
    assert "gen_ai.request.model" not in rollout.attributes

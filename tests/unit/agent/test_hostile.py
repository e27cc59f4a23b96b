"""Whatever a model writes is data: it ends no rollout as a failure of ours, loses no record, and nothing of it goes
back to the model's server in a form for which servers refuse the whole conversation."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.group import run_group
from agentenv.agent.jsonable import deeper_than
from agentenv.agent.protocols import Completion, Message
from agentenv.agent.rollout import Rollout
from agentenv.agent.rollout_log import RolloutLog
from agentenv.agent.transcript import GroupRecord
from agentenv.config import PoolSettings
from agentenv.errors import ModelServerError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.unit.agent.agent_stubs import StubHooks, StubModel, StubSessions, farm, saying

HALF = "\ud800"
"""Half of a surrogate pair: JSON can carry it, UTF-8 cannot."""
TOLD = "\\ud800"


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


def call(name: Any, arguments: Any, call_id: Any = "i") -> Completion:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return Completion({"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls")


# fmt: off
WRITTEN = {
    "half a pair in the answer": saying("a" + HALF),
    "half a pair in a name": call("ba" + HALF, "{}"),
    "half a pair in an id": call("bash", '{"command": "ls"}', "x" + HALF),
    "half a pair in an argument": call("bash", json.dumps({"command": "echo " + HALF})),
    "half a pair as an argument's name": call("bash", json.dumps({"command": "ls", "x" + HALF: 1})),
    "half a pair for arguments": call("bash", HALF),
    "half a pair in a path": call("write_file", json.dumps({"path": "x" + HALF, "text": HALF})),
    "half a pair in a session's name": call("tmux", json.dumps({"action": "start", "session": HALF})),
    "half a pair in what was unreadable": Completion(
        {"role": "assistant", "content": "x"}, "stop", None, HALF, "bad " + HALF, "raw" + HALF
    ),
    "a long id": call("bash", '{"command": "ls"}', "x" * 100_000),
    "a long id of a tool that is not there": call("nope", "{}", "x" * 100_000),
    "a long name": call("b" * 100_000, "{}"),
    "a name with spaces and slashes": call("a b/c!", "{}"),
    "no name": call(None, "{}"),
    "an infinite number": call("bash", '{"command": "ls", "timeout": 1e999}'),
    "what is not a number": call("bash", '{"command": NaN}'),
    "a number too long to read": call("bash", '{"command": ' + "9" * 5000 + "}"),
    "objects 900 deep": call("bash", '{"command": ' + nested(900) + "}"),
    "lists 900 deep": call("bash", '{"command": ' + nested(900, "[", "]") + "}"),
    "objects 900 deep, of a server that parses": call("bash", json.loads('{"command": ' + nested(900) + "}")),
    "objects 5000 deep": call("bash", nested(5000)),
    "a NUL": call("bash", json.dumps({"command": "echo \0"})),
    "a number for arguments": call("bash", 5),
    "no calls where calls belong": Completion(
        {"role": "assistant", "content": [{"text": HALF}, 5], "tool_calls": [5, "x", None]}, "tool_calls"
    ),
    "a path of 5000 parts": call("read_file", json.dumps({"path": "a/" * 5000})),
}
# fmt: on


def check_sendable(messages: list[Message]) -> None:
    """What every server takes: UTF-8, JSON without constants of JavaScript's, plain names, short ids."""
    json.dumps(messages, ensure_ascii=False, allow_nan=False).encode()
    for one in (one for message in messages for one in message.get("tool_calls") or ()):
        read = json.loads(one["function"]["arguments"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert isinstance(read, dict)
        json.dumps(read, ensure_ascii=False).encode()
        assert re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", one["function"]["name"])
        assert 0 < len(one["id"]) <= 64


@pytest.mark.parametrize("name", WRITTEN)
async def test_what_a_model_writes_is_data(name: str, tmp_path: Path) -> None:
    model = StubModel(WRITTEN[name], saying("done"))
    async with (
        SlotPool(FakeBackend(), PoolSettings(max_containers=1)) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        transcript = await Rollout(farm(executor, lambda _: model), StubHooks(), "it", "i").run("t")  # type: ignore[arg-type]
    assert (transcript.fault, transcript.attempt, transcript.score) == ("none", 1, 1.0), transcript.error
    for asked in model.asked:
        check_sendable(asked)
    assert await RolloutLog(str(tmp_path / "r.jsonl")).add("g", {"id": "x"}, 1, [transcript]) == ""
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    assert GroupRecord.model_validate_json(line).trajectories[0].score == 1.0


async def test_an_error_that_quotes_half_a_pair_loses_no_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="agentenv")  # no report of a test can hold what is logged here

    class Quoting(StubModel):
        async def complete(self, *_: Any, **__: Any) -> Completion:
            raise ModelServerError(f"cannot encode {HALF}")

    rollout = Rollout(farm(StubSessions(), lambda _: Quoting(saying("never")), infra_retries=1), StubHooks(), "it", "i")
    (transcript,) = await run_group(["t"], rollout.run, "i")
    assert (transcript.error, transcript.attempt) == (f"ModelServerError: cannot encode {TOLD}", 2)

    async def broken(_: str) -> Any:
        raise RuntimeError(HALF)

    (transcript,) = await run_group(["t"], broken, "i")
    assert transcript.error == f"RuntimeError: {TOLD}"


async def test_a_record_that_cannot_be_made_costs_no_rollout(tmp_path: Path) -> None:
    transcript = await Rollout(farm(StubSessions()), StubHooks(), "it", "i").run("t")
    transcript.finish_reason = Unwritable("x")  # type: ignore[assignment]
    assert await RolloutLog(str(tmp_path / "r.jsonl")).add("g", {"id": "x"}, 1, [transcript])


class Unwritable(str):
    """Something no writer of JSON can take, in a place where nobody expects it."""

    def isascii(self) -> bool:
        raise RecursionError("as a value nested too deeply would")


def test_how_deep_a_value_nests() -> None:
    assert not deeper_than(1, 0)
    assert deeper_than([], 0)
    assert deeper_than([[]], 0)
    assert not deeper_than({"a": [1, {"b": 2}]}, 3)
    assert deeper_than({"a": [1, {"b": 2}]}, 2)
    assert deeper_than(json.loads(nested(900)), 100)

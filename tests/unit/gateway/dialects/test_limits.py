"""Texts, calls, names and ids at their limits, in every dialect: answers are sent, and come back, as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.agent.assistant_messages import CALL_ID_CHARS, meaning
from agentenv.agent.jsonable import DEEPEST_ARGUMENTS
from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import RefusalError
from agentenv.gateway.history import Histories
from agentenv.tools.json_text import MOST_DIGITS, read_json
from tests.unit.gateway.dialects.answers import ASKED, STAMP, answer
from tests.unit.gateway.dialects.wire import PROGRAMS, Program

LINES = "a\u2028b\u2029c\x85d\x0be\x0cf\r\n\r\ndata: g\n\n: h\revent: i\n\n"
NUL = "a\x00b"
SURROGATES = "a\ud800b\udc80"


def nested(levels: int) -> str:
    """Arguments of so many levels."""
    return '{"a":' * levels + "1" + "}" * levels


def call(arguments: str, call_id: str = "c0", name: str = "bash") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str, *calls: dict[str, Any]) -> Completion:
    return Completion({"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})})


ANSWERS = {
    "nothing": said(""),
    "white space": said(" \n\t"),
    "64 KiB": said("0123456789abcdé\n" * 4096),
    "5 MB": said("x" * 5_000_000, call(json.dumps({"command": "y" * 5_000_000}))),
    "separators of lines": said(LINES, call(json.dumps({"command": LINES}))),
    "NUL": said(NUL, call(json.dumps({NUL: NUL}))),
    "lone surrogates": said(SURROGATES, call(json.dumps({SURROGATES: SURROGATES}), name=f"bash{SURROGATES}")),
    "300 calls at once": said("", *(call(json.dumps({"n": n}), f"c{n}") for n in range(300))),
    "the deepest arguments": said("", call(nested(DEEPEST_ARGUMENTS))),
    "deeper arguments": said("", call(nested(DEEPEST_ARGUMENTS + 1))),
    "much deeper arguments": said("", call(nested(100_000))),
    "the largest number": said("", call('{"a": %s}' % ("9" * MOST_DIGITS))),
    "a larger number": said("", call('{"a": %s}' % ("9" * (MOST_DIGITS + 1)))),
    "a number beyond doubles": said("", call('{"a": 1e400}')),
    "NaN": said("", call('{"a": NaN}')),
    "a key twice": said("", call('{"a": 1, "a": 2}')),
    "a list": said("", call("[1]")),
    "a number": said("", call("7")),
    "null": said("", call("null")),
    "no arguments": said("", call("")),
    "no JSON": said("", call("ls -l")),
    "raw line breaks": said("", call('{"command": "a\nb"}')),
    "the longest id": said("", call("{}", "i" * CALL_ID_CHARS)),
    "a longer id": said("", call("{}", "i" * (CALL_ID_CHARS + 1))),
    "no id": said("", call("{}", "")),
    "an id of odd characters": said("", call("{}", "functions.bash:0 ü")),
    "a name of odd characters": said("", call("{}", name="bash<x> ü\n")),
    "a long name": said("", call("{}", name="n" * 200)),
    "no name": said("", call("{}", name="")),
}


@pytest.fixture(params=PROGRAMS, ids=str)
def program(request: pytest.FixtureRequest) -> Program:
    found = request.param
    assert isinstance(found, Program)
    return found


@pytest.mark.parametrize("done", ANSWERS.values(), ids=list(ANSWERS))
def test_an_answer_comes_back_as_it_was_sent(program: Program, done: Completion) -> None:
    found = answer(done)
    sent = json.loads(json.dumps(program.dialect.whole(ASKED, found, STAMP)))
    results = [(one.call_id, one.name, f"result {n}") for n, one in enumerate(found.calls)]
    body = json.dumps(program.request("go", program.back(sent, results)))
    request = program.dialect.parse(read_json(body))
    assert [meaning(one) for one in request.messages if one["role"] == "assistant"] == [meaning(found.message)]
    back = [(one["tool_call_id"], one["content"]) for one in request.messages if one["role"] == "tool"]
    assert back == [(call_id, text) for call_id, _, text in results]
    json.dumps(request.messages, ensure_ascii=False).encode()  # what a model's server is sent


@pytest.mark.parametrize("done", ANSWERS.values(), ids=list(ANSWERS))
def test_a_stream_is_divided_as_it_is_meant(program: Program, done: Completion) -> None:
    raw = b"".join(program.dialect.events(ASKED, answer(done), STAMP))
    assert raw.isascii()  # some clients end lines at U+2028 and the like
    assert raw.endswith(b"\n\n")
    *events, nothing = raw.decode().split("\n\n")
    assert nothing == ""
    for event in events:
        *named, data = event.splitlines()
        assert all(line.startswith("event: ") for line in named)
        assert data == "data: [DONE]" or json.loads(data.removeprefix("data: "))


@pytest.mark.parametrize(
    "text", ["", NUL, SURROGATES, LINES, "x" * 5_000_000], ids=["", "NUL", "lone", "lines", "5 MB"]
)
def test_a_text_is_read_as_it_is(program: Program, text: str) -> None:
    message = program.dialect.parse(read_json(json.dumps(program.request(text)))).messages[-1]
    assert message == {"role": "user", "content": text.encode("utf-8", "backslashreplace").decode()}


@pytest.mark.parametrize("length", [CALL_ID_CHARS, CALL_ID_CHARS + 1, 10_000])
def test_results_find_their_calls_by_ids_of_any_length(program: Program, length: int) -> None:
    ids = ["i" * length, "i" * (length - 1) + "j"]
    found = answer(said("", *(call("{}", f"c{n}") for n in range(2))))
    sent = json.dumps(program.dialect.whole(ASKED, found, STAMP))
    for n, one in enumerate(ids):
        sent = sent.replace(f'"c{n}"', f'"{one}"')
    results = [(one, "bash", f"result {n}") for n, one in enumerate(ids)]
    request = program.dialect.parse(program.request("go", program.back(json.loads(sent), results)))
    kept = [one["id"] for one in request.messages[1]["tool_calls"]]
    assert len(set(kept)) == 2
    assert all(len(one) <= CALL_ID_CHARS for one in kept)
    assert (kept == ids) == (length == CALL_ID_CHARS)
    back = [(one["tool_call_id"], one["content"]) for one in request.messages if one["role"] == "tool"]
    assert back == [(one, f"result {n}") for n, one in enumerate(kept)]


@pytest.mark.parametrize("levels", [200, 3000])
def test_a_request_that_nests_too_deeply_is_refused(program: Program, levels: int) -> None:
    deep: Any = []
    for _ in range(levels):
        deep = [deep]
    for body in (program.request("go", [deep]), {**program.request("go"), "novelty": deep}):
        with pytest.raises(RefusalError, match="nests more than 150 levels deep"):
            program.dialect.parse(body, Histories())

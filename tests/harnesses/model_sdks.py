"""The SDKs of OpenAI, Anthropic and Google as the clients of the gateway: what they parse of its answers, whole and
streamed, and what they send back of them; those for node too, and the AI SDK, which checks the shape of what it reads.
Run in an environment that has them (scripts/harnesses makes it; NODE_MODULES has those for node)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp.test_utils import TestServer
from google import genai
from google.genai import errors as google_errors
from google.genai import types as google

from agentenv.agent.assistant_messages import meaning
from agentenv.agent.protocols import Completion, ContextOverflow
from agentenv.errors import ModelServerError
from agentenv.gateway.canonical import ModelRequest, RefusalError, Shown, shown
from agentenv.gateway.server import Gateway

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"name": "bash", "description": "Run it.", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edit."}
MESSAGES_TOOL: Any = {"name": "bash", "description": "Run it.", "input_schema": SCHEMA}
GOOGLE_TOOL = google.Tool(
    function_declarations=[
        google.FunctionDeclaration(
            name="bash",
            description="Run it.",
            parameters=google.Schema(
                type=google.Type.OBJECT, properties={"command": google.Schema(type=google.Type.STRING)}
            ),
        )
    ]
)
GO: Any = {"role": "user", "content": "go"}
COMMANDS = ["ls ü", 'echo "</a>\n"']


def call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLS = Completion(
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call(f"c{n}", "bash", {"command": command}) for n, command in enumerate(COMMANDS)],
    },
    "stop",
    {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77},
    reasoning="Where am I?",
)
DONE = Completion({"role": "assistant", "content": "Done."}, "stop", CALLS.usage)
CUT = Completion({"role": "assistant", "content": "I lo"}, "length", CALLS.usage)


class Served:
    """A gateway, what it is to answer, and what it was asked."""

    def __init__(self) -> None:
        self.answer: Completion | Exception = CALLS
        self.asked: list[ModelRequest] = []
        self.delay_s = 0.0
        self.last: Completion | None = None
        self.server = TestServer(Gateway(self, quiet_s=0.05).application())

    async def generate(self, request: ModelRequest, number: int) -> Shown:
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        returned = any(message["role"] == "tool" for message in request.messages)
        done = self.last if self.last is not None and returned else self.answer
        return shown(request, done, number, reasoning=True)

    def count(self, request: ModelRequest) -> int:
        return 41

    def refuse(self, refusal: RefusalError) -> None:
        raise AssertionError(f"an SDK's request was refused: {refusal}")

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=str(self.server.make_url("/v1")), api_key="unused", max_retries=0)

    @property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=str(self.server.make_url("")), api_key="unused", max_retries=0)

    @property
    def google(self) -> genai.Client:
        options = google.HttpOptions(base_url=str(self.server.make_url("/")))
        return genai.Client(api_key="unused", http_options=options)

    def came_back(self) -> None:
        """The last request has the answer as the model gave it, and the results after it; nothing was left out."""
        request = self.asked[-1]
        said = {**CALLS.message, "content": CALLS.message["content"]}
        assert [meaning(one) for one in request.messages if one["role"] == "assistant"] == [meaning(said)]
        results = [one for one in request.messages if one["role"] == "tool"]
        assert [(one["tool_call_id"], one["content"]) for one in results] == [("c0", "out 0"), ("c1", "out 1")]
        assert request.dropped == {}
        assert request.overruled == ()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    async with one.server:
        yield one


# -- chat completions ---------------------------------------------------------------------------------


async def test_chat(served: Served) -> None:
    async with served.openai as client:
        done = await client.chat.completions.create(model="m", messages=[GO], tools=[CHAT_TOOL])
        message = done.choices[0].message
        assert message.content == "I look."
        assert message.tool_calls is not None
        assert [json.loads(one.function.arguments)["command"] for one in message.tool_calls] == COMMANDS  # type: ignore[union-attr]
        assert message.reasoning_content == "Where am I?"  # type: ignore[attr-defined]
        assert done.choices[0].finish_reason == "tool_calls"
        assert done.usage is not None
        assert done.usage.total_tokens == 77
        results: list[Any] = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"out {n}"} for n in range(2)]
        back: Any = message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="m", messages=[GO, back, *results], tools=[CHAT_TOOL])
        served.came_back()


async def test_chat_streamed(served: Served) -> None:
    async with served.openai as client:
        options: Any = {"include_usage": True}
        async with client.chat.completions.stream(
            model="m", messages=[GO], tools=[CHAT_TOOL], stream_options=options
        ) as stream:
            done = await stream.get_final_completion()
    message = done.choices[0].message
    assert message.content == "I look."
    assert message.tool_calls is not None
    assert [json.loads(one.function.arguments)["command"] for one in message.tool_calls] == COMMANDS
    assert [one.id for one in message.tool_calls] == ["c0", "c1"]
    assert done.choices[0].finish_reason == "tool_calls"
    assert done.usage is not None
    assert done.usage.total_tokens == 77


# -- responses ----------------------------------------------------------------------------------------


def check_response(done: Any) -> None:
    assert done.status == "completed"
    assert done.output_text == "I look."
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call", "function_call"]
    assert done.output[0].content[0].text == "Where am I?"
    assert [json.loads(item.arguments)["command"] for item in done.output[2:]] == COMMANDS
    assert done.usage.total_tokens == 77


async def test_responses(served: Served) -> None:
    async with served.openai as client:
        done = await client.responses.create(model="m", input="go", tools=[RESPONSES_TOOL])
        check_response(done)
        results = [{"type": "function_call_output", "call_id": f"c{n}", "output": f"out {n}"} for n in range(2)]
        back: Any = [GO, *(item.model_dump(exclude_none=True) for item in done.output), *results]
        await client.responses.create(model="m", input=back, tools=[RESPONSES_TOOL])
        served.came_back()
        counted = await client.responses.input_tokens.count(model="m", input=back, tools=[RESPONSES_TOOL])
        assert counted.input_tokens == 41


async def test_responses_streamed(served: Served) -> None:
    async with (
        served.openai as client,
        client.responses.stream(model="m", input="go", tools=[RESPONSES_TOOL]) as stream,
    ):
        kinds = [event.type async for event in stream]
        done = await stream.get_final_response()
    check_response(done)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 4


async def test_responses_with_a_tool_that_takes_text(served: Served) -> None:
    served.answer = Completion(
        {"role": "assistant", "content": "", "tool_calls": [call("c", "patch", {"input": "*** Begin"})]}
    )
    async with served.openai as client:
        done = await client.responses.create(model="m", input="go", tools=[PATCH])
        (item,) = done.output
        assert item.type == "custom_tool_call"
        assert item.input == "*** Begin"
        async with await client.responses.create(model="m", input="go", tools=[PATCH], stream=True) as stream:
            texts = [event.delta async for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert texts == ["*** Begin"]


# -- messages -----------------------------------------------------------------------------------------


def check_message(done: Any) -> None:
    assert done.stop_reason == "tool_use"
    assert [block.type for block in done.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert done.content[0].thinking == "Where am I?"
    assert done.content[1].text == "I look."
    assert [block.input["command"] for block in done.content[2:]] == COMMANDS
    assert (done.usage.input_tokens, done.usage.output_tokens) == (70, 7)


async def test_messages(served: Served) -> None:
    async with served.anthropic as client:
        done = await client.messages.create(model="m", max_tokens=99, messages=[GO], tools=[MESSAGES_TOOL])
        check_message(done)
        results: Any = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": f"out {n}"} for n in range(2)]
        history: Any = [GO, {"role": "assistant", "content": done.content}, {"role": "user", "content": results}]
        await client.messages.create(model="m", max_tokens=99, messages=history, tools=[MESSAGES_TOOL])
        served.came_back()
        counted = await client.messages.count_tokens(model="m", messages=history, tools=[MESSAGES_TOOL])
        assert counted.input_tokens == 41


async def test_messages_streamed(served: Served) -> None:
    system: Any = [{"type": "text", "text": "s"}]
    async with (
        served.anthropic as client,
        client.messages.stream(model="m", max_tokens=99, messages=[GO], tools=[MESSAGES_TOOL], system=system) as stream,
    ):
        done = await stream.get_final_message()
    check_message(done)


# -- generateContent ----------------------------------------------------------------------------------

GOOGLE = google.GenerateContentConfig(system_instruction="Be brief.", tools=[GOOGLE_TOOL], max_output_tokens=99)


def check_content(done: google.GenerateContentResponse) -> None:
    assert done.candidates is not None
    (candidate,) = done.candidates
    assert candidate.finish_reason == google.FinishReason.STOP
    assert candidate.content is not None
    assert candidate.content.parts is not None
    thought, said, *called = candidate.content.parts
    assert (thought.text, thought.thought) == ("Where am I?", True)
    assert said.text == "I look."
    assert done.function_calls == [part.function_call for part in called]
    assert [call.args for call in done.function_calls] == [{"command": command} for command in COMMANDS]
    assert done.usage_metadata is not None
    assert done.usage_metadata.total_token_count == 77
    assert done.model_version == "m"


def google_history(done: google.GenerateContentResponse, *, ids: bool) -> list[google.Content]:
    """What a program sends back of an answer, with the results of its calls."""
    assert done.candidates is not None
    said = done.candidates[0].content
    assert said is not None
    parts = [
        google.Part(
            function_response=google.FunctionResponse(
                id=f"c{n}" if ids else None, name="bash", response={"output": f"out {n}"}
            )
        )
        for n in range(2)
    ]
    return [google.Content(role="user", parts=[google.Part(text="go")]), said, google.Content(role="user", parts=parts)]


@pytest.mark.parametrize("ids", [True, False])
async def test_content(served: Served, ids: bool) -> None:
    models = served.google.aio.models
    done = await models.generate_content(model="m", contents="go", config=GOOGLE)
    check_content(done)
    history: Any = google_history(done, ids=ids)
    await models.generate_content(model="m", contents=history, config=GOOGLE)
    served.came_back()
    assert served.asked[-1].messages[0] == {"role": "system", "content": "Be brief."}
    assert served.asked[-1].tools == [CHAT_TOOL]
    assert served.asked[-1].max_tokens == 99
    assert (await models.count_tokens(model="m", contents=history)).total_tokens == 41


async def test_content_streamed(served: Served) -> None:
    chunks = [
        chunk
        async for chunk in await served.google.aio.models.generate_content_stream(
            model="m", contents="go", config=GOOGLE
        )
    ]
    (done,) = chunks
    check_content(done)


async def test_content_streamed_slowly(served: Served) -> None:
    served.delay_s = 0.3
    stream = await served.google.aio.models.generate_content_stream(model="m", contents="go", config=GOOGLE)
    (done,) = [chunk async for chunk in stream]
    check_content(done)
    served.answer = ModelServerError("no route")
    with pytest.raises(google_errors.ServerError) as failed:
        _ = [
            chunk
            async for chunk in await served.google.aio.models.generate_content_stream(
                model="m", contents="go", config=GOOGLE
            )
        ]
    assert (failed.value.code, failed.value.status) == (503, "UNAVAILABLE")


# -- ends, failures, models ---------------------------------------------------------------------------


async def test_a_cut_answer(served: Served) -> None:
    served.answer = CUT
    async with served.openai as client, served.anthropic as other:
        chat = await client.chat.completions.create(model="m", messages=[GO])
        assert chat.choices[0].finish_reason == "length"
        response = await client.responses.create(model="m", input="go")
        assert response.incomplete_details is not None
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        message = await other.messages.create(model="m", max_tokens=9, messages=[GO])
        assert message.stop_reason == "max_tokens"
    content = await served.google.aio.models.generate_content(model="m", contents="go")
    assert content.candidates is not None
    assert content.candidates[0].finish_reason == google.FinishReason.MAX_TOKENS


async def google_asks(served: Served, stream: bool) -> None:
    models = served.google.aio.models
    if stream:
        _ = [chunk async for chunk in await models.generate_content_stream(model="m", contents="go")]
    else:
        await models.generate_content(model="m", contents="go")


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_are_the_sdks_own(served: Served, stream: bool) -> None:
    async with served.openai as client, served.anthropic as other:
        served.answer = ContextOverflow("9 tokens")
        for asks in (
            client.chat.completions.create(model="m", messages=[GO], stream=stream),
            client.responses.create(model="m", input="go", stream=stream),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await asks
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9 tokens"):
            await other.messages.create(model="m", max_tokens=9, messages=[GO], stream=stream)
        with pytest.raises(google_errors.ClientError, match="exceeds the maximum number of tokens allowed"):
            await google_asks(served, stream)
        served.answer = ModelServerError("no route")
        with pytest.raises(google_errors.ServerError):
            await google_asks(served, stream)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=[GO], stream=stream)
        with pytest.raises(anthropic.InternalServerError):
            await other.messages.create(model="m", max_tokens=9, messages=[GO], stream=stream)


async def test_failures_after_a_stream_has_begun(served: Served) -> None:
    served.delay_s, served.answer = 0.1, ModelServerError("no route")
    async with served.openai as client, served.anthropic as other:
        with pytest.raises(openai.APIError, match="no route"):
            _ = [chunk async for chunk in await client.chat.completions.create(model="m", messages=[GO], stream=True)]
        events = [event async for event in await client.responses.create(model="m", input="go", stream=True)]
        assert [event.type for event in events] == ["response.created", "response.failed"]
        assert events[-1].response.error.code == "server_error"  # type: ignore[union-attr]
        with pytest.raises(anthropic.APIStatusError, match="no route"):
            async with other.messages.stream(model="m", max_tokens=9, messages=[GO]) as stream:
                await stream.get_final_message()


async def test_images_are_left_out(served: Served) -> None:
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    block: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}
    async with served.openai as client, served.anthropic as other:
        await client.chat.completions.create(model="m", messages=[image])
        await client.responses.create(model="m", input=[item])
        await other.messages.create(model="m", max_tokens=9, messages=[block])
    contents: Any = [google.Part.from_bytes(data=b"x", mime_type="image/png")]
    await served.google.aio.models.generate_content(model="m", contents=contents)
    notes = ["[image (image/png) is not shown]"] * 3 + ["[data (image/png) is not shown]"]
    assert [request.messages for request in served.asked] == [[{"role": "user", "content": note}] for note in notes]
    assert [sum(request.dropped.values()) for request in served.asked] == [1] * 4


async def test_models(served: Served) -> None:
    async with served.openai as client, served.anthropic as other:
        assert [one.id async for one in client.models.list()] == ["policy"]
        assert [one.id async for one in other.models.list()] == ["policy"]
        assert (await client.models.retrieve("m")).id == (await other.models.retrieve("m")).id == "m"
    assert (await served.google.aio.models.get(model="m")).name == "models/m"


# -- clients for node ---------------------------------------------------------------------------------

OWN = ("chat", "responses", "messages", "google")
AI_SDK = ("ai_chat", "ai_compatible", "ai_responses", "ai_messages", "ai_google")


@pytest.mark.parametrize("client", [*OWN, *AI_SDK])
async def test_clients_for_node(served: Served, client: str) -> None:
    """Each has the model's calls, sends them back with their results, and reads the last answer; once without a stream
    and once with one that is kept open for some time."""
    served.delay_s, served.last = 0.1, DONE
    here, node = Path(__file__).parent, Path(sys.executable).with_name("node")
    url = str(served.server.make_url("")).rstrip("/")
    process = await asyncio.create_subprocess_exec(
        node,
        here / "model_sdks.cjs",
        client,
        url,
        env={**os.environ, "NODE_PATH": os.environ["NODE_MODULES"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    expected = {"text": "I look.", "commands": COMMANDS, "last": "Done."}
    assert json.loads(stdout.decode().splitlines()[-1]) == [expected, expected]
    assert [request.stream for request in served.asked] == [False, False, True, True]
    served.came_back()

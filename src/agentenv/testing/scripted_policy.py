"""An OpenAI-compatible server that plays scripts. Deterministic, and recognisable as scripted: the model is
``scripted``, ``system_fingerprint`` and the ``Server`` header say so.

    async with ScriptedPolicy({"task-1": [[Reply(calls=(Call("bash", {"command": "ls"}),)), Reply("done")]]}) as policy:
        ...  # base_url=policy.base_url, model_name="scripted", api_key="unused"

With a ``speaker`` it also serves managed servers: ``/generate`` of vLLM and SGLang, with tokens and logprobs of the
script's replies; ``speaker.said`` has them for tests. There the trajectory's name is in the header
``X-Trajectory``.

A conversation's task is found in its first user message (``[task:task-1]`` by default). Its member is the number at
the end of the request's ``user`` field when one is sent (``…-3`` or ``…-3-try2``, as AgentEnv does with
``send_trajectory_id``); otherwise conversations are numbered in order of arrival, and later recognised by the ids
of their tool calls. A request for one token, with which a command begins to see whether the server takes its requests,
is answered without a player and not counted.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from agentenv.config import cannot_listen
from agentenv.testing.generate import TokenSpeaker, read_request
from agentenv.testing.script import Failure, Reply, Script, Turn, answer

MODEL: Final = "scripted"
FINGERPRINT: Final = "agentenv-scripted-policy"
TASK_MARK: Final = re.compile(r"\[task:([^\]]+)\]")
MEMBER_MARK: Final = re.compile(r"-(\d+)(?:-try\d+)?$")
CALL_ID: Final = re.compile(r"^scripted-(\d+)-")
TRAJECTORY_HEADER: Final = "X-Trajectory"
MAX_REQUEST_BYTES: Final = 256 * 1024 * 1024


class ScriptedPolicy:
    """The server, as an async context manager. ``latency_s``: pause before each answer.

    Opening it raises ConfigError when the address cannot be listened on.
    """

    def __init__(
        self,
        script: Script,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        latency_s: float = 0.0,
        task_mark: re.Pattern[str] = TASK_MARK,
        speaker: TokenSpeaker | None = None,
    ) -> None:
        self._script = script
        self._host = host
        self._port = port
        self._latency_s = latency_s
        self._task_mark = task_mark
        self._arrivals: Counter[str] = Counter()
        self._speaker = speaker
        self._runner: web.AppRunner | None = None
        self.requests = 0
        """Number of completions requested so far, including failures."""

    @property
    def base_url(self) -> str:
        """``base_url`` for an OpenAI client. Valid while the server is running."""
        return f"http://{self._host}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/generate", self._generate)
        app.on_response_prepare.append(_say_who)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen(error, self._host, self._port) from error
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "scripted": True})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": FINGERPRINT}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            messages = body["messages"]
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise TypeError("messages must be a list of objects")
        except (ValueError, KeyError, TypeError) as error:
            self.requests += 1
            return _refused(Failure(400, f"bad request: {type(error).__name__}: {error}"))
        if body.get("max_tokens") == 1:
            return web.json_response(completion(Reply("ok", finish_reason="length"), Turn("", 0, 0, messages)))
        self.requests += 1
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        turn = self._turn(messages, body.get("user"), body.get("tools") or ())
        said = answer(self._script, turn)
        return _refused(said) if isinstance(said, Failure) else web.json_response(completion(said, turn))

    async def _generate(self, request: web.Request) -> web.Response:
        """vLLM's and SGLang's own endpoint: token ids in, token ids and logprobs out."""
        self.requests += 1
        if self._speaker is None:
            return _refused(Failure(404, "this policy has no tokenizer: give it a speaker"))
        try:
            asked = read_request(await request.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _refused(Failure(400, f"bad request: {type(error).__name__}: {error}"))
        if (refusal := self._speaker.too_long(asked)) is not None:
            return _refused(refusal)
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        text, step = self._speaker.parse_prompt(asked.prompt)
        task = _task_in(text, self._task_mark)
        named = MEMBER_MARK.search(request.headers.get(TRAJECTORY_HEADER, ""))
        member = int(named.group(1)) if named else self._speaker.member_of(asked.prompt)
        if member is None:
            member = self._arrivals[task]
            self._arrivals[task] += 1
        turn = Turn(task, member, step, [{"role": "user", "content": text}])
        said = answer(self._script, turn)
        return (
            _refused(said) if isinstance(said, Failure) else web.json_response(self._speaker.answer(said, turn, asked))
        )

    def _turn(self, messages: Sequence[Mapping[str, Any]], user: Any, tools: Sequence[Mapping[str, Any]]) -> Turn:
        task = _task_of(messages, self._task_mark)
        spoken = [message for message in messages if message.get("role") == "assistant"]
        member = _member_of(user, spoken)
        if member is None:
            member = self._arrivals[task]
            self._arrivals[task] += 1
        return Turn(task, member, len(spoken), messages, tools)


def _task_of(messages: Sequence[Mapping[str, Any]], mark: re.Pattern[str]) -> str:
    """Of the first user message that names one: agent programs put messages of their own before the task."""
    asked = (str(message.get("content") or "") for message in messages if message.get("role") == "user")
    return next((task for text in asked if (task := _task_in(text, mark))), "")


def _task_in(text: str, mark: re.Pattern[str]) -> str:
    found = mark.search(text)
    return found.group(1) if found else ""


def _member_of(user: Any, spoken: Sequence[Mapping[str, Any]]) -> int | None:
    if isinstance(user, str) and (found := MEMBER_MARK.search(user)):
        return int(found.group(1))
    ids = [str(call.get("id")) for message in spoken for call in message.get("tool_calls") or []]
    found = next((match for call_id in ids if (match := CALL_ID.match(call_id))), None)
    return int(found.group(1)) if found else None


def completion(reply: Reply, turn: Turn) -> dict[str, Any]:
    """The reply as a ChatCompletion; usage counts four characters as one token."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"scripted-{turn.member}-{turn.step}-{n}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
                },
            }
            for n, call in enumerate(reply.calls)
        ]
    prompt, written = len(json.dumps(list(turn.messages))) // 4 + 1, len(json.dumps(message)) // 4 + 1
    return {
        "id": f"scripted-{turn.task}-{turn.member}-{turn.step}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": reply.finish_reason or ("tool_calls" if reply.calls else "stop"),
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }


def _refused(failure: Failure) -> web.Response:
    error = {"message": failure.message, "type": FINGERPRINT, "code": failure.code}
    return web.json_response({"error": error}, status=failure.status)


async def _say_who(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = FINGERPRINT

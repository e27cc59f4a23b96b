"""`agentenv mcp` as clients of the Model Context Protocol meet it: the SDK's own client, over both transports."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx2
import pytest
from mcp import Client, ClientSession, MCPError, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from agentenv.config import ContainerSettings
from agentenv.errors import AgentEnvError, ConfigError, ConnectionLostError, LeaseReclaimedError, SlotDestroyedError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm.open import open_executor
from agentenv.mcp.http import PATH, address, needed_token, serving
from agentenv.mcp.server import made
from agentenv.mcp.slots import SessionSlot
from agentenv.mcp.tools import offered
from agentenv.slots.backends.registry import Backend
from agentenv.wire.calls import CallResult
from tests.waiting import until

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
ACCEPT = {"Accept": "application/json, text/event-stream"}


def said(result: types.CallToolResult) -> tuple[bool, str]:
    """Whether it is an error, and its text."""
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return result.is_error, content.text


@asynccontextmanager
async def server(*, idle_timeout_s: float = 600, token: str | None = None) -> AsyncIterator[tuple[str, ToolExecutor]]:
    """A server over HTTP with two slots: its URL, and whose slots they are."""
    async with open_executor(ContainerSettings(slots_per_container=2), Backend.fake) as executor:
        open_session = partial(executor.open, "mcp", acquire_timeout_s=30)
        of_sdk = made(open_session, offered(()), timeout_s=60)
        async with serving(of_sdk, "127.0.0.1", 0, token=token, idle_timeout_s=idle_timeout_s) as url:
            yield url, executor


@asynccontextmanager
async def session(url: str) -> AsyncIterator[ClientSession]:
    async with streamable_http_client(url) as (reader, writer), ClientSession(reader, writer) as opened:
        await opened.initialize()
        yield opened


def held(executor: ToolExecutor) -> int:
    return executor.statistics().sessions_now


async def test_a_client_over_standard_input_and_output(tmp_path: Path) -> None:
    program = "from agentenv.cli import main; main()"
    arguments = ["-c", program, "mcp", "--backend", "fake", "--own", "--tools", "bash,read_file,write_file,terminal"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = StdioServerParameters(command=sys.executable, args=arguments, env=environment)
    async with stdio_client(command) as (reader, writer), ClientSession(reader, writer) as opened:
        await opened.initialize()
        tools = (await opened.list_tools()).tools
        assert [tool.name for tool in tools] == ["bash", "terminal", "read_file", "write_file"]
        assert tools[0].input_schema["required"] == ["command"]
        assert said(await opened.call_tool("bash", {"command": "echo out; exit 3"})) == (
            True,
            "exit code: 3\nstdout:\nout",
        )
        assert said(await opened.call_tool("write_file", {"path": "a", "content": "x\n"})) == (
            False,
            "created, 2 bytes",
        )
        assert said(await opened.call_tool("read_file", {"path": "a"})) == (False, "x\n")
        await opened.call_tool("terminal", {"command": "cd /; A=1"})
        assert "/\n1\n" in said(await opened.call_tool("terminal", {"command": "pwd; echo $A"}))[1]


async def test_wrong_calls_are_told_to_the_model() -> None:
    async with server() as (url, executor), session(url) as opened:
        for tool, arguments, message in (
            ("bash", {"comand": "x"}, "missing argument 'command'"),
            ("bash", {"command": "x", "argv": ["x"]}, "unknown argument 'argv'"),
            ("artifacts", {"action": "list"}, 'unknown tool "artifacts"'),
            ("read_file", {"path": "no"}, "No such file"),
        ):
            wrong, text = said(await opened.call_tool(tool, arguments))
            assert wrong, tool
            assert message in text
        assert held(executor) == 1


async def test_a_picture_is_an_image() -> None:
    async with server() as (url, _), session(url) as opened:
        text = base64.b64encode(PNG).decode()
        await opened.call_tool(
            "bash", {"command": f"echo {text} | base64 -d > a.png; head -c 20 a.png > cut; printf '\\377' > no"}
        )
        for path in ("a.png", "cut"):
            (picture,) = (await opened.call_tool("read_file", {"path": path})).content
            assert isinstance(picture, types.ImageContent)
            assert picture.mime_type == "image/png"
            assert base64.b64decode(picture.data) == PNG[: len(PNG) if path == "a.png" else 20]
        assert "not valid UTF-8" in said(await opened.call_tool("read_file", {"path": "no"}))[1]


async def test_sessions_have_a_slot_each_and_give_it_back() -> None:
    async with server() as (url, executor):
        async with session(url) as one, session(url) as other:
            assert held(executor) == 0  # none before a call
            for number, each in enumerate((one, other)):
                await each.call_tool("bash", {"command": f"echo {number} > who"})
            for number, each in enumerate((one, other)):
                assert said(await each.call_tool("bash", {"command": "cat who"}))[1].endswith(f"stdout:\n{number}")
            assert held(executor) == 2
        await until(lambda: held(executor) == 0)  # the client deleted them
        async with session(url) as again:
            assert said(await again.call_tool("bash", {"command": "cat who"}))[0]


async def test_a_client_of_the_protocol_without_sessions_falls_back_to_one() -> None:
    async with server() as (url, executor), Client(url) as client:
        await client.call_tool("bash", {"command": "echo 1 > a"})
        assert said(await client.call_tool("bash", {"command": "cat a"})) == (False, "exit code: 0\nstdout:\n1")
        assert held(executor) == 1


async def test_a_session_that_its_client_forgot_ends() -> None:
    async with server(idle_timeout_s=5) as (url, executor), aiohttp.ClientSession(headers=ACCEPT) as http:
        async with http.post(url, json=INITIALIZE) as reply:
            known = {"Mcp-Session-Id": reply.headers["Mcp-Session-Id"]}
            await reply.read()
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call"}
        call |= {"params": {"name": "bash", "arguments": {"command": "sleep 6; echo ok"}}}
        async with http.post(url, json=call, headers=known) as reply:  # longer than idle: a call is no idleness
            assert "ok" in await reply.text()
        assert held(executor) == 1
        await until(lambda: held(executor) == 0)
        async with http.post(url, json=call, headers=known) as reply:
            assert reply.status == 404


async def test_slots_are_given_back_when_the_server_ends() -> None:
    async with open_executor(ContainerSettings(slots_per_container=1), Backend.fake) as executor:
        of_sdk = made(partial(executor.open, "mcp"), offered(()), timeout_s=60)
        async with aiohttp.ClientSession(headers=ACCEPT) as http:
            async with serving(of_sdk, "127.0.0.1", 0, token=None, idle_timeout_s=600) as url:
                async with http.post(url, json=INITIALIZE) as reply:
                    known = {"Mcp-Session-Id": reply.headers["Mcp-Session-Id"]}
                    await reply.read()
                call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call"}
                call |= {"params": {"name": "bash", "arguments": {"command": "true"}}}
                async with http.post(url, json=call, headers=known) as reply:
                    await reply.read()
                assert held(executor) == 1
            assert held(executor) == 0


async def test_who_may_ask() -> None:
    async with server() as (url, executor), aiohttp.ClientSession(headers=ACCEPT) as http:
        for refused in ({"Host": "rebound.example"}, {"Origin": "http://rebound.example"}):
            async with http.post(url, json=INITIALIZE, headers=refused) as reply:
                assert reply.status in (403, 421)
        async with http.post(url.removesuffix(PATH), json=INITIALIZE) as reply:
            assert reply.status == 404
        async with http.post(url, json={**INITIALIZE, "method": "tools/list"}) as reply:
            assert reply.status == 400
        assert held(executor) == 0
    token = "a-token-of-a-test-only"
    async with server(token=token) as (url, _), aiohttp.ClientSession(headers=ACCEPT) as http:
        async with http.post(url, json=INITIALIZE) as reply:
            assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
        async with http.post(url, json=INITIALIZE, headers={"Authorization": "Bearer other-token-than-that"}) as reply:
            assert reply.status == 401
        bearing = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"})
        async with (
            bearing,
            streamable_http_client(url, http_client=bearing) as (reader, writer),
            ClientSession(reader, writer) as opened,
        ):
            await opened.initialize()
            assert said(await opened.call_tool("bash", {"command": "true"}))[0] is False


def test_addresses_and_who_needs_a_token(tmp_path: Path) -> None:
    assert [address(each) for each in ("8791", ":8791", "[::1]:0", "0.0.0.0:80")] == [
        ("127.0.0.1", 8791),
        ("127.0.0.1", 8791),
        ("::1", 0),
        ("0.0.0.0", 80),
    ]
    for wrong in ("", "localhost", "a:b", "a:70000"):
        with pytest.raises(ConfigError, match="--http"):
            address(wrong)
    assert {needed_token(host, None) for host in ("127.0.0.1", "127.3.0.1", "::1", "localhost")} == {None}
    for host in ("0.0.0.0", "::", "192.0.2.1", "farm.example"):
        with pytest.raises(ConfigError, match="--token-file"):
            needed_token(host, None)
    made_token = needed_token("0.0.0.0", tmp_path / "token")
    assert made_token
    assert (tmp_path / "token").read_text().strip() == made_token == needed_token("127.0.0.1", tmp_path / "token")


class Failing:
    """A session whose first call fails."""

    def __init__(self, error: AgentEnvError | None) -> None:
        self.error = error
        self.closed = False

    async def __aenter__(self) -> Failing:
        return self

    async def aclose(self) -> None:
        self.closed = True

    async def call(self, *_: Any, **__: Any) -> CallResult:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return CallResult(id="1", exit_code=0)


@pytest.mark.parametrize("kind", [LeaseReclaimedError, ConnectionLostError])
async def test_a_failing_slot_is_an_error_of_the_protocol(kind: type[AgentEnvError]) -> None:
    """A lost slot is replaced by the next call, and the client is told so."""
    sessions = [Failing(kind("the reason")), Failing(None)]
    waiting = list(sessions)
    slot = SessionSlot(lambda: cast("ToolSession", waiting.pop(0)), offered(()), 60)
    lost = kind is LeaseReclaimedError
    with pytest.raises(MCPError, match="the next call begins in a new slot" if lost else "the reason"):
        await slot.call("bash", {"command": "true"})
    assert sessions[0].closed is lost
    assert said(await slot.call("bash", {"command": "true"})) == (False, "exit code: 0\n(no output)")
    await slot.close()
    assert [each.closed for each in sessions] == [True, lost]


async def test_a_slot_that_the_model_destroyed_is_told_to_the_model() -> None:
    slot = SessionSlot(lambda: cast("ToolSession", Failing(SlotDestroyedError("killed"))), offered(()), 60)
    wrong, text = said(await slot.call("bash", {"command": "kill -9 1"}))
    assert (wrong, "begins in a new slot" in text) == (True, True)


async def test_two_first_calls_at_once_lease_one_slot() -> None:
    async with server() as (url, executor), session(url) as opened:
        await asyncio.gather(*(opened.call_tool("bash", {"command": "true"}) for _ in range(5)))
        assert held(executor) == 1

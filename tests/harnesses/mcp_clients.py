"""`agentenv mcp` with an agent of the OpenAI Agents SDK and MCP's own inspector as its clients, over both transports.
Run in an environment that has both (scripts/harnesses makes it; NODE_MODULES has the inspector); the server is the
project's own, by AGENTENV_PYTHON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from agents.mcp import MCPServer, MCPServerStdio, MCPServerStreamableHttp
from openai import AsyncOpenAI

from agentenv.testing import Call, Reply, ScriptedPolicy, Turn

IMAGE = "debian:bookworm-slim"
COMMAND = [os.environ["AGENTENV_PYTHON"], "-c", "from agentenv.cli import main; main()", "mcp", "--image", IMAGE]
STARTS_S = 300
PLACES = [
    word for name in ("AGENTENV_CACHE_DIR", "AGENTENV_STATE_DIR") for word in ("-e", f"{name}={os.environ[name]}")
]
"""Of images and containers: the inspector hands on little of its own environment to a server."""
KILLED = """
import asyncio, sys
from agents.mcp import MCPServerStdio
async def main():
    command = {"command": sys.argv[1], "args": sys.argv[2:]}
    async with MCPServerStdio(command, client_session_timeout_seconds=300) as server:
        await server.call_tool("bash", {"command": "true"})
        print("called", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def stdio(*arguments: str) -> MCPServerStdio:
    command, *rest = [*COMMAND, *arguments]
    return MCPServerStdio(
        {"command": command, "args": rest, "env": dict(os.environ)}, client_session_timeout_seconds=STARTS_S
    )


def over_http(url: str, **more: Any) -> MCPServerStreamableHttp:
    return MCPServerStreamableHttp({"url": url, **more}, client_session_timeout_seconds=STARTS_S)


@asynccontextmanager
async def served(*arguments: str) -> AsyncIterator[str]:
    """The server over HTTP: its URL."""
    server = await asyncio.create_subprocess_exec(
        *COMMAND, "--http", "127.0.0.1:0", "--json", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        line = await asyncio.wait_for(server.stdout.readline(), STARTS_S)
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        await server.wait()


async def inspected(server: Sequence[str], *asked: str) -> tuple[int, Any]:
    """The inspector's command on a server, a command and its arguments or a URL: its exit code and what it printed."""
    node = Path(sys.executable).with_name("node")
    program = Path(os.environ["NODE_MODULES"], ".bin/mcp-inspector")
    process = await asyncio.create_subprocess_exec(
        node, program, "--cli", *server, *PLACES, "--connect-timeout", str(int(1000 * STARTS_S)), "--method", *asked,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, errors = await asyncio.wait_for(process.communicate(), STARTS_S)
    assert printed, errors.decode()
    return process.returncode or 0, json.loads(printed)


def play(turn: Turn) -> Reply:
    """Look which system this is, fail, and answer with what was seen."""
    if turn.step == 0:
        return Reply(calls=(Call("bash", {"command": ". /etc/os-release; echo $VERSION_CODENAME; id -u"}),))
    if turn.step == 1:
        return Reply(calls=(Call("bash", {"command": "echo lost; exit 3"}),))
    seen = [str(message.get("content")) for message in turn.messages if message.get("role") == "tool"]
    return Reply("\n".join(seen))


async def answer_of(server: MCPServer) -> str:
    """What an agent with these tools answers."""
    async with (
        ScriptedPolicy({"*": [play]}) as policy,
        AsyncOpenAI(base_url=policy.base_url, api_key="unused") as client,
    ):
        model = OpenAIChatCompletionsModel(model="scripted", openai_client=client)
        agent = Agent(name="player", model=model, mcp_servers=[server])
        done = await Runner.run(agent, "Which system is this?", run_config=RunConfig(tracing_disabled=True))
        return str(done.final_output)


async def test_an_agent_over_standard_input_and_output() -> None:
    async with stdio("--tools", "bash,read_file") as server:
        assert [tool.name for tool in await server.list_tools()] == ["bash", "read_file"]
        answer = await answer_of(server)
        assert "bookworm" in answer
        assert "exit code: 3" in answer
        failed = await server.call_tool("bash", {"command": "exit 3"})
        assert failed.is_error
        wrong = await server.call_tool("bash", {"command": "true", "comand": "true"})
        assert wrong.is_error
        assert "comand" in wrong.content[0].text


async def test_agents_over_http_have_a_slot_each() -> None:
    async with served("--slots", "2") as url, over_http(url) as one, over_http(url) as other:
        for answer in await asyncio.gather(answer_of(one), answer_of(other)):
            assert "bookworm" in answer
            assert "exit code: 3" in answer
        await one.call_tool("bash", {"command": "echo 1 > /tmp/mine"})
        assert (await other.call_tool("bash", {"command": "cat /tmp/mine"})).is_error


async def test_the_inspector() -> None:
    call = ("tools/call", "--tool-name", "bash", "--tool-arg")
    # It ends no session, so its slots are given back when they are idle.
    async with served("--slots", "2", "--idle-timeout", "5", "--wait", "120") as url:
        for server in (COMMAND, [url]):
            code, listed = await inspected(server, "tools/list")
            assert code == 0, listed
            assert {"bash", "terminal", "read_file", "patch"} < {tool["name"] for tool in listed["tools"]}
            assert all(tool["description"] and tool["inputSchema"]["type"] == "object" for tool in listed["tools"])
            code, done = await inspected(server, *call, "command=. /etc/os-release; echo $ID")
            assert (code, done["content"]) == (0, [{"type": "text", "text": "exit code: 0\nstdout:\ndebian"}])
            code, failed = await inspected(server, *call, "command=exit 3")
            assert (code, failed["isError"]) == (5, True)


async def test_a_client_that_leaves_gives_its_slot_back() -> None:
    """The only slot: of a client that ends its session, and of one that does not (as one that is killed)."""
    async with served("--slots", "1", "--idle-timeout", "5", "--wait", "120") as url:
        for ends in (True, False, True):
            async with over_http(url, terminate_on_close=ends) as server:
                found = await server.call_tool("bash", {"command": "cat /tmp/mine; echo 1 > /tmp/mine"})
                assert "No such file" in found.content[0].text


async def test_the_command_ends_when_its_client_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    shell = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(noted), *COMMAND]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, "env", *(f"{k}={v}" for k, v in os.environ.items()), *shell,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    assert await asyncio.wait_for(client.stdout.readline(), STARTS_S) == b"called\n"
    server = Path("/proc", noted.read_text().strip())
    assert server.exists()
    client.send_signal(signal.SIGKILL)
    await client.wait()
    async with asyncio.timeout(60):
        while server.exists():
            await asyncio.sleep(0.1)

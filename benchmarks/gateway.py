"""What answers agent programs, without slots: programs in a process of their own, gateways and models in this one."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from agentenv.agent.protocols import Completion, Model
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.env.environment import AgentEnv, AgentEnvConfig
from agentenv.gateway.conversations import Conversations
from agentenv.gateway.server import Gateway
from agentenv.gateway.turns import ProgramTurns
from agentenv.testing import build_tokenizer
from benchmarks.measure import MIB, percentile

TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{n}",
            "description": "It does what a tool does, and says how. " * 20,
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
    for n in range(8)
]
SYSTEM: Final = "You repair programs. " * 150
OUTPUT: Final = "a line of what a command prints\n" * 40
CALL: Final = {"name": "tool_0", "arguments": {"command": "sed -n 1,200p src/a/module.py " + "x" * 150}}


@dataclass
class Costs:
    """Of one run. ``cpu_ms``: of this process for each request, in their order; ``waited_s``: what programs waited."""

    cpu_ms: list[float] = field(default_factory=list)
    cpu_cores: float = 0.0
    rate: float = 0.0
    memory_mib: float = 0.0
    waited_s: list[float] = field(default_factory=list)

    @property
    def p50_ms(self) -> float:
        return 1e3 * percentile(self.waited_s, 0.5)


class Instant:
    """A model that answers at once, and notes the CPU time at which it was asked."""

    def __init__(self, asked_at_s: list[float]) -> None:
        self._asked_at_s = asked_at_s

    async def complete(self, *_: Any, **__: Any) -> Completion:
        self._asked_at_s.append(time.process_time())
        function = {"name": CALL["name"], "arguments": json.dumps(CALL["arguments"])}
        call = {"id": f"call_{len(self._asked_at_s)}", "type": "function", "function": function}
        return Completion({"role": "assistant", "content": "I look at it.", "tool_calls": [call]}, "tool_calls")


class Nothing(AgentEnv):
    """An environment for its models only."""

    name = "nothing"

    def build_task(self, item: Any) -> str:
        return str(item)

    def score_trajectory(self, item: Any, final_response: str) -> float:  # noqa: ARG002
        return 0.0


async def one_long(turns: int) -> Costs:
    """One conversation of so many turns, with a model that costs nothing."""
    asked_at_s: list[float] = []
    async with _gateways(1, lambda _: Instant(asked_at_s)) as paths:
        waited_s = await _programs(paths, turns)
    each = [1e3 * (after - before) for before, after in pairwise(asked_at_s)]
    return Costs(cpu_ms=each, waited_s=waited_s)


async def many(rollouts: int, turns: int, latency_s: float) -> Costs:
    """So many conversations at once, with models that keep tokens, of a server in another process."""
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-") as where:
        tokenizer = build_tokenizer(Path(where) / "tokenizer", merges_from=[SYSTEM, OUTPUT, json.dumps(TOOLS)])
        script = Path(where) / "script.json"
        script.write_text(json.dumps({"tasks": {"*": [[{"text": "I look at it.", "calls": [CALL]}] * turns]}}))
        async with _policy(script, tokenizer, latency_s) as url:
            config = AgentEnvConfig(
                tokenizer_name=str(tokenizer), tool_pool_mode="fake", max_containers=1, slots_per_container=1,
                group_size=1, use_wandb=False, runs_dir="", tool_call_parser="hermes", agent_max_tokens=2000,
                max_token_length=1_000_000, send_trajectory_id=True,
            )  # fmt: skip
            server = APIServerConfig(
                base_url=url, model_name="scripted", api_key="x", timeout=60, server_type="vllm",
                num_max_requests_at_once=4 * rollouts,
            )  # fmt: skip
            async with (
                Nothing(config, [server]) as env,
                _gateways(rollouts, lambda n: env.model_for(f"load-{n}-{n}")) as paths,
            ):
                began, cpu_s = time.perf_counter(), time.process_time()
                waited_s = await _programs(paths, turns)
                took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    return Costs([1e3 * cpu_s / len(waited_s)], cpu_s / took_s, len(waited_s) / took_s, memory, waited_s)


@asynccontextmanager
async def _gateways(number: int, model_for: Callable[[int], Model]) -> AsyncIterator[list[str]]:
    """Their sockets."""
    async with AsyncExitStack() as stack:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentenv-gateways-"))
        paths = []
        for n in range(number):
            conversations = await stack.enter_async_context(Conversations(lambda n=n: model_for(n), 4))  # type: ignore[misc]
            turns = ProgramTurns(conversations, AgentSettings(max_steps=10_000), Timeline())
            runner = web.AppRunner(Gateway(turns).application(), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            paths.append(f"{where}/{n}")
            await web.UnixSite(runner, paths[-1]).start()
        yield paths


@asynccontextmanager
async def _policy(script: Path, tokenizer: Path, latency_s: float) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentenv.testing", str(script), "--tokenizer", str(tokenizer),
        "--latency-s", str(latency_s), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline())["base_url"]
    finally:
        process.terminate()
        await process.wait()


async def _programs(paths: Sequence[str], turns: int) -> list[float]:
    """One program for each socket, in another process; the seconds that each of their requests took."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.gateway", str(turns), *paths, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the programs ended with {process.returncode}")
    return list(json.loads(printed))


async def _program(path: str, turns: int) -> list[float]:
    reader, writer = await asyncio.open_unix_connection(path, limit=2**24)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"[task:{path}] go"}]
    took_s = []
    for _ in range(turns):
        body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        began = time.perf_counter()
        writer.write(head + body)
        fields = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(fields.split(b"content-length:")[1].split(b"\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
        took_s.append(time.perf_counter() - began)
        message = reply["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": one["id"], "content": OUTPUT} for one in message["tool_calls"]]
        messages += [message, *results]
    writer.close()
    return took_s


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("turns", type=int)
    parser.add_argument("paths", nargs="+", help="sockets of gateways")
    chosen = parser.parse_args()
    took_s = await asyncio.gather(*(_program(path, chosen.turns) for path in chosen.paths))
    sys.stdout.write(json.dumps([one for each in took_s for one in each]))


if __name__ == "__main__":
    asyncio.run(_main())

"""Slots as a runtime of verifiers (docs/harnesses.md):

python verifiers_slots.py TASKSET --env.agent.runtime.type agentenv --env.agent.runtime.image python:3.12-slim

verifiers has a closed list of runtimes and no entry point for others: it is added to before the rest of the package
reads it. Import this module before verifiers.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field

from agentenv import AsyncSandbox, shared_farm
from agentenv.errors import AgentEnvError, InfraError, SlotDestroyedError
from agentenv.harnesses.programs import run


def _runtimes_alone() -> Any:
    """``verifiers.v1.runtimes`` without what it is a part of, whose configurations take the list as it is then."""
    found = find_spec("verifiers")
    assert found is not None, "install verifiers"
    alone = types.ModuleType("verifiers.v1")
    alone.__path__ = [f"{path}/v1" for path in found.submodule_search_locations or ()]
    sys.modules["verifiers.v1"] = alone
    import verifiers.v1.runtimes as runtimes

    del sys.modules["verifiers.v1"]
    return runtimes


if "verifiers.v1" in sys.modules:
    raise ImportError("import this module before verifiers")
runtimes = _runtimes_alone()
from verifiers.v1.configs.runtime import NetworkPolicyConfig  # noqa: E402
from verifiers.v1.errors import SandboxError  # noqa: E402
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime, RuntimeProcess  # noqa: E402

_HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1")
_FIRST_PORT = 40000
_OUTPUT_BYTES = 64 * 2**20
_TO_LOG = 'mkdir -p "$(dirname "$1")"; exec >"$1" 2>&1; shift; exec "$@"'
_KILLED = 137
Answer = TypeVar("Answer")


class SlotConfig(NetworkPolicyConfig):
    """``slots``: how many runtimes of this process can be there at once."""

    type: Literal["agentenv"] = "agentenv"
    image: str = "python:3.11-slim"
    workdir: str = "/app"
    user: str = ""
    cpu: float | None = None
    memory: float = 2.0
    """GiB."""
    slots: int = 10
    start_timeout_s: float = 600


class SlotInfo(SlotConfig, BaseRuntimeInfo):
    pass


class SlotRuntime(Runtime):
    """The slot needs no network: programs reach the interception server on a port of the slot's own. A failure of the
    farm is a SandboxError."""

    supports_user = True

    def __init__(self, config: SlotConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = SlotInfo(**config.model_dump())
        self._opened = AsyncExitStack()
        self._routes: dict[str, tuple[int, asyncio.Future[Any]]] = {}
        self._box: AsyncSandbox | None = None

    async def start(self) -> None:
        asked = self.config
        if asked.block and asked.block != ["*"]:
            raise SandboxError("block: slots have lists of what is allowed (allow)")
        farm = shared_farm(slots=asked.slots, start_timeout_s=asked.start_timeout_s, allow_network=True)
        root: dict[str, Any] = {"memory_mib": int(asked.memory * 1024), "cpus": asked.cpu, "user": asked.user}
        box = farm.sandbox(asked.image, workdir=asked.workdir, network="public", **root)
        self._box = await _named(self._opened.enter_async_context(box))
        self.info.id = self.name

    async def teardown(self) -> None:
        await self._opened.aclose()

    async def prepare_execution(self, routes: list[str] | None) -> None:
        """``routes`` are the slot's own ports, which no policy keeps from it."""
        if self.network_restricted:
            allowed = "public" if routes is None else tuple(self.config.allow or ()) or "none"
            await _named(self._slot.set_network(allowed))

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        half = _OUTPUT_BYTES // 2
        try:
            ended = await _named(run(self._slot, argv, **await self._as(env), first_bytes=half, last_bytes=half))
        except SlotDestroyedError as error:  # by what ran there
            return ProgramResult(_KILLED, "", str(error))
        return ProgramResult(ended.exit_code, ended.stdout.text, ended.stderr.text)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        program = await _named(self._slot.start(argv, **await self._as(env), output="stream"))
        return SlotProcess(await self._opened.enter_async_context(program))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await _named(self._slot.start(["sh", "-c", _TO_LOG, "sh", log, *argv], **await self._as(env)))

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:
            first: bytes = await super()._read(path, max_bytes)
            return first
        try:
            data: bytes = await _named(self._slot.read_file(self._at(path), binary=True))
        except (OSError, AgentEnvError) as error:
            raise SandboxError(f"read {path!r}: {error}") from error
        return data

    async def write(self, path: str, data: bytes) -> None:
        try:
            await _named(self._slot.write_file(self._at(path), data, user=self.user))
        except (OSError, AgentEnvError) as error:
            raise SandboxError(f"write {path!r}: {error}") from error

    def host_url(self, url: str) -> str:
        """By a port of the slot that leads to this machine's. It is opened meanwhile: what runs next waits for it."""
        parts = urlsplit(url)
        if parts.hostname not in _HERE:
            return url
        there = f"127.0.0.1:{parts.port or 80}"
        if there not in self._routes:
            port = _FIRST_PORT + len(self._routes)
            opening = self._opened.enter_async_context(self._slot.serve(there, port))
            self._routes[there] = port, asyncio.ensure_future(opening)
        return urlunsplit(parts._replace(netloc=f"127.0.0.1:{self._routes[there][0]}"))

    async def expose(self, port: int) -> str:
        url: str = await _named(self._opened.enter_async_context(self._slot.forward(port)))
        return url

    @property
    def _slot(self) -> AsyncSandbox:
        if self._box is None:
            raise SandboxError("the runtime was not started")
        return self._box

    async def _as(self, env: dict[str, str]) -> dict[str, Any]:
        """How a program is started, once it can reach what it was told of."""
        await _named(asyncio.gather(*(opening for _, opening in self._routes.values())))
        return {"env": self.process_env(env), "cwd": self.config.workdir, "user": self.user}

    def _at(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.config.workdir}/{path}"


class SlotProcess(RuntimeProcess):
    def __init__(self, program: Any) -> None:
        self._program = program
        self.stdout, self.stderr = _pieces(program.stdout), _pieces(program.stderr)

    async def write(self, data: bytes) -> None:
        await _named(self._program.write(data))

    async def wait(self) -> int:
        code: int = await _named(self._program.wait())
        return code

    async def poll(self) -> int | None:
        code: int | None = self._program.exit_code
        return code

    async def terminate(self) -> None:
        await _named(self._program.kill("TERM"))

    async def kill(self) -> None:
        await _named(self._program.kill())


async def _pieces(stream: Any) -> AsyncIterator[bytes]:
    while piece := await _named(stream.read(64 * 1024)):
        yield piece


async def _named(answer: Awaitable[Answer]) -> Answer:
    """A failure of the farm by the name that verifiers has for it, which it neither scores nor shows to a model."""
    try:
        return await answer
    except InfraError as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error


runtimes.RuntimeConfig = Annotated[runtimes.RuntimeConfig.__origin__ | SlotConfig, Field(discriminator="type")]
runtimes.RuntimeInfo = Annotated[runtimes.RuntimeInfo.__origin__ | SlotInfo, Field(discriminator="type")]
_known = runtimes._runtime_cls
runtimes._runtime_cls = lambda config: SlotRuntime if config.type == "agentenv" else _known(config)

if __name__ == "__main__":
    from verifiers.v1.cli.eval.main import main

    main()

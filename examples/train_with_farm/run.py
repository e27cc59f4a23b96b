"""The whole example in one command: a farm, a relay, run-api, a model, two environments, a trainer.

    python -m examples.train_with_farm.run --groups 100 --kill

With --kill an environment, the farm service, the relay and a container are killed while the trainer goes on, each once
and each started again as its supervisor would. Everything is on 127.0.0.1, on free ports, in a directory of its own,
and ends with this command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Self

import aiohttp

from agentenv.api.farm_server.tokens import TokenKeys
from agentenv.cli.output import InterruptedBySignalError, err, out, run_to_end
from agentenv.errors import FarmUnreachableError
from agentenv.farm_client.client import FarmClient, reachable
from agentenv.wire.farm import Scope
from examples.train_with_farm.checks import Checker, WrongGroupError
from examples.train_with_farm.trainer import GROUP_SIZE, checker, progress, summary, trainer_api

ROOT: Final = Path(__file__).resolve().parents[2]
SETTINGS: Final = Path(__file__).with_name("env.yaml")
ENVIRONMENTS: Final = {"words": "examples.hello.env", "terminal": "examples.terminal_smoke.env"}
"""Environments by the name of their run: the second reaches the containers through the relay."""
ROUTES: Final = {"words": "direct", "terminal": "relay"}
AGENTENV: Final = ("-c", "from agentenv.cli import main; main()")
LEASE_TTL_S: Final = 20
_END_S: Final = 20.0
_POLL_S: Final = 0.1
_FARM: Final = """\
name = "train"
relay_url = "http://127.0.0.1:{relay}"
[pool]
min_containers = 2
max_containers = 2
acquire_timeout_s = 180
start_timeout_s = 180
[containers]
slots_per_container = 8
"""


class Part:
    """A process of the run. What it says is in a file."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._argv = argv
        self.log = log
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, for the first time or again."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._argv, cwd=ROOT, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def kill(self) -> None:
        """Kill it, without a chance to end in order."""
        process, self._process = self._process, None  # so that nobody takes it for one that has ended by itself
        assert process is not None
        process.kill()
        await process.wait()

    async def end(self) -> None:
        """Ask it to end; after a while, make it."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def check(self) -> None:
        """Raises RuntimeError when it has ended by itself."""
        if self._process is not None and self._process.returncode is not None:
            raise RuntimeError(f"it ended with status {self._process.returncode}: {self.log}\n{tail(self.log)}")


class Everything:
    """All processes of the run. An async context manager: nothing is left of them at its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = directory / "tokenizer"
        self._stack = AsyncExitStack()
        ports = self._stack.enter_context(free_ports("farm", "relay", "api", "model"))
        self.farm_url, self.api_url = (f"http://127.0.0.1:{ports[name]}" for name in ("farm", "api"))
        self._config = directory / "farm.toml"
        self._config.write_text(_FARM.format(relay=ports["relay"]))
        self.env = {**os.environ, "AGENTENV_STATE_DIR": str(directory / "state"), **_isolation()}
        port = {name: ("--port", str(number)) for name, number in ports.items()}
        self.parts = {
            "model": self._part("model", "-m", "examples.train_with_farm.policy", *port["model"],
                                "--tokenizer", str(self.tokenizer)),
            "api": self._part("api", "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", *port["api"]),
            "farm": self._part("farm", *AGENTENV, "farm", "serve", "--config", str(self._config), *port["farm"]),
        }  # fmt: skip
        self._ports = ports

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self._end_containers)
        try:
            for name in ("model", "api", "farm"):
                await self._start(name)
            token = self.token("*", "admin")
            self.farm = await self._stack.enter_async_context(FarmClient(self.farm_url, token))
            await self.eventually(self._farm_answers)
            await self.eventually(self._model_answers)  # it has written the tokenizer by then
            await self._start_relay()
            for run in ENVIRONMENTS:
                await self._start_environment(run)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self, name: str) -> None:
        self._stack.push_async_callback(self.parts[name].end)
        await self.parts[name].start()

    async def _start_relay(self) -> None:
        token = self.token("*", "read")
        where = ("--url", self.farm_url, "--port", str(self._ports["relay"]))
        env = {**self.env, "AGENTENV_FARM_TOKEN": token}
        self.parts["relay"] = self._part("relay", *AGENTENV, "farm", "relay", *where, env=env)
        await self._start("relay")

    async def _start_environment(self, run: str) -> None:
        settings = {
            "env.farm_url": self.farm_url,
            "env.farm_route": ROUTES[run],
            "env.rollout_server_url": self.api_url,
            "env.tokenizer_name": self.tokenizer,
            "env.lease_ttl_s": LEASE_TTL_S,
            "env.acquire_timeout_s": 180,
            "env.runs_dir": self.directory / "runs",
            "env.rollouts_path": self.directory / f"{run}.jsonl",
            "openai.base_url": f"http://127.0.0.1:{self._ports['model']}/v1",
        }
        given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        env = {**self.env, "AGENTENV_FARM_TOKEN": self.token(run, "run")}
        argv = ("-m", ENVIRONMENTS[run], "serve", "--config", str(SETTINGS), *given)
        self.parts[run] = self._part(run, *argv, env=env)
        await self._start(run)

    def _part(self, name: str, *argv: str, env: Mapping[str, str] | None = None) -> Part:
        return Part(argv, self.directory / f"{name}.log", env or self.env)

    def token(self, run: str, scope: Scope) -> str:
        """A token of the farm, as `agentenv farm token` makes them."""
        return TokenKeys.read([self.directory / "farm.key"], create=True).mint(run, scope, expires_s=24 * 3600)

    async def _model_answers(self) -> bool:
        return await reachable(f"http://127.0.0.1:{self._ports['model']}", 1.0)

    async def _farm_answers(self) -> bool:
        try:
            return (await self.farm.info()).load.slots.get("free", 0) > 0
        except FarmUnreachableError:
            return False

    async def eventually(self, happened: Callable[[], Awaitable[bool]]) -> None:
        """Wait for it, as long as everything runs. Raises RuntimeError when a part has ended by itself."""
        while not await happened():
            self.check()
            await asyncio.sleep(_POLL_S)

    def check(self) -> None:
        """Raises RuntimeError when a part has ended by itself."""
        for part in self.parts.values():
            part.check()

    async def restart(self, name: str) -> None:
        """Kill a part; its supervisor starts it again at once, with the same arguments."""
        await self.parts[name].kill()
        await self.parts[name].start()

    async def kill_container(self) -> str:
        """Kill a container in which rollouts run, and return its id. The farm replaces it."""
        found: list[str] = []

        async def busy() -> bool:
            seen = (await self.farm.containers()).containers
            found.extend(container.id for container in seen if container.slots.get("leased"))
            return bool(found)

        await self.eventually(busy)
        os.kill(first_process(found[0]), signal.SIGKILL)
        return found[0]

    async def _end_containers(self) -> None:
        """The farm's containers outlive it, so they are ended last."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *AGENTENV, "gc", "--kept", "train", env=self.env, stdout=subprocess.DEVNULL
        )
        await process.wait()


@contextmanager
def free_ports(*names: str) -> Iterator[dict[str, int]]:
    """A free port for each name, which no other process gets by chance meanwhile, also while a part starts again."""
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in names}
        for one in sockets.values():  # they do not listen, so that the parts can, on the same ports
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield {name: one.getsockname()[1] for name, one in sockets.items()}


def first_process(container: str) -> int:
    """The process that all of a container ends with. Raises ValueError when there is none."""
    return min(
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and b"agentenv.sandbox" in (words := _command(entry)) and container.encode() in words
    )


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def _isolation() -> dict[str, str]:
    """An ordinary user has to ask for the weaker isolation by name."""
    return {} if os.geteuid() == 0 else {"AGENTENV_ISOLATION": os.environ.get("AGENTENV_ISOLATION", "user")}


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


Kill = Callable[[Everything], Awaitable[object]]

KILLS: Final[Mapping[str, Kill]] = {
    "environment": lambda everything: everything.restart("terminal"),
    "farm service": lambda everything: everything.restart("farm"),
    "relay": lambda everything: everything.restart("relay"),
    "container": lambda everything: everything.kill_container(),
}
"""Who is killed, in this order: the environment first, so that its successor meets the other deaths too."""


@asynccontextmanager
async def opened(directory: Path | None) -> AsyncIterator[Everything]:
    """All processes, in ``directory`` or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="agentenv-train-") as temporary:
        async with Everything(directory or Path(temporary)) as everything:
            yield everything


async def train(
    everything: Everything, groups: int, kills: Mapping[int, Callable[[], Awaitable[object]]], environments: int
) -> Checker:
    """Check so many groups, and go on until they are of so many ``environments``, where one that started again counts
    again. ``kills`` has what to do after how many groups, one after the other; groups are taken meanwhile, because an
    environment whose groups nobody takes comes to rest.

    Raises: WrongGroupError; RuntimeError when a part has ended by itself.
    """
    seen = checker(GROUP_SIZE, everything.tokenizer)
    async with trainer_api(everything.api_url) as api:
        with progress(groups) as advance:
            killing: asyncio.Task[None] | None = None
            try:
                async for group in api.groups(everything.check):
                    seen.add(group)
                    advance()
                    if kill := kills.get(seen.groups.total()):
                        killing = asyncio.create_task(_after(killing, kill))
                    if killing is not None and killing.done():
                        killing.result()
                    if seen.groups.total() < groups or len(seen.groups) < environments:
                        continue
                    if killing is None or killing.done():
                        break
            finally:
                if killing is not None:
                    killing.cancel()
                    await asyncio.wait([killing])
    return seen


async def _after(before: asyncio.Task[None] | None, kill: Callable[[], Awaitable[object]]) -> None:
    if before is not None:
        await before
    await kill()


async def run(arguments: argparse.Namespace) -> None:
    """The command. Raises: as :func:`train`."""
    began = time.monotonic()
    async with opened(arguments.directory) as everything:
        err().print(f"what everybody says is in {everything.directory}")

        async def killed(who: str, kill: Kill) -> None:
            await kill(everything)
            err().print(f"killed: {who}")

        every = arguments.groups // (len(KILLS) + 1)
        kills = {
            every * number: lambda who=who, kill=kill: killed(who, kill)
            for number, (who, kill) in enumerate(KILLS.items(), 1)
            if arguments.kill
        }
        seen = await train(everything, arguments.groups, kills, len(ENVIRONMENTS) + arguments.kill)
    out().print(summary(seen, time.monotonic() - began))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_with_farm.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--groups", type=int, default=100, help="end after so many (%(default)s)")
    parser.add_argument("--kill", action="store_true", help="kill each part once meanwhile")
    parser.add_argument("--directory", type=Path, help="keep logs and transcripts here")
    try:
        run_to_end(run(parser.parse_args()))
    except WrongGroupError as error:
        sys.exit(f"wrong group: {error}")
    except (RuntimeError, aiohttp.ClientError) as error:
        sys.exit(f"failed: {error}")
    except InterruptedBySignalError as ended:
        sys.exit(128 + ended.number)


if __name__ == "__main__":
    main()

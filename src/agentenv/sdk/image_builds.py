"""Builds the image of a Dockerfile (:mod:`agentenv.builder`): image slots of this machine are the machines.

Each step's files become an image of the store at once: it is the step's checkpoint, outlives the slot, and the next
build begins after it.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from agentenv.api.image_keeper.reach import Reach, ensured
from agentenv.builder.build import Built, LayerCache, Listeners, build, load
from agentenv.builder.context import BuildContext
from agentenv.builder.machine import BaseImage, ImageConfig, Machine, Seen, Start
from agentenv.builder.plan import Options
from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings, named_registries
from agentenv.containers.layers import image_above
from agentenv.containers.transfer import get_tar, put_tar
from agentenv.deadlines import START_TIMEOUT_S
from agentenv.errors import ConfigError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.store.addition import Runtime
from agentenv.store.manifest import StoredImage
from agentenv.store.reference import parse
from agentenv.store.store import Store
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB, SlotLimits

_STAGES_AT_ONCE: Final = 4
"""Of one build."""
_TMP_BYTES: Final = 64 * MIB
_PUBLIC: Final = NetworkPolicy("public")
_LOOK: Final = r"""
path=$1 rest=
while [ ! -e "$path" ] && [ ! -L "$path" ] && [ "$path" != / ]; do
  rest=/${path##*/}$rest path=${path%/*}; path=${path:-/}
done
links=0
while [ -L "$path" ]; do
  [ $((links += 1)) -le 40 ] || exit 40
  link=$(readlink -- "$path") || exit 1
  case $link in /*) path=$link ;; *) path=${path%/*}/$link ;; esac
done
if [ -d "$path" ]; then path=$(cd -P -- "$path" && pwd -P) || exit 1
else parent=${path%/*}; parent=$(cd -P -- "${parent:-/}" 2>/dev/null && pwd -P); path=${parent%/}/${path##*/}; fi
[ -z "$rest" ] || { printf 'missing %s' "${path%/}$rest"; exit 0; }
if [ -d "$path" ]; then printf 'directory %s' "$path"; elif [ -e "$path" ]; then printf 'file %s' "$path"
else printf 'missing %s' "$path"; fi
"""
_NAMES: Final = r"""
cd -- "$1" || exit 1
shopt -s nullglob dotglob
for name in *; do
  kind=f; [ -d "$name" ] && [ ! -L "$name" ] && kind=d
  printf '%s%s\0' "$kind" "$name"
done
"""


@dataclass(frozen=True)
class BuildLimits:
    """What a build may use: ``memory_mib`` includes what its steps write, which is at most ``storage_mib``."""

    memory_mib: int = 8192
    storage_mib: int = 6144
    timeout_s: float = 3600.0
    """Of each RUN."""
    network: NetworkPolicy = _PUBLIC
    """Of the commands; as with Docker, the whole of it."""


async def build_image(
    directory: Path,
    store: Store,
    *,
    file: Path | None = None,
    options: Options | None = None,
    limits: BuildLimits = BuildLimits(),
    machines: SlotMachines | None = None,
    listeners: Listeners | None = None,
) -> Built:
    """Build ``directory``'s Dockerfile (or ``file``) into the store, which has to be the one of this machine. A step
    that was built before, from the same files, is not run again. ``machines``: those of several builds, whose container
    is started once; their limits count then.

    Raises DockerfileError (with file and line), BuildStepError when a command fails; SandboxUnavailableError when this
    machine cannot have image slots.
    """
    dockerfile = await asyncio.to_thread(load, directory, file)
    cache = LayerCache(store.layout.directory / "builds")
    async with AsyncExitStack() as stack:
        context = await asyncio.to_thread(stack.enter_context, BuildContext(directory))
        if machines is None:
            machines = await stack.enter_async_context(SlotMachines(store, limits))
        timeout_s = machines.limits.timeout_s
        return await build(dockerfile, context, machines, cache, options, listeners=listeners, timeout_s=timeout_s)


class SlotMachines:
    """Implements :class:`agentenv.builder.machine.Machines` over the slots of a container of this machine, and its
    store. An async context manager; the container is started for the first :meth:`open`, since a build of cached steps
    needs none."""

    def __init__(self, store: Store, limits: BuildLimits, *, builds: int = 1) -> None:
        """``builds``: how many may use them at once."""
        self._store = store
        self._slots = builds * _STAGES_AT_ONCE
        self.limits = limits
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._executor: ToolExecutor | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def resolve(self, reference: str) -> BaseImage:
        """See Machines."""
        image = await ensured(self._store, parse(reference), Reach(named_registries()))
        return BaseImage(image.digest, _config_of(image))

    async def holds(self, start: Start) -> bool:
        """See Machines."""
        name = start.checkpoint or start.image
        return not name or await asyncio.to_thread(self._store.find, name) is not None

    @asynccontextmanager
    async def open(self, start: Start) -> AsyncIterator[Machine]:
        """See Machines."""
        name = start.checkpoint or start.image
        if not name:
            image = await asyncio.to_thread(self._store.add, None, (), Runtime())
        elif (found := await asyncio.to_thread(self._store.find, name)) is None:
            raise ConfigError("image", f"{name} is not in the store (any more)", next_step="build again")
        else:
            image = found
        async with self._opening:
            executor = self._executor = self._executor or await self._started()
        limits = self.limits
        root = RootSpec(image.digest, user="0", writable_bytes=limits.storage_mib * MIB, network=limits.network)
        name = f"build-{secrets.token_hex(4)}"
        async with executor.open(name, acquire_timeout_s=START_TIMEOUT_S, kind="interactive", root=root) as session:
            yield SlotMachine(ToolContext(session), self._store, image)

    async def _started(self) -> ToolExecutor:
        limits = self.limits
        slots = SlotLimits(
            memory_bytes=limits.memory_mib * MIB, workspace_bytes=_TMP_BYTES, tmp_bytes=_TMP_BYTES, processes=4000
        )
        settings = ContainerSettings(
            slots_per_container=self._slots, limits=slots, allow_network=limits.network.kind != "none"
        )
        once = PoolSettings(min_containers=1, max_containers=1)
        pool = await self._stack.enter_async_context(SlotPool(LocalBackend(settings), once))
        calls = ExecutorSettings(default_timeout_s=limits.timeout_s)
        return await self._stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin(), calls))


class SlotMachine:
    """Implements :class:`agentenv.builder.machine.Machine`."""

    def __init__(self, tools: ToolContext, store: Store, image: StoredImage) -> None:
        self._tools = tools
        self._store = store
        self._image = image
        self._layers = 0
        """Layers of this slot that are in ``image``."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        user: str,
        cwd: str,
        timeout_s: float,
        on_output: Callable[[bytes], None],
    ) -> int | None:
        """See Machine."""
        await self._checked("mkdir -p -- " + shlex.quote(cwd))
        result = await self._tools.terminal(
            _command(argv, env),
            timeout_s,
            cwd=cwd,
            user=user or "0",
            on_output=lambda _, text: on_output(text.encode()),
        )
        return None if result.timed_out else result.exit_code

    async def put(self, stream: IO[bytes], at: str, *, owner: tuple[int, int], mode: int) -> None:
        """See Machine."""
        async with self._tools.lease_for_transfer() as lease:
            await put_tar(lease, stream, at, owner=owner, mode=mode)

    async def look(self, path: str) -> Seen:
        """See Machine."""
        kind, _, where = (await self._script(_LOOK, path)).partition(" ")
        if kind not in ("directory", "file", "missing"):
            raise OSError(f"{path}: its links lead to one another")
        return Seen(kind, where)  # type: ignore[arg-type]  # one of these

    async def names(self, directory: str) -> Sequence[tuple[str, bool]]:
        """See Machine."""
        listed = await self._script(_NAMES, directory)
        return [(one[1:], one[0] == "d") for one in listed.split("\0") if one]

    async def get(self, path: str) -> IO[bytes]:
        """See Machine."""
        file = tempfile.NamedTemporaryFile(prefix="agentenv-tar-")  # noqa: SIM115 - the caller closes it
        async with self._tools.lease_for_transfer() as lease:
            await get_tar(lease, path, Path(file.name))
        return file

    async def checkpoint(self) -> str:
        """See Machine."""
        self._image = await self._stored(Runtime.of(self._image))
        return self._image.digest

    async def commit(self, config: ImageConfig) -> str:
        """See Machine."""
        runtime = Runtime(
            dict(config.env), config.user, config.workdir, config.entrypoint or (), config.cmd or (), config.shell
        )
        return (await self._stored(runtime)).digest

    async def _stored(self, runtime: Runtime) -> StoredImage:
        """The image of all that has been written."""
        name = (await self._tools.checkpoint()).root.checkpoint
        async with self._tools.lease_for_transfer() as lease:
            image, layers = await image_above(
                self._store, self._image, lease.container, name, runtime, first=self._layers
            )
        self._layers += layers
        return image

    async def _script(self, script: str, argument: str) -> str:
        result = await self._tools.exec(["bash", "-c", script, "bash", argument], user="0")
        if result.exit_code:
            raise OSError(f"{argument}: {result.stderr.strip() or f'exit code {result.exit_code}'}")
        return result.stdout_bytes.decode("utf-8", "surrogateescape")

    async def _checked(self, command: str) -> None:
        result = await self._tools.terminal(command, user="0")
        if result.exit_code:
            raise OSError(result.stderr.strip())


def _command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Bash text that runs ``argv`` with this environment, the user's HOME and nothing else; with builtins only, because
    an image may have no other program yet."""
    given = " ".join(shlex.quote(f"{name}={value}") for name, value in env.items())
    return "\n".join(
        [
            "while IFS= read -r -d '' entry; do",
            '  case $entry in HOME=*) ;; *) unset -- "${entry%%=*}" 2>/dev/null;; esac',
            "done < /proc/self/environ",
            f"export {given}" if given else ":",
            f"exec {shlex.join(argv)}",
        ]
    )


def _config_of(image: StoredImage) -> ImageConfig:
    return ImageConfig(
        env=tuple(image.env.items()),
        user=image.user,
        workdir=image.workdir,
        cmd=image.cmd or None,
        entrypoint=image.entrypoint or None,
        shell=image.shell,
        on_build=image.on_build,
    )

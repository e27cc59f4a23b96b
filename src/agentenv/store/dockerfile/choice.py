"""Who builds a Dockerfile: this package, or docker or buildah for what it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Literal

from agentenv.deadlines import scaled
from agentenv.errors import DockerfileError
from agentenv.store.dockerfile.instructions import Dockerfile
from agentenv.store.dockerfile.plan import Options, lacking

Tool = Literal["docker", "buildah"]
Builder = Literal["slots", "docker", "buildah"]

_ANSWER_S: Final = scaled(10.0)
"""How long a Docker engine may take to say its version."""
_TOOLS: Final[tuple[Tool, ...]] = ("docker", "buildah")


async def installed_tools() -> tuple[Tool, ...]:
    """The tools that work here, the preferred first: buildah if it is installed, docker if its engine answers."""
    found: list[Tool] = []
    if shutil.which("docker") and await _answers(["docker", "version", "--format", "{{.Server.Version}}"]):
        found.append("docker")
    if shutil.which("buildah"):
        found.append("buildah")
    return tuple(found)


def choose_builder(dockerfile: Dockerfile, options: Options, tools: Collection[str]) -> Builder:
    """Slots, unless the target needs what they lack and one of the ``tools`` is there. Raises DockerfileError for
    what is lacking and nobody has, naming every such place and both tools."""
    missing = lacking(dockerfile, options)
    if not missing:
        return "slots"
    for tool in _TOOLS:
        if tool in tools:
            return tool
    first, *others = missing
    also = "".join(f"; also line {error.line} ({error.instruction})" for error in others)
    reason = first.message.removeprefix(f"{first.field}: ")
    raise DockerfileError(
        first.field,
        f"{reason}{also}; neither docker (with an engine that answers) nor buildah is here to build it instead",
        next_step=first.next_step,
        file=first.file,
        line=first.line,
        instruction=first.instruction,
    )


def tool_argv(tool: Tool, dockerfile: Path, context: Path, options: Options, name: str) -> Sequence[str]:
    """The command by which ``tool`` builds the image and calls it ``name``."""
    argv = [tool, "build", "--file", str(dockerfile), "--tag", name]
    if options.target:
        argv += ["--target", options.target]
    for argument, value in sorted(options.arguments.items()):
        argv += ["--build-arg", f"{argument}={value}"]
    return [*argv, str(context)]


async def _answers(argv: Sequence[str]) -> bool:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        return await asyncio.wait_for(process.wait(), _ANSWER_S) == 0
    except TimeoutError:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

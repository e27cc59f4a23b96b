"""``agentenv exec``: one command in a fresh slot."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from agentenv.cli.options import (
    BackendOption,
    DownloadOption,
    Isolation,
    IsolationOption,
    JobOption,
    JsonOption,
    NetworkOption,
    OwnOption,
    TimeoutOption,
    UploadOption,
    backend_of,
)
from agentenv.cli.output import (
    EXIT_INFRA,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    described,
    err,
    exit_code_of,
    print_error,
    print_json,
    run_to_end,
    verb,
)
from agentenv.cli.upload import get_all, named, put_all, targets
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm import open
from agentenv.wire.calls import CallResult


@verb
def execute(
    command: Annotated[
        list[str], typer.Argument(help="The command, or a single argument of bash text.", metavar="COMMAND")
    ],
    timeout_s: TimeoutOption = 60.0,
    network: NetworkOption = False,
    isolation: IsolationOption = Isolation.auto,
    backend: BackendOption = None,
    job: JobOption = None,
    own: OwnOption = False,
    upload: UploadOption = None,
    download: DownloadOption = None,
    with_stdin: Annotated[bool, typer.Option("--stdin", help="Pass standard input to the command.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run one command in a fresh slot; its output and exit code become this command's.

    If a farm is running ([bold]agentenv up[/bold], or a Nomad job), the slot is taken from it; otherwise, or with
    --own, --network or --isolation, from a container that lives as long as the command.

    Output is shown when the command ends, at most 1 MiB of each stream (head and tail; a note tells how much was
    cut).

    [bold]Examples[/bold]

      agentenv exec -- ls -la

      agentenv exec 'for i in 1 2 3; do echo $i; done | wc -l'

      agentenv exec --upload src --upload setup.cfg -- python3 -m compileall src

      agentenv exec --upload project --download project/dist:dist -- make -C project dist

      agentenv exec --network --timeout 300 -- git ls-remote https://example.org/repo.git

      agentenv exec --backend nomad -- cat /etc/os-release

      echo hello | agentenv exec --stdin -- tr a-z A-Z
    """
    settings = open.container_settings(slots_per_container=1, allow_network=network, isolation=isolation.value)
    arguments: dict[str, object] = {"command": command[0] if len(command) == 1 else shlex.join(command)}
    if with_stdin:
        arguments["stdin"] = _standard_input()
    chosen = backend_of(backend)
    alone = own or network or isolation is not Isolation.auto
    opened = open.open_farm(settings, chosen, own=alone, job=job)
    result, lost = run_to_end(_run(opened, arguments, timeout_s, upload or [], download or []))
    told = result.model_dump(mode="json")
    if lost is None:
        print_json(told) if as_json else _show(result)
        raise typer.Exit(shell_exit_code(result))
    # The command's output often tells why there is nothing to fetch.
    if as_json:
        print_json({**told, "download_error": described(lost)})
    else:
        _show(result)
        print_error(lost, as_json=False)
    raise typer.Exit(shell_exit_code(result) or exit_code_of(lost))


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError("--stdin", f"is not UTF-8: {error}", next_step="use --upload for binary input") from None


async def _run(
    opened: AbstractAsyncContextManager[ToolExecutor],
    arguments: dict[str, object],
    timeout_s: float,
    upload: list[Path],
    download: list[str],
) -> tuple[CallResult, AgentEnvError | None]:
    """The command's result, and the error if its files could not be fetched."""
    sources, sinks = named(upload), targets(download)
    async with opened as executor, executor.open("agentenv-exec") as session:
        await put_all(session.lease, sources)
        result = await session.call("bash", arguments, timeout_s=timeout_s)
        try:
            if result.fault == "none":
                await get_all(session.lease, sinks)
        except AgentEnvError as error:
            return result, error
        return result, None


def _show(result: CallResult) -> None:
    """Both streams unchanged, then on stderr what the exit code alone would hide."""
    sys.stdout.buffer.write(result.stdout.encode())
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(result.stderr.encode())
    sys.stderr.buffer.flush()
    for note in notes(result):
        err().print(f"[yellow]agentenv:[/] {escape(note)}", soft_wrap=True)


def notes(result: CallResult) -> list[str]:
    """Notes on the output: deadline, memory, cut output, refusals."""
    said = []
    if result.fault != "none":
        said.append(f"{result.error}: {result.message}")
    if result.timed_out:
        said.append(f"timed out after {result.duration_s:.1f} s")
    if result.oom_killed:
        said.append("the slot ran out of memory and the kernel killed a process in it")
    for stream, dropped in (("stdout", result.stdout_dropped_bytes), ("stderr", result.stderr_dropped_bytes)):
        if dropped:
            said.append(f"{dropped} bytes were cut from the middle of {stream}")
    return said


def shell_exit_code(result: CallResult) -> int:
    """The command's own code; 124 when it timed out; 2 or 125 when it never ran (refused, or an infrastructure
    failure)."""
    if result.fault != "none":
        return EXIT_INFRA if result.fault == "infra" else EXIT_USAGE
    if result.timed_out:
        return EXIT_TIMED_OUT
    return result.exit_code or 0

"""``agentenv shell``: a terminal in one slot; or, from a pipe or with --json, one call per line.

The lines' directory and exported variables are carried from line to line by a file in the slot's own /tmp, so
nothing here has to trust what the slot prints.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.image_root import (
    AllowOption,
    CpusOption,
    DockerfileOption,
    ImageOption,
    MemoryOption,
    Place,
    RootOptions,
    StorageOption,
    UserOption,
    WorkdirOption,
    WritableOption,
    stored_here,
    stored_there,
)
from agentenv.cli.options import (
    BackendOption,
    FarmOption,
    GuestOption,
    Isolation,
    IsolationOption,
    JobOption,
    NetworkOption,
    OwnOption,
    SetOption,
    TimeoutOption,
    UploadOption,
    WaitOption,
    backend_of,
)
from agentenv.cli.output import InterruptedBySignalError, err, escape, verb
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from agentenv.executor.session import ToolSession
    from agentenv.wire.calls import CallResult


STATE = "/tmp/.agentenv-shell"  # noqa: S108 - inside the slot, whose /tmp is its own
_RESTORE = f"[ ! -r {STATE} ] || . {STATE}\n"
_SAVE = f"""trap '__code=$?; {{ printf "cd -- %q\\n" "$PWD"; export -p; }} >{STATE}; exit "$__code"' EXIT\n"""
_LEAVE = re.compile(r"\s*(?:exit|logout)\s*(\d*)\s*;?\s*")
_TERMINAL_BANNER = """[bold]A new slot[/] ({isolation}, network {network}). exit or Ctrl-D leaves and wipes it."""
_ATTACHED_BANNER = "[bold]The slot of another process[/]. exit or Ctrl-D ends this shell, and nothing else in the slot."
_BANNER = """[bold]A new slot[/] ({isolation}, network {network}). Each line is one bash call.
Kept between lines: files, background processes, the directory, exported variables.
Not kept: functions, aliases, unexported variables, shell options. No terminal: no vim, no prompts; \
output appears when a command ends.
Ctrl-C ends the running command, Ctrl-D leaves and wipes the slot."""


@verb
def shell(
    context: typer.Context,
    timeout_s: TimeoutOption = 600.0,
    image: ImageOption = None,
    dockerfile: DockerfileOption = None,
    user: UserOption = None,
    workdir: WorkdirOption = None,
    cpus: CpusOption = None,
    memory_mib: MemoryOption = None,
    storage_mib: StorageOption = None,
    writable: WritableOption = Place.memory,
    network: NetworkOption = False,
    allow: AllowOption = None,
    isolation: IsolationOption = Isolation.auto,
    settings: SetOption = None,
    backend: BackendOption = None,
    job: JobOption = None,
    own: OwnOption = False,
    farm: FarmOption = False,
    guest: GuestOption = False,
    wait_s: WaitOption = None,
    upload: UploadOption = None,
    attach: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A terminal in the slot of another process of yours, which has named this file (shell_command() of a "
            "sandbox). Of the other options only with --user and --quiet.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No banner.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result of each line as one line of JSON.")] = False,
) -> None:
    """A terminal in a fresh slot; leaving wipes it.

    With --attach it is a terminal in a slot that another process has; leaving ends the shell alone.

    From a pipe, or with --json, each line is a separate call with --timeout.

    With --image or --dockerfile the slot's root is an image, in which the shell is root.

    If a farm is running (`agentenv up`, or a Nomad job), the slot is taken from it; otherwise, or with
    --own, --image, --dockerfile, --memory, --storage, --network, --isolation or --set, from a container that lives as
    long as the shell.

    The exit code is that of the last command.

    \b
    Examples:
      agentenv shell
      agentenv shell --network --upload .
      agentenv shell --backend nomad
      agentenv shell --image debian:trixie --network
      agentenv shell --dockerfile tasks/hello --user app
      printf 'cd /tmp\\npwd\\n' | agentenv shell --quiet
      printf 'make\\nmake test\\n' | agentenv shell --upload . --json
    """
    from anyio.from_thread import start_blocking_portal

    from agentenv.cli import terminal
    from agentenv.cli.upload import named, put_all
    from agentenv.farm import open

    if attach is not None:
        raise typer.Exit(_attached(context, attach, user, quiet=quiet))
    asked = RootOptions(
        image, dockerfile, user, workdir, cpus, memory_mib, storage_mib, writable, network, tuple(allow or ()),
        tuple(settings or ()),
    )  # fmt: skip
    chosen = backend_of(backend)
    asked.check(chosen, farm=farm)
    opened = asked.farm(chosen, isolation, own=own, job=job, service=farm, guest=guest, wait_s=wait_s)
    root = asked.root()
    sources = named(upload or [])
    spec = None if root is None or farm else stored_here(root, quiet=as_json)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ending_signals_raise())
        portal = stack.enter_context(start_blocking_portal())
        executor = stack.enter_context(portal.wrap_async_context_manager(opened))
        if root is not None and farm:
            spec = portal.call(functools.partial(stored_there, root, executor, quiet=as_json))
        opening = executor.open("agentenv-shell", acquire_timeout_s=wait_s, kind="interactive", root=spec)
        session = stack.enter_context(portal.wrap_async_context_manager(opening))
        portal.call(put_all, session.lease, sources)
        full = not as_json and _on_terminal() and portal.call(terminal.can_attach, session.lease)
        if not (quiet or as_json):
            described = portal.call(open.describe, session)
            banner = _TERMINAL_BANNER if full else _BANNER
            reached = ("on" if described.allow_network else "off") if spec is None else spec.network.kind
            err().print(banner.format(isolation=described.isolation, network=reached))
        if full:
            code = terminal.attach(portal, session.lease, sys.stdin.fileno(), sys.stdout.fileno())
        else:
            start = "/workspace" if spec is None else spec.workdir or "/"
            code = converse(Conversation(portal, session, timeout_s, start), _show_json if as_json else _show)
    raise typer.Exit(code)


def _attached(context: typer.Context, file: Path, user: str | None, *, quiet: bool) -> int:
    """A terminal in the slot that the file offers; the exit code of its bash. Raises ConfigError, InfraError."""
    from anyio.from_thread import start_blocking_portal

    from agentenv.cli import terminal
    from agentenv.sdk.attached import attached

    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and option.name not in ("attach", "user", "quiet"):
            raise ConfigError("--attach", f"excludes {option.opts[0]}: the slot exists", next_step="leave that out")
    lease = attached(file)
    if not _on_terminal():
        raise ConfigError("--attach", "needs a terminal", next_step="run it in one, without a pipe")
    if not quiet:
        err().print(_ATTACHED_BANNER)
    with _ending_signals_raise(), start_blocking_portal() as portal:
        return terminal.attach(portal, lease, sys.stdin.fileno(), sys.stdout.fileno(), user)


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


class Conversation:
    """Runs lines in one session from a thread without an event loop, and remembers the state they leave."""

    def __init__(
        self, portal: BlockingPortal, session: ToolSession, timeout_s: float, directory: str = "/workspace"
    ) -> None:
        self.directory = directory
        self._portal = portal
        self._session = session
        self._timeout_s = timeout_s

    def run(self, line: str) -> CallResult | None:
        """Run one line; None when it was ended by Ctrl-C."""
        result = self._call(f"{_RESTORE}{_SAVE}eval {shlex.quote(line)}")
        if result is not None:
            where = self._call(f'{_RESTORE}printf %s "$PWD"')
            self.directory = where.stdout if where is not None and where.exit_code == 0 else self.directory
        return result

    def _call(self, script: str) -> CallResult | None:
        async def call() -> CallResult:
            return await self._session.call("bash", {"command": script}, timeout_s=self._timeout_s)

        future: concurrent.futures.Future[CallResult] = self._portal.start_task_soon(call)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()  # cancels the task, which cancels the call in the slot
            return None


def converse(conversation: Conversation, show: Callable[[CallResult], int]) -> int:
    """Read lines until the end; returns the exit code of the last one. ``show`` presents a result and returns its
    code."""
    code = 0
    while True:
        try:
            line = _read_line(conversation.directory)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        if line is None:
            return code
        if not line.strip():
            continue
        if leaving := _LEAVE.fullmatch(line):
            return int(leaving[1] or code) & 0xFF
        result = conversation.run(line)
        code = 128 + signal.SIGINT if result is None else show(result)


def _read_line(directory: str) -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() editing and history
    try:
        return input(f"slot:{directory}$ ")
    except EOFError:
        sys.stderr.write("\n")
        return None


def _show(result: CallResult) -> int:
    from agentenv.cli.execute import notes

    sys.stdout.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.write(result.stderr)
    for note in notes(result):
        err().print(f"[yellow]agentenv:[/] {escape(note)}", soft_wrap=True)
    return result.exit_code or 0


def _show_json(result: CallResult) -> int:
    sys.stdout.write(f"{result.model_dump_json()}\n")
    sys.stdout.flush()
    return result.exit_code or 0


@contextlib.contextmanager
def _ending_signals_raise() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind like an exception, so that the slot is wiped and the container stopped."""

    def stop(number: int, _frame: object) -> None:
        raise InterruptedBySignalError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Common behaviour of all verbs: printing, errors, exit codes, and unwinding on signals.

Every verb imports this, also where only its help or its options are wanted: what costs time is imported when used.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from agentenv.errors import AgentEnvError, ConfigError, InfraError, missing_extra

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")

EXIT_NOT_ALL_WELL = 1
EXIT_USAGE = 2
EXIT_INFRA = 125
"""Exit code of an infrastructure failure, as in `docker run`, so that it is not mistaken for a command's exit code."""
EXIT_TIMED_OUT = 124
"""Exit code of a command that timed out, as in coreutils' `timeout`."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedBySignalError(Exception):
    """A signal ended the verb, and everything it had opened has been closed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


_PIPED_WIDTH = 10_000


def out() -> Console:
    """Console for results. Created per use, so that it follows a redirected ``sys.stdout``; what another program reads
    is not broken into lines."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def err() -> Console:
    """Console for everything that is not the result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def escape(text: str) -> str:
    """The text as :func:`out` and :func:`err` print it unchanged."""
    from rich.markup import escape

    return escape(text)


def print_json(value: object) -> None:
    """Print one JSON document on stdout, never coloured nor wrapped, and at once: the command may go on."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def print_json_line(value: object) -> None:
    """Print one JSON document on one line of stdout, unbuffered: for continuous output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def announce(event: dict[str, object], line: str, *, as_json: bool) -> None:
    """A service listens: say so in one line, of JSON on stdout or of text on stderr, and to systemd, which starts what
    comes after a service of ``Type=notify`` then."""
    if as_json:
        print_json_line({"event": "ready", **event})
    else:
        err().print(line, soft_wrap=True)
    notify_systemd("READY=1")


def notify_systemd(state: str) -> None:
    """The protocol of sd_notify(3): a datagram to the socket that the environment names. Does nothing without one."""
    import socket

    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, suppress(OSError):  # it has ended
        manager.sendto(state.encode(), address.replace("@", "\0", 1))


def silence(stream_fd: int) -> None:
    """What is written to the stream from here on is lost: what it still buffers would fail again at the exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream_fd)
    os.close(nowhere)


def described(error: AgentEnvError) -> dict[str, str]:
    """An error as in a JSON document."""
    return {"error": error.code, "message": error.message, "next_step": error.next_step, "fault": error.fault}


def print_error(error: AgentEnvError, *, as_json: bool) -> None:
    """Print the message in red on stderr with the next step below it; or one JSON document on stdout."""
    if as_json:
        print_json(described(error))
        return
    console = err()
    console.print(f"[bold red]error[/] {escape(error.message)}", soft_wrap=True)
    if error.next_step:
        console.print(f"[bold]next[/]  {escape(error.next_step)}", soft_wrap=True)
    if isinstance(error, InfraError):
        console.print("[dim]more  AGENTENV_DEBUG=1 shows the logs, the container's included[/]", soft_wrap=True)


def print_problems(problems: list[str], most: int = 5) -> None:
    """Say which lines are in none of what is shown."""
    for problem in problems[:most]:
        err().print(f"[yellow]note[/] left out: {escape(problem)}", soft_wrap=True)
    if len(problems) > most:
        err().print(f"[yellow]note[/] and {len(problems) - most} more lines", soft_wrap=True)


def exit_code_of(error: AgentEnvError) -> int:
    """2 if the caller can fix it (a setting, an argument), 125 for an infrastructure failure."""
    return EXIT_USAGE if isinstance(error, ConfigError) or not isinstance(error, InfraError) else EXIT_INFRA


def verb(function: Callable[P, None]) -> Callable[P, None]:
    """Decorator of verbs: typed errors become a message and an exit code, signals become 128 + n.

    A verb's ``as_json`` argument, when it has one, decides how errors are printed.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        _set_up_logging()
        try:
            with _interruptible():
                function(*args, **kwargs)
                sys.stdout.flush()
        except (AgentEnvError, ModuleNotFoundError) as error:
            failed = error if isinstance(error, AgentEnvError) else missing_extra("this command", error)
            if failed is None or debugging():
                raise
            print_error(failed, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(exit_code_of(failed)) from None
        except InterruptedBySignalError as ended:
            err().print(f"[yellow]interrupted by {ended}[/]; nothing was left running")
            raise typer.Exit(128 + ended.number) from None
        except KeyboardInterrupt:
            err().print("[yellow]interrupted by SIGINT[/]")
            raise typer.Exit(128 + signal.SIGINT) from None
        except BrokenPipeError:  # `agentenv exec … | head`: the reader has enough
            silence(sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None

    return wrapped


@contextmanager
def _interruptible() -> Iterator[None]:
    """While a verb runs, Ctrl-C unwinds it; before and after it ends the process at once (see ``main``)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def debugging() -> bool:
    """See :func:`agentenv.config.debug`."""
    from agentenv.config import debug

    return debug()


def _set_up_logging() -> None:
    """No logs unless debugging (an error's message has what matters); then everything, including containers' logs."""
    ours = logging.getLogger("agentenv")
    if not debugging():
        ours.addHandler(logging.NullHandler())
        return
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ours.setLevel(logging.DEBUG)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, except that the first SIGINT, SIGTERM or SIGHUP unwinds every context manager.

    A second one ends the process at once, as if it handled none (containers still end, because their lifeline is
    cut). Raises InterruptedBySignalError after unwinding.
    """
    import asyncio

    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        return asyncio.run(_until_signal(work))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _until_signal(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        _end_at_once_by_signals(loop)
        task.cancel()

    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise InterruptedBySignalError(received[0]) from None
        raise
    finally:
        _end_at_once_by_signals(loop)


def _end_at_once_by_signals(loop: asyncio.AbstractEventLoop) -> None:
    """From now on. A KeyboardInterrupt out of a loop that is being closed would only be a traceback."""
    for number in ENDING_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


def count_of(value: float | None) -> str:
    """A whole number; a dash if unknown."""
    return "–" if value is None else f"{value:.0f}"


def mib(size_bytes: float | None) -> str:
    """``41 MiB``; a dash if unknown."""
    return "–" if size_bytes is None else f"{size_bytes / 2**20:.0f} MiB"


def short(container: str) -> str:
    """A container's id as people write it: Nomad's ids by their first eight characters."""
    return container[:8] if len(container) == 36 and container.count("-") == 4 else container

"""What is in a source checkout and in no wheel (examples/, benchmarks/, src/agentenv/dev), and programs of it."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentenv.cli.output import ENDING_SIGNALS, InterruptedBySignalError
from agentenv.errors import ConfigError


def checkout_root(needed: str) -> Path:
    """The checkout this package is installed from. Raises ConfigError when ``needed`` is not in it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / needed).is_dir():
        raise ConfigError(
            needed,
            "requires a source checkout, and agentenv is not installed from one",
            next_step="clone the repository and run `make setup` there",
        )
    return root


def directory_named(arguments: Sequence[str], otherwise: Path) -> Path:
    """Output directory of a module run with these arguments: the last ``--out``, relative to the checkout's root."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--out", type=Path, default=otherwise)
    try:
        named: Path = parser.parse_known_args(list(arguments))[0].out
    except argparse.ArgumentError:  # `--out` without a directory: the module rejects it itself
        named = otherwise
    return checkout_root("src") / named


def run_module(module: str, arguments: Sequence[str], *, quiet_stdout: bool = False) -> int:
    """Run ``python -m module`` in the checkout's root; return its exit code.

    ``quiet_stdout`` sends its output to stderr, so that stdout stays one JSON document. Signals go to it first:
    after it has unwound, InterruptedBySignalError is raised.
    """
    root = checkout_root(module.partition(".")[0])
    received: list[int] = []
    not_sent: list[int] = []
    process: list[subprocess.Popen[bytes]] = []

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        not_sent.append(number)
        hand_on()

    def hand_on() -> None:
        while process and not_sent:
            process[0].send_signal(not_sent.pop(0))

    before = {number: signal.signal(number, receive) for number in ENDING_SIGNALS}
    try:
        stdout = sys.stderr if quiet_stdout else None
        argv = [sys.executable, "-m", module, *arguments]
        # A process group of its own: each Ctrl-C reaches only us, and we pass it on once.
        with subprocess.Popen(argv, cwd=root, stdout=stdout, process_group=0) as child:
            process.append(child)
            hand_on()  # what came while the child was being created
            code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise InterruptedBySignalError(received[0])
    return code if code >= 0 else 128 - code

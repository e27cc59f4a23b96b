"""Python programs as processes, most of them without paying for the import of atropos, which takes seconds of CPU.

They are forked from one server per test process that has imported it (:mod:`multiprocessing.forkserver`), and are
processes like any other: own pid, directory, environment, output, signals and exit status. Only the start of the
interpreter is not their own, so one test of each command starts a real one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(
    [
        "agentenv.env.environment",
        "agentenv.slots.backends.fake",
        "agentenv.slots.backends.local",
        "agentenv.testing",
        "openai.resources.chat",
        "pytest",  # multiprocessing imports our __main__ in each of them, which may be pytest's
        "rich.console",
    ]
)


class Forked:
    """The part of :class:`asyncio.subprocess.Process` that is used here, of a process of the fork server."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


@asynccontextmanager
async def program(
    *argv: str,
    cwd: Path,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path | None = None,
    own_interpreter: bool = False,
) -> AsyncIterator[Process | Forked]:
    """``python argv...``, a file or ``-m`` and a module, killed at the end if it still lives. Its output is appended
    to ``stdout``, its errors to ``stderr`` or there too. Use ``own_interpreter`` where a real start is the subject."""
    process = await (_started if own_interpreter else _forked)(argv, cwd, env, stdout, stderr or stdout)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _started(argv: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> Process:
    with stdout.open("ab") as out, stderr.open("ab") as errors:
        return await asyncio.create_subprocess_exec(
            sys.executable, *argv, cwd=cwd, env=env, stdin=DEVNULL, stdout=out, stderr=errors
        )


async def _forked(argv: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> Forked:
    arguments = (argv, cwd, dict(env), stdout, stderr)
    process = _FORK_SERVER.Process(target=_run, args=arguments, daemon=True)  # the end of the tests waits for none
    await asyncio.to_thread(process.start)  # the first one waits for what the server imports
    return Forked(process)


def _run(argv: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> None:
    """In the forked process: what an interpreter does that is started like this."""
    assert "atroposlib" in sys.modules, "the fork server could not import it"
    for path, fd in ((stdout, 1), (stderr, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the server's would be kept, whatever TMPDIR says
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path.insert(0, str(cwd))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")

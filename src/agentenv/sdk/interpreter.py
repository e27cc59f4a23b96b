"""The Python interpreter of :mod:`agentenv.sdk.python`. This file's text runs in the slot, by the Python (3.7 or later)
that is there: it imports nothing but the standard library.

It reads requests from its standard input and writes frames to its standard output: the length of the rest (4 bytes,
big-endian), then JSON. Both are moved to other descriptors first: what cells and their children print goes through
pipes, and becomes frames too. Requests are lines, ``{"n": 1, "code": …}``. Frames have the ``n`` of the latest request,
and ``begun`` (an interrupt is the cell's now; before, it has no effect), ``stream`` and ``data`` (bytes as Latin-1),
``output`` (a MIME bundle; ``result``: of the last expression; ``cut``: content is missing), ``error``, or ``over`` at
the end.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import builtins
import collections
import contextlib
import inspect
import io
import json
import linecache
import os
import select
import signal
import struct
import sys
import threading
import traceback
import types
import warnings
from typing import Any

MOST_BYTES = 16 * 1024 * 1024
MOST_TEXT = 1024 * 1024
PIECE_BYTES = 65536
METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}


class Frames:
    """Reads what is printed, and writes frames: by one thread, so that an interrupt of a cell cuts no frame in two."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._written = threading.Event()
        self._woken, self._wake = os.pipe()
        self._pipes: dict[int, str] = {}
        self.number = 0
        for printed, name in ((1, "stdout"), (2, "stderr")):
            ours, theirs = os.pipe()
            os.dup2(theirs, printed)
            os.close(theirs)
            self._pipes[ours] = name
        threading.Thread(target=self._pump, daemon=True).start()

    def put(self, **fields: Any) -> None:
        """Write a frame, after all that was printed before. A child that prints without an end does not hold it up.
        No effect in a process that a cell has forked: the thread that writes is not there."""
        if os.getpid() != self._owner:
            return
        self._written.clear()
        self._waiting.append(self._frame(fields))
        os.write(self._wake, b".")
        self._written.wait()

    def _frame(self, fields: dict[str, Any]) -> bytes:
        text = json.dumps(dict(fields, n=self.number)).encode()
        return struct.pack(">I", len(text)) + text

    def _pump(self) -> None:
        while True:
            ready = select.select([*self._pipes, self._woken], [], [])[0]
            for fd in ready:
                if fd != self._woken:
                    self._pass(fd)
            if self._woken in ready:
                os.read(self._woken, 1)
                for fd in self._pipes:
                    for _ in range(16):  # at least as much as a pipe holds
                        if not select.select([fd], [], [], 0)[0]:
                            break
                        self._pass(fd)
                while self._waiting:
                    self._write(self._waiting.popleft())
                self._written.set()

    def _pass(self, fd: int) -> None:
        self._write(self._frame({"stream": self._pipes[fd], "data": os.read(fd, PIECE_BYTES).decode("latin-1")}))

    def _write(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest:
            rest = rest[os.write(self._fd, rest) :]


class Interpreter:
    """Runs cells in one namespace, that of ``__main__``."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._loop: asyncio.AbstractEventLoop | None = None
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._names = module.__dict__
        self._names["__builtins__"] = builtins
        builtins.display = self.display  # type: ignore[attr-defined]

    def run(self, number: int, code: str) -> None:
        """Run one cell. Raises nothing."""
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._frames.put(begun=True)
                self._execute(f"<cell {number}>", code)
                self._show_figures()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as error:
            self._failed(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the cell has closed or replaced it
                stream.flush()

    def display(self, *values: object) -> None:
        """Show values as the result of a cell is shown."""
        for value in values:
            self._put(_bundle(value), False)

    def _execute(self, name: str, code: str) -> None:
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        tree = ast.parse(code, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        flags = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
        self._evaluate(compile(tree, name, "exec", flags, True))
        if last is not None:
            value = self._evaluate(compile(last, name, "eval", flags, True))
            if value is not None:
                self._names["_"] = value
                self._put(_bundle(value), True)

    def _evaluate(self, compiled: types.CodeType) -> Any:
        value = eval(compiled, self._names)  # noqa: S307 (that is what it is for)
        if compiled.co_flags & inspect.CO_COROUTINE:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self._loop)
            value = self._loop.run_until_complete(value)
        return value

    def _show_figures(self) -> None:
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure, png = pyplot.figure(number), io.BytesIO()
            figure.savefig(png, format="png", bbox_inches="tight")
            self._put({"text/plain": repr(figure), "image/png": _text(png.getvalue())}, False)
        pyplot.close("all")

    def _put(self, data: dict[str, Any], result: bool) -> None:
        sys.stdout.flush()
        shown = {mime: _bounded(mime, content) for mime, content in data.items()}
        self._frames.put(output=shown, result=result, cut=any(shown[mime] is not data[mime] for mime in data))

    def _failed(self, error: BaseException) -> None:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        try:
            value = str(error)
        except Exception:
            value = "<str() failed>"
        text = "".join(lines)
        self._frames.put(error=[type(error).__name__, value[:PIECE_BYTES], text[:PIECE_BYTES]])


def _bundle(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": repr(value)}
    kind = type(value)
    try:
        if hasattr(kind, "_repr_mimebundle_"):
            made = value._repr_mimebundle_(include=None, exclude=None)
            data.update((made[0] if isinstance(made, tuple) else made) or {})
        for mime, method in METHODS.items():
            if mime not in data and hasattr(kind, method):
                made = getattr(value, method)()
                made = made[0] if isinstance(made, tuple) else made
                if made is not None:
                    data[mime] = made
    except Exception:
        traceback.print_exc()
    return {str(mime): _text(content) for mime, content in data.items()}


def _text(content: Any) -> Any:
    return base64.b64encode(content).decode() if isinstance(content, bytes) else content


def _bounded(mime: str, content: Any) -> Any:
    try:
        size = len(content) if isinstance(content, str) else len(json.dumps(content))
    except (TypeError, ValueError) as error:
        return f"[{mime} is no JSON: {error}]"
    if size <= (MOST_TEXT if mime == "text/plain" else MOST_BYTES):
        return content
    if mime == "text/plain":
        half = MOST_TEXT // 2
        return f"{content[:half]}\n[... {size - 2 * half} characters dropped ...]\n{content[-half:]}"
    return f"[{mime} of {size} bytes: more than {MOST_BYTES} are not shown]"


def main() -> None:
    """Serve requests until their end."""
    requests = os.fdopen(os.dup(0), "rb")
    frames = Frames(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    stream: Any
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=False)
    os.environ.setdefault("MPLBACKEND", "Agg")
    warnings.filterwarnings("ignore", message=".*non-interactive.*cannot be shown")
    sys.argv, sys.path[0] = [""], ""
    me = os.getpid()
    interpreter = Interpreter(frames)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames.put(version=sys.version)
    for line in requests:
        request = json.loads(line.decode())
        frames.number = request["n"]
        interpreter.run(request["n"], request["code"])
        if os.getpid() != me:
            os._exit(0)  # a process that a cell has forked
        frames.put(over=True)


if __name__ == "__main__":
    main()

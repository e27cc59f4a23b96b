"""Recordings of terminals as asciicast v2: one JSON line per event. Pure."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from typing import Any

MAX_UNTAKEN_BYTES = 1024 * 1024
"""Limit of recorded data that was not taken; further output is omitted, and a marker says so."""


class Recorder:
    """The recording of one session, taken piece by piece: the concatenated pieces are a playable file."""

    def __init__(self, *, columns: int, rows: int, began_unix_s: float, now_s: float, title: str) -> None:
        self._began_s = now_s
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        header = {"version": 2, "width": columns, "height": rows, "timestamp": int(began_unix_s), "title": title}
        self._lines: list[str] = [json.dumps(header)]
        self._bytes = len(self._lines[0])
        self._left_out_bytes = 0

    @property
    def full(self) -> bool:
        """Whether no more output is recorded until the recording is taken."""
        return self._bytes > MAX_UNTAKEN_BYTES

    def skip(self, count: int) -> None:
        """Note that this many bytes more are omitted."""
        self._left_out_bytes += count

    def output(self, data: bytes, now_s: float) -> None:
        """Record output."""
        if self.full:
            self.skip(len(data))
            return
        if text := self._decoder.decode(data):
            self._event(now_s, "o", text)

    def resized(self, columns: int, rows: int, now_s: float) -> None:
        """Record a change of the screen's size."""
        self._event(now_s, "r", f"{columns}x{rows}")

    def left_out(self, now_s: float) -> None:
        """Record that some output could not be read and is missing."""
        if not self.full:
            self._event(now_s, "m", "output was left out")

    def take(self, now_s: float) -> str:
        """The recording since the last call of this."""
        if self._left_out_bytes:
            self._event(now_s, "m", f"{self._left_out_bytes} bytes of output are not recorded")
            self._left_out_bytes = 0
        taken = "".join(f"{line}\n" for line in self._lines)
        self._lines.clear()
        self._bytes = 0
        return taken

    def _event(self, now_s: float, kind: str, text: str) -> None:
        line = json.dumps([round(now_s - self._began_s, 6), kind, text], ensure_ascii=False)
        self._lines.append(line)
        self._bytes += len(line)


def recordings(contents: Iterable[Any]) -> dict[str, str]:
    """The recordings in the contents of a trajectory's results (:class:`agentenv.wire.sessions.TmuxReply` as JSON),
    in order: one complete asciicast per session; sessions restarted under the same name are numbered."""
    found: dict[str, list[str]] = {}
    for content in contents:
        piece = content.get("recording") if isinstance(content, Mapping) else None
        state = content.get("session") if isinstance(content, Mapping) else None
        if not isinstance(piece, str) or not isinstance(state, Mapping) or not piece:
            continue
        name = str(state.get("session"))
        parts = found.setdefault(name, [])
        if piece.startswith("{") or not parts:
            parts.append(piece)
        else:
            parts[-1] += piece
    return {
        name if index == 0 else f"{name}-{index + 1}": cast
        for name, parts in found.items()
        for index, cast in enumerate(parts)
    }

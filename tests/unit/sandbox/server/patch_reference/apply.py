"""Where a hunk belongs in a file, and why it does not fit. Pure.

A hunk is looked for where its header says (moved by as much as the hunks before it were), then ever further
away; first with all of its context, then with up to ``fuzz`` lines less at each end. Lines that differ only
in CR LF against LF count as equal where no others fit: added lines then get the file's own line ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.unit.sandbox.server.patch_reference.parse import Hunk

_SHOWN_AROUND = 3
_MAX_SHOWN = 12
_MAX_LINE_CHARS = 120


@dataclass(frozen=True)
class Fit:
    """The file with the hunks applied, and how far from their headers they were."""

    content: bytes
    fuzz: int
    offset_lines: int


class HunkFailedError(Exception):
    """A hunk does not fit; the text says which, why, and what is there instead."""


def apply_hunks(content: bytes, hunks: list[Hunk], fuzz: int) -> Fit:
    """Raises HunkFailedError."""
    file = _File(content)
    places: list[_Place] = []
    taken = offset = most_fuzz = most_offset = 0
    for number, hunk in enumerate(hunks, 1):
        place = file.place(hunk, taken, offset, fuzz)
        if isinstance(place, str):
            raise HunkFailedError(
                f"hunk {number} of {len(hunks)} ({hunk.header}, line {hunk.at_line} of the patch) {place}"
            )
        places.append(place)
        taken = place.start + place.replaced
        if hunk.start is not None:
            offset = place.start - place.trimmed - (hunk.start - (1 if hunk.old else 0))
            most_offset = max(most_offset, abs(offset))
        most_fuzz = max(most_fuzz, place.fuzz)
    return Fit(b"".join(_merged(file, hunks, places)), most_fuzz, most_offset)


def _merged(file: _File, hunks: list[Hunk], places: list[_Place]) -> list[bytes]:
    done: list[bytes] = []
    taken = 0
    tolerant = any(place.tolerant for place in places)
    for hunk, place in zip(hunks, places, strict=True):
        done += file.lines[taken : place.start]
        done += file.merged(hunk, place, tolerant if not hunk.old else place.tolerant)
        taken = place.start + place.replaced
    return done + file.lines[taken:]


@dataclass(frozen=True)
class _Place:
    start: int
    replaced: int
    fuzz: int = 0
    trimmed: int = 0
    trimmed_back: int = 0
    tolerant: bool = False


class _File:
    def __init__(self, content: bytes) -> None:
        lines = content.split(b"\n")
        last = lines.pop()
        self.lines = [line + b"\n" for line in lines] + ([last] if last else [])
        self._exact = _index(self.lines)
        self._ends: dict[bytes, list[int]] | None = None

    def place(self, hunk: Hunk, taken: int, offset: int, fuzz: int) -> _Place | str:
        """Where the hunk goes, at or after line ``taken``; or why it does not."""
        if not hunk.old:
            return self._insertion(hunk, taken, offset)
        for level in range(fuzz + 1):
            front, back = min(level, hunk.before), min(level, hunk.after)
            if level and (front, back) == (min(level - 1, hunk.before), min(level - 1, hunk.after)):
                break  # there is no more context to leave out
            old = hunk.old[front : len(hunk.old) - back]
            if not old:
                break
            for tolerant in (False, True):
                found = self._positions(old, taken, tolerant)
                if hunk.start is None and len(found) > 1:
                    places = ", ".join(str(start + 1) for start in found[:5])
                    ambiguous = f"is ambiguous: it matches at {len(found)} places (lines {places})"
                    return f"{ambiguous}; add context lines or line numbers"
                if found:
                    expected = found[0] if hunk.start is None else hunk.start - 1 + offset + front
                    start = min(found, key=lambda at: abs(at - expected))
                    return _Place(start, len(old), level, front, back, tolerant)
        return self._why(hunk, taken, offset, fuzz)

    def merged(self, hunk: Hunk, place: _Place, tolerant: bool) -> list[bytes]:
        """What stands there afterwards: context as the file has it, added lines with the file's line ends
        where those were not the patch's."""
        merged: list[bytes] = []
        old_at, new_at = place.start, place.trimmed
        for kind in hunk.kinds[place.trimmed : len(hunk.kinds) - place.trimmed_back]:
            if kind == b" ":
                merged.append(self.lines[old_at])
            elif kind == b"+":
                added = hunk.new[new_at : new_at + 1]
                merged += self._ended(added, min(old_at, place.start + 1)) if tolerant else added
            old_at += kind != b"+"
            new_at += kind != b"-"
        return merged

    def _insertion(self, hunk: Hunk, taken: int, offset: int) -> _Place | str:
        if hunk.start is None:
            if self.lines:
                return "has neither context lines nor a line number to place it"
            return _Place(0, 0)
        start = hunk.start + offset
        if not taken <= start <= len(self.lines):
            return f"inserts after line {start}, but the file has {len(self.lines)} lines: add context lines"
        return _Place(start, 0)

    def _positions(self, old: list[bytes], taken: int, tolerant: bool) -> list[int]:
        """Every place of these lines, at or after ``taken``."""
        if not tolerant:
            starts = self._exact.get(old[0], ())
            return [at for at in starts if at >= taken and self.lines[at : at + len(old)] == old]
        if self._ends is None:
            self._ends = _index([_bare(line) for line in self.lines])
        bare = [_bare(line) for line in old]
        starts = self._ends.get(bare[0], ())
        return [
            at
            for at in starts
            if at >= taken
            and [_bare(line) for line in self.lines[at : at + len(old)]] == bare
            and self._same_end(old, at)
        ]

    def _same_end(self, old: list[bytes], at: int) -> bool:
        """Whether the last line has a newline in both, or in neither."""
        return _is_whole(old[-1]) == _is_whole(self.lines[at + len(old) - 1])

    def _has_crlf(self, at: int) -> bool:
        near = self.lines[at : at + 1] or self.lines[-1:]
        return any(line.endswith(b"\r\n") for line in near)

    def _ended(self, new: list[bytes], at: int) -> list[bytes]:
        """These lines with the line ends the file has at ``at``."""
        end = b"\r\n" if self._has_crlf(at) else b"\n"
        return [_bare(line) + end if line.endswith(b"\n") else line for line in new]

    # -- why not -----------------------------------------------------------------------------------

    def _why(self, hunk: Hunk, taken: int, offset: int, fuzz: int) -> str:
        best = self._nearest(hunk.old)
        newline = best is not None and self._newline(hunk.old, best[0])
        only = best is not None and all(
            at < len(self.lines) and _bare(self.lines[at]) == _bare(line) for at, line in enumerate(hunk.old, best[0])
        )
        if hunk.new and not (newline and only) and (there := self._positions(hunk.new, 0, True)):
            return f"does not apply: it is already applied, at line {there[0] + 1}"
        if (before := self._positions(hunk.old, 0, True)) and before[0] < taken:
            return (
                f"does not apply: its lines are at line {before[0] + 1}, before the hunk above it; "
                "hunks must be in line order and must not overlap"
            )
        ignoring = f", even without up to {fuzz} lines of context at each end" if fuzz else ""
        if best is None:
            at = max(0, min((hunk.start or 1) - 1 + offset, len(self.lines)))
            shown = self._shown(at, min(len(hunk.old), _MAX_SHOWN))
            return f"does not apply: none of its lines are in the file{ignoring}.\nThe file contains there:\n{shown}"
        start, equal = best
        differing = self._compared(hunk.old, start)
        return (
            f"does not apply{ignoring}. The closest place is line {start + 1}, where {equal} of its "
            f"{len(hunk.old)} old lines match:\n{differing}{self._newline(hunk.old, start)}"
        )

    def _newline(self, old: list[bytes], start: int) -> str:
        for at, (wanted, there) in enumerate(zip(old, self.lines[start:], strict=False), start + 1):
            if _bare(wanted) == _bare(there) and _is_whole(wanted) and not _is_whole(there):
                return (
                    "\nThe file's last line has no newline: '\\ No newline at end of file' must be below it in the "
                    "patch. To add lines after it, remove it ('-') and add it again ('+')."
                )
            if _bare(wanted) == _bare(there) and not _is_whole(wanted) and _is_whole(there):
                return (
                    f"\nLine {at} of the file ends with a newline: without '\\ No newline at end of file' below it, "
                    "the line of the patch does, too."
                )
        return ""

    def _nearest(self, old: list[bytes]) -> tuple[int, int] | None:
        """Where most of the lines are in the right order, white space aside; and how many."""
        where: dict[bytes, list[int]] = defaultdict(list)
        for at, line in enumerate(self.lines):
            where[line.strip()].append(at)
        votes: Counter[int] = Counter()
        for index, line in enumerate(old):
            if line.strip():
                votes.update(at - index for at in where.get(line.strip(), ())[:1000])
        votes = Counter({at: count for at, count in votes.items() if at >= 0})
        if not votes:
            return None
        start = max(votes, key=lambda at: (votes[at], -at))
        pairs = zip(old, self.lines[start : start + len(old)], strict=False)
        return start, sum(_agree(wanted, there) for wanted, there in pairs)

    def _compared(self, old: list[bytes], start: int) -> str:
        shown: list[str] = []
        for index, wanted in enumerate(old):
            at = start + index
            there = self.lines[at] if at < len(self.lines) else None
            if there is not None and _agree(wanted, there):
                shown.append(f"{at + 1:6}   {_text(there)}")
            else:
                shown.append(f"{at + 1:6} ! {'(the file ends here)' if there is None else _text(there)}")
                how = "with" if _is_whole(wanted) else "without"
                same = there is not None and _bare(there) == _bare(wanted)
                ending = f", {how} a newline at its end" if same else ""
                shown.append(f"       ? {_text(wanted)}   <- what the patch expects{ending}")
        if len(shown) > 2 * _MAX_SHOWN:
            first = (
                next(index for index, line in enumerate(shown) if line[7] in "!?")
                if any(line[7] in "!?" for line in shown)
                else 0
            )
            begin = max(0, first - _SHOWN_AROUND)
            shown = [*shown[begin : begin + 2 * _MAX_SHOWN], "       ..."]
        return "\n".join(shown)

    def _shown(self, at: int, count: int) -> str:
        begin = max(0, at - _SHOWN_AROUND)
        lines = self.lines[begin : begin + count + 2 * _SHOWN_AROUND]
        return "\n".join(f"{begin + index + 1:6}   {_text(line)}" for index, line in enumerate(lines)) or "(nothing)"


def _index(lines: list[bytes]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = defaultdict(list)
    for at, line in enumerate(lines):
        found[line].append(at)
    return dict(found)


def _bare(line: bytes) -> bytes:
    return line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n")


def _agree(one: bytes, other: bytes) -> bool:
    return _bare(one) == _bare(other) and _is_whole(one) == _is_whole(other)


def _text(line: bytes) -> str:
    text = _bare(line).decode("utf-8", "backslashreplace")
    return text if len(text) <= _MAX_LINE_CHARS else text[:_MAX_LINE_CHARS] + "..."

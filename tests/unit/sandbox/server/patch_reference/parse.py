"""Unified diffs, plain and git's, as values. Pure. Lenient where a diff's meaning is plain all the same.

A hunk's lines count more than the numbers in its header, which models get wrong; an empty line is an empty
line of context; text before, between and after the files' parts is skipped, as patch(1) does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_FILES = 500
_HUNK = re.compile(rb"@@(?: -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@.*|.*)")
_VERSION = re.compile(rb"\d+(\.\d+)+\S*")
_NO_NEWLINE = b"\\"
_DEV_NULL = b"/dev/null"
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a", b"b": b"\b", b"f": b"\f"}
_GIT_PREFIXES = (b"a/", b"b/", b"i/", b"w/", b"c/", b"o/", b"1/", b"2/")


class PatchTextError(ValueError):
    """The text is not a diff that can be understood; says at which line and why."""


@dataclass
class Hunk:
    """``old`` and ``new`` are whole lines, with their line ends; ``before`` and ``after`` count the lines of
    context at the ends. ``start`` is the first old line (from 1), None when the header gives no numbers."""

    at_line: int
    header: str
    start: int | None
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)
    kinds: list[bytes] = field(default_factory=list)
    """One of ``b" "``, ``b"-"``, ``b"+"`` for each line of the hunk's body."""

    @property
    def before(self) -> int:
        """Lines of context before the first change."""
        changed = [index for index, kind in enumerate(self.kinds) if kind != b" "]
        return changed[0] if changed else len(self.kinds)

    @property
    def after(self) -> int:
        """Lines of context after the last change."""
        changed = [index for index, kind in enumerate(reversed(self.kinds)) if kind != b" "]
        return changed[0] if changed else 0


@dataclass
class FileDiff:
    """One file's part. A name is None for ``/dev/null``; ``modes`` are git's six octal digits as numbers."""

    at_line: int
    git: bool = False
    old: bytes | None = None
    new: bytes | None = None
    creates: bool = False
    deletes: bool = False
    renames: bool = False
    copies: bool = False
    mode: int | None = None
    hunks: list[Hunk] = field(default_factory=list)


def parse(text: bytes, strip: int | None) -> list[FileDiff]:
    """Every file's part, in order. Raises PatchTextError."""
    return _Parser(text, strip).parts()


class _Parser:
    def __init__(self, text: bytes, strip: int | None) -> None:
        self._lines = _split(text)
        self._at = 0
        self._strip = strip

    def parts(self) -> list[FileDiff]:
        found: list[FileDiff] = []
        while self._at < len(self._lines):
            line = self._line()
            if line.startswith(b"diff --git "):
                found.append(self._git_part())
            elif line.startswith(b"--- ") and self._line(1).startswith(b"+++ "):
                part = FileDiff(self._at + 1)
                self._names(part)
                self._hunks(part)
                found.append(part)
            elif line.startswith(b"@@ -"):
                raise self._wrong("a hunk comes before any '--- old' and '+++ new' lines that name its file")
            else:
                self._at += 1
            if len(found) > MAX_FILES:
                raise self._wrong(f"the patch changes more than {MAX_FILES} files")
        if not found:
            raise PatchTextError("no file names: a unified diff has '--- old' and '+++ new' lines, then '@@' hunks")
        return found

    # -- headers -----------------------------------------------------------------------------------

    def _git_part(self) -> FileDiff:
        part = FileDiff(self._at + 1, git=True)
        part.old = part.new = self._same_name(self._line()[len(b"diff --git ") :])
        bare = _are_same(self._line()[len(b"diff --git ") :].rstrip(b"\r"))
        self._at += 1
        while self._at < len(self._lines):
            line = self._line()
            if line.startswith(b"--- ") and self._line(1).startswith(b"+++ "):
                self._names(part, bare)
                self._hunks(part)
                break
            if not self._extended(part, line):
                break
            self._at += 1
        if part.creates:
            part.old = None
        if part.deletes:
            part.new = None
        if part.old is None and part.new is None:
            raise PatchTextError(f"line {part.at_line}: this part does not name a file")
        if not (part.hunks or part.creates or part.deletes or part.renames or part.copies or part.mode is not None):
            raise PatchTextError(f"line {part.at_line}: this part of the patch changes nothing")
        return part

    def _extended(self, part: FileDiff, line: bytes) -> bool:
        """One of git's header lines; False when it is something else."""
        word, _, rest = line.rstrip(b"\r").partition(b" ")
        match (word, rest.split(b" ", 1)[0]):
            case (b"index" | b"similarity" | b"dissimilarity", _) | (b"old", b"mode"):
                pass
            case (b"new", b"mode"):
                part.mode = self._mode(rest[5:])
            case (b"new", b"file"):
                part.creates, part.mode = True, self._mode(rest[10:])
            case (b"deleted", b"file"):
                part.deletes = True
                self._mode(rest[10:])
            case (b"rename" | b"copy", b"from"):
                part.old = self._stripped(_unquoted(rest[5:]), bare=True)
            case (b"rename" | b"copy", b"to"):
                part.new = self._stripped(_unquoted(rest[3:]), bare=True)
                part.renames, part.copies = word == b"rename", word == b"copy"
            case (b"GIT", b"binary") | (b"Binary", b"files"):
                raise self._wrong("binary patches are not supported; use write_file instead")
            case _:
                return False
        return True

    def _mode(self, digits: bytes) -> int:
        try:
            mode = int(digits, 8)
        except ValueError:
            raise self._wrong("the file mode is not an octal number") from None
        if mode & 0o170000 != 0o100000:
            raise self._wrong("only regular files can be patched, not links or submodules")
        return mode & 0o777

    def _names(self, part: FileDiff, bare: bool = False) -> None:
        old, new = _name(self._line()[4:]), _name(self._line(1)[4:])
        git_like = not bare and all(name == _DEV_NULL or name.startswith(_GIT_PREFIXES) for name in (old, new))
        kept_old, kept_new = (
            None if name == _DEV_NULL else self._stripped(name, prefixed=git_like) for name in (old, new)
        )
        if kept_old is None and kept_new is None:
            raise self._wrong("both names are /dev/null")
        if not part.renames and not part.copies:
            part.creates = part.creates or kept_old is None
            part.deletes = part.deletes or kept_new is None
            # Without git's words for it another name is no rename: patch(1) takes the new file's.
            part.new = kept_new
            part.old = kept_old if kept_old is None or kept_new is None else kept_new
        self._at += 2

    def _same_name(self, rest: bytes) -> bytes | None:
        """The name in ``a/X b/X`` (or, without prefixes, ``X X``), which only says something when both are the same."""
        rest = rest.rstrip(b"\r")
        bare = _are_same(rest)
        if rest.startswith(b'"'):
            return self._stripped(_unquoted(rest[: rest.find(b'" ') + 1]), prefixed=not bare)
        half = len(rest) // 2
        old, between, new = rest[:half], rest[half : half + 1], rest[half + 1 :]
        same = bare or (old[2:] == new[2:] and len(old) == len(new) > 2)
        return self._stripped(old, prefixed=not bare) if same and between == b" " else None

    def _stripped(self, name: bytes, *, prefixed: bool = False, bare: bool = False) -> bytes:
        """Without its prefix. ``bare``: git writes names after ``rename`` and ``copy`` without one."""
        count = self._strip
        if count is None:
            return name[2:] if prefixed and name.startswith(_GIT_PREFIXES) else name
        if bare:
            count = max(0, count - 1)
        parts = name.split(b"/")
        if len(parts) <= count:
            raise self._wrong(f"strip={self._strip} removes all of {name.decode(errors='replace')!r}")
        return b"/".join(parts[count:])

    # -- hunks -------------------------------------------------------------------------------------

    def _hunks(self, part: FileDiff) -> None:
        while self._at < len(self._lines) and (found := _HUNK.fullmatch(self._line())):
            numbers = [None if group is None else int(group) for group in found.groups()]
            start, old_count, new_start, new_count = numbers
            header = self._line().decode(errors="replace").strip()
            hunk = Hunk(self._at + 1, header, start)
            self._at += 1
            counts = None if new_start is None else [_or_one(old_count), _or_one(new_count)]
            self._body(hunk, counts)
            self._check_end(counts)
            if not hunk.kinds:
                raise PatchTextError(f"line {hunk.at_line}: the hunk {header} has no lines")
            part.hunks.append(hunk)
        if not part.hunks:
            raise self._wrong("no '@@ -1,2 +1,3 @@' hunk follows the file names")

    def _body(self, hunk: Hunk, counts: list[int] | None) -> None:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            kind = line[:1]
            if kind == _NO_NEWLINE:
                _cut_newline(hunk, crlf=line.endswith(b"\r\n"))
            elif line.rstrip(b"\r\n") == b"":
                if not self._goes_on(counts):
                    break
                self._add(hunk, b" ", line, counts)
            elif kind in (b" ", b"-", b"+") and not self._ends_hunk(counts):
                self._add(hunk, kind, line[1:], counts)
            else:
                break
            self._at += 1

    def _check_end(self, counts: list[int] | None) -> None:
        """The line at hand is none of the hunk's: it lacks its sign if lines with signs follow it."""
        if counts is not None and max(counts) <= 0:
            return
        ahead = 0
        while (line := self._line(ahead)) and not line.startswith((b"@@", b"diff ")) and line != b"-- ":
            if line.startswith(b"--- ") and self._line(ahead + 1).startswith(b"+++ "):
                return
            if ahead and line[:1] in (b"+", b"-"):
                raise self._wrong("this line is inside a hunk, but begins with none of ' ', '+' and '-'")
            ahead += 1

    def _add(self, hunk: Hunk, kind: bytes, line: bytes, counts: list[int] | None) -> None:
        if (kind != b"+" and _has_ended(hunk.old)) or (kind != b"-" and _has_ended(hunk.new)):
            raise self._wrong("'\\ No newline at end of file' is before this line, which is of the same file")
        _add(hunk, kind, line, counts)

    def _goes_on(self, counts: list[int] | None) -> bool:
        """Whether an empty line is one of context, and not the text's end or what stands between two files."""
        if counts is not None:
            return max(counts) > 0
        next_line = self._line(1)
        new_file = next_line.startswith(b"--- ") and self._line(2).startswith(b"+++ ")
        return next_line[:1] in (b" ", b"+", b"-") and not new_file

    def _ends_hunk(self, counts: list[int] | None) -> bool:
        """Whether the line at hand, though it could be one of the hunk's, is not: the counts are used up (or
        never were) and it looks like what comes behind a hunk."""
        line = self._line()
        if line == b"-- " and _VERSION.fullmatch(self._line(1)):
            return True  # the end of a mail that git wrote
        if counts is not None and max(counts) > 0:
            return False
        return line in (b"-- ", b"--") or (line.startswith(b"--- ") and self._line(1).startswith(b"+++ "))

    # ----------------------------------------------------------------------------------------------

    def _line(self, ahead: int = 0) -> bytes:
        """Without its line end; empty beyond the last."""
        at = self._at + ahead
        return self._lines[at].rstrip(b"\r\n") if at < len(self._lines) else b""

    def _wrong(self, why: str) -> PatchTextError:
        return PatchTextError(f"line {self._at + 1}: {why}")


def _split(text: bytes) -> list[bytes]:
    """By newlines only: a lone CR is a character like any other."""
    lines = text.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _or_one(count: int | None) -> int:
    return 1 if count is None else count


def _are_same(rest: bytes) -> bool:
    half = len(rest) // 2
    return bool(half) and rest == rest[:half] + b" " + rest[:half]


def _add(hunk: Hunk, kind: bytes, line: bytes, counts: list[int] | None) -> None:
    line = line if line.endswith(b"\n") else line + b"\n"  # the text's own last line may lack it
    hunk.kinds.append(kind)
    if kind != b"+":
        hunk.old.append(line)
    if kind != b"-":
        hunk.new.append(line)
    if counts is not None:
        counts[0] -= kind != b"+"
        counts[1] -= kind != b"-"


def _has_ended(side: list[bytes]) -> bool:
    return bool(side) and not side[-1].endswith(b"\n")


def _cut_newline(hunk: Hunk, *, crlf: bool) -> None:
    """'\\ No newline at end of file' speaks of the line before it; if it ends with CR LF, the whole patch does."""
    if not hunk.kinds:
        return
    for side, absent in ((hunk.old, b"+"), (hunk.new, b"-")):
        if hunk.kinds[-1] != absent and side:
            side[-1] = side[-1].removesuffix(b"\n")
            side[-1] = side[-1].removesuffix(b"\r") if crlf else side[-1]


def _name(rest: bytes) -> bytes:
    """A name as it stands after ``--- ``: a tab ends it (git writes one after a name with spaces, others a time),
    unless it is quoted."""
    if rest.startswith(b'"'):
        return _unquoted(rest)
    name, tab, _ = rest.partition(b"\t")
    return name if tab else name.rstrip()


def _unquoted(name: bytes) -> bytes:
    name = name.rstrip(b"\r")
    if not name.startswith(b'"'):
        return name
    inner = name[1 : name.rfind(b'"')]
    octal = re.sub(rb"\\([0-3][0-7]{2})", lambda found: b"\\x" + bytes([int(found[1], 8)]), inner)
    return re.sub(rb"\\(x[\x00-\xff]|.)", lambda found: _ESCAPES.get(found[1], found[1][-1:]), octal, flags=re.DOTALL)

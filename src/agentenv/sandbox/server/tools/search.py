"""The search tool: arguments for ``slotfiles search``, which runs ripgrep, and parsing of its output. Pure."""

from __future__ import annotations

import os

from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.file_names import readable_name
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.server.tools.slotfiles_exit_codes import BAD_PATTERN
from agentenv.sandbox.slot_paths import USUAL_PATHS, SlotPaths
from agentenv.sessions.head_tail import whole_end, whole_start
from agentenv.wire.tools import SearchArguments, SearchMatch, SearchReply

_MAX_WHY_BYTES = 16 * 1024


def search_arguments(arguments: SearchArguments) -> tuple[str, str, str, str]:
    """What follows the path and the program on slotfiles' command line. Raises InvalidArgumentsError for what no line
    and no path contains."""
    if "\n" in arguments.pattern or "\0" in arguments.pattern:
        raise _wrong("the pattern has a line break or NUL byte, but lines are matched one at a time")
    if "\0" in (arguments.glob or ""):
        raise _wrong("the glob has a NUL byte")
    flags = ("i" if arguments.ignore_case else "") + ("F" if arguments.literal else "")
    return flags or "-", str(arguments.limit), _glob(arguments.glob or ""), arguments.pattern


def _glob(glob: str) -> str:
    """As ripgrep understands it: no path that it looks at begins with ``./`` or, being a file's, ends with a slash,
    and what begins with ``#`` is a comment to it."""
    negated, glob = glob.startswith("!"), glob.removeprefix("!")
    while glob.startswith("./"):
        glob = glob[1:]
    directory = glob.rstrip("/")
    if directory != glob and not negated:
        if directory.endswith("/**") or directory == "**":
            directory += "/*"  # two stars may stand for no directory at all
        glob = f"{directory}/**" if "/" in directory else f"**/{directory}/**" if directory else "**"
    return "!" + glob if negated else "\\" + glob if glob.startswith("#") else glob


def check_pattern(exit_code: int, printed: bytes | memoryview) -> None:
    """Return unless ripgrep refused the pattern or the glob: then raise InvalidArgumentsError with its reason."""
    if exit_code != BAD_PATTERN:
        return
    reader = RecordReader(printed)
    if reader.record().kind != "w":
        raise ProtocolError("slotfiles gave no reason for refusing the pattern")
    why = str(reader.view()[:_MAX_WHY_BYTES], "utf-8", "replace").removeprefix("rg: ")
    raise _wrong(why.partition("\n\nConsider enabling")[0].strip())  # options that only its command line has


def _wrong(why: str) -> InvalidArgumentsError:
    return InvalidArgumentsError(f"search: {why}", next_step="correct it, or set literal to search for plain text")


def parse_matches(printed: bytes, arguments: SearchArguments, paths: SlotPaths = USUAL_PATHS) -> SearchReply:
    """The reply. Raises ProtocolError when the slot printed anything else than it must."""
    reader = RecordReader(printed)
    matches: list[SearchMatch] = []
    base = os.fsencode(_base(paths.named(arguments.path), paths.start))
    while (record := reader.record()).kind == "h":
        path = readable_name(b"/".join(part for part in (base, record.path) if part))
        line = record.link
        if record.truncated:  # perhaps within a character, at either end
            line = line[whole_start(line) : whole_end(line)]
        text = line.decode("utf-8", "replace")
        lossy = text.encode() != line
        matches.append(SearchMatch(path=path, line=record.size_bytes, text=text, cut=record.truncated, lossy=lossy))
        if len(matches) > arguments.limit:
            raise ProtocolError("slotfiles found more than requested")
    counts = reader.numbers(4)
    if record.kind != "e":
        raise ProtocolError("slotfiles printed something else than matches")
    searched, binary, large, unreadable = counts
    return SearchReply(
        matches=tuple(matches),
        truncated=record.truncated,
        files_searched=searched,
        binary_skipped=binary,
        large_skipped=large,
        unreadable_skipped=unreadable,
    )


def _base(path: str, workspace: str) -> str:
    """``path`` as it stands before what was found below it."""
    inside = path == workspace or path.startswith(workspace + "/")
    parts = [part for part in (path.removeprefix(workspace) if inside else path).split("/") if part not in ("", ".")]
    return "/".join(["", *parts] if path.startswith("/") and not inside else parts)

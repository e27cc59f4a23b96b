"""The tools that run inside a slot: their arguments and replies, and one row per tool (:data:`BASH`,
:data:`FILE_TOOLS`, :data:`CODE_TOOLS`; :data:`agentenv.wire.sessions.SESSION_TOOLS`).

Tool and field descriptions are written for a language model: they become the JSON schema it is given.
Paths are relative to the workspace, or absolute, or begin with ``~/`` (the home directory, which is the workspace
unless a setting changes it). They reach what the slot's own commands reach; on the fake backend, only the workspace.
Some arguments are also accepted under the names that models trained on other harnesses use (``AliasChoices``); the
schema does not show these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from agentenv.wire.base import (
    MAX_ARGUMENTS,
    MAX_CALL_VARIABLES,
    MAX_COMMAND_BYTES,
    MAX_FILE_BYTES,
    NOT_BOOL,
    Base64,
    Count,
    ForCode,
    WireModel,
)
from agentenv.wire.environment import MAX_PATH_CHARS

PathArgument = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]


@dataclass(frozen=True)
class SlotTool:
    """One tool of a slot: its description for a model, and everything both sides need to call it.

    ``streamed`` names the arguments that a program in the slot reads from their attachment when they are large; other
    large arguments become values in the server first. ``reply`` is the model of the result's content, None if it has
    none.
    """

    name: str
    description: str
    arguments: type[WireModel]
    reply: type[WireModel] | None
    toolset: str
    streamed: tuple[str, ...] = ()


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain NUL bytes")
    return value


def _directory(value: str) -> str:
    if len(value) > MAX_PATH_CHARS:
        raise ValueError(f"must be at most {MAX_PATH_CHARS} characters")
    return _no_nul(value)


def _command(value: str) -> str:
    if len(value.encode("utf-8", "surrogatepass")) > MAX_COMMAND_BYTES:
        raise ValueError(f"must be at most {MAX_COMMAND_BYTES} bytes")
    return _no_nul(value)


CommandText = Annotated[str, AfterValidator(_command)]
UserName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_no_nul)]
"""A user of an image slot: a name or number of its /etc/passwd, with ``:GROUP`` or without."""


def _argv(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value[0]:
        raise ValueError("must begin with a program")
    return tuple(map(_no_nul, value))


Argv = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_ARGUMENTS), AfterValidator(_argv)]
"""A program, found by PATH, and its arguments."""


def _environment(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_CALL_VARIABLES:
        raise ValueError(f"must be at most {MAX_CALL_VARIABLES} variables")
    for name, text in value.items():
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise ValueError(f"{name[:80]!r} is not a valid environment variable")
    return value


Environment = Annotated[dict[str, str], AfterValidator(_environment)]
"""Variables of one program. ``execve`` limits their bytes."""


class BashArguments(WireModel):
    """Run a command in a new shell in the workspace. No state of the shell is kept.

    With ``argv`` no shell is started, but this program with these arguments; ``command`` is then only what is shown of
    it. ``output_bytes`` bounds what is kept of each stream, instead of the container's own limit. ``binary``: the
    result has the bytes of both streams in its content (:class:`BashReply`), and no text of them.
    """

    command: CommandText = Field(description="The bash command to run. It may span several lines.")
    cwd: Annotated[str, AfterValidator(_directory)] | None = Field(
        default=None, description="Working directory; by default the workspace."
    )
    env: Environment | None = Field(default=None, description="Additional environment variables.")
    stdin: str | None = Field(default=None, description="Text passed to the command on standard input.")
    stdin_data: ForCode[Base64 | None] = None
    argv: ForCode[Argv | None] = None
    user: ForCode[UserName | None] = None
    output_bytes: ForCode[Annotated[int, Field(ge=2, le=MAX_FILE_BYTES), NOT_BOOL] | None] = None
    binary: ForCode[bool] = False

    @model_validator(mode="after")
    def _one_stdin(self) -> BashArguments:
        if self.stdin is not None and self.stdin_data is not None:
            raise ValueError("give either stdin or stdin_data")
        return self


class BashReply(WireModel):
    """Of a call with ``binary``: what is kept of its output."""

    data: Base64 = b""
    parts: tuple[int, int, int, int] = (0, 0, 0, 0)
    """The lengths of what ``data`` consists of: the beginning and the end of stdout, those of stderr. The end is empty
    where nothing was dropped."""


class FileToolArguments(WireModel):
    """What all file tools have in common. ``user``: as whom, in a slot with an image; by default the slot's own."""

    user: ForCode[UserName | None] = None


class ReadFileArguments(FileToolArguments):
    """Read a file."""

    path: PathArgument = Field(description="File to read: relative to the workspace, or absolute.")
    offset: Annotated[Count, NOT_BOOL] = Field(default=0, description="Offset of the first byte to read.")
    limit: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES), NOT_BOOL] | None = Field(
        default=None,
        description="Maximum number of bytes to read. By default the whole file, up to 1 MiB: the result says where "
        "to continue.",
    )
    binary: bool = Field(default=False, description="Return the bytes as base64 instead of text.")


class ReadFileReply(WireModel):
    """``text`` or, for binary reads, ``data`` (base64). ``size_bytes`` is that of the whole file; of one whose size the
    kernel does not know (in ``/proc``), of as much as is known."""

    text: str | None = None
    data: Base64 | None = None
    size_bytes: int
    mode: int
    truncated: bool = False
    """True when the file continues after the bytes returned."""
    lossy: bool = False
    """True when the text is not the file's exact content (it was not UTF-8)."""
    next_offset: int | None = None
    """Offset to continue at, if the file continues."""


class WriteFileArguments(FileToolArguments):
    """Write a whole file; missing parent directories are created."""

    path: PathArgument = Field(description="File to write: relative to the workspace, or absolute.")
    text: str | None = Field(
        default=None, validation_alias=AliasChoices("text", "content"), description="The new content as text."
    )
    data: Base64 | None = Field(default=None, description="The new content as base64, instead of text.")
    mode: Annotated[int, Field(ge=0, le=0o777), NOT_BOOL] | None = Field(
        default=None,
        description="Permission bits as a decimal number (493 is 0755, 420 is 0644). By default those of the "
        "existing file, or 0644.",
    )


class WriteFileReply(WireModel):
    """``created``: the file is new; otherwise it was overwritten."""

    size_bytes: int
    created: bool


class ListFilesArguments(FileToolArguments):
    """List a directory."""

    path: PathArgument = Field(default=".", description="Directory to list: relative to the workspace, or absolute.")
    depth: Annotated[int, Field(ge=1, le=64), NOT_BOOL] = Field(default=1, description="Number of levels to descend.")
    limit: Annotated[int, Field(ge=1, le=100_000), NOT_BOOL] = Field(
        default=2_000, description="Maximum number of entries."
    )
    hidden: bool = Field(default=True, description="Include names that begin with a dot.")


class FileEntry(WireModel):
    """One directory entry; symbolic links are reported, never followed."""

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: int
    modified_s: float


class ListFilesReply(WireModel):
    """Entries in order of path; ``truncated`` when ``limit`` cut the list."""

    entries: tuple[FileEntry, ...]
    truncated: bool = False


class ArtifactsArguments(FileToolArguments):
    """List or read files with their SHA-256, pack a path into a tar archive, or extract one."""

    action: Literal["archive", "extract", "list", "read"] = Field(
        description="archive: pack a path into a tar; extract: unpack data into a directory; list: list the files "
        "below a path; read: read one file."
    )
    path: PathArgument = Field(default=".", description="Path to archive, list or read, or directory to extract into.")
    data: Base64 | None = Field(
        default=None, description="For extract: the tar archive (plain or gzip), base64-encoded."
    )


class ArtifactFile(WireModel):
    """One file: named relative to its archive or directory, else by its own name."""

    path: str
    size_bytes: int
    sha256: str


class ArtifactsReply(WireModel):
    """The files, with names relative to ``path``. ``data``: for archive an uncompressed tar of them, for read the
    file's bytes."""

    data: Base64 | None = None
    files: tuple[ArtifactFile, ...]
    total_bytes: int


class PatchArguments(FileToolArguments):
    """Apply a unified diff to files: all of it, or nothing."""

    patch: str = Field(
        description="A unified diff (git or plain) of one or more files. Line numbers may be wrong; context lines "
        "must match."
    )
    path: PathArgument = Field(default=".", description="Directory that the file names in the diff are relative to.")
    strip: Annotated[int, Field(ge=0, le=10), NOT_BOOL] | None = Field(
        default=None,
        description="Number of leading components to remove from file names; by default only the a/ and b/ of git "
        "diffs.",
    )
    fuzz: Annotated[int, Field(ge=0, le=3), NOT_BOOL] = Field(
        default=2, description="Maximum number of context lines at each end of a hunk that may be ignored to place it."
    )


class PatchedFile(WireModel):
    """The outcome for one file. ``fuzz`` and ``offset_lines`` are the largest that any of its hunks needed."""

    path: str
    action: Literal["created", "modified", "deleted", "renamed", "copied"]
    old_path: str | None = None
    hunks: int = 0
    fuzz: int = 0
    offset_lines: int = 0


class PatchReply(WireModel):
    """Every file the patch changed, in the patch's order."""

    files: tuple[PatchedFile, ...]


class SearchArguments(FileToolArguments):
    """Search files for a regular expression, line by line. ``pattern`` and ``glob`` mean what they mean to ripgrep."""

    pattern: Annotated[str, Field(min_length=1, max_length=1000)] = Field(
        validation_alias=AliasChoices("pattern", "query"),
        description="Regular expression in ripgrep's syntax, matched against each line. Look-around and "
        "back-references are not supported.",
    )
    path: PathArgument = Field(
        default=".", description="File or directory to search: relative to the workspace, or absolute."
    )
    glob: Annotated[str, Field(min_length=1, max_length=500)] | None = Field(
        default=None,
        description="Search only files that match this glob, as ripgrep's --glob: *.py or *.{js,ts} at any depth, "
        "src/*.py, src/**/*.py, src/; !*.md leaves files out. Relative to path.",
    )
    ignore_case: bool = Field(default=False, description="Ignore case.")
    literal: bool = Field(default=False, description="Treat the pattern as plain text.")
    limit: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = Field(
        default=200, description="Maximum number of matching lines."
    )


class SearchMatch(WireModel):
    """One matching line. ``cut``: the line is long, and ``text`` is 400 bytes around the match. ``lossy``: some bytes
    are not UTF-8, and are U+FFFD in ``text``."""

    path: str
    line: int
    text: str
    cut: bool = False
    lossy: bool = False


class SearchReply(WireModel):
    """Matches by path, then line. ``truncated``: there are more than ``limit``; the counts then cover only what was
    searched so far. Binary files (a NUL byte in the first 64 KiB), files over 64 MiB and files that cannot be read
    are skipped and counted; directories named ``.git`` below ``path`` are not searched."""

    matches: tuple[SearchMatch, ...]
    truncated: bool = False
    files_searched: int = 0
    binary_skipped: int = 0
    large_skipped: int = 0
    unreadable_skipped: int = 0


class PathsArguments(FileToolArguments):
    """Look at, make, rename or remove what a path names, as ``os.stat``, ``Path.mkdir``, ``os.rename``, ``os.remove``
    and, with ``recursive``, ``shutil.rmtree`` do."""

    action: Literal["stat", "mkdir", "rename", "remove"]
    path: PathArgument
    follow: bool = True
    """Of stat: a link at the path's end is followed."""
    parents: bool = False
    exist_ok: bool = False
    target: PathArgument | None = None
    """Of rename."""
    recursive: bool = False

    @model_validator(mode="after")
    def _one_target(self) -> PathsArguments:
        if (self.target is None) == (self.action == "rename"):
            raise ValueError("rename, and nothing else, has a target")
        return self


class PathsReply(WireModel):
    """``entry``: of stat, named as in the call."""

    entry: FileEntry | None = None


BASH: Final = SlotTool(
    name="bash",
    description=(
        "Run a bash command in the workspace (/workspace). Each call starts a new shell: files and background "
        "processes persist, the current directory and variables do not. Returns stdout, stderr and the exit "
        "code; very long output is truncated in the middle."
    ),
    arguments=BashArguments,
    reply=None,
    toolset="terminal",
    streamed=("stdin", "stdin_data"),
)

FILE_TOOLS: Final = (
    SlotTool(
        name="read_file",
        description="Read a file: as text, or as base64 if `binary` is true.",
        arguments=ReadFileArguments,
        reply=ReadFileReply,
        toolset="file",
    ),
    SlotTool(
        name="write_file",
        description=(
            "Write a file, replacing any existing content. Give the content as `text`, or "
            "base64-encoded as `data`. Missing parent directories are created."
        ),
        arguments=WriteFileArguments,
        reply=WriteFileReply,
        toolset="file",
        streamed=("text", "data"),
    ),
    SlotTool(
        name="list_files",
        description=("List a directory, with types, sizes and modification times. Symbolic links are not followed."),
        arguments=ListFilesArguments,
        reply=ListFilesReply,
        toolset="file",
    ),
    SlotTool(
        name="search",
        description=(
            "Search files for a regular expression, line by line. Returns the path, line number "
            "and text of each match, sorted by path. Binary files and .git directories are skipped."
        ),
        arguments=SearchArguments,
        reply=SearchReply,
        toolset="file",
    ),
    SlotTool(
        name="patch",
        description=(
            "Apply a unified diff (`diff -u` or git format): edit, create, delete or rename any number of files "
            "at once. Either the whole patch is applied or nothing is changed; an error says which hunk does not "
            "apply and what the file contains there."
        ),
        arguments=PatchArguments,
        reply=PatchReply,
        toolset="file",
        streamed=("patch",),
    ),
    SlotTool(
        name="artifacts",
        description=(
            "List the files below a path with their sizes and SHA-256 (action `list`), read one file as base64 "
            "(action `read`), pack a file or directory into a tar archive (action `archive`), or extract a "
            "base64-encoded tar archive, given as `data`, into a directory (action `extract`)."
        ),
        arguments=ArtifactsArguments,
        reply=ArtifactsReply,
        toolset="file",
        streamed=("data",),
    ),
)

CODE_TOOLS: Final = (
    SlotTool(
        name="paths",
        description="Look at, make, rename or remove a file or directory.",
        arguments=PathsArguments,
        reply=PathsReply,
        toolset="",
    ),
)
"""What hooks and scripts may call besides, and models are never offered: ``bash`` does the same for them."""

"""The tools every slot has, as data."""

from __future__ import annotations

from typing import Final

from agentenv.tools.spec import ToolSpec
from agentenv.wire.tools import (
    ArtifactsArguments,
    BashArguments,
    ListFilesArguments,
    PatchArguments,
    ReadFileArguments,
    SearchArguments,
    WriteFileArguments,
)

BUILTIN: Final = (
    ToolSpec(
        name="bash",
        description=(
            "Run a bash command in the workspace (/workspace). Each call is a fresh `bash -c`: files stay, the "
            "current directory, variables and background jobs' shell do not. Returns stdout, stderr and the exit "
            "code; very long output is cut in the middle."
        ),
        arguments=BashArguments,
    ),
    ToolSpec(
        name="read_file",
        description="Read a file of the workspace: as text, or as base64 when `binary` is true.",
        arguments=ReadFileArguments,
    ),
    ToolSpec(
        name="write_file",
        description=(
            "Write a whole file of the workspace, replacing what was there. Give the content as `text`, or as "
            "base64 in `data`. Missing parent directories are made."
        ),
        arguments=WriteFileArguments,
    ),
    ToolSpec(
        name="list_files",
        description="List a directory of the workspace, with kinds, sizes and times. Symbolic links are not followed.",
        arguments=ListFilesArguments,
    ),
    ToolSpec(
        name="search",
        description=(
            "Search the files of the workspace for a regular expression, line by line. Returns path, line number and "
            "text of each match, in order of path. Binary files and what is in .git are left out."
        ),
        arguments=SearchArguments,
    ),
    ToolSpec(
        name="patch",
        description=(
            "Change files by a unified diff (`diff -u` or git format): edit, create, delete or rename any number of "
            "them at once. Either all of it is applied or nothing; an error says which hunk does not fit and what the "
            "file has in its place."
        ),
        arguments=PatchArguments,
    ),
    ToolSpec(
        name="artifacts",
        description=(
            "Archive a file or directory of the workspace as a tar (action `archive`), or extract a tar given as "
            "base64 in `data` into a directory (action `extract`)."
        ),
        arguments=ArtifactsArguments,
    ),
)

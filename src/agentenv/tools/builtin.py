"""The tools every slot has, as data."""

from __future__ import annotations

from typing import Final

from agentenv.tools.spec import ToolSpec
from agentenv.wire.sessions import ProcessArguments, TerminalArguments, TmuxArguments
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
        name="terminal",
        description=(
            "Run a command in a bash that stays: current directory, variables, functions and jobs are kept between "
            "calls. Several named sessions work side by side. A command that takes longer than `timeout_s` goes on; "
            "an empty command returns more of its output, `keys` such as C-c reach it, `reset` starts afresh. With "
            "`pty` the session has a terminal, for programs that ask questions. `background` starts a process that "
            "the `process` tool watches."
        ),
        arguments=TerminalArguments,
    ),
    ToolSpec(
        name="process",
        description=(
            "Run commands in the background: start, list, poll (state and new output), log (kept output), wait, kill, "
            "write, submit (input and Enter) and close (end of input). The last 200 kB of output are kept. All end "
            "with the task."
        ),
        arguments=ProcessArguments,
    ),
    ToolSpec(
        name="tmux",
        description=(
            "Drive full-screen programs (editors, debuggers, games) in tmux: start a session, send_keys, wait for a "
            "text, for an idle shell or for the end, capture the screen, the scrollback or what is new, resize, stop."
        ),
        arguments=TmuxArguments,
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
            "List the files below a path with size and SHA-256 (action `list`), read one file as base64 with both "
            "(action `read`), archive a file or directory of the workspace as a tar (action `archive`), or extract a "
            "tar given as base64 in `data` into a directory (action `extract`)."
        ),
        arguments=ArtifactsArguments,
    ),
)

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
            "Run a bash command in the workspace (/workspace). Each call starts a new shell: files and background "
            "processes persist, the current directory and variables do not. Returns stdout, stderr and the exit "
            "code; very long output is truncated in the middle."
        ),
        arguments=BashArguments,
    ),
    ToolSpec(
        name="terminal",
        description=(
            "Run a command in a persistent bash session: the current directory, variables, functions and jobs are "
            "kept between calls. Several named sessions can be used side by side. A command that exceeds "
            "`timeout_s` keeps running: send an empty command to get more of its output, `keys` such as C-c to "
            "control it, or `reset` to start over. Set `pty` for programs that need a terminal. `background` "
            "starts the command as a background process, see the `process` tool."
        ),
        arguments=TerminalArguments,
    ),
    ToolSpec(
        name="process",
        description=(
            "Manage background processes: start, list, poll (state and new output), log (kept output), wait, "
            "kill, write, submit (write, then Enter) and close (end of input). The last 200 kB of output are "
            "kept. All processes end with the task."
        ),
        arguments=ProcessArguments,
    ),
    ToolSpec(
        name="tmux",
        description=(
            "Drive full-screen programs (editors, debuggers, games) in tmux: start a session, send_keys, wait "
            "(for a text, an idle shell or the end of the session), capture (the screen, the scrollback or what "
            "is new), resize, stop, list."
        ),
        arguments=TmuxArguments,
    ),
    ToolSpec(
        name="read_file",
        description="Read a file in the workspace: as text, or as base64 if `binary` is true.",
        arguments=ReadFileArguments,
    ),
    ToolSpec(
        name="write_file",
        description=(
            "Write a file in the workspace, replacing any existing content. Give the content as `text`, or "
            "base64-encoded as `data`. Missing parent directories are created."
        ),
        arguments=WriteFileArguments,
    ),
    ToolSpec(
        name="list_files",
        description=(
            "List a directory in the workspace, with types, sizes and modification times. Symbolic links are not "
            "followed."
        ),
        arguments=ListFilesArguments,
    ),
    ToolSpec(
        name="search",
        description=(
            "Search files in the workspace for a regular expression, line by line. Returns the path, line number "
            "and text of each match, sorted by path. Binary files and .git directories are skipped."
        ),
        arguments=SearchArguments,
    ),
    ToolSpec(
        name="patch",
        description=(
            "Apply a unified diff (`diff -u` or git format): edit, create, delete or rename any number of files "
            "at once. Either the whole patch is applied or nothing is changed; an error says which hunk does not "
            "apply and what the file contains there."
        ),
        arguments=PatchArguments,
    ),
    ToolSpec(
        name="artifacts",
        description=(
            "List the files below a path with their sizes and SHA-256 (action `list`), read one file as base64 "
            "(action `read`), pack a file or directory into a tar archive (action `archive`), or extract a "
            "base64-encoded tar archive, given as `data`, into a directory (action `extract`)."
        ),
        arguments=ArtifactsArguments,
    ),
)

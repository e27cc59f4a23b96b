"""Protocol between a session and its shell: the text typed to it, and its answers. Pure.

The shell is an interactive ``bash`` whose standard input is a pipe: bash reads its commands there, a line at a
time, and answers through a second one, descriptor 252. (Two pipes instead of a socket: over a socket any process
in the slot could send us descriptors, which may take the kernel long to close.) Around each command we type two
things::

    { <command>
    } <&253 2>&254
    for _ in; do :; done 2>&252 <"/NONCE/$?/…/NONCE/" || …

- The group gives the command its own standard input and errors; bash keeps ours meanwhile. All it keeps
  for us is closed by every exec (:func:`first_lines`): the command cannot read what we type, and nothing
  it starts has a descriptor of ours. None of ours is ever closed and opened again either, so a limit of
  open files (``ulimit -n``) below their numbers does no harm. Prompts, ``set -v`` and job notices go
  where nobody looks.
- A group is no level of evaluation: ``set -x`` shows ``+ cmd``, traps and ``$_`` see the command alone.
- The last line runs no command at all, so ``set -x`` and the DEBUG, ERR and RETURN traps have nothing to
  show: its loop has no turns, and its redirection fails on purpose, after ``2>&252`` has sent bash's
  complaint, which holds ``$?`` and more, to us. The ``||`` keeps ``set -e`` and ERR out of it. The nonce
  is new for each command and typed only behind it: nothing a command prints can pass for an answer.
- It stands on a line of its own because an interrupt (C-c) makes bash drop the line it is in.

Text that is not surely a whole command (an open quote would swallow what we type behind it) is parsed by the shell
first, in a subshell that runs none of it; what does not parse goes through ``eval``, which says what is wrong with
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RESERVED_WORDS = frozenset({
    "if", "then", "elif", "else", "fi", "case", "esac", "for", "select", "while", "until", "do", "done", "in",
    "function", "time", "coproc", "{", "}", "!", "[[", "]]", "alias", "unalias", "shopt",
})  # fmt: skip


GIVEN_ANSWERS_FD = 9
"""Where a new shell has the pipe for its answers."""
ANSWERS_FD, STDIN_FD, STDERR_FD = 252, 253, 254
MAX_NATIVE_BYTES = 32 * 1024
"""Longer commands go through eval, because bash runs the commands of one group by recursion."""
MAX_PLAIN_BYTES = 4 * 1024

SHELL_ARGV = ("bash", "--norc", "--noprofile", "--noediting", "+H", "-i")
NOTHING = "for _ in; do :; done"
_REDIRECTS = f"<&{STDIN_FD} 2>&{STDERR_FD}"
_QUIET = "</dev/null >/dev/null 2>&1"

# No group is possessive: before Python 3.11.5 such a group keeps what its last, failed round has taken
# (github.com/python/cpython/issues/106052). What a round begins with tells what it is: there is little to go back to.
_VALUE = r"\$(?:[A-Za-z_?]|\{[A-Za-z_]\w*+\}|\(\([\w \t+*/%<>=-]++\)\))"
_OUTPUT = r"\$\([\w \t./=:,+%-]++\)"
_WORD = (
    rf"(?:[A-Za-z0-9_./:=,@%+^~*?-]|'[^']*+'|\"(?:[^\"$`\\]|{_VALUE})*\"|{_VALUE}|{_OUTPUT}"
    r"|\\[A-Za-z0-9_. /-])+"
)
_ATOM = rf"(?:[12]?>&[12]|[12]?>>?[ \t]*+{_WORD}|<[ \t]*+{_WORD}|{_WORD}|[][](?![^ \t\n;]))"
_SIMPLE = rf"{_ATOM}(?:[ \t]++{_ATOM})*"
_PLAIN = re.compile(rf"[ \t]*+{_SIMPLE}(?:[ \t]*+(?:;|&&|\|\|?|\n)[ \t\n]*+{_SIMPLE})*[ \t]*+;?[ \t\n]*+")
# Compiled once: a pattern that holds the nonce of its command costs as much as all else of a call.
_REPORT = re.compile(rb"(/[^/]+/)(\d+)/([^/]*)/([^/]*)/(.*?)\1", re.DOTALL)
_BARE_WORDS = re.compile(r"'[^']*'|\"[^\"]*\"|[A-Za-z\[\]!{}]+")


@dataclass(frozen=True)
class ShellReport:
    """The shell's report after a command."""

    exit_code: int
    pipe_status: tuple[int, ...]
    flags: str
    cwd: str


def first_lines(*, terminal: bool) -> str:
    """The first commands of a new shell: disable the history, and move the command's errors, the shell's answers
    and the command's input to their final descriptors, closed by every exec. For this property each is copied from
    10, where bash keeps redirected descriptors of a group: these are closed by every exec, and so are copies of
    them."""

    def kept(number: int, redirected: str) -> str:
        return f"{{ exec {number}>&10; }} {redirected}"

    user_stdin = f"{kept(STDIN_FD, '>/dev/null')}; exec 2>/dev/null"
    if not terminal:
        user_stdin = f"exec 2<>/dev/null; {kept(STDIN_FD, '2>&-')}"
    steps = (
        "set +o history; history -c; unset HISTFILE",
        kept(STDERR_FD, "2>/dev/null"),
        f"exec 2>&{GIVEN_ANSWERS_FD} {GIVEN_ANSWERS_FD}>&-",
        kept(ANSWERS_FD, "2>/dev/null"),
        user_stdin,
    )
    return "; ".join(steps) + "\n"


def question(nonce: str, *, marker: bool) -> str:
    """The line that makes the shell report. With ``marker`` it also writes the nonce to its terminal, as its last
    output: output through a terminal arrives later than through a pipe."""
    asked = f'"/{nonce}/$?/${{PIPESTATUS[*]/#/,}}/$-/${{PWD-}}/{nonce}/"'
    marked = f"{NOTHING} 2>&{STDERR_FD} </{nonce} || " if marker else ""
    return f"{NOTHING} 2>&{ANSWERS_FD} <{asked} || {marked}{NOTHING}\n"


def without_editor() -> str:
    """Undo ``set -o vi`` and ``set -o emacs``: there is no line to edit."""
    return "set +o vi; set +o emacs\n"


def typed_ahead_dropped() -> str:
    """Discard unread input of the terminal, so that no other program gets it. In a subshell, which leaves no
    variable behind; without line mode, so that partial lines are discarded too; until nothing has come for a
    moment."""
    more = "\\builtin read -r -s -N 4096 -t 0.1; [[ $? -le 128 ]] || \\builtin read -t 0 || break"
    drop = f"for _ in {{1..64}}; do {more}; done"
    return f"( trap - DEBUG ERR; {drop} ) <&{STDIN_FD} >/dev/null 2>&1 || {NOTHING}\n"


def report(nonce: str, said: bytes) -> ShellReport | None:
    """The complete answer to the question with that nonce, None if incomplete."""
    mark, at = b"/%b/" % nonce.encode(), -1
    while (at := said.find(mark, at + 1)) >= 0:
        if found := _REPORT.match(said, at):
            statuses = tuple(int(number) for number in re.findall(rb"\d+", found[3]))
            return ShellReport(
                int(found[2]), statuses, found[4].decode("ascii", "replace"), found[5].decode("utf-8", "replace")
            )
    return None


def marker_line(nonce: str) -> re.Pattern[bytes]:
    """The line that ends a command's output on a terminal. Short, so that output that begins like one is not held
    back for long."""
    return re.compile(rb"(?:bash: )?/%b: [^\r\n]{0,200}\r?\n" % nonce.encode())


def restored(last: ShellReport) -> str:
    """Text that restores ``$?`` and ``PIPESTATUS`` after the last command."""
    statuses = last.pipe_status if last.pipe_status and last.pipe_status[-1] == last.exit_code else (last.exit_code,)
    if not any(statuses):
        return ""
    ended = " | ".join(rf"( \builtin exit {status} )" for status in statuses)
    return f"{ended} {'&&' if last.exit_code else '||'} {NOTHING}\n"


def is_plain(command: str) -> bool:
    """Whether the text is certainly a list of complete simple commands. Errs on the side of False."""
    if len(command) > MAX_PLAIN_BYTES or _PLAIN.fullmatch(command) is None:
        return False
    return not RESERVED_WORDS.intersection(_BARE_WORDS.findall(command))


def fits(command: str) -> bool:
    """Whether the text is short enough to be typed unchanged."""
    return len(command.encode()) <= MAX_NATIVE_BYTES


def check(command: str) -> str:
    """Parse the command without running it. Reports 1 when it is complete, 0 when it is not. Parsed twice, because
    a text may end the brackets it is in and open others; it cannot do so with both kinds."""
    wrapped = f"for _ in; do {{ {command}\n\n}} ; ( {command}\n\n) ; done"
    return f"! ( \\builtin eval {quoted(wrapped)} ) {_QUIET}\n"


def native(command: str, *, plain: bool = False) -> str:
    """Run a complete command. The empty line survives a backslash at its end, which a plain one would not."""
    return f"{{ {command}{chr(10) if plain else chr(10) * 2}}} {_REDIRECTS}\n"


def evaluated(command: str) -> str:
    """Run any text; an incomplete command is an error message. The empty line is for bash, which drops the first
    word it reads after some of these errors."""
    return f"\\builtin eval {quoted(command)} {_REDIRECTS}\n\n"


def quoted(text: str) -> str:
    """``text`` as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"

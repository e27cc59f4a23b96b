"""Passes a script to a shell that was started before the script was known.

``["bash", "-c", BOOTSTRAP]`` waits for a script on descriptor 9 (:func:`encode_script`), then behaves as ``bash -c
script`` started at that moment. The remaining differences, all on standard error or in rarely used features: a
syntax error is reported by ``bash: eval:`` instead of ``bash: -c:``; the last command is a child of the shell
instead of replacing it, so when a signal ends it bash reports that (the exit code is 128 + n where ``bash -c``
would die of the signal itself); and the features that :func:`needs_cold_shell` looks for.
"""

from __future__ import annotations

import re

BOOTSTRAP = (
    "TMOUT= IFS= read -r -d '' -u 9 BASH_EXECUTION_STRING || exit; "
    "exec 9<&-; "
    "SECONDS=0; "
    ': "$0"; '
    'eval "$BASH_EXECUTION_STRING"'
)
"""The script a waiting shell is started with, piece by piece:

- ``BASH_EXECUTION_STRING`` is the variable in which ``bash -c`` shows its script: reading into it
  leaves no variable of ours behind and gives it the right value. (``bash -c`` forgets it after use:
  the bootstrap itself is not read from there.)
- ``TMOUT=`` and ``IFS=`` hold for the ``read`` only. With TMOUT in the environment bash would stop
  waiting; without the empty IFS it would trim the script.
- ``-d ''`` reads up to a NUL, which no script can hold. End of file before it means that the sender
  died halfway: ``|| exit``, never run half a script.
- ``SECONDS=0``: it counts from the shell's start, which was long ago.
- ``: "$0"`` makes ``$_`` what it is at the start of ``bash -c``.
- ``eval`` comes last and as a list element of its own, so ``set -e``, traps, ``exit``, ``return`` and
  ``$?`` mean what they mean at top level. LINENO counts from 1 in it.
"""

# Matched in time linear in the script, which comes from a slot: none of these begins with what it may repeat.
_COLD = re.compile(
    r"xtrace|PS4|SHELLOPTS|BASH_XTRACEFD"
    r"|-[A-Za-z]*o[ \t]+verbose"
    r"|PIPESTATUS|\bcompgen\b|\benable\b"  # set by the bootstrap's own commands; unset in a new shell
)
_BETWEEN = re.compile(r"[\n;&|]")
_SET = re.compile(r"\bset\b")
_TRACE = re.compile(r"[ \t][-+][A-Za-z]*[xv]")


def needs_cold_shell(script: str) -> bool:
    """Whether the text mentions a feature by which it could distinguish BOOTSTRAP from ``bash -c``.

    Errs on the side of True. Such a script is run as ``["bash", "-c", script]`` where it fits into a packet; a
    longer one goes through BOOTSTRAP all the same.
    """
    return _COLD.search(script) is not None or ("set" in script and _sets_a_trace(script))


def _sets_a_trace(script: str) -> bool:
    """``set`` and, later in the same command, an option with x or v: eval is one level deeper, so that ``+ cmd`` is
    traced as ``++ cmd``. Searched after the first ``set`` only: whatever follows another also follows the first."""
    for command in _BETWEEN.split(script):
        found = _SET.search(command)
        if found and _TRACE.search(command, found.end()):
            return True
    return False


def encode_script(script: str) -> bytes:
    """The bytes to put on descriptor 9. Raises ValueError when the script holds a NUL.

    Two NULs end it: when the script ends in the middle of a UTF-8 character, bash's ``read`` takes
    the first NUL for the rest of that character.
    """
    if "\0" in script:
        raise ValueError("a script must not contain NUL bytes")
    return script.encode("utf-8", "surrogateescape") + b"\0\0"

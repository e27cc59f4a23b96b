"""Logs each kind of failure once, in full, and counts the others of its kind.

The same bug in a hook fails every rollout; a log that repeats its traceback for each of them hides the one line that
says where it is.
"""

from __future__ import annotations

import logging
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

from agentenv.errors import AgentEnvError, BuildStepError, DockerfileError

logger = logging.getLogger(__name__)

MOST_KINDS = 200
"""Number of kinds that are distinguished; failures of further kinds count as one."""
_OF_DOCKERFILES = (BuildStepError, DockerfileError)
"""They name a line of a Dockerfile, and no code of the author's is wrong."""
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def same_kind(text: str) -> str:
    """The text without its numbers, addresses and digests: equal for failures that differ in nothing else."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", text[:300])


def is_shown(count: int) -> bool:
    """Whether the occurrence of this number is logged: the 1st, 10th, 100th, ..."""
    return str(count).rstrip("0") == "1"


class FailureLog:
    """The failures of one run. Bounded: every kind is logged once, then at its 10th, 100th, ... occurrence."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, str]] = {}
        """Kind → how many, and the words of the first."""

    def hook_failed(self, error: AgentEnvError, *, item: str, trajectory: str) -> None:
        """A hook raised, or returned something wrong: where in the author's code, and for which item."""
        cause = error.__cause__ or error
        wanted = _authors(cause)
        place = _place(cause, wanted)
        text = f"{error}\n  item {item}, rollout {trajectory}: not scored, because the fault is the task's"
        if place and not isinstance(cause, _OF_DOCKERFILES):
            text += "\n" + _traceback(cause, wanted)
        hook = error.message.partition(" raised ")[0]
        if place:
            self.add(f"{hook} raised {type(cause).__name__} at {place}", text, level=logging.ERROR, exact=True)
        else:
            self.add(f"{type(error).__name__}: {error}", text, level=logging.ERROR)

    def unexpected(self, error: BaseException, *, trajectory: str) -> None:
        """An exception that is not in :mod:`agentenv.errors`, from outside the author's code."""
        kind = f"unexpected {type(error).__name__} at {_place(error, _is_not_atropos)}"
        text = f"{trajectory}: unexpected failure\n{_traceback(error, _is_not_atropos)}"
        self.add(kind, text, level=logging.ERROR, exact=True)

    def add(self, what: str, text: str, *, level: int = logging.WARNING, exact: bool = False) -> None:
        """Log ``text``, unless a failure of the same kind was logged before; ``what`` names the kind, by
        :func:`same_kind` or ``exact``."""
        kind = what if exact else same_kind(what)
        if kind not in self._seen and len(self._seen) >= MOST_KINDS:
            kind = what = "further kinds of failures"
            text = "further kinds of failures are only counted"
        count, first = self._seen.get(kind, (0, what))
        self._seen[kind] = count + 1, first
        if not count:
            logger.log(level, "%s", text)
        elif is_shown(count + 1):
            logger.log(level, "again ×%d: %s", count, first)
        else:
            logger.info("again: %s", "; ".join(line.strip() for line in text.splitlines()[:2]))

    def close(self) -> None:
        """Log how often each failure was repeated since its last line. Repeatable."""
        seen, self._seen = self._seen, {}
        for count, first in seen.values():
            if not is_shown(count):
                logger.warning("again ×%d: %s", count - 1, first)


def authors_traceback(error: BaseException) -> str:
    """The traceback with the frames of the author's code alone; empty if there are none."""
    wanted = _authors(error)
    return _traceback(error, wanted) if _place(error, wanted) else ""


def _authors(error: BaseException) -> Callable[[str], bool]:
    return _is_users if _place(error, _is_users) else _is_not_ours  # an installed environment has no other


def _is_users(filename: str) -> bool:
    return not filename.startswith((_PACKAGE, "<frozen", *_INSTALLED))


def _is_not_ours(filename: str) -> bool:
    return _is_not_atropos(filename) and not filename.startswith((_PACKAGE, "<frozen"))


def _is_not_atropos(filename: str) -> bool:
    return "atroposlib" not in filename


def _place(error: BaseException, wanted: Callable[[str], bool]) -> str:
    """File and function of the innermost wanted frame; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if wanted(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""


def _traceback(error: BaseException, wanted: Callable[[str], bool]) -> str:
    """The traceback with the wanted frames alone. A chained exception without any is left out: atropos runs its
    commands inside an ``except`` block, whose exception would head every traceback."""

    def cut(shown: traceback.TracebackException) -> traceback.TracebackException:
        shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if wanted(frame.filename)])
        for name in ("__cause__", "__context__"):
            chained = getattr(shown, name)
            if chained is not None and not cut(chained).stack:
                setattr(shown, name, None)
        return shown

    return "".join(cut(traceback.TracebackException.from_exception(error)).format()).rstrip()

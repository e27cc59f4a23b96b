"""Mirrors of git repositories on this machine: cloned once, by one process at a time, and fetched when asked for.

A directory of them may be bound into slots (``sandbox_binds``): there ``git clone --shared /opt/repositories/NAME.git``
takes no time and almost no space, and needs no network.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentenv.errors import InfraError
from agentenv.locks import locked

__all__ = ["RepositoryError", "fetch", "has_commit", "mirror"]

GIT_TIMEOUT_S = 300.0
CLONE_TIMEOUT_S = 1800.0

_LEAD_ASTRAY = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"})
"""Set inside git's hooks: they would redirect our commands to another repository."""
_REPRODUCIBLE = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "agentenv",
    "GIT_AUTHOR_EMAIL": "agentenv@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "agentenv",
    "GIT_COMMITTER_EMAIL": "agentenv@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}


class RepositoryError(InfraError):
    """A repository could not be cloned or read. Nothing reached a slot; it may be retried."""

    code = "repository"


class GitError(Exception):
    """git failed; its message is the text."""


def mirror(directory: Path, name: str, url: str, *, commit: str = "", refresh: bool = False) -> Path:
    """The bare mirror of ``url`` at ``directory/NAME.git``, whose files everybody may read; blocking.

    It is cloned if it is missing, and fetched with ``refresh`` or if it lacks ``commit`` (see :func:`fetch`).
    Processes that want the same mirror wait for each other. Raises: RepositoryError.
    """
    target = directory / f"{name}.git"
    missing = [place for place in (target.parent, *target.parent.parents) if not place.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for place in missing:
        place.chmod(0o755)
    with locked(_lock_of(target)):
        if not target.is_dir():
            _clone(url, target, name)
            refresh = False
    if refresh or (commit and not has_commit(target, commit)):
        fetch(target, "" if refresh else commit)
    return target


def fetch(repository: Path, commit: str = "") -> None:
    """Fetch what is new; or only what is needed to have this commit, which need not be on any branch. Blocking.

    Afterwards :func:`has_commit` tells whether the other side had it. Raises: RepositoryError.
    """
    fetching = ["git", "--git-dir", directory_of(repository), "fetch", "--quiet"]
    with locked(_lock_of(repository)):
        if commit and has_commit(repository, commit):
            return
        _reach([*fetching, "--all"], repository.name)
        if commit and not has_commit(repository, commit):
            # With a ref of its own, or git would remove it one day. Servers that do not have it, or hide it, refuse.
            with contextlib.suppress(RepositoryError):
                _reach([*fetching, "origin", f"{commit}:refs/agentenv/{commit}"], repository.name)


def _lock_of(repository: Path) -> Path:
    return repository.with_name(f"{repository.name.removesuffix('.git')}.lock")


def has_commit(repository: Path, commit: str) -> bool:
    """Whether the repository has this commit."""
    try:
        git(["cat-file", "-e", f"{commit}^{{commit}}"], {"GIT_DIR": directory_of(repository)})
    except GitError:
        return False
    return True


def directory_of(repository: Path) -> str:
    """The ``GIT_DIR`` of a repository, bare or not."""
    inner = repository / ".git"
    return str((inner if inner.is_dir() else repository).resolve())


def git(
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> bytes:
    """What a git command prints. It obeys no settings of this machine's users, and its commits are reproducible.

    ``env`` is added to the environment. Raises: GitError.
    """
    return _run(["git", *arguments], {**_plain(), **_REPRODUCIBLE, **(env or {})}, stdin=stdin, cwd=cwd)


def _clone(url: str, target: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".cloning-") as directory:
        cloned = Path(directory) / "repository"
        # Never repacked behind the back of clones that share its objects.
        _reach(["git", "clone", "--quiet", "--mirror", "--config", "gc.auto=0", "--", url, str(cloned)], name)
        cloned.rename(target)


def _reach(command: list[str], name: str) -> None:
    """Run a git command that needs the network, with the user's own settings (proxies, credentials)."""
    try:
        _run(command, _plain(), timeout_s=CLONE_TIMEOUT_S)
    except GitError as error:
        raise RepositoryError(
            f"{name} could not be cloned: {error}", next_step="clone it by hand into the directory of repositories"
        ) from error


def _plain() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LEAD_ASTRAY}
    return {**kept, "GIT_TERMINAL_PROMPT": "0"}


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: str | None = None,
    cwd: Path | None = None,
    timeout_s: float = GIT_TIMEOUT_S,
) -> bytes:
    given = (stdin or "").encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            env=dict(env),
            cwd=cwd,
            timeout=timeout_s,
            check=False,
            umask=0o022,  # slots have other uids, and must be able to read it
        )
    except FileNotFoundError as error:
        raise GitError("git is not installed: apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git did not end in {timeout_s:.0f} s") from error
    if done.returncode:
        raise GitError(done.stderr.decode("utf-8", "replace").strip()[-600:] or f"exit code {done.returncode}")
    return done.stdout

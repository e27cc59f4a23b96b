"""Repositories at a record's commit, out of local git repositories. All of it runs on the environment's side.

Slots never see these repositories, only a work tree with a single new commit: there is no later history with the
solution.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import ConfigError, InfraError
from examples.swe.records import SweRecord
from examples.swe.scan import digest

GIT_TIMEOUT_S = 300.0
CLONE_TIMEOUT_S = 1800.0
_OURS = {
    "GIT_TERMINAL_PROMPT": "0",
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


@dataclass(frozen=True)
class Checkout:
    """A record's repository, prepared in a separate directory."""

    tree: Path
    """The files at the base commit, without ``.git``."""
    workspace: Path
    """The same with a ``.git`` of one commit: the policy's workspace."""
    known: Mapping[str, str]
    """``scan.digest`` of every file of the tree, by path."""
    executable: frozenset[str]
    """Those of them that are executable."""
    tests: Mapping[str, bytes | None]
    """The files of the test patch with their new content; None: it removes them."""
    gold: frozenset[str]
    """The paths the gold patch names."""


def find(repositories: Path, repo: str) -> Path | None:
    """Path of ``owner/name`` below ``repositories``: as ``owner/name`` or ``owner__name``, with ``.git`` or without."""
    for name in (repo, repo.replace("/", "__")):
        for path in (repositories / f"{name}.git", repositories / name):
            if path.is_dir():
                return path
    return None


def check(repositories: Path, records: Sequence[SweRecord], *, may_clone: bool) -> None:
    """Check whether each record's repository exists, or may be cloned.

    Raises: ConfigError naming the record, when a repository or a commit in one is missing.
    """
    for record in records:
        path = find(repositories, record.repo)
        if path is None and not may_clone:
            raise ConfigError(
                "repositories",
                f"{record.instance_id}: {record.repo} is not in {repositories}",
                next_step=f"git clone --mirror it to {repositories / record.repo}.git, or set clone_url",
            )
        if path is not None and not may_clone and not _has(path, record.base_commit):
            raise _no_commit(record, path)


def ensure(repositories: Path, record: SweRecord, clone_url: str) -> Path:
    """The record's repository including its commit; cloned or fetched if missing and ``clone_url`` is set.

    ``clone_url`` has ``{repo}`` in it. Two calls for one repository must not overlap. Raises: RepositoryError when
    git cannot reach it; ConfigError when it has no such commit.
    """
    path = find(repositories, record.repo)
    if path is None:
        if not clone_url:
            check(repositories, [record], may_clone=False)
        path = _clone(repositories, record.repo, clone_url.format(repo=record.repo))
    elif clone_url and not _has(path, record.base_commit):
        _reached(["git", "--git-dir", _git_dir(path), "fetch", "--quiet", "--all"], record.repo)
    if not _has(path, record.base_commit):
        raise _no_commit(record, path)
    return path


def check_out(repository: Path, record: SweRecord, target: Path) -> Checkout:
    """Make the record's checkout in ``target``, which must not exist.

    Raises: ConfigError naming the record's field that does not fit its repository; RepositoryError.
    """
    target.mkdir(parents=True)
    trees = _Trees(_git_dir(repository), target)
    try:
        base = trees.files(record.base_commit, target / "tree")
        trees.files(record.base_commit, target / "workspace")
        _commit_all(target / "workspace")
        gold = trees.patched(record, "patch", record.patch)
        tests = trees.patched(record, "test_patch", record.test_patch)
    except (GitError, OSError) as error:
        raise RepositoryError(f"{record.instance_id}: cannot check {record.repo} out: {error}") from error
    missing = [path for path in record.test_files if path not in base and tests.get(path) is None]
    if missing:
        raise ConfigError(
            "FAIL_TO_PASS", f"{record.instance_id}: {missing[0]} is neither in the repository nor in its test_patch"
        )
    executable = frozenset(path for path in base if os.access(target / "tree" / path, os.X_OK))
    return Checkout(target / "tree", target / "workspace", base, executable, tests, frozenset(gold))


def remove(checkout: Path) -> None:
    """Remove a checkout's directory."""
    shutil.rmtree(checkout, ignore_errors=True)


class _Trees:
    """Commits and patched commits as files, through a separate index: the repository is only read."""

    def __init__(self, git_dir: str, scratch: Path) -> None:
        self._git_dir = git_dir
        self._scratch = scratch

    def files(self, commit: str, target: Path) -> dict[str, str]:
        """Write a commit's files below ``target``; their digests by path."""
        target.mkdir()
        with self._index(commit) as index:
            index.git("checkout-index", "--all", "--force", work_tree=target)
        paths = (path for path in target.rglob("*") if path.is_symlink() or path.is_file())
        return {str(path.relative_to(target)): digest(str(path)) or "" for path in paths}

    def patched(self, record: SweRecord, field: str, patch: str) -> dict[str, bytes | None]:
        """The files of a record's patch with their new content. Raises: ConfigError when it does not apply."""
        with self._index(record.base_commit) as index:
            try:
                index.git("apply", "--cached", "--whitespace=nowarn", "-", stdin=patch)
            except GitError as error:
                raise ConfigError(
                    field,
                    f"{record.instance_id}: does not apply to {record.repo} at {record.base_commit}: {error}",
                ) from error
            said = index.git("diff-index", "--cached", "--no-renames", "--name-status", "-z", record.base_commit)
            words = said.decode("utf-8", "surrogateescape").split("\0")[:-1]
            changes = dict(zip(words[1::2], words[::2], strict=True))
            return {
                path: None if status == "D" else index.git("cat-file", "blob", f":{path}")
                for path, status in changes.items()
            }

    @contextmanager
    def _index(self, commit: str) -> Iterator[_Index]:
        with tempfile.TemporaryDirectory(dir=self._scratch, prefix="index-") as directory:
            index = _Index(self._git_dir, Path(directory))
            index.git("read-tree", commit)
            yield index


@dataclass(frozen=True)
class _Index:
    """A git index in a directory of its own."""

    git_dir: str
    directory: Path

    def git(self, *arguments: str, stdin: str | None = None, work_tree: Path | None = None) -> bytes:
        """Run git on this index. Raises: GitError."""
        env = {"GIT_INDEX_FILE": str(self.directory / "index"), "GIT_DIR": self.git_dir}
        env |= {"GIT_WORK_TREE": str(work_tree)} if work_tree else {}
        return _git(["git", "-c", "core.bare=false", *arguments], env, stdin=stdin, cwd=work_tree or self.directory)


def _commit_all(tree: Path) -> None:
    config = ["-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0"]
    for command in (
        ["init", "--quiet", "--template=", "--initial-branch=main"],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--allow-empty", "--no-verify", "--message", "The repository before the task"],
        ["repack", "-a", "-d", "--quiet"],  # one file instead of one per object: slots limit the number of inodes
    ):
        _git(["git", *config, *command], {}, cwd=tree)


def _clone(repositories: Path, repo: str, url: str) -> Path:
    repositories.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=repositories, prefix=".cloning-") as directory:
        cloned = Path(directory) / "repository"
        _reached(["git", "clone", "--quiet", "--mirror", "--", url, str(cloned)], repo)
        target = repositories / f"{repo}.git"
        target.parent.mkdir(parents=True, exist_ok=True)
        cloned.rename(target)
    return target


def _reached(command: list[str], repo: str) -> None:
    """Run a git command that needs the network, with the user's own settings (proxies, credentials)."""
    try:
        env = {name: value for name, value in os.environ.items() if name not in _LEAD_ASTRAY}
        _run(command, {**env, "GIT_TERMINAL_PROMPT": "0"}, timeout_s=CLONE_TIMEOUT_S)
    except GitError as error:
        raise RepositoryError(
            f"{repo} could not be had: {error}", next_step="clone it by hand into the repositories directory"
        ) from error


_LEAD_ASTRAY = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"})
"""Set inside git's hooks: they would redirect our commands to another repository."""


def _has(repository: Path, commit: str) -> bool:
    try:
        _git(["git", "cat-file", "-e", f"{commit}^{{commit}}"], {"GIT_DIR": _git_dir(repository)})
    except GitError:
        return False
    return True


def _git_dir(repository: Path) -> str:
    inner = repository / ".git"
    return str((inner if inner.is_dir() else repository).resolve())


def _git(command: Sequence[str], env: Mapping[str, str], *, stdin: str | None = None, cwd: Path | None = None) -> bytes:
    plain = {name: value for name, value in os.environ.items() if name not in _LEAD_ASTRAY}
    return _run(command, {**plain, **_OURS, **env}, stdin=stdin, cwd=cwd)


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
            command, input=given, capture_output=True, env=dict(env), cwd=cwd, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise GitError("git is not installed: apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git did not end in {timeout_s:.0f} s") from error
    if done.returncode:
        raise GitError(done.stderr.decode("utf-8", "replace").strip()[-600:] or f"exit code {done.returncode}")
    return done.stdout


def _no_commit(record: SweRecord, path: Path) -> ConfigError:
    return ConfigError(
        "base_commit",
        f"{record.instance_id}: {record.base_commit} is not in {path}",
        next_step="fetch the repository anew, or set clone_url",
    )


def manifest(checkout: Checkout) -> bytes:
    """The input of ``scan.py``."""
    return json.dumps(dict(checkout.known)).encode()

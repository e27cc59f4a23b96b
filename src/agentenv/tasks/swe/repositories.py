"""Repositories at a record's commit, out of local git repositories. All of it runs on the environment's side.

Slots never see these repositories, only a work tree with a single new commit: there is no later history with the
solution. Checkouts in use are kept, and the last few others: a group's members share one, and the disk does not fill
up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from agentenv import mirrors
from agentenv.errors import ConfigError
from agentenv.mirrors import GitError, RepositoryError, directory_of, git, has_commit
from agentenv.tasks.swe.records import SweRecord
from agentenv.tasks.swe.scan import digest


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
    """The paths the solution changes."""


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
        if path is not None and not may_clone and not has_commit(path, record.base_commit):
            raise _no_commit(record, path)


def ensure(repositories: Path, record: SweRecord, clone_url: str) -> Path:
    """The record's repository including its commit; cloned or fetched if missing and ``clone_url`` is set.

    ``clone_url`` has ``{repo}`` in it. Raises: RepositoryError when git cannot reach it; ConfigError when it
    has no such commit, or is missing and may not be cloned.
    """
    path = find(repositories, record.repo)
    if path is None:
        if not clone_url:
            check(repositories, [record], may_clone=False)
        url = clone_url.format(repo=record.repo)
        path = mirrors.mirror(repositories, record.repo, url, commit=record.base_commit)
    elif clone_url and not has_commit(path, record.base_commit):
        mirrors.fetch(path, record.base_commit)
    if not has_commit(path, record.base_commit):
        raise _no_commit(record, path)
    return path


def check_out(repository: Path, record: SweRecord, target: Path) -> Checkout:
    """Make the record's checkout in ``target``, which must not exist.

    Raises: ConfigError naming the record's field that does not fit its repository; RepositoryError.
    """
    target.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(dir=target, prefix="git-") as scratch:
            trees = _Trees(directory_of(repository), record, Path(scratch))
            base = trees.base(target / "tree")
            trees.base(target / "workspace")
            gold, tests = trees.gold(), trees.tests()
        _commit_all(target / "workspace")
    except (GitError, OSError) as error:
        raise RepositoryError(f"{record.instance_id}: cannot check {record.repo} out: {error}") from error
    _check_tests(record, base, gold, tests)
    executable = frozenset(path for path in base if os.access(target / "tree" / path, os.X_OK))
    return Checkout(target / "tree", target / "workspace", base, executable, tests, gold)


def _check_tests(
    record: SweRecord, base: Mapping[str, str], gold: frozenset[str], tests: Mapping[str, bytes | None]
) -> None:
    """The named tests are in the repository or come with the test patch, and not with the solution."""
    for path in record.test_files:
        if path not in base and tests.get(path) is None:
            raise ConfigError(
                "FAIL_TO_PASS", f"{record.instance_id}: {path} is neither in the repository nor in its test_patch"
            )
        if path in gold and not record.test_patch:
            raise ConfigError(
                "patch",
                f"{record.instance_id}: changes {path}, whose tests decide the score",
                next_step="move the changes of tests into test_patch",
            )


class _Trees:
    """The record's trees as files. The repository is only read: new objects are written to ``scratch``."""

    def __init__(self, git_dir: str, record: SweRecord, scratch: Path) -> None:
        """Raises: ConfigError when the record's bug does not apply."""
        self._git_dir = git_dir
        self._record = record
        self._scratch = scratch
        (scratch / "objects").mkdir()
        self._base = record.base_commit
        self._undoes_bug = record.patch_is == "bug"
        if self._undoes_bug and not self._has_bug():
            with self._index() as index:
                self._apply(index, "patch", record.patch)
                self._base = index.git("write-tree").decode().strip()

    def base(self, target: Path) -> dict[str, str]:
        """Write the files a policy starts with below ``target``; their digests by path."""
        target.mkdir()
        with self._index() as index:
            index.git("checkout-index", "--all", "--force", work_tree=target)
        paths = (path for path in target.rglob("*") if path.is_symlink() or path.is_file())
        return {str(path.relative_to(target)): digest(str(path)) or "" for path in paths}

    def gold(self) -> frozenset[str]:
        """The paths the solution changes. Raises: ConfigError when it does not apply."""
        return frozenset(self._patched("patch", self._record.patch, *(["--reverse"] if self._undoes_bug else [])))

    def tests(self) -> dict[str, bytes | None]:
        """The files of the test patch with their new content. Raises: ConfigError when it does not apply."""
        return self._patched("test_patch", self._record.test_patch) if self._record.test_patch else {}

    def _has_bug(self) -> bool:
        """Whether the bug is in the base commit already: then the patch can be taken back."""
        with self._index() as index:
            try:
                index.git("apply", "--cached", "--reverse", "--whitespace=nowarn", "-", stdin=self._record.patch)
            except GitError:
                return False
        return True

    def _patched(self, field: str, patch: str, *options: str) -> dict[str, bytes | None]:
        with self._index() as index:
            self._apply(index, field, patch, *options)
            output = index.git("diff-index", "--cached", "--no-renames", "--name-status", "-z", self._base)
            words = output.decode("utf-8", "surrogateescape").split("\0")[:-1]
            changes = dict(zip(words[1::2], words[::2], strict=True))
            return {
                path: None if status == "D" else index.git("cat-file", "blob", f":{path}")
                for path, status in changes.items()
            }

    def _apply(self, index: _Index, field: str, patch: str, *options: str) -> None:
        try:
            index.git("apply", "--cached", "--whitespace=nowarn", *options, "-", stdin=patch)
        except GitError as error:
            record = self._record
            raise ConfigError(
                field, f"{record.instance_id}: does not apply to {record.repo} at {record.base_commit}: {error}"
            ) from error

    @contextmanager
    def _index(self) -> Iterator[_Index]:
        with tempfile.TemporaryDirectory(dir=self._scratch, prefix="index-") as directory:
            index = _Index(self._git_dir, Path(directory), self._scratch / "objects")
            index.git("read-tree", self._base)
            yield index


@dataclass(frozen=True)
class _Index:
    """A git index in a directory of its own."""

    git_dir: str
    directory: Path
    objects: Path

    def git(self, *arguments: str, stdin: str | None = None, work_tree: Path | None = None) -> bytes:
        """Run git on this index. Raises: GitError."""
        env = {"GIT_INDEX_FILE": str(self.directory / "index"), "GIT_DIR": self.git_dir}
        env |= {"GIT_OBJECT_DIRECTORY": str(self.objects)}
        env |= {"GIT_ALTERNATE_OBJECT_DIRECTORIES": f"{self.git_dir}/objects"}
        env |= {"GIT_WORK_TREE": str(work_tree)} if work_tree else {}
        return git(["-c", "core.bare=false", *arguments], env, stdin=stdin, cwd=work_tree or self.directory)


def _commit_all(tree: Path) -> None:
    config = ["-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0"]
    for command in (
        ["init", "--quiet", "--template=", "--initial-branch=main"],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--allow-empty", "--no-verify", "--message", "The repository before the task"],
        ["repack", "-a", "-d", "--quiet"],  # one file instead of one per object: slots limit the number of inodes
    ):
        git([*config, *command], cwd=tree)


def _no_commit(record: SweRecord, path: Path) -> ConfigError:
    return ConfigError(
        "base_commit",
        f"{record.instance_id}: {record.base_commit} is not in {path}",
        next_step="fetch the repository again, or set clone_url",
    )


def manifest(checkout: Checkout) -> bytes:
    """The input of ``scan.py``."""
    return json.dumps(dict(checkout.known)).encode()


@dataclass
class _Entry:
    directory: Path
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    checkout: Checkout | None = None
    users: int = 0


class Checkouts:
    """Makes each checkout once, on request; removes unused ones beyond ``keep``."""

    def __init__(self, repositories_dir: Path, clone_url: str = "", *, keep: int = 8) -> None:
        self._repositories = repositories_dir
        self._clone_url = clone_url
        self._keep = keep
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._cloning: dict[str, asyncio.Lock] = {}
        self._names = itertools.count()
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        self._directory = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="agentenv-swe-")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._directory is not None:
            await asyncio.to_thread(self._directory.cleanup)

    @property
    def made(self) -> tuple[str, ...]:
        """The records with existing checkouts, the least recently used first."""
        return tuple(name for name, entry in self._entries.items() if entry.checkout is not None)

    @asynccontextmanager
    async def of(self, record: SweRecord) -> AsyncIterator[Checkout]:
        """The record's checkout; it stays at least as long as the context.

        Raises: ConfigError when the record does not fit its repository; RepositoryError.
        """
        entry = self._entries.setdefault(record.instance_id, _Entry(self._place()))
        self._entries.move_to_end(record.instance_id)
        entry.users += 1
        try:
            async with entry.making:
                if entry.checkout is None:
                    entry.checkout = await self._make(record, entry.directory)
            yield entry.checkout
        finally:
            entry.users -= 1
            await self._forget_some()

    def _place(self) -> Path:
        assert self._directory is not None, "opened as a context manager"
        return Path(self._directory.name) / f"{next(self._names)}"

    async def _make(self, record: SweRecord, target: Path) -> Checkout:
        async with self._cloning.setdefault(record.repo, asyncio.Lock()):
            repository = await asyncio.to_thread(ensure, self._repositories, record, self._clone_url)
        try:
            return await asyncio.to_thread(check_out, repository, record, target)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            raise

    async def _forget_some(self) -> None:
        unused = [name for name, entry in self._entries.items() if not entry.users]
        for name in unused[: max(0, len(self._entries) - self._keep)]:
            await asyncio.to_thread(shutil.rmtree, self._entries.pop(name).directory, ignore_errors=True)

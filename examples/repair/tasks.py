"""Makes the tasks: bugs that a package's own tests detect, verified by running them.

Deterministic by seed: a fixed number of candidates is tried, whatever the machine's speed. The outcome of every run
is kept in the cache by the hash of all its inputs, so a second start runs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentenv.tasks import judging
from agentenv.tasks.pinned import slot_python
from examples.repair import mutate
from examples.repair.mutate import Mutation
from examples.repair.packages import Catalogue, Package, cache_dir

TASKS_PER_PACKAGE = 8
CANDIDATES_PER_PACKAGE = 20
RUN_TIMEOUT_S = 120.0
"""Suites take 1 to 3 s; a mutant that never ends is rare, and a busy machine must not pass for one."""
MAX_BROKEN_SHARE = 0.4
"""A bug that breaks a larger share of the suite is not useful: nothing is left to locate it by."""
MAX_BROKEN_TESTS = 60
WORKERS = 2


@dataclass(frozen=True)
class Bug:
    """One injected mistake: its place, and the original text."""

    path: str
    mutation: Mutation


@dataclass(frozen=True)
class Task:
    """A package with bugs, and the tests they break. ``partial`` is the share that fixing only the
    first bug repairs: strictly between 0 and 1 when there are several."""

    id: str
    package: str
    version: str
    bugs: tuple[Bug, ...]
    diff: str
    broken: tuple[str, ...]
    passing: tuple[str, ...]
    partial: float

    @property
    def paths(self) -> tuple[str, ...]:
        """The files with bugs in them."""
        return tuple(dict.fromkeys(bug.path for bug in self.bugs))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Task:
        """The inverse of :meth:`to_json`."""
        bugs = tuple(Bug(bug["path"], Mutation(**bug["mutation"])) for bug in raw["bugs"])
        return cls(**{**raw, "bugs": bugs, "broken": tuple(raw["broken"]), "passing": tuple(raw["passing"])})


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` test runs; ``kept`` tasks so far."""

    done: int
    total: int
    kept: int


Report = Callable[[Progress], None]


def injected(package: Package, bugs: Sequence[Bug]) -> dict[str, bytes]:
    """The package's files with these bugs in them."""
    files = dict(package.files)
    for path in {bug.path for bug in bugs}:
        mutations = [bug.mutation for bug in bugs if bug.path == path]
        files[path] = mutate.apply(package.files[path].decode(), mutations).encode()
    return files


def make_tasks(
    catalogue: Catalogue, *, seed: int, cache: Path | None = None, report: Report = lambda _: None
) -> list[Task]:
    """Verified tasks from every package, in an order that mixes the packages.

    Raises:
        judging.VoidVerdictError: a package's own tests do not pass (or do not end) as it was released.
    """
    with _Bench(catalogue, cache or cache_dir(), report) as bench:
        per_package = [_package_tasks(bench, package, seed) for package in catalogue.packages]
    mixed = [task for row in itertools.zip_longest(*per_package) for task in row if task is not None]
    random.Random(seed).shuffle(mixed)
    return mixed


def _package_tasks(bench: _Bench, package: Package, seed: int) -> list[Task]:
    sound = bench.run([(package, ())])[0]
    if sound is None or sound.broken:
        raise judging.VoidVerdictError(f"{package.name} {package.version}: its own tests fail here as released")
    bugs = _draw_bugs(package, seed)
    outcomes = bench.run([(package, (bug,)) for bug in bugs])
    alone = {bug: found for bug, found in zip(bugs, outcomes, strict=True) if found and _useful(found, sound)}
    pairs = _pairs([(bug, found.broken) for bug, found in alone.items()])[: TASKS_PER_PACKAGE // 2]
    both = zip(pairs, bench.run([(package, pair) for pair in pairs]), strict=True)
    tasks = [
        _task(package, pair, found, sound, alone[pair[1]].broken)
        for pair, found in both
        if found and _useful(found, sound) and _halves(found.broken, [alone[bug].broken for bug in pair])
    ]
    for task in tasks:
        for bug in task.bugs:
            alone.pop(bug)
    singles = itertools.islice(alone.items(), TASKS_PER_PACKAGE - len(tasks))
    tasks += [_task(package, (bug,), found, sound, frozenset()) for bug, found in singles]
    bench.kept += len(tasks)
    return tasks


def _draw_bugs(package: Package, seed: int) -> list[Bug]:
    """The candidates of all files, alternating between files; never two of a kind in one function."""
    streams = [_bugs_in(package, path, f"{seed}:{package.name}:{path}") for path in package.mutable]
    mixed = (bug for row in itertools.zip_longest(*streams) for bug in row if bug is not None)
    chosen: dict[tuple[str, str, str], Bug] = {}
    for bug in mixed:
        chosen.setdefault((bug.path, bug.mutation.function, bug.mutation.kind), bug)
        if len(chosen) == CANDIDATES_PER_PACKAGE:
            break
    return list(chosen.values())


def _bugs_in(package: Package, path: str, seed: str) -> Iterator[Bug]:
    return (Bug(path, mutation) for mutation in mutate.candidates(package.files[path].decode(), seed))


def _useful(verdict: judging.Verdict, sound: judging.Verdict) -> bool:
    """Whether the same tests ran, some of them broke, and enough did not."""
    if verdict.outcomes.keys() != sound.outcomes.keys():
        return False
    limit = min(MAX_BROKEN_TESTS, MAX_BROKEN_SHARE * len(sound.passed))
    return 0 < len(verdict.broken) <= limit and verdict.broken <= sound.passed


def _pairs(singles: Sequence[tuple[Bug, frozenset[str]]]) -> list[tuple[Bug, Bug]]:
    """Bugs of different functions that break different tests, each bug in one pair at most."""
    used: set[Bug] = set()
    pairs = []
    for (first, broken), (second, others) in itertools.combinations(singles, 2):
        apart = first.mutation.function != second.mutation.function and not broken & others
        if apart and not {first, second} & used:
            used |= {first, second}
            pairs.append((first, second))
    return pairs


def _halves(together: frozenset[str], alone: Sequence[frozenset[str]]) -> bool:
    """Whether fixing either bug repairs some of the broken tests, not all, and breaks no other."""
    return all(broken < together for broken in alone)


def _task(
    package: Package, bugs: tuple[Bug, ...], verdict: judging.Verdict, sound: judging.Verdict, left: frozenset[str]
) -> Task:
    broken, files = verdict.broken, injected(package, bugs)
    diffs = [
        mutate.diff(path, package.files[path].decode(), files[path].decode())
        for path in dict.fromkeys(bug.path for bug in bugs)
    ]
    digest = hashlib.sha256("".join(diffs).encode()).hexdigest()[:8]
    return Task(
        id=f"{package.name}-{digest}",
        package=package.name,
        version=package.version,
        bugs=bugs,
        diff="".join(diffs),
        broken=tuple(sorted(broken)),
        passing=tuple(sorted(sound.passed - broken)),
        partial=1 - len(left & broken) / len(broken),
    )


class _Bench:
    """Runs suites two at a time, and caches their outcomes."""

    def __init__(self, catalogue: Catalogue, cache: Path, report: Report) -> None:
        self.kept = 0
        self._done = 0
        self._total = len(catalogue.packages) * (1 + CANDIDATES_PER_PACKAGE + TASKS_PER_PACKAGE // 2)
        self._report = report
        self._runs = cache / "runs"
        self._runs.mkdir(parents=True, exist_ok=True)
        self._workers = ThreadPoolExecutor(WORKERS)
        self._directory = tempfile.TemporaryDirectory(prefix="agentenv-repair-")
        self._runner = catalogue.runner  # its name is a digest of the wheels and the interpreter
        self._context = _digest(judging.JUDGE.read_bytes(), catalogue.runner.name.encode())

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._directory.cleanup()

    def run(self, work: Sequence[tuple[Package, Sequence[Bug]]]) -> list[judging.Verdict | None]:
        """The verdict on each of these; None if the run did not end, or ended the judge."""
        found = []
        for verdict in self._workers.map(lambda pair: self._one(*pair), work):
            found.append(verdict)
            self._done += 1
            self._report(Progress(self._done, self._total, self.kept))
        return found

    def _one(self, package: Package, bugs: Sequence[Bug]) -> judging.Verdict | None:
        changes = json.dumps([asdict(bug) for bug in bugs], sort_keys=True)
        key = _digest(self._context.encode(), package.sha256.encode(), repr(package.tests).encode(), changes.encode())
        remembered = self._runs / f"{key}.json"
        if remembered.exists():
            raw = json.loads(remembered.read_text())
            return judging.Verdict(**raw) if raw else None
        verdict = self._judge(package, bugs, key)
        # Others may be at the same work, in this directory.
        with tempfile.NamedTemporaryFile("w", dir=self._runs, suffix=".part", delete=False) as whole:
            json.dump(asdict(verdict) if verdict else None, whole)
        Path(whole.name).replace(remembered)
        return verdict

    def _judge(self, package: Package, bugs: Sequence[Bug], key: str) -> judging.Verdict | None:
        with tempfile.TemporaryDirectory(dir=self._directory.name, prefix=key[:8]) as tree:
            write_tree(Path(tree), injected(package, bugs))
            try:
                return _judged_here(package, Path(tree), self._runner, RUN_TIMEOUT_S)
            except judging.VoidVerdictError:
                return None


def request(
    package: Package, tree: str, runner: str, nonce: str, timeout_s: float, canary: judging.Canary | None
) -> str:
    """The judge's standard input. ``tree`` and ``runner`` are absolute paths where the judge runs."""
    root = tree if package.root == "." else f"{tree}/{package.root}"
    return judging.question(package.tests, [root, tree], tree, runner, nonce, timeout_s, canary)


def _judged_here(package: Package, tree: Path, runner: Path, timeout_s: float) -> judging.Verdict:
    """Run ``package``'s tests over the files in ``tree``, on this machine, with the judge's own limits.

    The code is the package's own with one word changed.

    Raises:
        VoidVerdictError: the tests did not end in ``timeout_s``, or ended the run.
    """
    nonce = secrets.token_hex(16)
    question = request(package, str(tree), str(runner), nonce, timeout_s, None)
    with subprocess.Popen(
        [slot_python(), "-I", "-S", "-B", str(judging.JUDGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        start_new_session=True,
    ) as judge:
        try:
            answer, _ = judge.communicate(question, timeout=timeout_s + 10)
        except subprocess.TimeoutExpired as error:
            judge.send_signal(signal.SIGKILL)
            raise judging.VoidVerdictError("the judge did not end in time") from error
    return judging.read(answer, nonce)


def write_tree(directory: Path, files: dict[str, bytes]) -> None:
    """Write these files below ``directory``."""
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]

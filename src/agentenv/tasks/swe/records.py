"""SWE-style records: the required fields of a dataset's row, and the choice of rows.

The fields are those of SWE-bench; ``test_patch`` may be missing, as in SWE-smith, whose tests are in the repository.
Rows are taken as they come, with lists or with lists as JSON text; an invalid row is a ConfigError that names the
record and the field.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from agentenv.errors import ConfigError

logger = logging.getLogger(__name__)

_REPO = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
_INSTANCE = re.compile(r"[A-Za-z0-9_.+-]{1,200}")
MAX_SHOWN_CHARS = 80
TestLog = Literal[
    "pytest",
    "unittest",
    "r2e",
    "json",
    "smith-pytest",
    "swebench-pytest",
    "swebench-pytest-options",
    "swebench-pytest-v2",
    "swebench-pytest-v2-cut",
    "swebench-pydantic",
    "swebench-matplotlib",
    "swebench-seaborn",
    "swebench-django",
    "swebench-sympy",
    "swebench-gotest",
    "swebench-cargo",
    "swebench-minitest",
    "swebench-cucumber",
    "swebench-ruby-unit",
    "swebench-rspec",
    "swebench-phpunit",
    "swebench-redis",
    "swebench-jq",
    "swebench-doctest",
    "swebench-micropython",
    "swebench-googletest",
    "swebench-maven",
    "swebench-ant",
    "swebench-gradle",
    "swebench-jest",
    "swebench-jest-json",
    "swebench-vitest",
    "swebench-karma",
    "swebench-tap",
    "swebench-carbon",
    "swebench-grommet",
    "swebench-highlightjs",
    "swebench-calypso",
    "swebench-chart-js",
    "swebench-bpmn-js",
    "swebench-openlayers",
    "swebench-eslint",
    "swebench-marked",
]
"""What a test command prints, and how its tests are named: pytest's summary (-rA); a line for each test, as unittest
does (-v 2 in Django); pytest's summary, whose tests are named without their files and with dots, as R2E-Gym does; a
JSON text, ``{"tests": [{"name": "...", "status": "PASSED"}]}``; pytest's progress (-v), as SWE-smith does; or as one of
SWE-bench's own parsers reads it (:mod:`agentenv.tasks.swe.swebench_logs`, :mod:`agentenv.tasks.swe.language_logs`)."""
Grading = Literal["swebench", "passed", "live", "fail-only", "exact"]
"""What a dataset calls resolved (:mod:`agentenv.tasks.swe.outcomes`)."""
DEFAULT_WORKDIR = "/testbed"
"""Where the images of SWE-bench have the repository."""
PatchIs = Literal["fix", "bug"]
"""What a dataset calls ``patch``: the solution (SWE-bench), or the bug that the solution takes back (SWE-smith)."""


@dataclass(frozen=True)
class SweRecord:
    """One issue: the repository before its solution, and the tests that decide whether it is solved."""

    instance_id: str
    repo: str
    """``owner/name``."""
    base_commit: str
    """Empty, with an image: its repository as it is there, of which a policy sees one commit."""
    problem_statement: str
    patch: str
    """The gold patch, or the bug (``patch_is``). Never shown to a model, and not part of a score."""
    test_patch: str
    """Empty: the tests are in the repository at ``base_commit``."""
    fail_to_pass: tuple[str, ...]
    """pytest ids, ``path.py::test``: they fail before with ``test_patch``, and must pass."""
    pass_to_pass: tuple[str, ...]
    """They pass before, and must still pass."""
    version: str = ""
    environment_setup_commit: str = ""
    patch_is: PatchIs = "fix"
    image: str = ""
    """Reference of an image that has the repository at ``base_commit`` in ``workdir``, and all that its tests need
    (docs/images.md). Its tests may have any names that its ``test_log`` has."""
    workdir: str = DEFAULT_WORKDIR
    test_command: str = ""
    """Runs the tests of ``test_patch``, in ``workdir``; ``{files}`` in it are its files. Empty: that of the repository,
    else pytest."""
    test_log: TestLog | None = None
    """None: as SWE-bench reads the repository's tests, else pytest's summary."""
    hidden: tuple[str, ...] = ()
    """Absolute paths that the image has for the verifier: tests which a policy must not see."""
    grading: Grading = "swebench"
    expected: Mapping[str, str] = field(default_factory=dict)
    """Of ``exact``: the statuses of tests that do not pass with the solution."""
    install_command: str = ""
    """Runs before the tests, in ``workdir``; they run even if it fails, as in SWE-bench."""
    verifier_files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files, by their absolute paths, that are written before the tests: no policy sees them."""
    lays_tests: bool = False
    """Whether ``test_command`` applies the test patch itself."""

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files the named tests are in."""
        named = (*self.fail_to_pass, *self.pass_to_pass)
        return tuple(sorted({test.partition("::")[0] for test in named}))

    def item(self, **more: str) -> dict[str, Any]:
        """The record as the item in its transcripts, with ``more`` about it. Its patches are not included."""
        return {
            "instance_id": self.instance_id,
            "repo": self.repo,
            "base_commit": self.base_commit,
            **more,
            "FAIL_TO_PASS": list(self.fail_to_pass),
            "PASS_TO_PASS": len(self.pass_to_pass),
        }


@dataclass(frozen=True)
class Wanted:
    """Filters of records; empty: all."""

    repos: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    python_only: bool = False
    """Leave out records with tests that are not pytest ids, and without an image in which they run."""
    limit: int | None = None
    """Use only this many of the remaining records."""


def read_records(
    rows: Sequence[Mapping[str, Any]],
    wanted: Wanted = Wanted(),
    patch_is: PatchIs = "fix",
    *,
    check: Callable[[SweRecord], None] = lambda _: None,
    refused: dict[str, ConfigError] | None = None,
) -> tuple[SweRecord, ...]:
    """The wanted records of a dataset, in its order. Rows that are filtered out are not checked further. ``check``
    raises ConfigError for a record that cannot be played; with ``refused`` the errors of records are added to it, by
    their names, and the others are returned.

    Raises: ConfigError naming record and field, a duplicate record, or a filter that leaves nothing.
    """
    records: dict[str, SweRecord] = {}
    left_out = 0
    for number, row in enumerate(rows, 1):
        if not is_wanted(row, wanted):
            continue
        if wanted.python_only and not _Row(row, number).has_pytest_ids():
            left_out += 1
            continue
        try:
            record = read_record(row, number, patch_is)
            check(record)
        except ConfigError as error:
            if refused is None:
                raise
            refused[str(row.get("instance_id") or f"record {number}")] = error
            continue
        if record.instance_id in records:
            raise _wrong(row, number, "instance_id", "appears twice")
        records[record.instance_id] = record
        if wanted.limit is not None and len(records) == wanted.limit:
            break
    if left_out:
        logger.warning("%d records are left out: their tests are not pytest ids (python_only)", left_out)
    _refuse_unmatched(records, rows, wanted, refused or {})
    return tuple(records.values())


def read_record(row: Mapping[str, Any], number: int = 1, patch_is: PatchIs = "fix") -> SweRecord:
    """One row, checked. ``number`` identifies it if it has no id. Raises: ConfigError."""
    found = _Row(row, number)
    record = SweRecord(
        instance_id=found.matching("instance_id", _INSTANCE, "letters, digits and _ . + -"),
        repo=found.matching("repo", _REPO, "owner/name"),
        base_commit=found.base_commit(),
        problem_statement=found.text("problem_statement"),
        patch=found.diff("patch"),
        test_patch=found.diff("test_patch") if row.get("test_patch") else "",
        fail_to_pass=found.tests("FAIL_TO_PASS"),
        pass_to_pass=found.tests("PASS_TO_PASS"),
        version=found.optional("version"),
        environment_setup_commit=found.optional("environment_setup_commit"),
        patch_is=found.choice("patch_is", PatchIs, patch_is),
        image=found.optional("image"),
        workdir=found.workdir(),
        test_command=found.optional("test_command"),
        test_log=found.choice("test_log", TestLog, None) if row.get("test_log") is not None else None,
        hidden=found.hidden(),
        grading=found.choice("grading", Grading, "swebench") if row.get("grading") is not None else "swebench",
        expected=found.texts("expected"),
        install_command=found.optional("install_command"),
        verifier_files=found.texts("verifier_files"),
        lays_tests=row.get("lays_tests") is True,
    )
    if outside := [path for path in record.verifier_files if not path.startswith("/")]:
        raise found.wrong("verifier_files", f"got {shown(outside[0])}", "allowed: absolute paths")
    if ".." in record.repo.split("/") or "." in record.repo.split("/"):
        raise found.wrong("repo", f"got {record.repo!r}", "allowed: owner/name")
    if not record.fail_to_pass:
        raise found.wrong("FAIL_TO_PASS", "names no test: nothing would decide whether it is solved")
    if both := set(record.fail_to_pass) & set(record.pass_to_pass):
        raise found.wrong("PASS_TO_PASS", f"{min(both)!r} is also in FAIL_TO_PASS", "name it once")
    return record


class _Row:
    """Reads and checks the fields of a row."""

    def __init__(self, row: Mapping[str, Any], number: int) -> None:
        self._row = row
        self._number = number

    def wrong(self, field: str, problem: str, next_step: str = "") -> ConfigError:
        return _wrong(self._row, self._number, field, problem, next_step)

    def text(self, field: str) -> str:
        value = self._row.get(field)
        if field not in self._row:
            raise self.wrong(field, "is missing")
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, f"got {shown(value)}", "allowed: text that is not empty")
        return value

    def optional(self, field: str) -> str:
        value = self._row.get(field)
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self.wrong(field, f"got {shown(value)}", "allowed: text")
        return str(value)

    def matching(self, field: str, form: re.Pattern[str], allowed: str) -> str:
        value = self.text(field)
        if not form.fullmatch(value):
            raise self.wrong(field, f"got {shown(value)}", f"allowed: {allowed}")
        return value

    def base_commit(self) -> str:
        if self._row.get("base_commit") is None:
            if self._row.get("image"):
                return ""
            branch = self._row.get("instance_id")
            raise self.wrong(
                "base_commit",
                "is missing",
                f"add the commit a policy starts from; of a SWE-smith mirror: git rev-parse {branch}~1",
            )
        return self.matching("base_commit", _COMMIT, "a commit's hex digits")

    def diff(self, field: str) -> str:
        value = self.text(field)
        if not re.search(r"^(diff --git |--- )", value, re.MULTILINE):
            raise self.wrong(field, f"got {shown(value)}", "allowed: a unified diff")
        return value if value.endswith("\n") else value + "\n"

    def workdir(self) -> str:
        value = self.optional("workdir") or DEFAULT_WORKDIR
        if not value.startswith("/"):
            raise self.wrong("workdir", f"got {shown(value)}", "allowed: an absolute path")
        return value

    def choice(self, field: str, of: Any, default: Any) -> Any:
        """One of a Literal's values."""
        value = self._row.get(field, default)
        if value not in get_args(of):
            raise self.wrong(field, f"got {shown(value)}", f"allowed: {', '.join(get_args(of))}")
        return value

    def hidden(self) -> tuple[str, ...]:
        paths = self._row.get("hidden") or ()
        if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) and path[:1] == "/" for path in paths):
            raise self.wrong("hidden", f"got {shown(paths)}", "allowed: a list of absolute paths")
        return tuple(paths)

    def texts(self, field: str) -> Mapping[str, str]:
        """Texts by their names."""
        value = self._row.get(field) or {}
        texts = isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
        if not texts:
            raise self.wrong(field, f"got {shown(value)}", "allowed: a table of texts")
        return dict(value)

    def tests(self, field: str) -> tuple[str, ...]:
        names = self._names(field)
        for test in () if self._row.get("image") else names:
            if not _is_pytest_id(test):
                cure = "allowed: path/in/the/repo.py::test, in full; leave other records out (python_only, only_repos)"
                raise self.wrong(field, f"{shown(test)} is not a pytest id", cure)
        return tuple(dict.fromkeys(names))

    def has_pytest_ids(self) -> bool:
        if self._row.get("image"):
            return True
        return all(_is_pytest_id(test) for field in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in self._names(field))

    def _names(self, field: str) -> Sequence[str]:
        value = self._row.get(field)
        if field not in self._row:
            pro = "records of SWE-bench Pro need images (docs/swe.md)" if field.lower() in self._row else ""
            raise self.wrong(field, "is missing", pro)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise self.wrong(field, f"is not JSON: {error}", "allowed: a list, or one as JSON text") from error
        if not isinstance(value, (list, tuple)) or not all(isinstance(test, str) for test in value):
            raise self.wrong(field, f"got {shown(value)}", "allowed: a list of test ids, or one as JSON text")
        return value


def _is_pytest_id(test: str) -> bool:
    path, colons, name = test.partition("::")
    plain = path.endswith(".py") and not path.startswith(("/", "-")) and ".." not in PurePosixPath(path).parts
    whole = "[" not in name or name.endswith("]")  # SWE-bench's lists have names that end at their first blank
    return bool(colons) and plain and whole and path.isprintable()


def is_wanted(row: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether a row, as it is, passes the filters."""
    filters = ((wanted.repos, "repo"), (wanted.instances, "instance_id"), (wanted.versions, "version"))
    return all(not values or str(row.get(field)) in values for values, field in filters)


def _refuse_unmatched(
    records: Mapping[str, SweRecord],
    rows: Sequence[Mapping[str, Any]],
    wanted: Wanted,
    refused: Mapping[str, ConfigError],
) -> None:
    there = {str(row.get("instance_id")) for row in rows} | refused.keys()
    if missing := [name for name in wanted.instances if name not in there]:
        raise ConfigError("only_instances", f"{missing[0]!r} is not in the dataset", next_step="check dataset_split")
    if not records and not refused:
        repos = sorted({str(row.get("repo")) for row in rows})[:12]
        raise ConfigError(
            "only_repos", "no record is left by the filters", next_step=f"the dataset has {', '.join(repos)}"
        )


def _wrong(row: Mapping[str, Any], number: int, field: str, problem: str, next_step: str = "") -> ConfigError:
    name = row.get("instance_id")
    which = f"record {number} ({name})" if isinstance(name, str) and name.isprintable() else f"record {number}"
    return ConfigError(field, f"{which}: {problem}", next_step=next_step)


def shown(value: object) -> str:
    """A value in an error: at most ``MAX_SHOWN_CHARS`` of it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"

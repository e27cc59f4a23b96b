"""Repositories at a record's commit: found, cloned, checked out, kept and removed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.mirrors import RepositoryError
from agentenv.tasks.swe.records import SweRecord, read_record
from agentenv.tasks.swe.repositories import Checkout, Checkouts, check, check_out, ensure, find
from tests.unit.tasks.swe_repos import SLUGS, dataset, git, record, slugs, smith, tally


def read(directory: Path) -> tuple[Path, list[SweRecord]]:
    _, repositories, rows = dataset(directory)
    return repositories, [read_record(row) for row in rows]


@pytest.mark.parametrize("name", ["acme/a", "acme/a.git", "acme__a", "acme__a.git"])
def test_a_repository_is_found_under_its_usual_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    assert find(tmp_path, "acme/a") == tmp_path / name
    assert find(tmp_path, "acme/b") is None


def test_a_checkout_is_the_base_commit_and_no_more(tmp_path: Path) -> None:
    repositories, (first, *_) = read(tmp_path)
    found = check_out(repositories / first.repo, first, tmp_path / "out")
    files = {str(path.relative_to(found.tree)) for path in found.tree.rglob("*") if path.is_file()}
    assert files == set(found.known) == {"README.md", "run.sh", "slugs.py", "tests/test_slugs.py"}
    assert 'replace(" ", "-")' in (found.tree / "slugs.py").read_text()
    assert found.gold == {"slugs.py"}
    assert "test_spaces" in (found.tests["tests/test_slugs.py"] or b"").decode()
    log = git(found.workspace, "log", "--all", "--format=%s")
    assert log == "The repository before the task\n"
    assert git(found.workspace, "status", "--porcelain") == ""
    objects = git(found.workspace, "cat-file", "--batch-check", "--batch-all-objects")
    assert len(objects.splitlines()) == 7  # a commit, two trees, four files: no later ones among them


def test_a_repository_is_only_read(tmp_path: Path) -> None:
    repositories, (first, *_) = read(tmp_path)
    before = git(repositories / first.repo, "status", "--porcelain", "--branch")
    objects = git(repositories / first.repo, "count-objects", "-v")
    check_out(repositories / first.repo, first, tmp_path / "out")
    assert git(repositories / first.repo, "count-objects", "-v") == objects
    assert git(repositories / first.repo, "status", "--porcelain", "--branch") == before
    assert "test_spaces" in (repositories / first.repo / "tests/test_slugs.py").read_text()


def test_a_test_patch_may_move_and_remove_files_and_a_patch_too(tmp_path: Path) -> None:
    repositories, (_, moved, removed) = read(tmp_path)
    found = check_out(repositories / moved.repo, moved, tmp_path / "moved")
    assert found.tests["tests/test_spans.py"] is None
    assert found.tests["tests/unit/test_spans.py"] is not None
    found = check_out(repositories / removed.repo, removed, tmp_path / "removed")
    assert found.gold == {"tally/tally.py", "tally/step.py", "tally/old.py"}


def test_without_a_test_patch_the_workspace_has_the_bug_whatever_patch_is(tmp_path: Path) -> None:
    for number, (what, row) in enumerate(smith(tmp_path / "repositories").items()):
        found = check_out(
            tmp_path / "repositories/acme/smith",
            read_record(row, patch_is="bug" if what.startswith("a bug") else "fix"),
            tmp_path / f"out{number}",
        )
        assert (found.workspace / "slugs.py").read_text() == SLUGS.replace('replace(" ", "-")', "strip()"), what
        assert found.gold == {"slugs.py"}, what
        assert not found.tests, what
        assert git(found.workspace, "status", "--porcelain") == ""


def test_a_bug_that_fits_neither_way_is_named(tmp_path: Path) -> None:
    row = smith(tmp_path)["a bug in the base commit"]
    row["patch"] = row["patch"].replace("text.lower()", "text.upper()")
    with pytest.raises(ConfigError, match=r"patch: acme__smith-1: does not apply"):
        check_out(tmp_path / "acme/smith", read_record(row, patch_is="bug"), tmp_path / "out")


def test_a_solution_that_brings_its_own_tests_needs_a_test_patch(tmp_path: Path) -> None:
    row = slugs(tmp_path)
    row["patch"] += row.pop("test_patch")
    with pytest.raises(ConfigError, match=r"patch: acme__slugs-1: changes tests/test_slugs\.py"):
        check_out(tmp_path / "acme/slugs", read_record(row), tmp_path / "out")


def test_links_modes_and_names_are_kept(tmp_path: Path) -> None:
    row = slugs(tmp_path / "repositories")
    there = tmp_path / "repositories" / row["repo"]
    git(there, "checkout", "--quiet", row["base_commit"])
    (there / "run.sh").chmod(0o755)
    (there / "link.py").symlink_to("slugs.py")
    (there / "ünï code.py").write_text("")
    (there / ".gitattributes").write_text("README.md export-ignore\n")
    git(there, "add", "--all")
    git(there, "commit", "--quiet", "--message", "odd files")
    row["base_commit"] = git(there, "rev-parse", "HEAD").strip()
    found = check_out(there, read_record(row), tmp_path / "out")
    assert found.executable >= {"run.sh"}
    assert found.known["link.py"].startswith("link:")
    assert {"ünï code.py", "README.md"} <= set(found.known)


@pytest.mark.parametrize("field", ["patch", "test_patch"])
def test_a_patch_that_does_not_apply_is_named(tmp_path: Path, field: str) -> None:
    row = slugs(tmp_path)
    path = "slugs.py" if field == "patch" else "tests/test_slugs.py"
    row[field] = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-nothing of the kind\n+better\n"
    with pytest.raises(ConfigError, match=rf"{field}: acme__slugs-1: does not apply to acme/slugs"):
        check_out(tmp_path / "acme/slugs", read_record(row), tmp_path / "out")


def test_a_test_that_is_nowhere_is_named(tmp_path: Path) -> None:
    row = slugs(tmp_path)
    row["FAIL_TO_PASS"] = ["tests/test_nowhere.py::test_it"]
    with pytest.raises(ConfigError, match=r"acme__slugs-1: tests/test_nowhere\.py is neither"):
        check_out(tmp_path / "acme/slugs", read_record(row), tmp_path / "out")


def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    repositories, (first, *_) = read(tmp_path)
    check(repositories, [first], may_clone=False)
    with pytest.raises(ConfigError, match="repositories: acme__slugs-1: acme/slugs is not in"):
        check(tmp_path / "elsewhere", [first], may_clone=False)
    check(tmp_path / "elsewhere", [first], may_clone=True)
    unknown = replace(first, base_commit="0" * 40)
    with pytest.raises(ConfigError, match="base_commit: acme__slugs-1: 0000"):
        check(repositories, [unknown], may_clone=False)
    with pytest.raises(ConfigError, match="base_commit"):
        ensure(repositories, unknown, "")


def test_a_missing_repository_is_cloned_once_and_fetched_when_a_commit_is_missing(tmp_path: Path) -> None:
    row = tally(tmp_path / "remote")
    url, mirrors = f"file://{tmp_path}/remote/{{repo}}", tmp_path / "mirrors"
    path = ensure(mirrors, read_record(row), url)
    assert path == mirrors / "acme/tally.git"
    assert ensure(mirrors, read_record(row), "file:///nowhere/{repo}") == path
    there = tmp_path / "remote/acme/tally"
    git(there, "commit", "--quiet", "--allow-empty", "--message", "later")
    later = replace(read_record(row), base_commit=git(there, "rev-parse", "HEAD").strip())
    with pytest.raises(ConfigError):
        ensure(mirrors, later, "")
    assert ensure(mirrors, later, url) == path
    assert sorted(entry.name for entry in (mirrors / "acme").iterdir()) == ["tally.git", "tally.lock"]


def test_a_clone_that_fails_is_ours_and_leaves_nothing(tmp_path: Path) -> None:
    row = tally(tmp_path / "remote")
    with pytest.raises(RepositoryError, match="acme/tally could not be cloned"):
        ensure(tmp_path / "mirrors", read_record(row), f"file://{tmp_path}/no/{{repo}}")
    assert [path.name for path in (tmp_path / "mirrors").rglob("*")] == ["acme", "tally.lock"]


def test_a_repository_that_is_broken_is_ours(tmp_path: Path) -> None:
    repositories, (first, *_) = read(tmp_path)
    objects = repositories / first.repo / ".git/objects"
    tree = git(repositories / first.repo, "rev-parse", f"{first.base_commit}^{{tree}}").strip()
    (objects / tree[:2] / tree[2:]).unlink()
    with pytest.raises(RepositoryError, match="acme__slugs-1: cannot check acme/slugs out"):
        check_out(repositories / first.repo, first, tmp_path / "out")


def test_git_settings_of_hooks_do_not_lead_astray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repositories, (first, *_) = read(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "wrong"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "wrong-index"))
    assert check_out(repositories / first.repo, first, tmp_path / "out").gold == {"slugs.py"}
    assert not (tmp_path / "wrong-index").exists()


async def test_a_group_shares_a_checkout_and_unused_ones_go(tmp_path: Path) -> None:
    repositories, records = read(tmp_path)
    async with Checkouts(repositories, keep=1) as checkouts:
        made: list[Checkout] = []

        async def use() -> None:
            async with checkouts.of(records[0]) as found:
                made.append(found)
                async with checkouts.of(records[1]):
                    assert found.tree.is_dir()

        await asyncio.gather(*(use() for _ in range(4)))
        assert len({id(found) for found in made}) == 1
        async with checkouts.of(records[2]) as last:
            pass
        assert checkouts.made == ("acme__tally-1",)
        assert not made[0].tree.exists()
        assert last.tree.is_dir()
        top = last.tree.parent.parent
    assert not top.exists()


async def test_a_checkout_that_failed_is_tried_again(tmp_path: Path) -> None:
    row = record(
        tmp_path / "remote",
        "acme/one",
        {"a.py": "a = 1\n"},
        {"a.py": "a = 2\n"},
        {"test_a.py": "from a import a\n\n\ndef test_a():\n    assert a == 2\n"},
        problem_statement="a is 2",
        FAIL_TO_PASS=["test_a.py::test_a"],
        PASS_TO_PASS=[],
    )
    async with Checkouts(tmp_path / "remote") as checkouts:
        (tmp_path / "remote/acme/one").rename(tmp_path / "away")
        with pytest.raises(ConfigError):
            async with checkouts.of(read_record(row)):
                pass
        (tmp_path / "away").rename(tmp_path / "remote/acme/one")
        async with checkouts.of(read_record(row)) as found:
            assert found.gold == {"a.py"}

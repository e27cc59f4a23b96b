"""Directories of runs: made, found by name, and what their locks say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.runs.directory import RunDirectory, run_named, runs_in
from agentenv.runs.manifest import FILE, RunManifest, read_manifest


def manifest(**changed: Any) -> RunManifest:
    given: dict[str, Any] = {
        "id": "20261128-180043-18efd6", "name": "hello", "verb": "process", "command": ["python", "hello.py"],
        "directory": "/", "model": "m", "settings_digest": "d", "began_unix_s": 1795888843.0,
    }  # fmt: skip
    return RunManifest(**{**given, **changed})


def test_a_run_is_running_killed_or_as_it_ended(tmp_path: Path) -> None:
    run = RunDirectory.made(tmp_path, "hello", manifest())
    assert run.path == tmp_path / "hello-20261128-180043"
    [found] = runs_in(tmp_path)
    assert (found.state, found.is_running) == ("running", True)
    run.close()
    assert (found.state, found.is_running) == ("killed", False)
    again = RunDirectory.opened(run.path)
    again.update(state="failed", error="no slots")
    again.close()
    [found] = runs_in(tmp_path)
    assert (found.state, found.manifest.error) == ("failed", "no slots")


def test_two_of_one_second_have_two_directories(tmp_path: Path) -> None:
    made = [RunDirectory.made(tmp_path, "a/b c", manifest()) for _ in range(3)]
    assert [run.path.name for run in made] == [f"a_b_c-20261128-180043{end}" for end in ("", "-2", "-3")]
    for run in made:
        run.close()


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("größe ü", "größe_ü"),
        ("gro\u0308ße", "größe"),
        ("日本語", "日本語"),
        ("  ", "run"),
        ("../up", "up"),
        ("😀\x1b[", "run"),
    ],
)
def test_a_run_is_found_by_a_name_in_any_script(tmp_path: Path, name: str, stem: str) -> None:
    made = RunDirectory.made(tmp_path, name, manifest(name=name))
    assert made.path.name == f"{stem}-20261128-180043"
    made.close()
    RunDirectory.made(tmp_path, "zebra", manifest(name="zebra")).close()
    assert run_named(tmp_path, name).path == run_named(tmp_path, stem).path == made.path


def test_a_long_name_is_cut_between_characters(tmp_path: Path) -> None:
    made = RunDirectory.made(tmp_path, "ü" * 39 + "日本語" * 99, manifest())
    assert made.path.name == "ü" * 39 + "-20261128-180043"
    made.close()


def test_one_that_runs_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.runs.directory.TRIES", 5)
    run = RunDirectory.made(tmp_path, "hello", manifest())
    with pytest.raises(ConfigError, match=r"hello-20261128-180043 still runs"):
        RunDirectory.opened(run.path)
    run.close()


def test_a_manifest_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run = RunDirectory.made(tmp_path, "hello", manifest())
    before = (run.path / FILE).stat().st_ino
    run.update(results={"mean": 0.5})
    assert (run.path / FILE).stat().st_ino != before
    assert read_manifest(run.path).results == {"mean": 0.5}
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []
    run.close()


def test_results_so_far_are_written_now_and_then(tmp_path: Path) -> None:
    run = RunDirectory.made(tmp_path, "hello", manifest())
    run.progressed(lambda: {"mean": 1.0})
    assert read_manifest(run.path).results == {}
    run._written_s -= 100
    run.progressed(lambda: {"mean": 1.0})
    assert read_manifest(run.path).results == {"mean": 1.0}
    run.close()


@pytest.mark.parametrize("name", ["last", "hello-2026", "20261128-180043-18efd6", "20261128-180043-1", "DIRECTORY"])
def test_a_run_has_many_names(tmp_path: Path, name: str) -> None:
    for number, kind in enumerate(("other", "hello")):
        begun = manifest(id=f"2026112{7 + number}-180043-18efd6", began_unix_s=1795802443.0 + number * 86400)
        RunDirectory.made(tmp_path, kind, begun).close()
    directory = str(tmp_path / "hello-20261128-180043")
    assert run_named(tmp_path, directory if name == "DIRECTORY" else name).path == Path(directory)


def test_a_name_of_two_runs_or_of_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        run_named(tmp_path, "last")
    for end in "ab":
        RunDirectory.made(tmp_path, f"hello-{end}", manifest()).close()
    (tmp_path / "not a run").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"2 runs begin with 'hello' \(allowed: last, hello-b-.*, hello-a-"):
        run_named(tmp_path, "hello")
    with pytest.raises(ConfigError, match=r"no run in .* is named 'nix'"):
        run_named(tmp_path, "nix")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        run_named(tmp_path, str(tmp_path / "broken"))


def test_where_no_directory_can_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="runs_dir: no directory for this run can be made"):
        RunDirectory.made(tmp_path / "file", "hello", manifest())

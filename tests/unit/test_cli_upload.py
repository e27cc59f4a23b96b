"""What --upload packs."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

import pytest

from agentenv.cli import upload
from agentenv.errors import ConfigError


def names(archive: str) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        return sorted(tar.getnames())


def test_each_path_arrives_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "deep" / "a.py").write_text("a")
    (tmp_path / "one.txt").write_text("1")
    monkeypatch.chdir(tmp_path / "src")
    assert names(upload.tar_of([Path(), Path("../one.txt")])) == ["one.txt", "src", "src/deep", "src/deep/a.py"]


def test_two_paths_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "x").touch()
    with pytest.raises(ConfigError, match="two paths are called 'x'"):
        upload.tar_of([tmp_path / "a" / "x", tmp_path / "b" / "x"])


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--upload"):
        upload.tar_of([tmp_path / "missing"])


def test_too_much_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", 100)
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(ConfigError, match="at most 100") as refused:
        upload.tar_of([tmp_path / "big"])
    assert "--network" in refused.value.next_step

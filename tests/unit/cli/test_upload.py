"""What ``--upload`` and ``--download`` name, what they copy, and how they fail."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentenv.cli import upload
from agentenv.cli.app import app
from agentenv.errors import ConfigError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm import open
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog


def test_each_path_gets_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "one.txt").write_text("1")
    monkeypatch.chdir(tmp_path / "src")
    assert upload.named([Path(), Path("../one.txt")]) == {"src": tmp_path / "src", "one.txt": tmp_path / "one.txt"}


def test_a_name_is_its_own_bytes_and_a_link_s_its_own(tmp_path: Path) -> None:
    """Names as slots take them: a byte that is not UTF-8 as \\xNN, which may also be a name's own text."""
    (tmp_path / "v2").mkdir()
    (tmp_path / "current").symlink_to("v2")
    assert upload.named([tmp_path / "current"]) == {"current": tmp_path / "v2"}
    one, other = (tmp_path / os.fsdecode(name) for name in (b"caf\xe9", rb"caf\xe9"))
    for path in (one, other):
        path.touch()
    assert upload.named([one, other]) == {r"caf\xe9": one, r"caf\\xe9": other}
    assert upload.targets([r"d/caf\xe9"]) == {r"d/caf\xe9": Path(one.name)}


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side / "x").mkdir(parents=True)
    with pytest.raises(ConfigError, match="two paths have the name 'x'"):
        upload.named([tmp_path / "a/x", tmp_path / "b/x"])


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        upload.named([tmp_path / "missing"])


def test_where_downloads_go() -> None:
    assert upload.targets(["out/a.txt", "dist:/tmp/there"]) == {"out/a.txt": Path("a.txt"), "dist": Path("/tmp/there")}
    for wrong in (":x", "x:", "/", ""):
        with pytest.raises(ConfigError, match="PATH:LOCAL"):
            upload.targets([wrong])


@pytest.mark.parametrize("terminal", [True, False])
async def test_files_go_in_and_out_with_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100)
    monkeypatch.setattr(upload, "err", lambda: console)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_bytes(bytes(3_000_000))
    async with (
        SlotPool(FakeBackend()) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open("t", acquire_timeout_s=30) as session,
    ):
        await upload.put_all(session.lease, {"in": tmp_path / "in"})
        await upload.get_all(session.lease, {"in/a": tmp_path / "b"})
        with pytest.raises(ConfigError, match=r"--download.*No such file"):
            await upload.get_all(session.lease, {"missing": tmp_path / "c"})
        with pytest.raises(ConfigError, match=r"--download.*outside"):
            await upload.get_all(session.lease, {"../x": tmp_path / "c"})
    assert (tmp_path / "b").read_bytes() == bytes(3_000_000)
    assert ("upload in" in shown.getvalue()) is terminal


def test_exec_brings_files_and_fetches_what_came_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open, "make_backend", lambda _, settings, **__: FakeBackend(settings))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in").write_text("abc")
    moves = ["--upload", str(tmp_path / "data"), "--download", f"data/out:{tmp_path / 'out'}"]
    done = CliRunner().invoke(app, ["exec", "--own", *moves, "tr a-z A-Z < data/in > data/out; exit 3"])
    assert (done.exit_code, (tmp_path / "out").read_text()) == (3, "ABC")
    done = CliRunner().invoke(app, ["exec", "--own", *moves, "true"])
    assert done.exit_code == 2
    assert "No such file" in done.stderr


def test_a_failed_download_hides_neither_output_nor_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open, "make_backend", lambda _, settings, **__: FakeBackend(settings))
    failing = ["exec", "--own", "--download", "out", "echo why >&2; exit 3"]
    done = CliRunner().invoke(app, failing)
    assert done.exit_code == 3
    assert done.stderr.startswith("why\n")
    assert "No such file" in done.stderr
    done = CliRunner().invoke(app, ["exec", "--json", *failing[1:]])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["exit_code"], told["stderr"]) == (3, 3, "why\n")
    assert told["download_error"]["error"] == "config"
    done = CliRunner().invoke(app, ["exec", "--own", "--download", "../out", "true"])
    assert done.exit_code == 2
    assert "next  use a path inside" in done.stderr

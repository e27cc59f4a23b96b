"""Running what ships beside the package: exit codes, stdout, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.cli import source_checkout
from agentenv.cli.app import app
from agentenv.cli.output import InterruptedBySignalError
from agentenv.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source_checkout, "checkout_root", lambda _needed: tmp_path)
    return tmp_path


def write(root: Path, text: str) -> None:
    (root / "child.py").write_text(textwrap.dedent(text))


def test_its_exit_code_is_ours(root: Path) -> None:
    write(root, "import sys; sys.exit(int(sys.argv[1]))")
    assert source_checkout.run_module("child", ["3"]) == 3


def test_death_by_signal_is_128_plus_its_number(root: Path) -> None:
    write(root, "import os; os.kill(os.getpid(), 9)")
    assert source_checkout.run_module("child", []) == 137


def test_a_signal_reaches_it_and_we_wait_until_it_has_unwound(root: Path) -> None:
    write(
        root,
        """
        import os, pathlib, signal, sys, time
        def stop(number, frame):
            pathlib.Path("unwound").write_text(str(number))
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        os.kill(os.getppid(), signal.SIGTERM)
        while True:  # not pause(): a signal just before it would not end it
            time.sleep(0.05)
        """,
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InterruptedBySignalError):
        source_checkout.run_module("child", [])
    assert (root / "unwound").read_text() == str(int(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_it_prints_can_be_kept_off_stdout(root: Path) -> None:
    write(root, "print('chatter')")
    caller = (
        "import pathlib; from agentenv.cli import source_checkout; "
        f"source_checkout.checkout_root = lambda _needed: pathlib.Path({str(root)!r}); "
        "source_checkout.run_module('child', [], quiet_stdout=True)"
    )
    done = subprocess.run([sys.executable, "-c", caller], capture_output=True, text=True, check=True, env=os.environ)
    assert (done.stdout, done.stderr) == ("", "chatter\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "out/demo"),
        (["--groups", "1"], "out/demo"),
        (["--out", "a", "--seed", "3", "--out=b"], "b"),
        (["--out", "/elsewhere"], "/elsewhere"),
        (["--out"], "out/demo"),
    ],
)
def test_what_it_is_told_to_write_to_is_known(root: Path, arguments: list[str], named: str) -> None:
    assert source_checkout.directory_named(arguments, Path("out/demo")) == root / named


def test_the_demos_document_names_the_files_of_this_run_and_no_older_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("rollouts.jsonl", "report.html")

    def play(_module: str, arguments: list[str], *, quiet_stdout: bool) -> int:
        assert quiet_stdout
        if "--out" not in arguments:
            return 2
        for name in files:
            (Path(arguments[-1]) / name).touch()
        return 0

    monkeypatch.setattr("agentenv.cli.demo.run_module", play)
    for directory in (root / "there", root / "out/demo"):
        directory.mkdir(parents=True)
        for name in files:
            (directory / name).touch()
            os.utime(directory / name, (1, 1))
    done = CliRunner().invoke(app, ["demo", "--json", "--", "--out", str(root / "there")])
    rollouts, report = (str(root / "there" / name) for name in files)
    assert json.loads(done.stdout) == {"rollouts": rollouts, "report": report, "exit_code": 0}
    done = CliRunner().invoke(app, ["demo", "--json"])
    assert (json.loads(done.stdout), done.exit_code) == ({"rollouts": None, "report": None, "exit_code": 2}, 2)


def test_the_benchmarks_document_is_the_one_they_wrote(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_module: str, arguments: list[str], *, quiet_stdout: bool) -> int:
        assert quiet_stdout
        if Path(arguments[-1]).name != "there":
            return 2
        (Path(arguments[-1]) / "results.json").write_text("[1]")
        return 0

    monkeypatch.setattr("agentenv.cli.bench.run_module", measure)
    (root / "there").mkdir()
    done = CliRunner().invoke(app, ["bench", "--json", "--", "--out", str(root / "there")])
    assert (json.loads(done.stdout), done.exit_code) == ([1], 0)
    done = CliRunner().invoke(app, ["bench", "--json"])
    assert (json.loads(done.stdout), done.exit_code) == ({"exit_code": 2}, 2)


def test_without_a_checkout_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match="source checkout") as refused:
        source_checkout.checkout_root("no-such-directory")
    assert "make setup" in refused.value.next_step

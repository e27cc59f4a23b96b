"""``agentenv dev`` and ``agentenv image`` as their users see them; what they do is a stand-in here."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentenv.cli import progress
from agentenv.cli.app import app
from agentenv.dev.agent import AgentPlace
from agentenv.dev.cluster import Cluster, ClusterStatus
from agentenv.errors import SandboxUnavailableError
from agentenv.image import BuildStep, ImageStatus
from agentenv.wire.server import Proof, ServerInfo

UP = ClusterStatus("ready", "http://127.0.0.1:4646", "running", "agentenv-sandbox:local current", ("farm: running",))
DOWN = ClusterStatus("not running", None, "not running", "", abandoned=("/tmp/killed/s1",))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


def test_up_says_where_things_are(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = (Proof(name="p", holds=True, required=True), Proof(name="q", holds=False, required=False))
    info = ServerInfo(container="c", boot="b", version="0", slots=1, isolation="full", proofs=proofs)
    found = Cluster(AgentPlace(Path("/cache/nomad-dev")), "http://127.0.0.1:4646", True, info)
    monkeypatch.setattr("agentenv.dev.cluster.up", lambda **given: found)

    code, output = run("dev", "up")
    assert code == 0
    assert "1 of 2 proofs hold" in output
    assert "http://127.0.0.1:4646/ui/" in output
    assert "/cache/nomad-dev/nomad.log" in output
    assert json.loads(run("dev", "up", "--json")[1])["isolation"] == "full"


def test_nomad_says_where_the_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.dev.program.nomad_program", lambda report: Path("/opt/bin/nomad"))

    assert run("dev", "nomad") == (0, "nomad /opt/bin/nomad\n")
    assert json.loads(run("dev", "nomad", "--json")[1]) == {"nomad": "/opt/bin/nomad"}


def test_failure_names_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def up(**given: object) -> Cluster:
        raise SandboxUnavailableError("no engine", next_step="start one")

    monkeypatch.setattr("agentenv.dev.cluster.up", up)

    code, output = run("dev", "up")
    assert code == 125
    assert "no engine" in output
    assert "start one" in output


def test_an_ordinary_user_is_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    code, output = run("dev", "up")
    assert code == 125
    assert "needs root" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("found", "code"), [(UP, 0), (DOWN, 1)])
def test_status_says_by_its_exit_code_whether_it_is_up(
    monkeypatch: pytest.MonkeyPatch, found: ClusterStatus, code: int
) -> None:
    monkeypatch.setattr("agentenv.dev.cluster.status", lambda: found)

    assert run("dev", "status")[0] == code
    assert f"jobs           {len(found.jobs)}" in run("dev", "status")[1]
    assert json.loads(run("dev", "status", "--json")[1])["up"] is (code == 0)
    assert ("/tmp/killed/s1" in run("dev", "status")[1]) is (code == 1)


def test_down_says_what_became_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.dev.cluster.down", lambda **given: "left running: it was not started by agentenv")

    assert "left running" in run("dev", "down")[1]


@pytest.mark.parametrize(
    ("content", "wanted", "there", "code", "word"),
    [("a", "a", True, 0, "current"), ("a", "b", True, 1, "stale"), ("", "b", False, 1, "missing")],
)
def test_image_status(
    monkeypatch: pytest.MonkeyPatch, content: str, wanted: str, there: bool, code: int, word: str
) -> None:
    found = ImageStatus("agentenv-sandbox:local", "sha256:1" if there else "", 247_000_000, content, wanted, "base")
    monkeypatch.setattr("agentenv.image.connect", io.StringIO)
    monkeypatch.setattr("agentenv.image.image_status", lambda client, name: found)

    assert run("image", "status")[0] == code
    assert word in run("image", "status")[1]
    assert json.loads(run("image", "status", "--json")[1])["stale"] is (word == "stale")


def test_each_step_leaves_a_line_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("agentenv.cli.progress.err", lambda: Console(file=file, width=100))

    with progress.shown() as report:
        report(BuildStep("image", "[0] of many", 1, 3))
        report(BuildStep("image", "copying", 2, 3))
        report(BuildStep("agent"))

    lines = [line.split() for line in file.getvalue().splitlines() if "✓" in line]
    assert [line[1] for line in lines] == ["image", "agent"]
    assert all(line[3] == "s" for line in lines)


def test_the_step_that_failed_is_not_ticked_off(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("agentenv.cli.progress.err", lambda: Console(file=file, width=100))

    def fails() -> None:
        with progress.shown() as report:
            report(BuildStep("image"))
            report(BuildStep("agent"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()

    assert [line.split()[:2] for line in file.getvalue().splitlines() if line] == [["✓", "image"], ["✗", "agent"]]


def test_a_long_step_says_what_it_does_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("agentenv.cli.progress.err", lambda: Console(file=file, width=40))
    now = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))

    with progress.shown() as report:
        for packages in range(6):
            report(BuildStep("nomad", f"building: {packages} packages"))

    said = [line.strip() for line in file.getvalue().splitlines() if "building" in line]
    assert 0 < len(said) < 6
    assert set(said) <= {f"nomad: building: {packages} packages" for packages in range(6)}

"""The walls of pyproject.toml hold: every import that crosses one fails ``make check``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOWNWARD = "imports go downward only"
APART = "supervisor and server are two processes"
SERVER = "nobody else imports the sandbox server"
SUPERVISOR = "who needs the supervisor's knowledge of this machine"
SANDBOX = "what else lies in the sandbox is for its two processes"
NOT_IN_THE_WHEEL = "what the wheel lacks"
ACYCLIC = "no circles"
TRAINER = "only env imports atroposlib and wandb"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("walls")
    shutil.copy(ROOT / "pyproject.toml", copy)
    ignored = shutil.ignore_patterns("__pycache__", "bin")
    shutil.copytree(ROOT / "src/agentenv", copy / "src/agentenv", ignore=ignored, symlinks=True)
    return copy


def lint(sources: Path) -> subprocess.CompletedProcess[str]:
    """What ``make check`` says of the imports."""
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_sources_as_they_are_keep_every_contract(sources: Path) -> None:
    done = lint(sources)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "imported", "broken"),
    [
        ("slots/histogram.py", "atroposlib", TRAINER),
        ("agent/loop.py", "wandb", TRAINER),
        ("slots/histogram.py", "agentenv.env.model_servers", DOWNWARD),
        ("slots/pool.py", "agentenv.sandbox.server.server", SERVER),
        ("executor/batcher.py", "agentenv.sandbox.slot_loss", SANDBOX),
        ("executor/batcher.py", "agentenv.slots.ledger", DOWNWARD),
        ("slots/pool.py", "agentenv.executor.session", DOWNWARD),
        ("containers/connection.py", "agentenv.slots.records", DOWNWARD),
        ("dev/cluster.py", "agentenv.sandbox.slotagent.build", SANDBOX),
        ("slots/ledger.py", "agentenv.sandbox.supervisor.cgroups", SUPERVISOR),
        ("sandbox/supervisor/slot_process.py", "agentenv.sandbox.server.calls", APART),
        ("sandbox/server/tools/bash.py", "agentenv.sandbox.supervisor.isolation", APART),
        ("sandbox/server/server.py", "agentenv.config", DOWNWARD),
        ("sandbox/server/server.py", "agentenv.slots.ledger", DOWNWARD),
        ("sessions/reader.py", "agentenv.sandbox.server.process", DOWNWARD),
        ("metrics/readings.py", "agentenv", DOWNWARD),
        ("agent/loop.py", "agentenv.api.tool_server.tool", DOWNWARD),
        ("tools/spec.py", "agentenv.executor.session", DOWNWARD),
        ("builder/build.py", "agentenv.containers.transfer", DOWNWARD),
        ("store/store.py", "agentenv.builder.plan", DOWNWARD),
        ("slots/container_manager.py", "agentenv.farm_client.pool", DOWNWARD),
        ("image_placement/placement.py", "agentenv.slots.records", DOWNWARD),
        ("wire/base.py", "agentenv.config", DOWNWARD),
        ("errors.py", "agentenv.wire.base", DOWNWARD),
        ("env/tools.py", "agentenv.cli.app", DOWNWARD),
        ("env/tools.py", "agentenv.tasks.scripted", DOWNWARD),
        ("doctor/facts.py", "agentenv.dev.program", NOT_IN_THE_WHEEL),
        ("slots/commands.py", "agentenv.slots.ledger", ACYCLIC),
        ("slots/backends/base.py", "agentenv.slots.pool", ACYCLIC),
    ],
)
def test_an_import_across_a_wall_is_refused(sources: Path, module: str, imported: str, broken: str) -> None:
    file = sources / "src/agentenv" / module
    before = file.read_text()
    late = f"def _late() -> None:\n    import {imported}\n" if broken == ACYCLIC else f"import {imported}\n"
    file.write_text(f"{before}\n{late}")
    try:
        done = lint(sources)
    finally:
        file.write_text(before)
    assert done.returncode == 1, done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith(broken) and " BROKEN" in line], done.stdout


def test_a_new_module_of_the_top_level_has_to_be_given_a_layer(sources: Path) -> None:
    file = sources / "src/agentenv/somewhere.py"
    file.write_text("import agentenv.errors\n")
    try:
        done = lint(sources)
    finally:
        file.unlink()
    assert done.returncode == 1
    assert "agentenv.somewhere" in done.stdout


def test_the_architecture_page_has_the_packages_by_their_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    packages = [[one for one in row.split(" | ") if (ROOT / "src/agentenv" / one).is_dir()] for row in layers]
    page = (ROOT / "docs/architecture.md").read_text().partition("| packages | what |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in page.splitlines()[2:]]
    assert rows == [row for row in packages if row]

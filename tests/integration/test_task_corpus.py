"""The corpus of task directories: everything that is played comes to 1 and 0, and a refusal names its field."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentenv.report import read_records
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from agentenv.tasks.harbor.directories import read_tasks
from tests.cli import Command
from tests.debian_images import base_in_cache
from tests.integration.task_corpus import CASES, SAYS, table

DOCS = Path(__file__).parents[2] / "docs/harbor.md"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, case in CASES.items():
        case.write(tmp_path / "tasks" / name)
    return tmp_path / "tasks"


def test_the_page_has_the_table() -> None:
    assert table() in DOCS.read_text(), "python -m tests.integration.task_corpus"


def test_what_is_refused_names_its_field(corpus: Path) -> None:
    found = read_tasks(corpus, {"A_KEY": "secret"})
    unsolved = {"no-solution"}  # which a model plays
    assert {name: error.message.partition(":")[0] for name, error in found.refused.items()} == {
        name: case.refused for name, case in CASES.items() if case.refused and name not in unsolved
    }
    assert len(found.tasks) + len(found.refused) == len(CASES)


@pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")
def test_every_other_task_is_played_as_its_format_says(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = base_in_cache(tmp_path / "cache")
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(cache))
    make_base(Store.open(store_directory()))
    env = {"AGENTENV_STATE_DIR": str(tmp_path / "state"), "A_KEY": "secret"}
    within = ["--image-from=dockerfile", "--storage=memory", "--max-cpus=1", "--max-memory-mib=1024"]
    code, said, err = Command(env).run(
        "tasks", "check", str(corpus), *within, "--host-env=A_KEY", f"--out={tmp_path}", "--json"
    )
    found = json.loads(said)
    assert [row for row in found["records"] if not row["ok"]] == []
    assert code == 0, err
    played = sorted(name for name, case in CASES.items() if not case.refused)
    assert sorted(row["record"] for row in found["records"]) == played
    assert found["refused"].keys() == CASES.keys() - set(played)
    first = {group.item_id: group.trajectories[0] for group in read_records(tmp_path / "rollouts.jsonl")}
    assert first["marked"].messages[1]["content"] == f"[task:marked]\n{SAYS}\n"
    steps = first["steps"].verification["steps"]
    assert [(each["step"], each["rewards"]) for each in steps] == [
        ("first", {"reward": 1.0}), ("second part", {"reward": 1.0, "style": 1.0}), ("third", {"reward": 1.0}),
    ]  # fmt: skip
    asked = [message["content"] for message in first["steps"].messages if message["role"] == "user"]
    assert asked == ["[task:steps]\nDo first.\n", "Do second part.\n", "Do third.\n"]

"""Which layers of checkpoints are still needed, and what of the budget they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import checkpoints, syscalls
from agentenv.sandbox.supervisor.checkpoints import Checkpoint, Checkpoints
from agentenv.sandbox.supervisor.user_namespace import IdRange
from agentenv.wire.spec import MIB


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.setattr(syscalls, "mount", lambda *_, **__: None)
    monkeypatch.setattr(checkpoints, "_used_bytes", lambda _: MIB)
    return Checkpoints(tmp_path / "checkpoints", 2 * MIB)


def freeze(kept: Checkpoints, name: str, below: Checkpoint | None = None) -> Checkpoint:
    return kept.freeze(name, "image", below.layers if below else (), Path("/slot"), IDS, "upper")


IDS = IdRange(0)


def test_a_layer_is_kept_while_a_checkpoint_or_a_slot_stands_on_it(kept: Checkpoints) -> None:
    first = freeze(kept, "first")
    second = freeze(kept, "second", first)
    kept.hold(second.layers)
    kept.hold(first.layers)
    assert kept.drop("first") == []  # the second one stands on it
    assert kept.drop("second") == []
    assert kept.used_bytes == 2 * MIB
    assert kept.give_back(second.layers) == [second.layers[0].mount]
    assert kept.give_back(first.layers) == [first.layers[0].mount]
    assert kept.drop("second") == []


def test_what_is_to_be_unmounted_takes_no_room(kept: Checkpoints) -> None:
    freeze(kept, "first")
    freeze(kept, "second")
    assert kept.refusal(Path("/slot")) is not None
    assert len(kept.drop("first")) == 1
    assert kept.refusal(Path("/slot")) is None

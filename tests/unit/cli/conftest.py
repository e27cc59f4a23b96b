"""Verbs are tested in a state directory of their own: farms that run on this machine are none of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(directory))
    return directory

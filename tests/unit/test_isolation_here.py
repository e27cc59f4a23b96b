"""AGENTENV_ISOLATION is what `auto` means on this machine."""

from __future__ import annotations

import pytest

from agentenv.config import ContainerSettings, isolation_here
from agentenv.errors import ConfigError
from agentenv.slots.backends.local import LocalBackend


def test_it_is_what_auto_means_and_overrides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTENV_ISOLATION", raising=False)
    assert isolation_here("auto") == "auto"
    monkeypatch.setenv("AGENTENV_ISOLATION", "user")
    assert (isolation_here("auto"), isolation_here("full")) == ("user", "full")
    assert LocalBackend(ContainerSettings())._settings.isolation == "user"
    monkeypatch.setenv("AGENTENV_ISOLATION", "none")
    with pytest.raises(ConfigError, match=r"AGENTENV_ISOLATION.*allowed: auto, full, user"):
        LocalBackend()

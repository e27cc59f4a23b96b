"""Which farm, which token, which run."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.farm_client.access import announced, farm_access, run_name


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path))
    for name in ("URL", "TOKEN", "RUN"):
        monkeypatch.delenv(f"AGENTENV_FARM_{name}", raising=False)
    return tmp_path


def test_the_service_of_this_machine_needs_no_setting() -> None:
    with pytest.raises(ConfigError, match="agentenv farm serve"):
        farm_access()
    with announced("default", "http://127.0.0.1:8700") as announce:
        announce("secret")
        found = farm_access(run_here="count words!")
        assert (found.urls, found.token, found.run) == (("http://127.0.0.1:8700",), "secret", "count-words")
        assert farm_access(run="exp7").run == "exp7"
        assert "secret" not in repr(found)
        announce("another")
        assert found.renew is not None
        assert found.renew() == "another"
    with pytest.raises(ConfigError, match="farm_url"):
        farm_access()


def test_what_is_given_comes_before_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_FARM_URL", "http://a:1, http://b:2")
    with pytest.raises(ConfigError, match="farm_token"):
        farm_access()
    (here / "token").write_text("from a file\n")
    monkeypatch.setenv("AGENTENV_FARM_TOKEN", f"file:{here / 'token'}")
    found = farm_access()
    assert (found.urls, found.token, found.run) == (("http://a:1", "http://b:2"), "from a file", "")
    assert farm_access("http://c:3", "other").urls == ("http://c:3",)
    with pytest.raises(ConfigError, match="cannot be read"):
        farm_access(token=f"file:{here / 'none'}")


@pytest.mark.parametrize(
    ("text", "name"), [("exp7", "exp7"), ("a b/c", "a-b-c"), ("--x--", "x"), ("äöü", "local"), ("", "local")]
)
def test_any_text_makes_a_run_s_name(text: str, name: str) -> None:
    assert run_name(text) == name

"""A farm service's file: what it may hold, and what becomes of it when it is changed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentenv.api.farm_server.settings import FarmSettings, SettingsFile, ShareTable, merged
from agentenv.errors import ConfigError
from agentenv.slots.sharing import KIND_WEIGHTS, FairShare, Share
from agentenv.wire.farm import RunShare

WHOLE = """
name = "lab"
backend = "nomad"
unattended_after_s = 600
reclaim_after_s = 30
relay_url = "https://relay.example.org/farm"
audit_log = "log/audit.jsonl"
[pool]
min_containers = 2
max_containers = 20
[containers]
slots_per_container = 20
isolation = "full"
binds = ["/data:/data"]
[containers.limits]
processes = 100
[nomad]
job_id = "lab-sandbox"
ca_cert = "ca.pem"
[shares.default]
cap = 40
[runs.exp7]
weight = 2
guaranteed = 16
[runs."team/exp8"]
cap = 100
paused = true
[kinds]
eval = 2
[tokens]
key_files = ["new.key", "/etc/farm/old.key"]
denied = ["0123456789abcdef"]
[limits]
asks_per_s = 10
burst = 50
[plain]
idle_s = 300
calls_at_once = 20
[public]
metrics = true
"""


@pytest.fixture(autouse=True)
def _no_nomad_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NOMAD_")]:
        monkeypatch.delenv(name)


def written(directory: Path, text: str) -> Path:
    path = directory / "farm.toml"
    new = directory / "farm.toml.new"
    new.write_text(text)
    return new.rename(path)


def read(directory: Path, text: str) -> FarmSettings:
    return FarmSettings.from_file(written(directory, text))


def test_a_whole_file(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert (found.name, found.backend, found.unattended_after_s, found.reclaim_after_s) == ("lab", "nomad", 600, 30)
    assert (found.pool.min_containers, found.pool.max_containers) == (2, 20)
    assert (found.containers.slots_per_container, found.containers.limits.processes) == (20, 100)
    assert found.containers.binds[0].source == "/data"
    assert (found.nomad.job_id, found.nomad.ca_cert) == ("lab-sandbox", tmp_path / "ca.pem")
    assert found.tokens.key_files == (tmp_path / "new.key", Path("/etc/farm/old.key"))
    assert found.tokens.denied == {"0123456789abcdef"}
    assert (found.limits.asks_per_s, found.limits.burst) == (10, 50)
    assert (found.plain.idle_s, found.plain.acquire_timeout_s, found.plain.calls_at_once) == (300, 30, 20)
    assert found.audit_log == tmp_path / "log/audit.jsonl"
    assert (found.public.metrics, found.public.openapi) == (True, False)
    assert found.relay_url == "https://relay.example.org/farm"


def test_an_empty_file_says_nothing_but_where_it_is(tmp_path: Path) -> None:
    found = read(tmp_path, "")
    assert found == FarmSettings().below(tmp_path)
    assert found.tokens.key_files == (tmp_path / "farm.key",)
    assert found.share_table == ShareTable(Share(), {}, KIND_WEIGHTS)


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("not toml", "config", "cannot be read"),
        ("poool = 1", "poool", "did you mean pool"),
        ("[pool]\nmax_container = 2", "pool.max_container", "did you mean pool.max_containers"),
        ("[limits]\nburts = 2", "limits.burts", "did you mean limits.burst?"),
        ("[containers.limits]\nopn = 2", "containers.limits.opn", "did you mean containers.limits.open_files?"),
        ("[pool]\nmin_containers = 11", "pool.min_containers", "is more than max_containers"),
        ("[containers]\nslots_per_container = 0", "containers.slots_per_container", "greater than"),
        ("[containers.limits]\nmemory_bytes = 1", "containers.limits.memory_bytes", "raise memory_bytes"),
        ('[containers]\nclosed_networks = ["x"]', "containers.closed_networks", "IPv4"),
        ("nomad = 3", "nomad", "NomadSettings"),
        ("[nomad]\ncls = 3", "nomad.cls", "unknown setting"),
        ('backend = "docker"', "backend", "'local'"),
        ('name = "a/b"', "name", "pattern"),
        ("[shares.default]\nweight = 0", "shares.default.weight", "greater than 0"),
        ("[runs.a]\nweight = -1", "runs.a.weight", "greater than 0"),
        ("[runs.a]\nwieght = 1", "runs.a.wieght", "unknown setting"),
        ('[runs."team/*"]\nweight = 1', "runs.team/*.[key]", "pattern"),
        ("runs = 3", "runs", "dictionary"),
        ("runs = { a = 3 }\n[shares.default]\ncap = 1", "runs.a", "RunShare"),
        ("[kinds]\nother = 1", "kinds.other", "unknown setting"),
        ("[kinds]\neval = 0", "kinds.eval", "greater than 0"),
        ("reclaim_after_s = 0", "reclaim_after_s", "greater than 0"),
        ('relay_url = "relay.example.org"', "relay_url", "pattern"),
        ("[tokens]\nkey_files = []", "tokens.key_files", "at least 1"),
        ("[limits]\nburst = 0", "limits.burst", "greater than"),
        ("[plain]\nidle_s = 1", "plain.idle_s", "greater than"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.field == field
    assert str(caught.value).count(f"{field}: ") == 1
    assert said in str(caught.value)


def test_nomads_own_variables_fill_what_the_file_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOMAD_ADDR", "http://nomad:4646")
    monkeypatch.setenv("NOMAD_TOKEN", "secret-of-nomad")
    found = read(tmp_path, '[nomad]\naddress = "http://other:4646"')
    assert (found.nomad.address, found.nomad.token) == ("http://other:4646", "secret-of-nomad")
    assert read(tmp_path, "").nomad.address == "http://nomad:4646"
    assert "secret-of-nomad" not in repr(found)


def test_a_farms_job_stays_unless_asked_otherwise(tmp_path: Path) -> None:
    assert not FarmSettings().nomad.purge_job_on_shutdown
    assert not read(tmp_path, "").nomad.purge_job_on_shutdown
    assert not read(tmp_path, '[nomad]\njob_id = "a"').nomad.purge_job_on_shutdown
    assert read(tmp_path, "[nomad]\npurge_job_on_shutdown = true").nomad.purge_job_on_shutdown


# -- shares -----------------------------------------------------------------------------------------


def test_the_table_is_what_the_queue_takes(tmp_path: Path) -> None:
    table = read(tmp_path, WHOLE).share_table
    assert table.default == table.of("another") == Share(cap=40)
    assert table.of("exp7") == Share(weight=2, guaranteed=16, cap=40)
    assert table.of("team/exp8") == Share(cap=100, paused=True)
    assert table.kinds == {**KIND_WEIGHTS, "eval": 2}
    line = FairShare()
    line.set_shares(table.default, table.runs, table.kinds)
    line.set_shares(*vars(table).values())


def test_a_table_with_other_shares_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    table = read(tmp_path, WHOLE).share_table
    other = table.changed({"exp7": RunShare(weight=5), "new": RunShare(cap=1)})
    assert (other.of("exp7"), other.of("new")) == (Share(weight=5), Share(cap=1))
    assert other.of("team/exp8") == table.of("team/exp8")
    assert (table.of("exp7").weight, "new" in table.runs, other.kinds) == (2, False, table.kinds)


# -- read again -------------------------------------------------------------------------------------


def test_what_may_change_changes_and_the_rest_is_named(tmp_path: Path) -> None:
    running = read(tmp_path, WHOLE)
    text = WHOLE.replace("weight = 2", "weight = 3").replace("eval = 2", "eval = 1").replace("cap = 40", "cap = 50")
    text = text.replace("reclaim_after_s = 30", "").replace("burst = 50", "burst = 60")
    text = text.replace("0123456789abcdef", "another")
    found = merged(running, read(tmp_path, text))
    assert found.changed == ("kinds", "limits", "reclaim_after_s", "runs", "shares", "tokens.denied")
    assert (found.needs_restart, found.error) == ((), None)
    assert found.settings == read(tmp_path, text)

    text = text.replace("new.key", "newer.key").replace('"lab"', '"other"').replace("max_containers = 20", "")
    again = merged(found.settings, read(tmp_path, text))
    assert (again.changed, again.needs_restart) == ((), ("name", "pool", "tokens.key_files"))
    assert again.settings == found.settings


def test_both_at_once(tmp_path: Path) -> None:
    running = read(tmp_path, "")
    found = merged(running, read(tmp_path, 'relay_url = "http://a"\n[tokens]\nkey_files = ["a"]\ndenied = ["x"]'))
    assert (found.changed, found.needs_restart) == (("tokens.denied",), ("relay_url", "tokens.key_files"))
    assert found.settings.tokens == running.tokens.model_copy(update={"denied": frozenset({"x"})})
    assert found.settings.relay_url == ""


def test_a_file_is_read_when_it_was_changed_or_when_asked(tmp_path: Path) -> None:
    file = SettingsFile(written(tmp_path, "[runs.a]\nweight = 2"))
    assert file.look() is None
    unchanged = file.look(force=True)
    assert unchanged is not None
    assert (unchanged.changed, unchanged.needs_restart, unchanged.error) == ((), (), None)
    written(tmp_path, "[runs.a]\nweight = 3")
    changed = file.look()
    assert changed is not None
    assert changed.changed == ("runs",)
    assert file.look() is None
    assert file.settings is changed.settings
    assert file.settings.share_table.of("a").weight == 3


def test_a_wrong_file_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    file = SettingsFile(written(tmp_path, "[runs.a]\nweight = 2"))
    before = file.settings
    for text, field in (("[runs.a]\nweight = 0", "runs.a.weight"), ("[runs", "config")):
        written(tmp_path, text)
        found = file.look()
        assert found is not None
        assert found.error is not None
        assert (found.error.field, found.settings, file.settings) == (field, before, before)
        assert file.look() is None
    file.path.unlink()
    gone = file.look()
    assert gone is not None
    assert gone.error is not None
    assert file.look() is None
    written(tmp_path, "[runs.a]\nweight = 4")
    mended = file.look()
    assert mended is not None
    assert (mended.error, file.settings.share_table.of("a").weight) == (None, 4)


async def test_a_running_service_follows_its_file(tmp_path: Path) -> None:
    file = SettingsFile(written(tmp_path, "[runs.a]\nweight = 2"))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, file.ask)
    try:
        async with asyncio.timeout(30):
            soon = file.reloads(every_s=0.01)
            written(tmp_path, "[runs.a]\nweight = 3")
            assert (await anext(soon)).changed == ("runs",)
            await soon.aclose()
            asked = file.reloads(every_s=3600)
            signal.raise_signal(signal.SIGHUP)
            assert (await anext(asked)).changed == ()
            await asked.aclose()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)

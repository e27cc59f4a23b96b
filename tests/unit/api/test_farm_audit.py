"""What a farm service writes down about its decisions, and what it never does."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentenv.api.audit_file import AuditFile
from agentenv.api.farm_server.audit import BY_FARM, FarmAudit
from agentenv.errors import ConfigError, QuotaError
from agentenv.wire.farm import Ask, AskTags, Grant, RunShare
from agentenv.wire.leases import LeaseKey

ASK = Ask(request_id="r" * 16, trajectories=("t-1", "t-2"), tags=AskTags(kind="eval", group="g"))
SECRETS = ("secret-pass-of-run", "secret-of-the-lease")
GRANTS = tuple(
    Grant(
    index=0,
        lease=f"c1/{slot}/7", trajectory=f"t-{slot}", base_url="http://c1", token=SECRETS[0],
        key=LeaseKey(slot=slot, epoch=7, secret=SECRETS[1]), ttl_s=30, slots=2,
    )
    for slot in (1, 2)
)  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_decision_is_a_line_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    audit = FarmAudit(path)
    audit.ask_granted("jti-1", "exp7", ASK, GRANTS)
    audit.ask_refused("jti-1", "exp7", ASK, QuotaError("slots", "more than the cap"))
    audit.lease_ended(BY_FARM, "exp7", "c1/1/7", "reclaimed")
    audit.token_minted("jti-2", "exp7", "jti-3", scope="run", cap=8, expires_s=60)
    audit.container_drained("jti-2", "c1", 3)
    audit.share_changed("jti-2", "exp7", RunShare(weight=2))
    audit.share_changed("jti-2", "exp7", None)
    audit.settings_reloaded(("runs",), ("name",))
    audit.token_revoked("jti-2", "jti-3", streams=1, asks=2, leases=3, ended=True)
    audit.close()
    audit.close()
    audit.lease_ended(BY_FARM, "exp7", "c1/2/7", "after the end")
    found = lines(path)
    methods = [name for name, _ in inspect.getmembers(FarmAudit, inspect.isfunction) if name in vars(FarmAudit)]
    assert {line["event"] for line in found} == {name for name in methods if name != "_add"}
    assert all(line["at_unix_s"] > 1e9 and isinstance(line["by"], str) for line in found)
    assert found[0]["leases"] == {"t-1": "c1/1/7", "t-2": "c1/2/7"}
    assert found[0]["tags"] == {"kind": "eval", "group": "g"}
    assert (found[1]["error"], found[1]["slots"]) == ("quota", 2)
    assert (found[2]["by"], found[2]["why"]) == ("farm", "reclaimed")
    assert (found[5]["share"]["weight"], found[6]["share"]) == (2, None)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(secret in path.read_text() for secret in SECRETS)


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    audit = FarmAudit(None)
    audit.ask_granted("jti-1", "exp7", ASK, GRANTS)
    assert (audit.writes, audit.lost) == (False, 0)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="audit_log"):
        FarmAudit(tmp_path / "file" / "audit.jsonl")


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    audit = AuditFile(Path("/dev/full"))
    audit.write({"a": 1})
    audit.write({"b": "\ud800"})
    assert audit.lost == 2
    audit.close()


def test_two_processes_append_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first, second = FarmAudit(path), FarmAudit(path)
    for number in range(3):
        for audit in (first, second):
            audit.lease_ended(BY_FARM, "exp7", f"c1/{number}/1", "x" * os.sysconf("SC_PAGE_SIZE"))
    assert len(lines(path)) == 6


def test_a_file_that_was_rotated_away_gets_no_more_lines(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    audit = AuditFile(path)
    audit.write({"number": 1})
    path.rename(old)
    audit.write({"number": 2})
    path.unlink()
    audit.write({"number": 3})
    audit.close()
    assert (lines(old), lines(path)) == ([{"number": 1}], [{"number": 3}])
    assert path.stat().st_mode & 0o777 == 0o600
    assert audit.lost == 0

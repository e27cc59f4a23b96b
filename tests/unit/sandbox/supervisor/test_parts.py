"""The supervisor's small parts: slot states, crash loops, sweep, tokens, ports."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.supervisor import isolation, launch, mounts, server_process, sweep
from agentenv.sandbox.supervisor.slot_lifecycle import CrashLoop
from agentenv.sandbox.supervisor.supervisor import Supervisor
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import Capability, SandboxSpec


def test_a_crash_loop_is_so_many_within_so_long() -> None:
    loop = CrashLoop(3, 10.0)
    assert [loop.crashed(now) for now in (0.0, 11.0, 12.0, 13.0)] == [False, False, False, True]
    slow = CrashLoop(3, 10.0)
    assert not any(slow.crashed(now) for now in range(0, 100, 6))


def test_the_lock_tells_the_living_from_the_dead(tmp_path: Path) -> None:
    lock = sweep.take_lock(tmp_path / "c")
    try:
        with pytest.raises(sweep.StillRunningError):
            sweep.take_lock(tmp_path / "c")
        assert sweep.sweep(tmp_path) == []
        assert (tmp_path / "c").is_dir()
    finally:
        os.close(lock)
    assert [swept.container for swept in sweep.sweep(tmp_path)] == ["c"]
    assert not (tmp_path / "c").exists()
    assert sweep.sweep(tmp_path) == []


def test_the_sweep_removes_recorded_cgroups_of_that_name_only(tmp_path: Path) -> None:
    own, other = tmp_path / "cg/agentenv/c", tmp_path / "cg/agentenv/d"
    for base in (own, other):
        (base / "slot-0").mkdir(parents=True)
    os.close(sweep.take_lock(tmp_path / "state/c"))
    sweep.record_cgroups(tmp_path / "state/c", (own, other))
    (found,) = sweep.sweep(tmp_path / "state")
    assert found.removed == (str(own), str(tmp_path / "state/c"))
    assert other.is_dir()


def test_the_sweep_leaves_other_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    assert sweep.sweep(tmp_path) == []
    assert sweep.sweep(tmp_path / "missing") == []
    assert (tmp_path / "photos").is_dir()


def test_sweep_s_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.close(sweep.take_lock(tmp_path / "c"))
    assert sweep.main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["container"] == "c"
    assert sweep.main([]) == 2


def test_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot read"):
        launch.read_token(token)
    token.write_text("0123456789abcdef\n")
    token.chmod(0o640)
    with pytest.raises(ConfigError, match="readable by others"):
        launch.read_token(token)
    token.chmod(0o600)
    assert launch.read_token(token) == "0123456789abcdef"
    token.write_text("short")
    with pytest.raises(ConfigError, match="fewer than 16"):
        launch.read_token(token)
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(ConfigError, match="--userns=host"):
        launch.read_token(token)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="port: cannot listen"):
        launch.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="host: cannot listen"):
        launch.listen("203.0.113.77", 0)


def test_uid_blocks_are_not_shared() -> None:
    one, two = launch.claim_uids(), launch.claim_uids()
    try:
        assert one.getsockname() != two.getsockname()
    finally:
        one.close()
        two.close()


def test_the_server_imports_from_where_its_supervisor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the relative entries, which mean other directories to a process that starts elsewhere."""
    monkeypatch.setenv("PYTHONPATH", "/srv/packages:relative::/usr/lib")
    own, *named = server_process.environment()["PYTHONPATH"].split(":")
    assert (Path(own) / "agentenv/__init__.py").is_file()
    assert named == ["/srv/packages", "/usr/lib"]
    assert Path("/usr/lib") in mounts.interpreter_directories(), "shown to the server where it could not reach it"


@pytest.mark.parametrize(("capabilities", "allowed"), [(("net_admin",), False), (("sys_nice",), True)])
def test_the_supervisor_refuses_what_a_server_should_have_refused(
    capabilities: tuple[Capability, ...], allowed: bool
) -> None:
    spec = SandboxSpec(container="c", token_file="/t", data_dir="/d", store_dir="/s")
    refused = isolation.refused_roots(spec, ("cpu", "memory", "pids"), "", "", "")
    supervisor = SimpleNamespace(_launch=SimpleNamespace(spec=spec), _refused_roots=lambda: refused)
    slot = Mock()
    asked = RootSpec(f"sha256:{'a' * 64}", capabilities=capabilities)
    Supervisor._reroot(cast("Supervisor", supervisor), slot, asked)
    assert slot.reroot.called == allowed
    assert slot.refuse.called != allowed

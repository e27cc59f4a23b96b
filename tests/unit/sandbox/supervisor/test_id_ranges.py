from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import id_ranges
from agentenv.sandbox.supervisor.id_ranges import IdRanges, has_store
from agentenv.sandbox.supervisor.user_namespace import FIRST_ID, IDS, RANGES, IdRange
from agentenv.store import Store
from agentenv.store.layout import RANGES as FILES


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a node that has four ranges."""
    monkeypatch.setattr(id_ranges, "TREES", 4)
    for number in range(4):
        (tmp_path / str(number)).touch(mode=0o444)
    return tmp_path


def test_containers_of_a_node_share_no_range(few: Path) -> None:
    one, two = IdRanges(few), IdRanges(few)
    claimed = [one.claim(), two.claim(), two.claim(), one.claim()]
    assert {each.ids for each in claimed} == {IdRange(number) for number in range(4)}
    with pytest.raises(SandboxUnavailableError, match="all 4 ranges of ids of this node are in use"):
        one.claim()
    claimed[2].release()
    claimed[2].release()
    assert one.claim().ids == claimed[2].ids


def test_a_supervisor_that_is_killed_leaves_no_range_taken(few: Path) -> None:
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        kept = [IdRanges(few).claim() for _ in range(4)]
        os.write(writable, str(len(kept)).encode())
        signal.pause()
    assert os.read(readable, 1) == b"4"
    with pytest.raises(SandboxUnavailableError):
        IdRanges(few).claim()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ranges = IdRanges(few)
    assert {ranges.claim().ids for _ in range(4)} == {IdRange(number) for number in range(4)}
    os.close(readable)
    os.close(writable)


def test_a_store_has_a_file_for_every_range(tmp_path: Path) -> None:
    assert FILES == RANGES
    Store.open(tmp_path / "store")
    ranges = IdRanges(tmp_path / "store/ranges")
    claimed = ranges.claim()
    assert FIRST_ID <= claimed.ids.first < 2**31
    assert claimed.ids.first + IDS <= 2**31
    claimed.release()
    (tmp_path / "store/ranges" / str(ranges._next)).unlink()
    with pytest.raises(SandboxUnavailableError, match="the image store was created by an older version"):
        ranges.claim()


def test_a_container_that_may_only_read_the_store_has_ranges(few: Path) -> None:
    few.chmod(0o555)
    if (pid := os.fork()) == 0:
        os.chdir(few)
        if os.geteuid() == 0:
            os.setuid(65_534)
        os._exit(0 if IdRanges(Path()).claim().ids in [IdRange(number) for number in range(4)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_store_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    (tmp_path / "ranges").mkdir()
    (tmp_path / "ranges" / "0").touch()
    assert not has_store(tmp_path)
    Store.open(tmp_path)
    assert has_store(tmp_path)

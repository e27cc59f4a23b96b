"""Whose limit was met: told from the counters of cgroup v1 and v2, here plain files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agentenv.sandbox.limit_watch import MEMORY_ABOVE, PROCESSES_ABOVE, TERMINALS_ABOVE, LimitFiles, LimitWatch, Usage
from agentenv.sandbox.slot_loss import WAYS, LossReason, error_of, loss_of_end, loss_of_network

GIB = 2**30


class Slot:
    """The counters of one slot's cgroup, as either version writes them."""

    def __init__(self, directory: Path, version: int) -> None:
        self.directory = directory
        self.version = version
        self.kills = self.hits = self.forks = 0
        self.pids, self.peak = 2, 2
        self.write()

    def write(self) -> None:
        one = self.version == 1
        files = {
            "pids.max": "402",
            "pids.current": f"{self.pids}",
            "pids.peak": f"{self.peak}",
            "pids.events": f"max {self.forks}\n",
            "memory.usage_in_bytes" if one else "memory.current": f"{self.hits}\n",
            "memory.limit_in_bytes" if one else "memory.max": f"{GIB}\n",
            "cpuacct.usage" if one else "cpu.stat": "2500000000\n" if one else "nr_periods 1\nusage_usec 2500000\n",
            "memory.events": f"low 0\nhigh 0\nmax {self.hits * 9}\noom {self.hits}\noom_kill {self.kills}\n",
        }
        if one:
            del files["memory.events"]
            files["memory.oom_control"] = f"oom_kill_disable 0\nunder_oom 0\noom_kill {self.kills}\n"
            files["memory.failcnt"] = f"{self.hits}\n"
        files["memory.max_usage_in_bytes" if one else "memory.peak"] = f"{GIB}\n"
        for name, text in files.items():
            (self.directory / name).write_text(text)

    def watch(self) -> LimitWatch:
        place = str(self.directory)
        return LimitWatch(LimitFiles(self.version, place, place, place, own_processes=2))


@pytest.fixture(params=[1, 2])
def slot(request: pytest.FixtureRequest, tmp_path: Path) -> Slot:
    return Slot(tmp_path, request.param)


def test_what_a_slot_uses_is_read_of_its_files(slot: Slot) -> None:
    slot.hits, slot.pids = 4096, 7
    slot.write()
    assert slot.watch().usage() == Usage(4096, GIB, 2.5, 5, 400)
    (slot.directory / "pids.max").write_text("max\n")
    (slot.directory / ("cpuacct.usage" if slot.version == 1 else "cpu.stat")).unlink()
    used = slot.watch().usage()
    assert (used.processes, used.processes_limit, used.cpu_s) == (5, None, None)
    assert LimitWatch(LimitFiles()).usage() == Usage(None, None, None, None, None)


def test_a_kill_at_the_slot_s_own_limit_is_its_own(slot: Slot) -> None:
    watch = slot.watch()
    watch.begin()
    slot.hits, slot.kills = 3, 1
    slot.write()
    assert watch.killed_by_own_limit()
    assert watch.take_above() == ""
    assert watch.peak_bytes() == GIB
    watch.begin()
    assert not watch.killed_by_own_limit(), "of an earlier call"
    watch.close()


def test_a_kill_below_the_slot_s_own_limit_is_not(slot: Slot) -> None:
    slot.hits = 7  # met once, long ago
    slot.write()
    watch = slot.watch()
    watch.begin()
    watch.begin()
    slot.kills = 1
    slot.write()
    assert not watch.killed_by_own_limit()
    assert watch.take_above() == MEMORY_ABOVE
    assert watch.take_above() == "", "told once"
    watch.close()


def test_a_kill_between_two_calls_is_told_to_the_next(slot: Slot) -> None:
    watch = slot.watch()
    slot.kills = 1
    slot.write()
    watch.begin()
    assert watch.take_above() == MEMORY_ABOVE
    watch.close()


def test_a_limit_met_a_moment_before_the_kernel_kills_for_it_is_still_the_slot_s(slot: Slot) -> None:
    watch = slot.watch()
    slot.hits = 1
    slot.write()
    watch.begin()
    slot.kills = 1
    slot.write()
    assert watch.killed_by_own_limit()
    assert watch.take_above() == ""
    watch.close()


@pytest.mark.parametrize(("pids", "peak", "own"), [(402, 402, True), (390, 390, True), (2, 402, True), (2, 9, False)])
def test_a_process_that_cannot_be_had(slot: Slot, pids: int, peak: int, own: bool) -> None:
    watch = slot.watch()
    slot.pids, slot.peak = pids, peak
    slot.write()
    assert watch.refused(errno.EAGAIN) == ("" if own else PROCESSES_ABOVE)
    slot.forks = 4
    slot.write()
    assert watch.take_above() == ("" if own else PROCESSES_ABOVE), "a fork of a command's that was refused"
    watch.close()


def test_where_no_peak_is_told_a_refused_process_is_the_slot_s_own_doing(slot: Slot) -> None:
    """Linux before 6.6: it forks to its limit, lets all end, and is seen far below it."""
    (slot.directory / "pids.peak").unlink()
    watch = slot.watch()
    assert watch.refused(errno.EAGAIN) == ""
    (slot.directory / "pids.events").write_text("max 300\n")
    assert watch.take_above() == ""
    watch.close()


def test_where_no_peak_is_told_a_full_container_is_seen_all_the_same(tmp_path: Path) -> None:
    slot = Slot(_below(tmp_path), 2)
    (slot.directory / "pids.peak").unlink()
    watch = slot.watch()
    (tmp_path / "container/pids.current").write_text("1000\n")
    assert watch.refused(errno.EAGAIN) == PROCESSES_ABOVE
    slot.pids = 402
    slot.write()
    (slot.directory / "pids.peak").unlink()
    assert watch.refused(errno.EAGAIN) == "", "it is at its own limit too"
    watch.close()


def _below(tmp_path: Path) -> Path:
    """A slot's cgroup below two others, as a kernel of today shows them."""
    directory = tmp_path / "container" / "agentenv" / "slot-0"
    directory.mkdir(parents=True)
    for above, most in ((directory.parents[0], "max"), (directory.parents[1], "1000")):
        files = {"pids.max": most, "pids.current": "40", "pids.events": "max 0", "pids.events.local": "max 0"}
        for name, text in files.items():
            (above / name).write_text(f"{text}\n")
    return directory


def test_a_fork_that_a_limit_above_refused_is_counted_there(tmp_path: Path) -> None:
    """Linux 6.11 and later: in the cgroup whose limit was met, and in no slot's."""
    slot = Slot(_below(tmp_path), 2)
    watch = slot.watch()
    assert watch.take_above() == ""
    (tmp_path / "container/pids.events.local").write_text("max 1\n")
    assert watch.take_above() == PROCESSES_ABOVE
    assert watch.take_above() == "", "told once"
    (tmp_path / "container/pids.events.local").write_text("max 2\n")
    assert watch.refused(errno.EAGAIN) == PROCESSES_ABOVE
    assert watch.take_above() == "", "told already"
    watch.close()


def test_what_is_above_all_slots_is_opened_once(tmp_path: Path) -> None:
    slot = Slot(_below(tmp_path), 2)
    watches = [slot.watch() for _ in range(3)]
    opened = {watch._above_slot.forks_fds for watch in watches}
    assert len(opened) == 1
    assert all(os.fstat(fd) for fds in opened for fd in fds)
    for watch in watches:
        watch.close()
    assert len([os.fstat(fd) for fds in opened for fd in fds]) == 2, "the container's, not a slot's"


def test_a_kill_is_told_before_a_refused_fork(tmp_path: Path) -> None:
    slot = Slot(_below(tmp_path), 2)
    watch = slot.watch()
    slot.kills = 1
    slot.write()
    (tmp_path / "container/pids.events.local").write_text("max 1\n")
    assert watch.take_above() == MEMORY_ABOVE
    (tmp_path / "container/pids.events.local").write_text("max 2\n")
    watch.look()
    slot.kills = 2
    slot.write()
    assert watch.take_above() == MEMORY_ABOVE
    watch.close()


def test_what_slots_met_of_their_own_limits_is_nothing_above_them(tmp_path: Path) -> None:
    """The counter that a cgroup has for all below it says nothing of its own limit."""
    slot = Slot(_below(tmp_path), 2)
    watch = slot.watch()
    slot.peak, slot.forks = 402, 7
    slot.write()
    for above in ("container", "container/agentenv"):
        (tmp_path / above / "pids.events").write_text("max 7\n")
    assert watch.take_above() == ""
    watch.close()


@pytest.mark.parametrize(("used", "told"), [(3070, ""), (3071, TERMINALS_ABOVE)])
def test_a_terminal_that_cannot_be_had(tmp_path: Path, used: int, told: str) -> None:
    for name, number in (("max", 4096), ("reserve", 1024), ("nr", used)):
        (tmp_path / name).write_text(f"{number}\n")
    watch = LimitWatch(LimitFiles(), terminals=str(tmp_path))
    assert watch.refused(errno.ENOSPC) == told
    watch.close()
    unknown = LimitWatch(LimitFiles(), terminals=str(tmp_path / "none"))
    assert unknown.refused(errno.ENOSPC) == ""
    unknown.close()


def test_memory_that_cannot_be_had_for_a_process(slot: Slot) -> None:
    watch = slot.watch()
    assert watch.refused(errno.ENOMEM) == MEMORY_ABOVE
    slot.hits = 1
    slot.write()
    assert watch.refused(errno.ENOMEM) == ""
    watch.close()


def test_the_agent_s_descriptors_are_the_slot_s_and_the_machine_s_are_not(slot: Slot) -> None:
    watch = slot.watch()
    assert watch.refused(errno.EMFILE) == ""
    assert "Too many open files in system" in watch.refused(errno.ENFILE)
    watch.close()


def test_without_cgroups_nothing_is_known_and_nothing_is_said() -> None:
    watch = LimitWatch(LimitFiles())
    watch.begin()
    assert (watch.killed_by_own_limit(), watch.take_above(), watch.peak_bytes()) == (False, "", None)
    assert watch.refused(errno.EAGAIN) == "", "RLIMIT_NPROC is the slot's own"
    watch.close()


def test_every_way_to_lose_a_slot_has_a_culprit() -> None:
    assert set(WAYS) == set(LossReason)
    for loss in LossReason:
        error = error_of(loss, 3, "why")
        assert "slot 3" in str(error)
        assert "why" in str(error)
    assert {
        error_of(loss, 0, "").fault
        for loss in (LossReason.ended, LossReason.silent, LossReason.broken, LossReason.deaf)
    } == {"policy"}
    assert {
        error_of(loss, 0, "").fault for loss in (LossReason.memory_above, LossReason.quarantined, LossReason.reset)
    } == {"infra"}


def test_how_the_first_process_ended() -> None:
    assert loss_of_end(137, killed_for_memory_above=False) is LossReason.ended
    assert loss_of_end(None, killed_for_memory_above=False) is LossReason.ended
    assert loss_of_end(137, killed_for_memory_above=True) is LossReason.memory_above
    assert loss_of_end(65, killed_for_memory_above=False) is LossReason.agent_failed


@pytest.mark.parametrize(
    ("status", "loss"), [(9, LossReason.memory_above), (11, LossReason.offline), (1 << 8, LossReason.offline)]
)
def test_how_the_process_behind_the_network_ended(status: int, loss: LossReason) -> None:
    assert loss_of_network(status, killed_for_memory_above=False) is loss
    assert loss_of_network(status, killed_for_memory_above=True) is LossReason.memory_above

"""The checkpoints of runs that are gone make room."""

from __future__ import annotations

from agentenv.sandbox.server.container import KeptCheckpoints


def test_checkpoints_go_when_their_run_has_had_no_lease_for_long() -> None:
    kept = KeptCheckpoints(keep_s=100)
    for name, run in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "")):
        kept.made(name, run, 0.0)
    kept.seen("two", 90.0)
    kept.dropped("b")
    kept.dropped("unknown")
    assert kept.stale([], 100.0) == []
    assert kept.stale([], 101.0) == ["a"]
    assert kept.stale(["two"], 500.0) == [], "it has a lease now"
    assert kept.stale([], 600.0) == []
    assert kept.stale([], 601.0) == ["c"]
    assert kept.stale([], 1e9) == [], "who belongs to no run has its container to itself"


def test_a_run_that_comes_back_keeps_what_is_left() -> None:
    kept = KeptCheckpoints(keep_s=100)
    kept.made("a", "one", 0.0)
    kept.made("b", "one", 90.0)
    kept.seen("never heard of", 90.0)
    assert kept.stale([], 150.0) == []
    assert sorted(kept.stale([], 191.0)) == ["a", "b"]
    kept.made("c", "one", 200.0)
    assert kept.stale([], 300.0) == []

"""When a container has been unattended for too long."""

from __future__ import annotations

import pytest

from agentenv.sandbox.server.container import IdleTimer
from tests.clock import ManualClock


def test_it_is_over_after_so_long_without_a_request() -> None:
    clock = ManualClock()
    idle_timer = IdleTimer(60, clock)
    clock.advance(59.9)
    assert not idle_timer.is_over(leased=False)
    with idle_timer.request():
        pass
    clock.advance(59.9)
    assert not idle_timer.is_over(leased=False)
    clock.advance(0.2)
    assert idle_timer.is_over(leased=False)
    assert not idle_timer.is_over(leased=True)


def test_a_long_request_attends_to_the_container_until_it_ends() -> None:
    clock = ManualClock()
    idle_timer = IdleTimer(60, clock)
    with idle_timer.request():
        with idle_timer.request():
            clock.advance(600)
        assert not idle_timer.is_over(leased=False)
        clock.advance(600)
        assert not idle_timer.is_over(leased=False)
    assert not idle_timer.is_over(leased=False)
    clock.advance(60)
    assert idle_timer.is_over(leased=False)


def test_a_request_that_fails_has_ended() -> None:
    clock = ManualClock()
    idle_timer = IdleTimer(60, clock)
    with pytest.raises(ValueError, match="refused"), idle_timer.request():
        raise ValueError("refused")
    clock.advance(60)
    assert idle_timer.is_over(leased=False)


def test_without_a_limit_it_never_is() -> None:
    clock = ManualClock()
    idle_timer = IdleTimer(0, clock)
    clock.advance(1e9)
    assert not idle_timer.is_over(leased=False)

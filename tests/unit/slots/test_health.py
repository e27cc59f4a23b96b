"""Silence, statistics and refusals: what a pool concludes and says."""

from __future__ import annotations

import pytest

from agentenv.config import ContainerSettings
from agentenv.errors import ConfigError
from agentenv.slots.backends.acceptance import unacceptable
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.commands import Expire
from agentenv.slots.container_link import Liveness, Silence
from agentenv.slots.pool_errors import check_arguments, timeout_error, unavailable_error
from agentenv.slots.statistics import Durations, PoolStatistics
from agentenv.wire.server import Proof, ServerInfo
from agentenv.wire.states import ContainerState, SlotState
from tests.clock import ManualClock


def _ticks(silence: Silence, clock: ManualClock, seconds: float) -> Liveness:
    liveness = Liveness.well
    for _ in range(round(seconds / silence.step_s)):
        liveness = silence.tick(clock.advance(silence.step_s))
    return liveness


def test_silence_makes_suspect_then_gone() -> None:
    clock = ManualClock()
    silence = Silence(4, 12, clock())
    assert _ticks(silence, clock, 3) is Liveness.well
    assert _ticks(silence, clock, 1) is Liveness.suspect
    assert _ticks(silence, clock, 7) is Liveness.suspect
    assert _ticks(silence, clock, 1) is Liveness.gone


def test_an_answer_ends_the_silence() -> None:
    clock = ManualClock()
    silence = Silence(4, 12, clock())
    _ticks(silence, clock, 11)
    silence.answered(clock())
    assert _ticks(silence, clock, 3) is Liveness.well


def test_our_own_blocked_loop_is_no_evidence() -> None:
    clock = ManualClock()
    silence = Silence(4, 12, clock())
    assert silence.tick(clock.advance(3_600)) is Liveness.well
    assert silence.silent_s == 2.0
    assert repr(silence) == "<Silence 2.0 s of 12.0 s>"


def _statistics(**changes: object) -> PoolStatistics:
    values: dict[str, object] = {
        "containers": {ContainerState.ready: 3},
        "slots": {SlotState.leased: 12, SlotState.free: 18},
        "waiting": 2,
        "goal_containers": 3,
        "max_containers": 3,
        **changes,
    }
    return PoolStatistics(**values)  # type: ignore[arg-type]


def test_statistics_read_as_one_line() -> None:
    assert str(_statistics()) == "3 containers (ready), 12/30 slots leased, 2 waiting"
    mixed = _statistics(containers={ContainerState.ready: 1, ContainerState.suspect: 1})
    assert str(mixed).startswith("2 containers (1 ready, 1 suspect), ")
    assert str(PoolStatistics()) == "0 containers, 0/0 slots leased, 0 waiting"
    assert str(_statistics(containers={ContainerState.ready: 1})).startswith("1 container (ready), ")


def test_quantiles() -> None:
    durations = Durations()
    assert durations.quantile(0.5) is None
    for value in range(1, 101):
        durations.add(float(value))
    assert durations.quantile(0.5) == 51.0
    assert durations.quantile(0.99) == 100.0


def test_a_timeout_tells_all_there_is_to_know() -> None:
    failed = StartFailed("no memory", next_step="buy some")
    error = timeout_error(Expire(7, 2, 30.04), _statistics(), failed)
    text = str(error)
    for part in ("30.0 s", "position 2", "12 leased", "18 free", "3 ready", "the maximum", "no memory", "buy some"):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "allow more slots (max_containers"),
        ({"max_containers": 9}, "more containers are starting"),
        ({"slots": {}, "containers": {}}, "no container has become ready yet"),
    ],
)
def test_a_timeout_says_what_to_do(changes: dict[str, object], advice: str) -> None:
    assert advice in timeout_error(Expire(1, 1, 1.0), _statistics(**changes), None).next_step


def test_a_timeout_says_that_it_is_the_container_that_does_not_answer() -> None:
    error = timeout_error(Expire(7, 0, 30.04), _statistics(), None)
    assert str(error).startswith("no slot was leased within 30.0 s (a container with a free one was asked, and has not")
    assert error.next_step.endswith("the container or its machine is slow")


def test_unavailable_names_cause_and_cure() -> None:
    error = unavailable_error(StartFailed("bwrap is missing", "apt-get install bubblewrap", permanent=True))
    assert str(error) == "no container can be started: bwrap is missing (apt-get install bubblewrap)"


@pytest.mark.parametrize(
    ("trajectory", "timeout_s"),
    [
        *((name, 1.0) for name in ("", "x" * 257, "a\0b", "a\x1b[2Jb", "a\nb")),
        *(("t", timeout_s) for timeout_s in (0, -1, float("nan"))),
    ],
)
def test_bad_arguments_are_named(trajectory: str, timeout_s: float) -> None:
    with pytest.raises(ConfigError):
        check_arguments(trajectory, timeout_s)


def _info(**changes: object) -> ServerInfo:
    values = {"container": "c", "boot": "b", "version": "1", "slots": 10, "isolation": "full", **changes}
    return ServerInfo(**values)


@pytest.mark.parametrize(
    ("settings", "isolation", "accepted"),
    [
        ({}, "full", True),
        ({}, "user", False),
        ({"require_sandbox": False}, "user", True),
        ({"isolation": "user"}, "user", True),
        ({"isolation": "user"}, "full", False),
        ({"isolation": "full"}, "user", False),
        ({"isolation": "full", "require_sandbox": False}, "user", False),
    ],
)
def test_less_isolation_only_when_asked_for_by_name(
    settings: dict[str, object], isolation: str, accepted: bool
) -> None:
    refused = unacceptable(_info(isolation=isolation), ContainerSettings(**settings))
    assert (refused is None) == accepted
    if refused is not None:
        assert refused.permanent
        assert refused.next_step
        assert settings or "--isolation user" in refused.next_step


def test_a_broken_required_proof_is_refused_with_its_cure() -> None:
    proofs = (
        Proof(name="nice to have", holds=False, required=False),
        Proof(name="limits", holds=False, required=True, detail="no cgroup", cure="mount one"),
    )
    refused = unacceptable(_info(proofs=proofs), ContainerSettings())
    assert refused is not None
    assert refused.reason == "c cannot prove limits: no cgroup"
    assert refused.next_step == "mount one"

"""Nomad's figures and events, in words."""

from __future__ import annotations

import json

import pytest

from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.slots.backends.nomad.explain import (
    NomadError,
    end_of,
    hopeless,
    opening_error,
    placement,
    slow_start,
    start_failure,
)
from agentenv.slots.backends.nomad.facts import TaskEvent
from tests.unit.slots.backends.nomad.nomad_samples import STARTED, allocation


@pytest.mark.parametrize(
    ("metric", "reason", "next_step"),
    [
        (
            {"NodesEvaluated": 3, "CoalescedFailures": 1, "DimensionExhausted": {"memory": 3}},
            "Nomad cannot place 2 containers: memory exhausted on 3 nodes",
            "memory_mib",
        ),
        (
            {"NodesEvaluated": 2, "DimensionExhausted": {"cpu": 1}, "ConstraintFiltered": {"missing drivers": 1}},
            "Nomad cannot place a container: cpu exhausted on 1 node, 1 node filtered by 'missing drivers'",
            "driver",
        ),
        (
            {"NodesEvaluated": 1, "DimensionExhausted": {"network: reserved port collision http=80": 1}},
            "Nomad cannot place a container: network: reserved port collision http=80 on 1 node",
            "add nodes",
        ),
        (
            {"NodesEvaluated": 1, "ConstraintFiltered": {"${meta.agentenv_data_dir} is_set": 1}},
            "Nomad cannot place a container: 1 node filtered by '${meta.agentenv_data_dir} is_set'",
            "nomad node meta apply",
        ),
        ({"NodesEvaluated": 0}, "Nomad cannot place a container: no node is ready and eligible", "drain"),
        (
            {"QuotaExhausted": ["memory exhausted (2048 needed > 1024 limit)"]},
            "Nomad cannot place a container: quota exhausted: memory exhausted (2048",
            "max_containers",
        ),
    ],
)
def test_why_nothing_is_placed(metric: dict[str, object], reason: str, next_step: str) -> None:
    failed = placement({"sandbox": metric})
    assert failed.reason.startswith(reason)
    assert next_step in failed.next_step
    assert not failed.permanent, "capacity may come back"


def test_an_image_that_cannot_be_had_is_named_and_final() -> None:
    pull = TaskEvent("Driver Failure", "Failed to pull `nope:1`: Error response from daemon: pull access denied")
    failed = start_failure(allocation(client="failed", events=(pull,)), "nope:1", "", "")
    assert failed.permanent
    assert failed.reason.startswith("cannot pull image 'nope:1': Failed to pull")
    assert "agentenv image build" in failed.next_step


@pytest.mark.parametrize(
    ("kind", "message", "permanent", "cure"),
    [
        (
            "Driver Failure",
            "driver does not have the following capabilities allow-listed: sys_admin",
            True,
            "allow_caps",
        ),
        (
            "Driver Failure",
            "opening seccomp profile (/opt/nomad/data/x/seccomp.json) failed: no such file",
            True,
            "data_dir",
        ),
        ("Driver Failure", 'failed to parse config: No argument named "x"', True, "job file"),
        ("Failed Validation", "task is wrong", True, "job file"),
        ("Driver Failure", "Failed to create container: no space left on device", False, "client's log"),
    ],
)
def test_what_the_driver_says(kind: str, message: str, permanent: bool, cure: str) -> None:
    failed = start_failure(allocation(events=(TaskEvent(kind, message),)), "i:1", "", "")
    assert message in failed.reason
    assert (failed.permanent, cure in failed.next_step) == (permanent, True)


def test_the_containers_own_word_comes_before_a_guess() -> None:
    said = {"event": "failed", "code": "self_test_failed", "message": "no cgroups", "next_step": "mount them"}
    stdout = "noise\n" + json.dumps(said) + "\nmore noise\n"
    failed = start_failure(allocation(events=(TaskEvent("Terminated", "Exit Code: 2", 2),)), "i:1", stdout, "trace")
    assert (failed.reason, failed.next_step, failed.permanent) == ("no cgroups", "mount them", True)


def test_a_hint_to_the_log_is_followed() -> None:
    said = {"event": "failed", "code": "internal", "message": "exit code 1", "next_step": "the log says why"}
    failed = start_failure(allocation(), "i:1", json.dumps(said), "ModuleNotFoundError: x\n")
    assert failed.reason == "exit code 1; it logged: ModuleNotFoundError: x"
    assert not failed.permanent


def test_last_words_when_it_said_nothing_itself() -> None:
    killed = allocation(client="failed", events=(STARTED, TaskEvent("Terminated", "Exit Code: 1", 1)))
    assert "Exit Code: 1; it logged: a | b" in start_failure(killed, "i:1", "", "a\nb\n").reason
    assert "it logged nothing" in start_failure(killed, "i:1", "", "").reason
    assert "alloc logs" in start_failure(killed, "i:1", "", "").next_step


def test_memory_is_named_when_it_was_the_cause() -> None:
    oom = TaskEvent("Terminated", "Exit Code: 137, OOM killed", 137, oom_killed=True)
    killed = allocation(client="failed", events=(STARTED, oom))
    assert "memory_mib" in end_of(killed)
    assert "memory_mib" in start_failure(killed, "i:1", "", "").next_step


def test_hopeless_is_what_was_not_followed_by_a_start() -> None:
    failed = TaskEvent("Driver Failure", "x")
    assert hopeless(allocation(events=(failed, TaskEvent("Restarting", "soon"))))
    assert not hopeless(allocation(events=(failed, STARTED, TaskEvent("Terminated", "x"))))
    assert not hopeless(allocation())


def test_a_slow_start_tells_nomads_last_word() -> None:
    slow = slow_start(allocation(events=(TaskEvent("Template", "Missing: nomad.var"),)), 61)
    assert "61 s; Nomad's last event: Template: Missing: nomad.var" in slow.reason
    assert "no Nomad client has started it yet" in slow_start(allocation(), 61).reason


@pytest.mark.parametrize(
    ("status", "text", "token", "kind", "said"),
    [
        (0, "connection refused", False, SandboxUnavailableError, "NOMAD_ADDR"),
        (403, "Permission denied", True, ConfigError, "token: Nomad at http://n:4646 refuses it"),
        (403, "Permission denied", False, ConfigError, "requires an ACL token"),
        (404, "Namespace not found", False, ConfigError, "namespace: 'mine' does not exist"),
        (500, "No path to region", False, ConfigError, "NOMAD_REGION"),
        (500, "rpc error", False, SandboxUnavailableError, "rpc error (see the Nomad servers' log"),
    ],
)
def test_what_keeps_a_farm_from_opening(status: int, text: str, token: bool, kind: type, said: str) -> None:
    error = opening_error(NomadError(status, text), "http://n:4646", "mine", token)
    assert isinstance(error, kind)
    assert said in str(error)

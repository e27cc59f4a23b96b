from __future__ import annotations

from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.wire.roots import RootSpec, shm_bytes, unfit
from agentenv.wire.spec import MIB, SlotLimits

DIGEST = "sha256:" + "a" * 64
LIMITS = SlotLimits(memory_bytes=2048 * MIB, processes=400, shm_bytes=64 * MIB)


def root(**changes: Any) -> RootSpec:
    return RootSpec(DIGEST, **changes)


def test_a_root_goes_over_the_wire_as_it_is() -> None:
    asked = root(capabilities=("net_raw",), env={"A": "b"}, cpu_millis=500, nested_namespaces=True)
    assert RootSpec.parse(asked.to_dict()) == asked


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"image": "debian"}, "root.image"),
        ({"image": DIGEST, "writable": "tape"}, "root.writable: got 'tape'"),
        ({"image": DIGEST, "writable_bytes": 1}, "root.writable_bytes"),
        ({"image": DIGEST, "cpu_millis": -1}, "root.cpu_millis"),
        ({"image": DIGEST, "capabilities": ["sys_admin"]}, "root.capabilities"),
        ({"image": DIGEST, "env": {"A=B": "c"}}, "root.env"),
        ({"image": DIGEST, "workdir": "here"}, "root.workdir"),
        ({"image": DIGEST, "unknown": 1}, "unknown"),
    ],
)
def test_a_root_that_cannot_be_is_refused_by_its_field(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RootSpec.parse(raw)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (root(), ""),
        (root(memory_bytes=2048 * MIB, processes=400), ""),
        (root(memory_bytes=2049 * MIB), "root.memory_bytes: .* is more than a slot here has"),
        (
            root(memory_bytes=2049 * MIB),
            r"\(request less, or let the containers give more \(limits.max_memory_bytes\)\)$",
        ),
        (root(processes=401), "root.processes: 401 is more than a slot here has"),
        (root(writable_bytes=1985 * MIB), "root.writable_bytes: .* do not fit"),
        (root(writable_bytes=1984 * MIB), ""),
        (root(memory_bytes=100 * MIB, writable_bytes=75 * MIB), ""),
        (root(memory_bytes=100 * MIB, writable_bytes=76 * MIB), "root.writable_bytes: .* do not fit"),
        (root(writable="disk", writable_bytes=10**12), ""),
    ],
)
def test_what_fits_is_decided_by_the_limits_of_the_containers_slots(asked: RootSpec, said: str) -> None:
    _says(unfit(asked, LIMITS, {}), said)


def test_what_a_container_cannot_hold_at_all_is_refused_if_it_is_asked_for() -> None:
    refused = {"cpu_millis": "no cpu", "writable": "no disk"}
    _says(unfit(root(), LIMITS, refused), "")
    _says(unfit(root(cpu_millis=1), LIMITS, refused), "root.cpu_millis: no cpu")
    _says(unfit(root(writable="disk"), LIMITS, refused), "root.writable: no disk")
    _says(unfit(root(), LIMITS, {"image": "plain slots only"}), "root.image: plain slots only")


def test_a_capability_is_refused_by_its_name() -> None:
    refused = {"capabilities=net_admin": "no net_admin", "nested_namespaces": "none of them"}
    asked = root(capabilities=("sys_nice", "net_admin"))
    _says(unfit(asked, LIMITS, refused), "root.capabilities: no net_admin")
    _says(unfit(root(nested_namespaces=True), LIMITS, refused), "root.nested_namespaces: none of them")
    assert unfit(root(capabilities=("sys_nice",)), LIMITS, refused) is None


def test_shared_memory_leaves_room_in_small_slots() -> None:
    assert shm_bytes(64 * MIB, 2048 * MIB) == 64 * MIB
    assert shm_bytes(64 * MIB, 100 * MIB) == 25 * MIB


def _says(error: ConfigError | None, said: str) -> None:
    if said:
        with pytest.raises(ConfigError, match=said):
            raise error or AssertionError("it fits")
    else:
        assert error is None

from __future__ import annotations

import pytest

from agentenv import ContainerSettings, Sandbox, Service
from agentenv.errors import ConfigError
from agentenv.sdk.roots import (
    ImageRoot,
    Network,
    RootFields,
    container_for,
    network_policy,
    plain_container_for,
    with_memory,
)
from agentenv.wire.network import NO_NETWORK, NetworkPolicy
from agentenv.wire.roots import RootSpec, unfit
from agentenv.wire.spec import MIB, SlotLimits


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("none", NO_NETWORK),
        ([], NO_NETWORK),
        ("public", NetworkPolicy("public")),
        (
            ["Example.org", "*.index.example.org:443"],
            NetworkPolicy("allow", ("example.org", "*.index.example.org:443")),
        ),
        (NetworkPolicy("public"), NetworkPolicy("public")),
    ],
)
def test_a_network_is_a_word_or_a_list_of_hosts(written: Network, meant: NetworkPolicy) -> None:
    assert network_policy(written) == meant
    assert ImageRoot("debian", network=written).spec("sha256:" + "a" * 64).network == meant


@pytest.mark.parametrize("wrong", ["example.org", "", ["exa mple.org"], 5, None, b"none"])
def test_a_network_that_is_none_is_refused(wrong: Network) -> None:
    with pytest.raises(ConfigError, match="network"):
        ImageRoot("debian", network=wrong)


ROOTS = [
    ImageRoot("debian"),
    ImageRoot("debian", memory_mib=128),
    ImageRoot("debian", memory_mib=16384, cpus=0.5),
    ImageRoot("debian", storage_mib=8192),
    ImageRoot("debian", memory_mib=8192, storage_mib=4096),
    ImageRoot("debian", memory_mib=8192, storage_mib=100_000, storage="disk"),
]


def test_slots_of_a_farm_with_little_memory_have_little_room_for_files() -> None:
    small = with_memory(ContainerSettings(limits=SlotLimits(max_memory_bytes=4096 * MIB)), 256).limits
    assert (small.memory_bytes, small.workspace_bytes, small.most_memory_bytes) == (256 * MIB, 128 * MIB, 4096 * MIB)
    assert unfit(ImageRoot("debian", memory_mib=256).spec("sha256:" + "a" * 64), small, {}) is None
    assert with_memory(ContainerSettings(), 8192).limits.workspace_bytes == SlotLimits().workspace_bytes


@pytest.mark.parametrize("root", ROOTS)
def test_a_container_of_ones_own_has_what_the_root_asks_for(root: ImageRoot) -> None:
    spec = root.spec("sha256:" + "a" * 64)
    made = container_for(root, ContainerSettings())
    assert unfit(spec, made.limits, {}) is None
    assert made.limits.memory_bytes >= SlotLimits().memory_bytes, "nor less than it would have"
    assert not made.allow_network
    assert made.allowed_capabilities == ContainerSettings().allowed_capabilities
    assert container_for(ImageRoot("debian", network="public"), ContainerSettings()).allow_network


def test_what_a_plain_sandbox_asks_for_are_its_slots_limits() -> None:
    def limits(**fields: int) -> SlotLimits:
        given: RootFields = fields  # type: ignore[assignment]
        return plain_container_for(given, ContainerSettings()).limits

    default = SlotLimits()
    assert limits() == default
    assert limits(memory_mib=4096).memory_bytes == 4096 * MIB
    assert limits(memory_mib=4096).workspace_bytes == default.workspace_bytes
    small = limits(memory_mib=256)
    assert (small.memory_bytes, small.workspace_bytes) == (256 * MIB, 128 * MIB)
    large = limits(storage_mib=4096)
    assert large.workspace_bytes == 4096 * MIB < large.memory_bytes
    with pytest.raises(ConfigError, match="memory_bytes"):
        limits(memory_mib=512, storage_mib=1024)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cpus": 1.0}, "cpus"),
        ({"user": "app"}, "user"),
        ({"storage": "disk"}, "storage"),
        ({"capabilities": ["net_raw"]}, "capabilities"),
        ({"network": ["example.org"]}, "network"),
        ({"memory_mib": 0}, "memory_mib"),
        ({"storage_mib": -1}, "storage_mib"),
    ],
)
def test_a_plain_sandbox_cannot_have_everything(given: RootFields, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plain_container_for(given, ContainerSettings())
    assert plain_container_for({"network": "public"}, ContainerSettings()).allow_network


def test_what_a_plain_sandbox_denies_is_closed_to_its_container() -> None:
    policy = NetworkPolicy("public", denied=("10.0.0.0/8", "2001:db8::/32", "192.0.2.1"))
    made = plain_container_for({"network": policy}, ContainerSettings(closed_networks=("attached", "10.0.0.0/8")))
    assert (made.allow_network, made.closed_networks) == (True, ("attached", "10.0.0.0/8", "192.0.2.1/32"))


def test_capabilities_and_namespaces_reach_the_root() -> None:
    spec = ImageRoot("debian", capabilities=["net_raw"], nested_namespaces=True).spec("sha256:" + "a" * 64)
    assert (spec.capabilities, spec.nested_namespaces) == (("net_raw",), True)
    assert RootSpec.parse(spec.to_dict()) == spec


def test_a_container_of_ones_own_allows_what_the_root_asks_for() -> None:
    made = container_for(ImageRoot("debian", capabilities=["net_raw"], nested_namespaces=True), ContainerSettings())
    assert made.allowed_capabilities == (*ContainerSettings().allowed_capabilities, "net_raw")
    assert made.allow_nested_namespaces


def test_a_sandbox_with_services_says_so() -> None:
    box = Sandbox("fake", image="app", services={"db": Service("postgres"), "queue": Service("redis")})
    assert repr(box).startswith("<Sandbox with services db, queue of <")
    assert repr(Sandbox("fake")).startswith("<Sandbox <")

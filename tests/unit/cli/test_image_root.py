"""What the options for a slot's root mean together."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from agentenv.cli.image_root import Place, RootOptions, stored_here
from agentenv.errors import ConfigError
from agentenv.sdk.roots import ImageRoot
from agentenv.slots.backends.registry import Backend
from agentenv.wire.roots import Writable
from agentenv.wire.spec import MIB, SlotLimits

LOCAL = Backend.local


@pytest.mark.parametrize(
    ("asked", "farm", "named"),
    [
        (RootOptions(image="a", dockerfile=Path("/")), False, "exclude each other"),
        (RootOptions(image="a", network=True, allow=("b.example",)), False, "exclude each other"),
        (RootOptions(user="app"), False, "--user"),
        (RootOptions(workdir="/x"), False, "--workdir"),
        (RootOptions(cpus=1.0), True, "--cpus"),
        (RootOptions(writable=Place.disk), False, "--writable"),
        (RootOptions(allow=("b.example",)), False, "--allow"),
        (RootOptions(dockerfile=Path("/dev")), False, "/dev has no Dockerfile"),
        (RootOptions(dockerfile=Path("/etc/passwd")), True, "built on this machine"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: RootOptions, farm: bool, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        asked.check(LOCAL, farm=farm)


def test_images_are_for_slots_of_this_machine() -> None:
    for backend in (Backend.nomad, Backend.fake):
        with pytest.raises(ConfigError, match=f"not for --backend {backend}"):
            RootOptions(image="a").check(backend, farm=False)


def test_what_goes_together_is_the_root_and_its_container() -> None:
    asked = RootOptions(image="debian", user="app", cpus=0.5, memory_mib=4096, storage_mib=512, allow=("b.example",))
    asked.check(LOCAL, farm=False)
    asked.check(LOCAL, farm=True)
    assert asked.root() == ImageRoot(
        "debian", cpus=0.5, memory_mib=4096, storage_mib=512, user="app", network=["b.example"]
    )
    made = asked.container(isolation="auto")
    assert (made.slots_per_container, made.allow_network, made.limits.memory_bytes) == (1, True, 4096 * MIB)
    assert asked.takes_container(farm=False)
    assert not asked.takes_container(farm=True)


def test_what_it_writes_may_be_kept_on_the_disk() -> None:
    root = RootOptions(image="debian", storage_mib=512, writable=Place.disk).root()
    assert root is not None
    assert (root.storage, root.storage_mib) == ("disk", 512)
    assert {place.value for place in Place} == set(get_args(Writable))


def test_without_an_image_there_is_no_root() -> None:
    assert RootOptions().root() is None
    assert RootOptions().container(isolation="auto").limits == SlotLimits()
    assert not RootOptions().takes_container(farm=False)
    asked = RootOptions(memory_mib=4096, network=True)
    asked.check(LOCAL, farm=False)
    made = asked.container(isolation="auto")
    assert (made.allow_network, made.limits.memory_bytes) == (True, 4096 * MIB)
    assert asked.takes_container(farm=True), "which a farm does not start"


def test_a_dockerfile_is_a_reference() -> None:
    root = RootOptions(dockerfile=Path("/tasks/a")).root()
    assert root is not None
    assert root.image == "dockerfile:/tasks/a"


def test_a_digest_is_not_looked_for() -> None:
    digest = "sha256:" + "a" * 64
    assert stored_here(ImageRoot(digest)).image == digest

"""Images from a real registry on this machine, by skopeo."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import ImageUnavailableError
from agentenv.store import RegistrySettings, Store
from tests.image_sources import OciLayout, compressed, member, sha256, tar_of
from tests.registry import Registry, running_registry
from tests.waiting import wait_for

BASE = tar_of(member("base", b"base" * 10_000))
TOPS = [tar_of(member(f"top{n}", b"top" * 1000)) for n in range(3)]


HASH_OF_SECRET = "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a"
"""By bcrypt, as htpasswd writes it."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", registries=RegistrySettings(tls_verify=False, retries=0))


@pytest.fixture
def layout(tmp_path: Path) -> OciLayout:
    made = OciLayout(tmp_path / "oci")
    for number, top in enumerate(TOPS):
        made.name(made.manifest([BASE, top]), str(number))
    return made


def test_an_image_is_pulled_and_layers_that_are_there_are_not(
    registry: Registry, layout: OciLayout, store: Store
) -> None:
    base = sha256(compressed(BASE, "gzip"))
    first = store.ensure(registry.push(layout.directory, "0"))
    assert [layer.read_bytes() for layer in first.layers] == [BASE, TOPS[0]]
    assert first == store.ensure(f"oci:{layout.directory}:0")
    assert wait_for(lambda: registry.served(base)) == 1  # it writes its log behind the answer
    other = store.ensure(registry.push(layout.directory, "1"))
    assert [layer.read_bytes() for layer in other.layers] == [BASE, TOPS[1]]
    assert registry.served(base) == 1
    assert list(store.layout.pulls.iterdir()) == []


def test_an_image_of_dockers_own_format_is_the_same_image(registry: Registry, layout: OciLayout, store: Store) -> None:
    reference = registry.push(layout.directory, "2", "--format", "v2s2")
    assert store.ensure(reference) == store.ensure(f"oci:{layout.directory}:2")


def test_a_tag_means_what_it_meant_until_it_is_asked_for_again(
    registry: Registry, layout: OciLayout, store: Store
) -> None:
    reference = registry.push(layout.directory, "0")
    before = store.ensure(reference)
    layout.name(moved := layout.manifest([BASE, TOPS[2]]), "moved")
    registry.push(layout.directory, "moved")
    tag = f"{registry.address}/team/app"
    copy = ["skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false", "--dest-tls-verify=false"]
    subprocess.run([*copy, f"docker://{tag}:moved", f"docker://{tag}:0"], check=True)
    assert store.ensure(reference) == before
    after = store.ensure(reference, refresh=True)
    assert after.layers[1].read_bytes() == TOPS[2]
    assert store.ensure(f"{tag}@{moved['digest']}") == after


def test_an_image_that_is_not_there_is_told_and_nothing_stays(registry: Registry, store: Store) -> None:
    with pytest.raises(ImageUnavailableError, match="skopeo could not copy"):
        store.ensure(f"{registry.address}/team/none:1")
    assert store.images() == []
    store.gc(budget_bytes=0)
    assert list(store.layout.pulls.iterdir()) == []


def test_a_mirror_is_asked_in_the_place_of_the_registry(registry: Registry, layout: OciLayout, tmp_path: Path) -> None:
    registry.push(layout.directory, "1")
    settings = RegistrySettings(tls_verify=False, mirrors={"away.example/hub": registry.address})
    store = Store.open(tmp_path / "mirrored", registries=settings)
    image = store.ensure("away.example/hub/team/app:1")
    assert store.references() == {image.digest: ["away.example/hub/team/app:1"]}


def test_a_pull_that_is_killed_is_continued(registry: Registry, layout: OciLayout, tmp_path: Path) -> None:
    """skopeo survives, and keeps the download to itself until it ends: the next pull waits, and uses what it got."""
    layer = tar_of(member("own", os.urandom(3_000_000)))
    layout.name(layout.manifest([layer]), "killed")
    reference = registry.push(layout.directory, "killed")
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        from agentenv.store import RegistrySettings, Store

        store = Store.open(Path(sys.argv[1]), registries=RegistrySettings(tls_verify=False))
        store.ensure(sys.argv[2], progress=lambda step: os.kill(os.getpid(), signal.SIGKILL))
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "store", reference])
    assert done.returncode == -signal.SIGKILL
    store = Store(tmp_path / "store", registries=RegistrySettings(tls_verify=False))
    assert store.ensure(reference).layers[0].read_bytes() == layer
    assert wait_for(lambda: registry.served(sha256(compressed(layer, "gzip")))) == 1
    assert list(store.layout.pulls.iterdir()) == []


def test_plain_http_has_to_be_allowed(registry: Registry, layout: OciLayout, tmp_path: Path) -> None:
    reference = registry.push(layout.directory, "0")
    store = Store.open(tmp_path / "strict", registries=RegistrySettings(retries=0))
    with pytest.raises(ImageUnavailableError, match="HTTPS"):
        store.ensure(reference)


def test_credentials_come_from_a_file(layout: OciLayout, tmp_path: Path) -> None:
    (tmp_path / "users").write_text(f"somebody:{HASH_OF_SECRET}\n")
    auth = tmp_path / "auth.json"
    closed = f"auth: {{htpasswd: {{realm: r, path: {tmp_path}/users}}}}\n"
    with running_registry(tmp_path, closed) as registry:
        token = base64.b64encode(b"somebody:secret").decode()
        auth.write_text(json.dumps({"auths": {registry.address: {"auth": token}}}))
        reference = registry.push(layout.directory, "0", "--dest-authfile", str(auth))
        for settings in (RegistrySettings(tls_verify=False, retries=0), RegistrySettings(auth, False, retries=0)):
            store = Store.open(tmp_path / "store", registries=settings)
            if settings.auth_file is None:
                with pytest.raises(ImageUnavailableError, match="authentication required"):
                    store.ensure(reference)
            else:
                assert store.ensure(reference).layers[0].read_bytes() == BASE

"""OCI layouts and archives: the right image of several, and nothing that its digest does not name."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import BadImageError, ConfigError
from agentenv.store.manifest import machine_architecture
from agentenv.store.sources import MAX_DOCUMENT_BYTES, SourceImage, files_of, image_of_archive, image_of_layout
from tests.image_sources import OciLayout, config_of, docker_archive, member, oci_layout, sha256, tar_of

ONE, TWO = tar_of(member("a", b"a")), tar_of(member("b", b"b"))
HERE = {"os": "linux", "architecture": machine_architecture()}
THERE = {"os": "linux", "architecture": "riscv64"}


def of_layout(path: Path, tag: str = "") -> SourceImage:
    with files_of(path) as files:
        return content_of(image_of_layout(files, tag))


def of_archive(path: Path, name: str = "") -> SourceImage:
    with files_of(path) as files:
        return content_of(image_of_archive(files, name))


def content_of(image: SourceImage) -> SourceImage:
    """Read while the source is open."""
    for layer in image.layers:
        assert len(b"".join(layer.chunks())) == layer.size_bytes
    return image


def packed(directory: Path, prefix: str = "") -> Path:
    """The tar of a directory."""
    path = directory.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        tar.add(directory, arcname=prefix or ".")
    return path


@pytest.mark.parametrize("tar", [False, True])
def test_a_layout_is_a_directory_or_a_tar_of_one(tmp_path: Path, tar: bool) -> None:
    layout = oci_layout(tmp_path / "oci", ONE, TWO, how="")
    path = packed(layout.directory) if tar else layout.directory
    with files_of(path) as files:
        image = image_of_layout(files, "t")
        assert [b"".join(layer.chunks()) for layer in image.layers] == [ONE, TWO]
        assert json.loads(image.config) == config_of([ONE, TWO])


def test_of_several_tags_one_is_named(tmp_path: Path) -> None:
    layout = oci_layout(tmp_path, ONE, tag="one")
    layout.name(layout.manifest([TWO]), "two")
    assert json.loads(of_layout(tmp_path, "two").config) == config_of([TWO])
    for tag in ("", "three"):
        with pytest.raises(ConfigError, match="name one of: one, two"):
            of_layout(tmp_path, tag)


def test_the_image_for_this_machine_is_chosen(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    other = {**layout.manifest([ONE], architecture="riscv64"), "platform": THERE}
    ours = {**layout.manifest([TWO]), "platform": HERE}
    unknown = {**layout.manifest([]), "platform": {"os": "unknown", "architecture": "unknown"}}
    layout.name(layout.index(unknown, other, layout_index := {**layout.index(ours), "platform": HERE}), "nested")
    assert layout_index["platform"] == HERE
    assert json.loads(of_layout(tmp_path).config) == config_of([TWO])


def test_a_layout_may_list_one_image_per_machine(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    layout.name({**layout.manifest([ONE], architecture="riscv64"), "platform": THERE}, "t")
    layout.name({**layout.manifest([TWO]), "platform": HERE}, "t")
    assert json.loads(of_layout(tmp_path, "t").config) == config_of([TWO])


def test_an_image_for_other_machines_only_is_refused(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    layout.name(layout.index({**layout.manifest([ONE]), "platform": THERE}), "t")
    with pytest.raises(BadImageError, match="linux/riscv64, this machine is linux/"):
        of_layout(tmp_path)


def test_a_loop_of_indexes_ends(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    inner = layout.manifest([ONE])
    for _ in range(7):
        inner = layout.index({**inner, "platform": HERE})
    layout.name(inner, "t")
    with pytest.raises(BadImageError, match="no configuration"):
        of_layout(tmp_path)


def test_a_manifest_that_its_digest_does_not_name_is_refused(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    descriptor = layout.manifest([ONE])
    layout.name(descriptor, "t")
    path = layout.path(descriptor["digest"])
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BadImageError, match="but should be"):
        of_layout(tmp_path)


def document(**changes: Any) -> dict[str, Any]:
    return {"mediaType": "application/vnd.oci.image.manifest.v1+json", **changes}


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (document(config={"digest": "sha256:../../../etc/passwd"}, layers=[]), "not by sha256"),
        (document(config={"digest": "sha512:" + "0" * 128}, layers=[]), "not by sha256"),
        (document(config={"digest": sha256(b"x")}, layers=[]), "blobs/sha256/.* is missing: is it really"),
        (document(layers=[]), "no configuration"),
        (document(manifests="x"), "wrong manifests"),
        (document(manifests=[1]), "wrong manifests"),
        (document(manifests=[]), "no machine"),
    ],
)
def test_a_malformed_manifest_is_refused_with_the_reason(tmp_path: Path, manifest: Any, reason: str) -> None:
    layout = OciLayout(tmp_path)
    layout.name(layout.document(manifest), "t")
    with pytest.raises(BadImageError, match=reason):
        of_layout(tmp_path)


def test_a_layer_without_a_size_or_file_is_refused(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    config = layout.blob(json.dumps(config_of([ONE])).encode(), "c")
    layout.name(layout.document(document(config=config, layers=[{"digest": sha256(b"x")}])), "sizeless")
    layout.name(layout.document(document(config=config, layers=[{"digest": sha256(b"x"), "size": 1}])), "fileless")
    with pytest.raises(BadImageError, match="without a size"):
        of_layout(tmp_path, "sizeless")
    with pytest.raises(BadImageError, match="is not in it"):
        of_layout(tmp_path, "fileless")


def test_a_document_that_is_too_large_is_refused(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path)
    layout.name(layout.blob(b" " * (MAX_DOCUMENT_BYTES + 1), "m"), "t")
    with pytest.raises(BadImageError, match="at most"):
        of_layout(tmp_path)


def test_what_is_neither_directory_nor_tar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        of_layout(tmp_path / "missing")
    (tmp_path / "text").write_text("x" * 600)
    with pytest.raises(BadImageError, match="tar is broken"):
        of_layout(tmp_path / "text")
    with pytest.raises(BadImageError, match=r"index\.json is missing"):
        of_layout(tmp_path)


def test_an_archive_with_links_between_its_layers(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "a.tar", ONE, TWO, ONE)
    with files_of(path) as files:
        image = image_of_archive(files, "app:1")
        assert [b"".join(layer.chunks()) for layer in image.layers] == [ONE, TWO, ONE]
    assert of_archive(path).config == image.config


def test_an_archive_that_was_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "a", "-xf", docker_archive(tmp_path / "a.tar", ONE)], check=True)
    assert len(of_archive(tmp_path / "a").layers) == 1


@pytest.mark.parametrize("name", ["app:2", "other"])
def test_an_archive_without_the_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name one of: app:1"):
        of_archive(docker_archive(tmp_path / "a.tar", ONE), name)


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"Config": 1}]', '[{"Config": "x", "Layers": [1]}]', "[", "null"])
def test_a_malformed_archive_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(member("manifest.json", content.encode())))
    with pytest.raises((BadImageError, ConfigError)):
        of_archive(path)

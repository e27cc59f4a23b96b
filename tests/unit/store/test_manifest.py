"""Configurations of images, and the manifests that the store keeps of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import BadImageError
from agentenv.store.addition import Runtime, image_above
from agentenv.store.manifest import (
    config_of_manifest,
    digest_of_manifest,
    machine_architecture,
    manifest_of,
    parse_config,
    read_manifest,
)
from tests.image_sources import config_of, sha256

LAYERS = [b"one", b"two"]


def parsed(**changes: Any) -> Any:
    document = {**config_of(LAYERS), "architecture": "amd64", **changes}
    return parse_config(json.dumps(document).encode(), "amd64")


def test_a_configuration_is_read() -> None:
    config = parsed()
    assert config.diff_ids == tuple(sha256(layer) for layer in LAYERS)
    assert config.env == {"PATH": "/usr/bin:/bin", "A": "b=c"}
    assert (config.user, config.workdir, config.entrypoint, config.cmd) == ("1000", "/w", (), ("sh",))


def test_what_is_missing_or_null_is_empty() -> None:
    config = parsed(config={"Env": None, "Cmd": None, "Entrypoint": ["/init", "-x"]})
    assert (config.env, config.user, config.entrypoint, config.cmd) == ({}, "", ("/init", "-x"), ())
    assert parsed(config=None).workdir == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "arm64"}, "linux/arm64, this machine is linux/amd64"),
        ({"os": "windows"}, "windows/amd64"),
        ({"architecture": 7}, "wrong 'architecture'"),
        ({"rootfs": None}, "not a container image"),
        ({"rootfs": {"diff_ids": ["sha256:../../x"]}}, "by sha256"),
        ({"rootfs": {"diff_ids": "sha256"}}, "wrong 'diff_ids'"),
        ({"rootfs": []}, "wrong 'rootfs'"),
        ({"config": {"Env": ["novalue"]}}, "is not NAME=VALUE"),
        ({"config": {"Env": ["=x"]}}, "is not NAME=VALUE"),
        ({"config": {"Env": {"A": "b"}}}, "wrong 'Env'"),
        ({"config": {"User": 0}}, "wrong 'User'"),
        ({"config": {"Cmd": ["a\0b"]}}, "wrong 'Cmd'"),
        ({"config": {"WorkingDir": "\ud800"}}, "wrong 'WorkingDir'"),
        ({"config": {"Cmd": "sh"}}, "wrong 'Cmd'"),
    ],
)
def test_a_malformed_configuration_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        parsed(**changes)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a":' * 100_000])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(BadImageError, match="is not"):
        parse_config(content, "amd64")


def test_the_digest_depends_on_the_content_only() -> None:
    one = manifest_of(parsed(), [512, 1024])
    other = manifest_of(parsed(created="2020", author="x", history=[{}]), [512, 1024])
    assert one == other
    assert digest_of_manifest(one) == sha256(one)
    assert manifest_of(parsed(config={"User": "0"}), [512, 1024]) != one


@pytest.mark.parametrize("of_builds", [{}, {"Shell": ["/bin/bash", "-c"], "OnBuild": ["RUN x"]}])
def test_what_matters_to_builds_comes_through_and_is_no_part_of_who_has_none(of_builds: dict[str, list[str]]) -> None:
    config = parsed(config=of_builds)
    manifest = manifest_of(config, [512, 1024])
    image = read_manifest(manifest, Path("i"), lambda diff_id: Path(diff_id))
    assert (image.shell, image.on_build) == tuple(tuple(of_builds.get(name, ())) for name in ("Shell", "OnBuild"))
    assert (b"shell" in manifest, b"on_build" in manifest) == (bool(of_builds), bool(of_builds))
    content, _ = config_of_manifest(manifest, digest_of_manifest(manifest))
    assert parse_config(content, "amd64") == config
    above = parse_config(image_above(None, (), Runtime.of(image)).config, machine_architecture())
    assert (above.shell, above.on_build) == (image.shell, image.on_build), "a commit has what its image had"


def test_a_manifest_is_read_as_it_was_written() -> None:
    config = parsed()
    image = read_manifest(manifest_of(config, [512, 1024]), Path("i"), lambda diff_id: Path(diff_id))
    assert (image.env, image.cmd, image.user, image.workdir) == (config.env, config.cmd, config.user, config.workdir)
    assert (image.diff_ids, image.size_bytes, image.architecture) == (config.diff_ids, 1536, "amd64")
    with pytest.raises(TypeError):
        image.env["A"] = "changed"  # type: ignore[index]

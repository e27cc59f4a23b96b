"""How skopeo is asked; that it answers is tested with a registry in tests/integration/test_store_registry.py."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from agentenv.errors import BadImageError, ConfigError, ImageUnavailableError
from agentenv.store import registry
from agentenv.store.manifest import machine_architecture
from agentenv.store.reference import parse
from agentenv.store.registry import BusyRegistryError, RegistrySettings, failure, mirrored, pinned, skopeo_argv

MIRRORS = {"docker.io": "mirror.example/hub", "docker.io/library": "other.example", "a.example:5000": "b.example"}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("docker.io/team/x", "mirror.example/hub/team/x"),
        ("docker.io/library/debian", "other.example/debian"),
        ("docker.iox/x", "docker.iox/x"),
        ("a.example:5000/x", "b.example/x"),
        ("c.example/x", "c.example/x"),
    ],
)
def test_the_longest_prefix_names_the_mirror(name: str, asked: str) -> None:
    assert mirrored(name, MIRRORS) == asked


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLICIES", (Path("/nonexistent"),))
    argv = skopeo_argv(parse("debian:trixie"), RegistrySettings(), Path("/l"))
    assert argv == [
        "skopeo", "--override-os", "linux", "--override-arch", machine_architecture(), "--insecure-policy",
        "copy", "--quiet", "--retry-times", "3", "docker://docker.io/library/debian:trixie", "oci:/l:image",
    ]  # fmt: skip


def test_the_machines_own_policy_is_obeyed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_POLICIES", (tmp_path,))
    assert "--insecure-policy" not in skopeo_argv(parse("debian"), RegistrySettings(), Path("/l"))


def test_settings_become_options() -> None:
    digest = "sha256:" + "a" * 64
    settings = RegistrySettings(Path("/auth.json"), tls_verify=False, mirrors=MIRRORS, retries=0)
    argv = skopeo_argv(parse(f"team/x:tag@{digest}"), settings, Path("/l"))
    assert argv[argv.index("--src-authfile") + 1] == "/auth.json"
    assert "--src-tls-verify=false" in argv
    assert argv[-2] == f"docker://mirror.example/hub/team/x@{digest}"


def skopeo(directory: Path, script: str) -> None:
    """A program of that name that does something else."""
    program = directory / "skopeo"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def download(directory: Path, stored: dict[str, int] | None = None, stall_s: float = 60.0) -> Path:
    settings = RegistrySettings(stall_s=stall_s)
    return registry.download(parse("x"), settings, directory, stored or {}, 0, lambda _: None)


def test_without_skopeo_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install skopeo"):
        download(tmp_path)


def test_the_last_line_of_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skopeo(tmp_path, "echo first; echo the registry is away >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ImageUnavailableError, match="latest: the registry is away"):
        download(tmp_path)


def test_a_download_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skopeo(tmp_path, "exec sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ImageUnavailableError, match=r"for 0\.1 s"):
        download(tmp_path, stall_s=0.1)


def test_a_download_beyond_the_limit_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skopeo(tmp_path, f"head -c 50000000 /dev/zero > {tmp_path}/layout/blobs/sha256/large; exec sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BadImageError, match="more than 1000000 bytes"):
        registry.download(parse("x"), RegistrySettings(), tmp_path, {}, 0, lambda _: None, limit_bytes=1_000_000)


def test_stand_ins_take_no_space_and_those_of_an_earlier_attempt_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skopeo(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    blobs = download(tmp_path, {"sha256:old": 10**9}) / "blobs/sha256"
    (blobs / "arrived").write_bytes(b"x" * 10_000)
    download(tmp_path, {"sha256:new": 10**12})
    assert {path.name: path.stat().st_size for path in blobs.iterdir()} == {"arrived": 10_000, "new": 10**12}


@pytest.mark.parametrize(
    ("words", "passes", "throttled"),
    [
        ("reading manifest: toomanyrequests: You have reached your pull rate limit", True, True),
        ("received unexpected HTTP status: 429 Too Many Requests", True, True),
        ("received unexpected HTTP status: 503 Service Unavailable", True, False),
        ('Get "http://x/v2/": dial tcp 127.0.0.1:1: connect: connection refused', True, False),
        ("happened during read: unexpected EOF", True, False),
        ("reading manifest 1 in x/none: name unknown: repository name not known to registry", False, False),
        ("unauthorized: authentication required", False, False),
    ],
)
def test_words_that_mean_another_attempt_may_help(words: str, passes: bool, throttled: bool) -> None:
    error = failure(parse("debian"), words)
    assert isinstance(error, BusyRegistryError) is passes
    assert getattr(error, "throttled", False) is throttled
    assert words in error.message


def test_of_a_line_of_its_log_only_the_message_is_shown() -> None:
    line = 'time="2026-01-02T03:04:05Z" level=fatal msg="Get \\"https://r.example/v2/\\": no such host" more=1'
    error = failure(parse("debian"), line)
    assert error.message.endswith(': Get "https://r.example/v2/": no such host')
    assert isinstance(error, BusyRegistryError)


def test_a_tag_is_pinned_by_the_digest_of_its_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skopeo(tmp_path, 'printf manifest; echo $* > "$(dirname $0)/asked"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = pinned(parse("debian:trixie"), RegistrySettings(tls_verify=False, retries=1))
    assert str(found) == f"docker.io/library/debian@sha256:{hashlib.sha256(b'manifest').hexdigest()}"
    asked = "inspect --raw --retry-times 1 --tls-verify=false docker://docker.io/library/debian:trixie"
    assert (tmp_path / "asked").read_text().strip() == asked
    assert pinned(found, RegistrySettings()) is found

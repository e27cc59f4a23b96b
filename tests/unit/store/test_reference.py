"""References as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.store.reference import Reference, located, parse

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:trixie", "docker.io/library/debian:trixie"),
        ("docker://debian:trixie", "docker.io/library/debian:trixie"),
        ("team/task_1.x--y:v1", "docker.io/team/task_1.x--y:v1"),
        ("docker.io/debian", "docker.io/library/debian:latest"),
        ("registry:5000/a/b", "registry:5000/a/b:latest"),
        (f"registry:5000/a/b@{DIGEST}", f"registry:5000/a/b@{DIGEST}"),
        (f"registry.example/a:tag@{DIGEST}", f"registry.example/a@{DIGEST}"),
        ("localhost:5000/a:1", "localhost:5000/a:1"),
        ("[::1]:5000/a:1", "[::1]:5000/a:1"),
        ("oci:/images/a", "oci:/images/a"),
        ("oci:/images/a:v1", "oci:/images/a:v1"),
        ("oci:images.d:8/a", "oci:images.d:8/a"),
        ("docker-archive:/a.tar", "docker-archive:/a.tar"),
        ("docker-archive:a.tar:app:1", "docker-archive:a.tar:app:1"),
        ("docker-daemon:app:1", "docker-daemon:app:1"),
        (f"docker-daemon:{DIGEST}", f"docker-daemon:{DIGEST}"),
        ("dockerfile:tasks/1", "dockerfile:tasks/1"),
        ("dockerfile:my tasks/1", "dockerfile:my tasks/1"),
        ("committed:prepared", "committed:prepared:latest"),
        ("localhost/a", "committed:a:latest"),
        ("localhost/team/a:1", "committed:team/a:1"),
        ("committed:localhost/a:1", "committed:a:1"),
        (DIGEST, DIGEST),
        ("committed:registry:5000/team/prepared:2", "committed:registry:5000/team/prepared:2"),
    ],
)
def test_a_reference_in_full_is_the_same_reference(text: str, full: str) -> None:
    found = parse(text)
    assert str(found) == full
    assert parse(full) == found


def test_the_parts() -> None:
    assert parse("docker-archive:a.tar:app:1") == Reference("docker-archive", "a.tar", "app:1")
    assert parse("oci:a:b") == Reference("oci", "a", "b")
    assert parse("host:1/a:b") == Reference("docker", "host:1/a", "b")
    assert [parse(text).moves for text in ("a", f"a@{DIGEST}", "oci:a")] == [True, False, True]


def test_paths_can_be_made_absolute() -> None:
    here = Path.cwd()
    assert located(parse("oci:a/b:t")) == Reference("oci", f"{here}/a/b", "t")
    assert located(parse("debian")) == parse("debian")


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "a b", "a\n", "Debian", "a/B", "-a", "a-", "a:", "a:.x", "a:" + "t" * 129, "a//b", "/a", "a/", "a@",
        "a@sha256:12", f"a@{DIGEST.upper()}", "a@sha512:" + "0" * 128, "--help", "a/../b", "oci:", "docker-archive:",
        "docker-daemon:", "x.y:port/a", "committed:", "committed:A", f"committed:a@{DIGEST}",
        "http://registry.example/a", "a" * 300, "localhost/", "oci:a b",
        "dockerfile:a\tb", "docker://localhost/a", f"localhost/a@{DIGEST}",
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: NAME"):
        parse(text)

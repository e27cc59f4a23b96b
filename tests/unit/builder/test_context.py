"""What a build context has, what it never reads, and what its digest depends on."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.builder.archive import Part, Placed, write
from agentenv.builder.context import BuildContext
from agentenv.builder.instructions import Place
from agentenv.builder.modes import kept
from agentenv.builder.steps import CopyStep
from agentenv.errors import DockerfileError
from agentenv.rooted import LeadsOutError, RootedDirectory

FILES = ("a.py", "a.pyc", "sub/b.py", "sub/b.pyc", "sub/deep/c.py", "data/d.bin", "data/keep/e.txt")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    top = tmp_path / "context"
    for name in FILES:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    return top


@pytest.fixture
def rooted(directory: Path) -> Iterator[RootedDirectory]:
    with RootedDirectory(directory) as opened:
        yield opened


def copy(*sources: str, unpack: bool = False) -> CopyStep:
    return CopyStep(Place("Dockerfile", 3, "ADD" if unpack else "COPY"), sources, "/to/", unpack=unpack)


def listed(directory: Path, *sources: str, dockerfile: str = "Dockerfile") -> list[str]:
    with BuildContext(directory, dockerfile) as context:
        return [item.name for source in context.sources(copy(*sources)) for item in source.items]


def digest(directory: Path, *sources: str, unpack: bool = False) -> str:
    with BuildContext(directory) as context:
        return context.digest(context.sources(copy(*sources, unpack=unpack)))


def test_a_directory_is_its_content_in_order_and_parents_first(directory: Path) -> None:
    assert listed(directory, "sub") == ["b.py", "b.pyc", "deep", "deep/c.py"]
    assert listed(directory, ".") == [
        *("a.py", "a.pyc", "data", "data/d.bin", "data/keep", "data/keep/e.txt"),
        *("sub", "sub/b.py", "sub/b.pyc", "sub/deep", "sub/deep/c.py"),
    ]
    assert listed(directory, "/") == listed(directory, ".") == listed(directory, "sub/..")


def test_what_is_ignored_is_not_there(directory: Path) -> None:
    (directory / ".dockerignore").write_text("**/*.pyc\n.dockerignore\ndata\n!data/keep\n")
    assert listed(directory, ".") == [
        *("a.py", "data", "data/keep", "data/keep/e.txt"),
        *("sub", "sub/b.py", "sub/deep", "sub/deep/c.py"),
    ]
    assert listed(directory, "*.py*") == ["a.py"]
    assert listed(directory, "data") == ["keep", "keep/e.txt"]
    for name in ("a.pyc", "data/d.bin"):
        with pytest.raises(DockerfileError, match=rf"Dockerfile:3: COPY: {name} is excluded by .dockerignore"):
            listed(directory, name)


def test_a_dockerfile_may_have_rules_of_its_own(directory: Path) -> None:
    (directory / ".dockerignore").write_text("*")
    (directory / "docker").mkdir()
    (directory / "docker/my.Dockerfile.dockerignore").write_text("*.py\ndocker\n.dockerignore")
    assert listed(directory, "*", dockerfile="docker/my.Dockerfile")[0] == "a.pyc"
    assert listed(directory, "*") == []


def test_rules_may_be_a_link_within_the_context(directory: Path) -> None:
    (directory / "sub/rules").write_text("*\n!a.py")
    (directory / ".dockerignore").symlink_to("sub/rules")
    assert listed(directory, ".") == ["a.py"]


def test_rules_that_cannot_be_read_are_told_with_their_file(directory: Path) -> None:
    (directory / ".dockerignore").write_text("a\n[\n")
    with pytest.raises(DockerfileError, match=r"context/\.dockerignore: \.dockerignore: \["):
        listed(directory, ".")
    (directory / ".dockerignore").write_bytes(b"caf\xe9\n")  # it would match nothing, and the file be copied
    with pytest.raises(DockerfileError, match=r"\.dockerignore: 'utf-8' codec can't decode byte 0xe9"):
        listed(directory, ".")
    (directory / ".dockerignore").unlink()
    (directory / ".dockerignore").symlink_to("/etc/passwd")
    with pytest.raises(DockerfileError, match=r"\.dockerignore is a link to /etc/passwd"):
        listed(directory, ".")


def test_names_in_any_encoding(directory: Path) -> None:
    (directory / os.fsdecode(b"sub/\xff\xfe")).write_text("x")
    (directory / "sub/\u00e9\u20ac").write_text("y")
    assert {os.fsdecode(b"\xff\xfe"), "\u00e9\u20ac"} < set(listed(directory, "sub"))
    assert digest(directory, "sub")
    with BuildContext(directory) as context, io.BytesIO() as out:
        (source,) = context.sources(copy("sub"))
        write(out, [Part(Placed("/to"), context.entries(source), None, kept)])
        out.seek(0)
        with tarfile.open(fileobj=out) as archive:
            assert {os.fsdecode(b"\xff\xfe"), "\u00e9\u20ac"} < set(archive.getnames())


def test_times_are_exact_and_the_stream_is_the_same_again(directory: Path) -> None:
    os.utime(directory / "sub/b.py", ns=(0, 1_234_567_890_123_456_789))
    streams = []
    for _ in range(2):
        with BuildContext(directory) as context, io.BytesIO() as out:
            (source,) = context.sources(copy("sub"))
            write(out, [Part(Placed("/to"), context.entries(source), (0, 0), kept)])
            streams.append(out.getvalue())
    assert streams[0] == streams[1]
    with tarfile.open(fileobj=io.BytesIO(streams[0])) as archive:
        assert archive.getmember("b.py").pax_headers["mtime"] == "1234567890.123456789"


def test_links_within_a_source_are_kept_and_a_named_one_is_followed(directory: Path) -> None:
    (directory / "sub/link").symlink_to("/etc/passwd")
    (directory / "named").symlink_to("sub/deep")
    with BuildContext(directory) as context:
        below, named = context.sources(copy("sub", "named"))
    assert [item.target for item in below.items if item.name == "link"] == ["/etc/passwd"]
    assert (named.name, [item.name for item in named.items]) == ("named", ["c.py"])


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "up/outside", "loop"])
@pytest.mark.parametrize("source", ["link", "link/x", "l*", "link/*"])
def test_nothing_outside_is_read(directory: Path, source: str, target: str) -> None:
    (directory.parent / "outside").write_text("secret")
    (directory / "up").symlink_to("..")
    (directory / "loop").symlink_to("loop")
    (directory / "link").symlink_to(target)
    with pytest.raises(DockerfileError, match=r"Dockerfile:3: COPY: l.* leads out of the build context") as raised:
        listed(directory, source)
    assert source in str(raised.value)


def test_a_directory_that_becomes_a_link_meanwhile_is_not_followed(rooted: RootedDirectory, directory: Path) -> None:
    assert rooted.followed("sub/b.py") == "sub/b.py"
    (directory / "sub").rename(directory / "away")
    (directory / "sub").symlink_to("/etc")
    for read in (rooted.entries, rooted.file, rooted.status):
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            read("sub/passwd")
    (directory / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        rooted.file("passwd")
    with pytest.raises(LeadsOutError):
        rooted.followed("passwd")


def test_no_descriptor_is_left(directory: Path) -> None:
    def open_now() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_now()
    for source in (".", "*", "missing"):
        try:
            digest(directory, source)
        except DockerfileError:
            continue
    assert open_now() == before


def test_what_is_no_file(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(directory / "sub/socket"))
        assert "socket" not in listed(directory, "sub")
    os.mkfifo(directory / "pipe")
    with pytest.raises(DockerfileError, match="pipe is neither a file nor a directory"):
        listed(directory, "pipe")


def test_the_digest_changes_with_content_names_modes_and_links(directory: Path) -> None:
    seen = {digest(directory, "sub")}

    def changed() -> bool:
        before = len(seen)
        seen.add(digest(directory, "sub"))
        return len(seen) > before

    os.utime(directory / "sub/b.py", (1, 1))
    assert not changed(), "times do not count"
    (directory / "a.py").write_text("other")
    assert not changed(), "nor does what is elsewhere"
    (directory / "sub/b.py").write_text("other")
    assert changed()
    (directory / "sub/b.py").chmod(0o600)
    assert changed()
    (directory / "sub/b.py").rename(directory / "sub/new.py")
    assert changed()
    (directory / "sub/link").symlink_to("new.py")
    assert changed()
    (directory / "sub/empty").mkdir()
    assert changed()
    (directory / "sub/hard").hardlink_to(directory / "sub/new.py")
    assert changed()
    assert digest(directory, "a.py") != digest(directory, "a.py", "a.py")


def test_a_context_that_is_none(directory: Path) -> None:
    for path in (directory / "missing", directory / "a.py"):
        with pytest.raises(DockerfileError, match="build context") as raised:
            listed(path, ".")
        assert raised.value.next_step

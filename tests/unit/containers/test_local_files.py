"""Streams of transfers, from local files and to local files; what arrives is not trusted."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentenv.containers.local_files import ContentDigest, TreeWriter, size_of, stream_of
from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.wire.transfers import BROKEN_OFF, CHUNKED, LENGTH, BrokenOffError, Decoder, Entry, Sink, chunk


def content(data: bytes) -> bytes:
    return (chunk(data) if data else b"") + chunk(b"") + hashlib.sha256(data).digest()


def file(path: bytes, data: bytes = b"x") -> bytes:
    return Entry("f", path, size=CHUNKED, mode=0o644).encode() + content(data)


ROOT = Entry("d", mode=0o755).encode()
END = Entry("e").encode()


def write(target: Path, *parts: bytes, **more: int) -> bool:
    with TreeWriter(target, max_bytes=more.get("max_bytes", 10**9)) as writer:
        for part in parts:
            writer.feed(part)
        return writer.finish()


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def make_tree(top: Path) -> Path:
    (top / "sub/deep").mkdir(parents=True)
    (top / "sub/run.sh").write_bytes(b"#!/bin/sh\n")
    (top / "sub/run.sh").chmod(0o755)
    (top / "big").write_bytes(os.urandom(300_000))
    (top / "empty").touch()
    (top / os.fsdecode(b"caf\xe9")).write_bytes(b"latin")
    (top / "link").symlink_to("sub/run.sh")
    (top / "dotted").symlink_to("./sub//deep/")
    (top / "sub/deep").chmod(0o700)
    return top


@pytest.mark.parametrize("piece_bytes", [1, 7, 65_536, 10**9])
def test_a_tree_comes_back_as_it_was(tmp_path: Path, piece_bytes: int) -> None:
    source = make_tree(tmp_path / "source")
    if piece_bytes == 1:
        (source / "big").write_bytes(b"less")
    tally = ContentDigest()
    stream = b"".join(stream_of(source, tally))
    with TreeWriter(tmp_path / "target", max_bytes=10**9) as writer:
        for at in range(0, len(stream), piece_bytes):
            writer.feed(stream[at : at + piece_bytes])
        assert writer.finish()
    target = tmp_path / "target"
    assert names(target) == names(source)
    for path in source.rglob("*"):
        twin = target / path.relative_to(source)
        if path.is_symlink():
            assert os.readlink(twin) == os.readlink(path)  # noqa: PTH115 (pathlib shows "./a" as "a")
        elif path.is_file():
            assert twin.read_bytes() == path.read_bytes()
            assert twin.stat().st_mtime_ns == path.stat().st_mtime_ns
        if not path.is_symlink():
            assert stat.S_IMODE(twin.stat().st_mode) == stat.S_IMODE(path.stat().st_mode)
    assert (writer.tally.sha256, writer.tally.total_bytes) == (tally.sha256, size_of(source))
    assert tally.files == 4


def test_one_file_keeps_its_own_digest(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"abc")
    tally = ContentDigest()
    stream = b"".join(stream_of(tmp_path / "one", tally))
    assert tally.sha256 == hashlib.sha256(b"abc").hexdigest()
    assert write(tmp_path / "new/two", stream)
    assert (tmp_path / "new/two").read_bytes() == b"abc"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "dir/pipe")
    with pytest.raises(InvalidArgumentsError, match="pipe is neither"):
        list(stream_of(tmp_path / "dir", ContentDigest()))
    with pytest.raises(InvalidArgumentsError, match="neither a file nor"):
        list(stream_of(tmp_path / "dir/pipe", ContentDigest()))
    with pytest.raises(FileNotFoundError):
        list(stream_of(tmp_path / "none", ContentDigest()))


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([file(b"../out")], ProtocolError),
        ([file(b"/abs")], ProtocolError),
        ([file(b"a/../../out")], ProtocolError),
        ([file(b"a//b")], ProtocolError),
        ([file(b"a\0b")], ProtocolError),
        ([Entry("l", b"link", b"../../etc").encode(), END], PermissionError),
        ([Entry("l", b"link", b"/etc/passwd").encode(), END], PermissionError),
        ([Entry("l", b"link", b"").encode(), END], PermissionError),
        ([Entry("d", b"there").encode(), file(b"there/x")], PermissionError),
        ([file(b"there/x")], PermissionError),
        ([file(b"directory")], IsADirectoryError),
        ([file(b"x", b"y" * 101)], OSError),
    ],
)
def test_nothing_is_written_outside_the_target(tmp_path: Path, parts: Iterable[bytes], kind: type[Exception]) -> None:
    target = tmp_path / "in"
    (target / "directory").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (target / "there").symlink_to("../out")
    with pytest.raises(kind):
        write(target, ROOT, *parts, max_bytes=100)
    assert names(tmp_path) <= {"in", "in/directory", "in/there", "out", "in/link"}


def link(path: str, to: str) -> bytes:
    return Entry("l", path.encode(), to.encode()).encode()


@pytest.mark.parametrize(
    "links",
    [
        {"p/q/r/s": "../../..", "result": "p/q/r/s/../secret"},
        {"result": "p/q/r/s/../secret", "p/q/r/s": "../../.."},
        {"a": ".", "b": "a/a/../secret"},
        {"d/d/d/d/top": "../../../..", "report": "d/d/d/d/top/../../../../etc/hostname"},
        {"d/up": "..", "x": "d/y", "d/y": "up/../secret"},
        {"result": "there/passwd"},
        {"result": "here/out/secret"},
    ],
)
def test_links_that_lead_out_together_are_refused(tmp_path: Path, links: dict[str, str]) -> None:
    target = tmp_path / "in"
    target.mkdir()
    (target / "there").symlink_to("/etc")
    (target / "out").symlink_to("..")
    (target / "here").symlink_to(".")
    with pytest.raises(PermissionError, match="leads out"):
        write(target, ROOT, *(link(path, to) for path, to in links.items()), END)
    assert {path.name for path in target.rglob("*") if path.is_symlink()} == {"there", "out", "here"}


@pytest.mark.parametrize(
    "links",
    [
        {"current": "releases/1", "bin": "current/bin", "run": "bin/../x"},
        {"deep": "p/q/r", "up": "deep/../../y"},  # out of the target by its text alone
        {"a": "b", "b": "a", "c": "a/../../x"},  # in circles, so nowhere
        {"self": "self/../../x"},
        {"nowhere": "not/there"},
        {f"l{number}": f"l{number + 1}" for number in range(39)},
    ],
)
def test_links_that_stay_inside_are_made(tmp_path: Path, links: dict[str, str]) -> None:
    target = tmp_path / "in"
    assert write(target, ROOT, *(link(path, to) for path, to in links.items()), END)
    for path, to in links.items():
        assert (target / path).readlink() == Path(to)
        if to != "self/../../x" and path not in ("a", "b", "c"):
            assert (target / path).resolve().is_relative_to(target)


def _is_circle(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


@example({"a": "a/../.."})
@example({"a": "a/../..", "b": "d/../a"})
@example({"a": "a", "b": "d/../a"})
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "d/e/b"]),
        st.lists(st.sampled_from(["..", "a", "b", "d", "e", "."]), min_size=1, max_size=6).map("/".join),
        min_size=1,
    )
)
def test_whatever_links_are_made_none_leads_out(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str]
) -> None:
    target = tmp_path_factory.mktemp("tree") / "in"
    with contextlib.suppress(PermissionError):
        write(target, ROOT, *(link(path, to) for path, to in links.items()), END)
    # The kernel follows no circle, resolve() follows it for a while: then only what can be opened is looked at.
    circle = any(_is_circle(target / path) for path in links)
    for path in links:
        with contextlib.suppress(*((OSError, RuntimeError) if circle else ())):
            assert (target / path).resolve(strict=circle).is_relative_to(target)


def test_links_come_last_so_that_nothing_goes_through_them(tmp_path: Path) -> None:
    link_first = [Entry("l", b"d", b"elsewhere").encode(), file(b"d/x"), END]
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "in", ROOT, *link_first)
    assert not (tmp_path / "in/d").is_symlink()
    assert write(tmp_path / "other", ROOT, file(b"x"), Entry("l", b"x", b"y").encode(), END)
    assert (tmp_path / "other/x").readlink() == Path("y")


@pytest.mark.parametrize("cut", [5, 40, 60, 75])
def test_what_was_cut_leaves_no_half_file(tmp_path: Path, cut: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x").write_text("old")
    stream = ROOT + file(b"x", b"new content")
    assert not write(tmp_path / "in", stream[:cut])
    assert names(tmp_path / "in") == {"x"}
    assert (tmp_path / "in/x").read_text() == "old"


def test_a_wrong_digest_is_found(tmp_path: Path) -> None:
    stream = bytearray(ROOT + file(b"x", b"content"))
    stream[-33 - 4] ^= 1
    with pytest.raises(ProtocolError, match="another SHA-256"):
        write(tmp_path / "in", bytes(stream))
    assert names(tmp_path / "in") == set()


def test_a_sender_that_failed_says_so(tmp_path: Path) -> None:
    begun = Entry("f", b"x", size=CHUNKED).encode() + chunk(b"part")
    for tail in (Entry("x", b"where", size=13).encode(), LENGTH.pack(BROKEN_OFF) + LENGTH.pack(13)):
        with pytest.raises(BrokenOffError) as caught:
            write(tmp_path / "in", ROOT, (begun if tail[:4] == LENGTH.pack(BROKEN_OFF) else b"") + tail)
        assert caught.value.code == 13


def ignore(_: object) -> None: ...


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([ROOT, END, file(b"a"), file(b""), chunk(b"a")]))))
def test_no_stream_breaks_the_decoder(parts: list[bytes]) -> None:
    taken: list[Entry] = []
    keep: Callable[[Entry], None] = taken.append
    decoder = Decoder(Sink(keep, ignore, ignore))
    try:
        for part in parts:
            decoder.feed(part)
    except (ProtocolError, BrokenOffError):
        pass
    assert all(b".." not in entry.path.split(b"/") for entry in taken)

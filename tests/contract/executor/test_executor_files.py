"""The file tools, over the whole path, on every backend."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.calls import CallResult
from agentenv.wire.tools import ArtifactsReply, ListFilesReply, ReadFileReply, WriteFileReply

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUTSIDE = ["/etc/passwd", "../x", "a/../../x", "/workspace/../etc/passwd"]
EMPTY_TAR = base64.b64encode(bytes(10240)).decode()


async def good(session: ToolSession, tool: str, **arguments: Any) -> Any:
    result = await session.call(tool, arguments, timeout_s=30)
    assert result.fault == "none", result
    assert result.content is not None, result
    return result.content


async def read(session: ToolSession, **arguments: Any) -> ReadFileReply:
    return ReadFileReply.model_validate(await good(session, "read_file", **arguments))


async def write(session: ToolSession, **arguments: Any) -> WriteFileReply:
    return WriteFileReply.model_validate(await good(session, "write_file", **arguments))


async def listing(session: ToolSession, **arguments: Any) -> ListFilesReply:
    return ListFilesReply.model_validate(await good(session, "list_files", **arguments))


async def artifacts(session: ToolSession, **arguments: Any) -> ArtifactsReply:
    return ArtifactsReply.model_validate(await good(session, "artifacts", **arguments))


async def bash(session: ToolSession, command: str) -> CallResult:
    return await session.call("bash", {"command": command}, timeout_s=30)


async def test_the_other_kind_of_content_may_be_null(session: ToolSession) -> None:
    """As models write arguments that they leave out."""
    assert (await write(session, path="null", text="é", data=None, mode=None)).size_bytes == 2
    assert (await write(session, path="null", text=None, data=b"\xff\0")).size_bytes == 2
    assert (await read(session, path="null", binary=True)).data == b"\xff\0"


async def test_text_there_and_back(session: ToolSession) -> None:
    text = "first\nzwölf \N{SNOWMAN}\r\n\ttab\0nul\n"
    wrote = await write(session, path="a/b/c.txt", text=text)
    assert (wrote.size_bytes, wrote.created) == (len(text.encode()), True)
    reply = await read(session, path="a/b/c.txt")
    assert (reply.text, reply.size_bytes, reply.truncated, reply.lossy) == (text, len(text.encode()), False, False)
    assert not (await write(session, path="a/b/c.txt", text="")).created
    assert (await read(session, path="a/b/c.txt")).text == ""


async def test_bytes_there_and_back(session: ToolSession) -> None:
    data = bytes(range(256)) * 5000
    await write(session, path="blob", data=data)
    reply = await read(session, path="blob", binary=True)
    assert reply.data == data
    assert reply.text is None
    assert (await bash(session, "sha256sum < blob")).stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_what_is_not_utf8_is_read_as_text_with_a_warning(session: ToolSession) -> None:
    await write(session, path="x", data=b"a\xffb")
    reply = await read(session, path="x")
    assert (reply.text, reply.lossy) == ("a\ufffdb", True)


async def test_offset_and_limit(session: ToolSession) -> None:
    await write(session, path="x", text="0123456789")
    part = await read(session, path="x", offset=3, limit=4)
    assert (part.text, part.size_bytes, part.truncated) == ("3456", 10, True)
    rest = await read(session, path="x", offset=7, limit=100)
    assert (rest.text, rest.truncated) == ("789", False)
    assert (await read(session, path="x", offset=50)).text == ""


async def test_modes(session: ToolSession) -> None:
    await write(session, path="run.sh", text="#!/bin/sh\necho ran\n", mode=0o755)
    assert (await bash(session, "./run.sh")).stdout == "ran\n"
    await write(session, path="run.sh", text="#!/bin/sh\necho again\n")
    assert (await read(session, path="run.sh")).mode & 0o777 == 0o755, "kept from the old file"
    await write(session, path="plain", text="")
    assert (await read(session, path="plain")).mode & 0o777 == 0o644


async def test_tools_and_commands_see_the_same_files(session: ToolSession) -> None:
    await bash(session, "mkdir d && echo made > d/by_bash")
    assert (await read(session, path="d/by_bash")).text == "made\n"
    assert (await read(session, path="./d/../d/by_bash")).text == "made\n"
    await write(session, path="d/by_tool", text="x")
    assert (await bash(session, "cat d/by_tool; stat -c %a d/by_tool")).stdout == "x644\n"


async def test_names_that_are_hard(session: ToolSession) -> None:
    for name in ["with space", "-rf", "né\N{SNOWMAN}", "new\nline", "q'\"$x", "a" * 255, "*"]:
        await write(session, path=name, text=name)
        assert (await read(session, path=name)).text == name


async def test_listing(session: ToolSession) -> None:
    await bash(session, "mkdir -p b/c; echo 12345 > a; echo x > b/c/deep; echo h > .hidden; ln -s a link")
    flat = await listing(session)
    assert [(entry.path, entry.kind) for entry in flat.entries] == [
        (".hidden", "file"),
        ("a", "file"),
        ("b", "directory"),
        ("link", "symlink"),
    ]
    assert flat.entries[1].size_bytes == 6
    shown = await listing(session, hidden=False, depth=5)
    assert [entry.path for entry in shown.entries] == ["a", "b", "b/c", "b/c/deep", "link"]
    cut = await listing(session, limit=2)
    assert (len(cut.entries), cut.truncated) == (2, True)


def isolated(session: ToolSession) -> bool:
    """Whether the slot has a file system of its own. The fake's slots have this machine's."""
    assert session.lease is not None
    return not session.lease.container.id.startswith("fake")


async def test_every_place_of_the_slot_is_reached_as_a_command_reaches_it(session: ToolSession, tmp_path: Path) -> None:
    if not isolated(session):
        return  # see the next test
    await write(session, path="/tmp/hidden/test.py", text="assert 1\n")
    assert (await bash(session, "cat /tmp/hidden/test.py")).stdout == "assert 1\n"
    assert (await read(session, path="../tmp/hidden/test.py")).text == "assert 1\n"
    await bash(session, "ln -s /tmp/hidden out")
    assert not (await write(session, path="out/test.py", text="assert 2\n")).created
    assert [entry.path for entry in (await listing(session, path="/tmp/hidden")).entries] == ["test.py"]
    (match,) = (await good(session, "search", pattern="assert", path="/tmp/hidden"))["matches"]
    assert match["path"] == "/tmp/hidden/test.py"
    diff = "--- a/test.py\n+++ b/test.py\n@@ -1 +1 @@\n-assert 2\n+assert 3\n"
    await good(session, "patch", patch=diff, path="/tmp/hidden")
    assert (await artifacts(session, action="read", path="out/test.py")).data == b"assert 3\n"
    await artifacts(session, action="extract", path="/dev/shm/into", data=tar_of(a=b"one"))
    (tmp_path / "local").write_text("sent")
    context = ToolContext(session)
    await context.upload(tmp_path / "local", "/tmp/sent")
    await context.download("/tmp/sent", tmp_path / "back")
    assert (tmp_path / "back").read_text() == (await bash(session, "cat /tmp/sent")).stdout == "sent"
    assert (await bash(session, "cat /etc/passwd")).stdout == (await read(session, path="/etc/passwd")).text
    assert (await session.call("read_file", {"path": str(tmp_path / "local")})).exit_code == errno.ENOENT


@pytest.mark.parametrize("path", ["/etc/agentenv", "/agentenv", "/usr/bin/agentenv", "../agentenv", "etc/agentenv"])
async def test_the_machine_cannot_be_written_to(session: ToolSession, path: str) -> None:
    """In an image's root, its own files are written."""
    await bash(session, "ln -s /etc etc")
    result = await session.call("write_file", {"path": path, "text": "x"})
    if session.root is not None:
        assert (result.fault, result.exit_code) == ("none", 0), result
        assert not Path("/", path.removeprefix("../")).exists()
    elif isolated(session):
        assert (result.fault, result.exit_code) == ("none", errno.EROFS), result
    else:
        assert (result.fault, result.error) == ("policy", "refused"), result


async def test_the_home_of_paths_is_the_one_of_the_shell(session: ToolSession) -> None:
    await write(session, path="~/notes/a", text="mine")
    assert (await bash(session, "cat ~/notes/a; ls -A; cd notes && ls ..")).stdout == "minenotes\nnotes\n"
    assert (await session.call("bash", {"command": "cat a", "cwd": "~/notes"})).stdout == "mine"
    assert [entry.path for entry in (await listing(session, path="~")).entries] == ["notes"]
    await write(session, path="./~/a", text="no home")
    assert (await read(session, path="~/notes/a")).text == "mine"


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize(
    ("tool", "more"),
    [
        ("read_file", {}),
        ("write_file", {"text": "x"}),
        ("list_files", {}),
        ("artifacts", {"action": "archive"}),
        ("artifacts", {"action": "list"}),
        ("artifacts", {"action": "read"}),
        ("artifacts", {"action": "extract", "data": EMPTY_TAR}),
        ("paths", {"action": "stat"}),
        ("paths", {"action": "mkdir"}),
        ("paths", {"action": "mkdir", "parents": True, "exist_ok": True}),
        ("paths", {"action": "rename", "target": "x"}),
        ("paths", {"action": "remove", "recursive": True}),
    ],
)
async def test_paths_outside_the_workspace_are_refused_where_nothing_isolates(
    session: ToolSession, tool: str, more: dict[str, Any], path: str
) -> None:
    if isolated(session):
        return  # see the test above
    result = await session.call(tool, {"path": path, **more})
    assert (result.fault, result.error) == ("policy", "refused"), result
    assert "workspace" in result.message


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read_file", {"path": "nothing"}),
        ("read_file", {"path": "directory"}),
        ("write_file", {"path": "directory", "text": "x"}),
        ("write_file", {"path": "file/below", "text": "x"}),
        ("list_files", {"path": "nothing"}),
        ("artifacts", {"action": "archive", "path": "nothing"}),
        ("artifacts", {"action": "list", "path": "nothing"}),
        ("artifacts", {"action": "read", "path": "nothing"}),
        ("artifacts", {"action": "read", "path": "directory"}),
    ],
)
async def test_a_failing_operation_is_data(session: ToolSession, tool: str, arguments: dict[str, Any]) -> None:
    await bash(session, "mkdir directory; touch file")
    result = await session.call(tool, arguments)
    assert result.fault == "none", result
    assert result.exit_code not in (0, None)
    assert result.stderr
    assert result.content is None


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read_file", {"path": "a\0b"}),
        ("write_file", {"path": "x"}),
        ("write_file", {"path": "x", "text": "a", "data": "YQ=="}),
        ("write_file", {"path": "x", "data": "not base64!"}),
        ("write_file", {"path": "x", "text": "a", "mode": 0o7777}),
        ("artifacts", {"action": "extract"}),
        ("artifacts", {"action": "archive", "data": EMPTY_TAR}),
        ("artifacts", {"action": "list", "data": EMPTY_TAR}),
        ("artifacts", {"action": "read", "path": "x", "data": EMPTY_TAR}),
        ("read_file", {"path": "x", "limit": 0}),
        ("read_file", {"path": ""}),
        ("paths", {"action": "rename", "path": "x"}),
        ("paths", {"action": "rename", "path": "x", "target": "a\0b"}),
        ("paths", {"action": "remove", "path": "x", "target": "y"}),
    ],
)
async def test_arguments_that_make_no_sense_are_the_models_fault(
    session: ToolSession, tool: str, arguments: dict[str, Any]
) -> None:
    result = await session.call(tool, arguments)
    assert (result.fault, result.error) == ("model", "invalid_arguments"), result


async def test_a_large_file_there_and_back(session: ToolSession) -> None:
    data = hashlib.sha256(b"seed").digest() * (20 * 1024 * 1024 // 32)
    await write(session, path="large", data=base64.b64encode(data).decode())
    reply = await read(session, path="large", binary=True)
    assert reply.data == data


async def test_a_file_larger_than_one_operation_may_carry_is_not_silently_cut(session: ToolSession) -> None:
    await bash(session, "truncate -s 65M sparse")
    result = await session.call("read_file", {"path": "sparse", "binary": True}, timeout_s=60)
    if result.content is None:
        assert result.fault == "policy" or result.exit_code not in (0, None)
    else:
        assert ReadFileReply.model_validate(result.content).truncated


def tar_of(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


async def test_artifacts_archive(session: ToolSession) -> None:
    await bash(session, "mkdir -p out/sub; printf one > out/a; printf two > out/sub/b")
    reply = await artifacts(session, action="archive", path="out")
    assert reply.data is not None
    with tarfile.open(fileobj=io.BytesIO(reply.data)) as archive:
        found = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]
    assert found == {"a": b"one", "sub/b": b"two"}
    assert {(f.path, f.size_bytes, f.sha256) for f in reply.files} == {
        ("a", 3, hashlib.sha256(b"one").hexdigest()),
        ("sub/b", 3, hashlib.sha256(b"two").hexdigest()),
    }
    assert reply.total_bytes == 6


async def test_artifacts_list(session: ToolSession) -> None:
    await bash(session, "mkdir -p out/sub/empty; printf one > out/a; printf two > out/sub/b; ln -s a out/link")
    for path in ("out", "/workspace/out", "./out/."):
        reply = await artifacts(session, action="list", path=path)
        assert [(f.path, f.size_bytes, f.sha256) for f in reply.files] == [
            ("a", 3, hashlib.sha256(b"one").hexdigest()),
            ("sub/b", 3, hashlib.sha256(b"two").hexdigest()),
        ]
        assert (reply.total_bytes, reply.data) == (6, None)
    assert (await artifacts(session, action="list", path="out/sub/empty")).files == ()
    one = await artifacts(session, action="list", path="out/a")
    assert [(f.path, f.size_bytes) for f in one.files] == [("a", 3)]


async def test_artifacts_read(session: ToolSession) -> None:
    data = bytes(range(256)) * 3000
    await write(session, path="out/blob", data=data)
    for path in ("out/blob", "/workspace/out/blob"):
        reply = await artifacts(session, action="read", path=path)
        assert reply.data == data
        assert [(f.path, f.size_bytes, f.sha256) for f in reply.files] == [
            ("blob", len(data), hashlib.sha256(data).hexdigest())
        ]
        assert reply.total_bytes == len(data)
    await write(session, path="empty", text="")
    assert (await artifacts(session, action="read", path="empty")).data == b""


@pytest.mark.parametrize("arguments", [{"action": "list"}, {"action": "archive"}, {"action": "read", "path": "sparse"}])
async def test_artifacts_too_large_for_one_operation_are_data_and_never_cut(
    session: ToolSession, arguments: dict[str, Any]
) -> None:
    await bash(session, "truncate -s 65M sparse")
    result = await session.call("artifacts", arguments, timeout_s=60)
    assert (result.fault, result.exit_code, result.content) == ("none", errno.EFBIG, None), result
    assert "exceeds" in result.stderr


async def test_a_list_of_artifacts_follows_no_links(session: ToolSession) -> None:
    await bash(session, "mkdir in; ln -s /etc/passwd in/pw; ln -s /etc in/etc")
    assert (await artifacts(session, action="list", path="in")).files == ()


async def test_artifacts_extract(session: ToolSession) -> None:
    reply = await artifacts(session, action="extract", path="into", data=tar_of(a=b"one", sub__b=b"two"))
    assert {file.path for file in reply.files} == {"a", "sub/b"}
    assert (await bash(session, "cat into/a into/sub/b")).stdout == "onetwo"


async def test_artifacts_that_would_leave_their_destination_are_not_extracted(session: ToolSession) -> None:
    await bash(session, "mkdir -p into; ln -s /tmp into/link; ln -s .. into/up")
    for name in ("../evil", "/tmp/agentenv-evil", "a/../../evil"):
        result = await session.call("artifacts", {"action": "extract", "path": "into", "data": tar_of(**{name: b"x"})})
        assert (result.fault, result.error) == ("policy", "refused"), result
        assert "evil" not in (await bash(session, "ls -A")).stdout.split()
    for name in ("link/agentenv-evil", "up/evil"):
        result = await session.call("artifacts", {"action": "extract", "path": "into", "data": tar_of(**{name: b"x"})})
        assert (result.fault, result.error) == ("policy", "refused"), result
        assert "evil" not in (await bash(session, "ls -A")).stdout.split()
        assert (await bash(session, "test -e /tmp/agentenv-evil")).exit_code == 1


async def test_rubbish_is_not_extracted(session: ToolSession) -> None:
    result = await session.call("artifacts", {"action": "extract", "data": b"this is no archive"})
    assert result.fault in ("model", "policy") or result.exit_code not in (0, None), result
    assert result.content is None


async def test_what_paths_name_is_looked_at_made_renamed_and_removed(session: ToolSession) -> None:
    slot = ToolContext(session)
    await slot.mkdir("made/deep", parents=True)
    await slot.write_file("made/f", "12", mode=0o640)
    seen = await slot.stat("/workspace/made/f")
    assert (seen.path, seen.kind, seen.size_bytes, seen.mode) == ("/workspace/made/f", "file", 2, 0o640)
    assert abs(seen.modified_s - float((await bash(session, "stat -c %.6Y made/f")).stdout)) < 1e-3
    await slot.rename("made/f", "~/made/caf\\xe9")
    assert (await bash(session, "ls made | od -An -c")).stdout.split() == [*"caf", "351", "\\n", *"deep", "\\n"]
    await bash(session, "ln -s made link; ln -s nothing broken")
    assert [(await slot.stat("link", follow_symlinks=follow)).kind for follow in (True, False)] == [
        "directory",
        "symlink",
    ]
    for failing, error in (
        (slot.mkdir("made"), FileExistsError),
        (slot.mkdir("made/caf\\xe9", exist_ok=True), FileExistsError),
        (slot.mkdir("no/parent"), FileNotFoundError),
        (slot.stat("broken"), FileNotFoundError),
        (slot.stat("made/caf\\xe9/x"), NotADirectoryError),
        (slot.rename("gone", "x"), FileNotFoundError),
        (slot.rename("made/caf\\xe9", "made/deep"), IsADirectoryError),
        (slot.remove("made"), IsADirectoryError),
        (slot.remove("gone", recursive=True), FileNotFoundError),
    ):
        with pytest.raises(error):
            await failing
    with pytest.raises(OSError, match=r"not empty: 'made/deep' -> 'made'") as raised:
        await slot.rename("made/deep", "made")
    assert (raised.value.filename, raised.value.filename2) == ("made/deep", "made")
    await slot.remove("link")
    assert (await slot.stat("made")).kind == "directory", "a link is removed, not what it leads to"
    await slot.remove("made", recursive=True)
    assert (await bash(session, "test -e made; echo $?")).stdout == "1\n"

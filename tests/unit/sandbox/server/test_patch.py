from __future__ import annotations

import os
import resource
import stat
import time
from typing import Any

import pytest

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError, ProtocolError
from agentenv.sandbox.server.tools.files import FileOutcome
from agentenv.wire.tools import PatchReply
from tests.unit.sandbox.server.file_tools_box import Box, box_fixture

__all__ = ["box_fixture"]

EDIT = "--- a/one\n+++ b/one\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"


async def patched(box: Box, patch: str, **more: Any) -> PatchReply:
    done = await box.call("patch", patch=patch, **more)
    assert isinstance(done.content, PatchReply), done
    return done.content


async def refused(box: Box, patch: str, **more: Any) -> FileOutcome:
    before = box.tree()
    done = await box.call("patch", patch=patch, **more)
    assert done.content is None
    assert box.tree() == before, "a patch that fails changes nothing"
    return done


async def test_edit_create_delete_rename_and_mode_at_once(box: Box) -> None:
    box.make("one", "a\nb\nc\n")
    box.make("dir/gone", "x\n")
    box.make("from.sh", "1\n2\n3\n").chmod(0o755)
    reply = await patched(
        box,
        EDIT
        + "diff --git a/new/deep/file b/new/deep/file\nnew file mode 100755\n--- /dev/null\n+++ b/new/deep/file\n"
        + "@@ -0,0 +1 @@\n+hello\n\\ No newline at end of file\n"
        + "--- a/dir/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        + "diff --git a/from.sh b/to.sh\nrename from from.sh\nrename to to.sh\n--- a/from.sh\n+++ b/to.sh\n"
        + "@@ -2 +2 @@\n-2\n+two\n",
    )
    assert [(file.path, file.action, file.old_path) for file in reply.files] == [
        ("one", "modified", None),
        ("new/deep/file", "created", None),
        ("dir/gone", "deleted", None),
        ("to.sh", "renamed", "from.sh"),
    ]
    assert box.tree() == {"one": "a\nB\nc\n", "new/deep/file": "hello", "to.sh": "1\ntwo\n3\n"}
    assert not (box.path / "dir").exists(), "a directory emptied by a patch goes, as with git"
    assert stat.S_IMODE((box.path / "new/deep/file").stat().st_mode) == 0o755
    assert stat.S_IMODE((box.path / "to.sh").stat().st_mode) == 0o755


async def test_in_a_directory_twice_the_same_file_and_fuzz_told(box: Box) -> None:
    box.make("pkg/one", "zero\na\nb\nc\n")
    second = "--- a/one\n+++ b/one\n@@ -1,3 +1,3 @@\n CHANGED\n-B\n+bee\n c\n"
    reply = await patched(box, EDIT + second, path="pkg")
    assert box.tree() == {"pkg/one": "zero\na\nbee\nc\n"}
    assert [(file.path, file.fuzz, file.offset_lines) for file in reply.files] == [("pkg/one", 0, 1), ("pkg/one", 1, 1)]


async def test_one_hunk_that_fails_undoes_all(box: Box) -> None:
    box.make("one", "a\nb\nc\n")
    box.make("two", "x\n")
    done = await refused(box, EDIT + "--- a/two\n+++ b/two\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n", fuzz=0)
    assert done.exit_code == 1
    assert done.stderr.startswith("two: hunk 1 of 1 (@@ -1,2 +1,2 @@, line 10 of the patch) does not apply.")
    assert "(the file ends here)\n       ? y   <- what the patch expects" in done.stderr
    assert done.stderr.endswith("Nothing was changed.\n")


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n", "none: there is no such file"),
        (
            "--- /dev/null\n+++ b/one\n@@ -0,0 +1 @@\n+x\n",
            "one: the patch creates it as a new file, but it already exists",
        ),
        ("--- a/one\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "one: the patch deletes it, but does not remove 2"),
        ("diff --git a/one b/two\nrename from one\nrename to two\n", "two: the new name is taken"),
    ],
)
async def test_what_does_not_fit_the_tree_is_said(box: Box, patch: str, says: str) -> None:
    box.make("one", "a\nb\nc\n")
    box.make("two", "x\n")
    done = await refused(box, patch)
    assert done.exit_code == 1
    assert says in done.stderr


async def test_what_the_system_refuses_undoes_all(box: Box) -> None:
    box.make("one", "a\nb\nc\n")
    box.make("locked", "a\nb\nc\n").chmod(0o444)
    (box.path / "link").symlink_to("one")
    (box.path / "directory").mkdir()
    for name in ("locked", "link", "directory"):
        done = await refused(box, "--- /dev/null\n+++ b/made\n@@ -0,0 +1 @@\n+x\n" + EDIT.replace("one", name))
        assert done.stderr.startswith(name), done
    # nothing that was staged is left either: tree() would show it


async def test_a_full_disk_undoes_all(box: Box) -> None:
    box.make("one", "a\nb\nc\n")
    box.runner._file_limit_bytes = 100_000
    big = "--- /dev/null\n+++ b/big\n@@ -0,0 +1,300 @@\n" + ("+" + "x" * 999 + "\n") * 300
    done = await refused(box, EDIT + big)
    assert done.exit_code != 0


async def test_outside_is_refused_and_leaves_nothing(box: Box) -> None:
    box.make("one", "a\nb\nc\n")
    (box.path / "away").symlink_to("../outside")
    for name in ("../outside/new", "/etc/new", "away/new"):
        before = box.tree()
        with pytest.raises(PolicyRefusalError):
            await box.call("patch", patch=EDIT + f"--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n")
        assert box.tree() == before
    assert {path.name for path in box.outside.iterdir()} == {"secret"}


async def test_text_that_is_no_diff_is_the_models_fault(box: Box) -> None:
    with pytest.raises(InvalidArgumentsError, match="no file names"):
        await box.call("patch", patch="please change it")
    with pytest.raises(ProtocolError, match="fuzz"):
        await box.call("patch", patch=EDIT, fuzz=9)


@pytest.mark.parametrize("header", ["@@ -1,3 +1,3 @@", "@@ -1,5 +1,9 @@", "@@"])
async def test_no_line_of_a_hunk_is_left_out(box: Box, header: str) -> None:
    """A sign was forgotten: what follows would not be applied."""
    box.make("one", "a\nb\nc\n")
    with pytest.raises(InvalidArgumentsError, match=r"line 6: this line is inside a hunk, but begins with none of"):
        await refused(box, f"--- a/one\n+++ b/one\n{header}\n-a\n+A\nb\n-c\n+C\n")
    with pytest.raises(InvalidArgumentsError, match="line 5: this line is inside a hunk"):
        await refused(box, "--- /dev/null\n+++ b/new\n@@ -0,0 +1,3 @@\n+a\nb\n+c\n")


@pytest.mark.parametrize(
    "rest",
    [
        "```\n",
        "\nThat is it.\n\n- one line\n",
        "Only in b: x\ndiff -u a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y\n",
    ],
)
@pytest.mark.parametrize("header", ["@@ -1,3 +1,3 @@", "@@ -1,5 +1,9 @@", "@@"])
async def test_text_behind_a_hunk_is_no_part_of_it(box: Box, header: str, rest: str) -> None:
    box.make("one", "a\nb\nc\n")
    box.make("x", "x\n")
    await patched(box, EDIT.replace("@@ -1,3 +1,3 @@", header) + rest)
    assert box.tree() == {"one": "a\nB\nc\n", "x": "y\n" if "diff" in rest else "x\n"}


async def test_line_ends_and_odd_bytes_survive(box: Box) -> None:
    box.make("one").write_bytes(b"a\r\nb\r\nc\r\n\xff\r\n")
    await patched(box, EDIT)
    assert (box.path / "one").read_bytes() == b"a\r\nB\r\nc\r\n\xff\r\n"


@pytest.mark.parametrize(
    ("content", "hunk"),
    [
        ("a\n" * 500_000, " a\n" * 2000 + "-z\n+y\n"),
        ("\n" * 8_000_000, " \n" * 2000 + "-z\n+y\n"),
        ("      0,\n" * 1_000_000, "       0,\n" * 3 + "-      0,\n+      1,\n" + "       0,\n" * 3),
        ("\n", "+\n" * 2_000_000),
    ],
)
async def test_equal_lines_cost_the_server_nothing(box: Box, content: str, hunk: str) -> None:
    """The work is the slot's, and it is linear: whoever asks spends next to no CPU time of its own."""
    box.make("one", content)
    asked = {"patch": "--- a/one\n+++ b/one\n@@ -400000,9 +400000,9 @@\n" + hunk, "path": "."}
    before, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    await box.call("patch", **asked)
    assert time.process_time() - before < 0.5
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - children < 20


async def test_names_that_are_not_utf8_are_shown_readably(box: Box) -> None:
    reply = await patched(box, '--- /dev/null\n+++ "b/odd\\377"\n@@ -0,0 +1 @@\n+x\n')
    assert reply.files[0].path == "odd\\xff"
    assert [os.fsencode(path.name) for path in box.path.iterdir()] == [b"odd\xff"]

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import InvalidArgumentsError
from agentenv.sandbox.server.tools.files import PatchFailedError, check_patched, patched
from agentenv.sandbox.server.tools.slotfiles_exit_codes import DOES_NOT_FIT, NO_PATCH
from agentenv.sandbox.slotagent.build import ensure_built

LINES = b"".join(b"line %d\n" % number for number in range(1, 21))


@dataclass(frozen=True)
class Fit:
    """What became of a file."""

    content: bytes
    fuzz: int
    offset_lines: int


def fit(content: bytes, hunks: bytes, fuzz: int = 2) -> Fit:
    """The hunks applied to a file of that content, by slotfiles itself."""
    patch = b"--- a/x\n+++ b/x\n" + hunks
    with tempfile.TemporaryDirectory() as root:
        file = Path(root, "x")
        file.write_bytes(content)
        command = [str(ensure_built().files), root, "patch", ".", "-", str(fuzz), str(len(patch))]
        done = subprocess.run(command, input=patch, capture_output=True, timeout=60, check=False)
        assert done.returncode in (0, DOES_NOT_FIT, NO_PATCH), done
        check_patched(done.returncode, done.stdout)
        (told,) = patched(done.stdout).files
        return Fit(file.read_bytes(), told.fuzz, told.offset_lines)


def failure(content: bytes, hunks: bytes, fuzz: int = 2) -> str:
    with pytest.raises(PatchFailedError, match=r"^x: ") as caught:
        fit(content, hunks, fuzz)
    return str(caught.value).removeprefix("x: ")


def test_a_hunk_where_it_says() -> None:
    done = fit(LINES, b"@@ -4,3 +4,3 @@\n line 4\n-line 5\n+five\n line 6\n")
    assert done == Fit(LINES.replace(b"line 5\n", b"five\n"), 0, 0)


def test_a_hunk_that_moved_moves_those_after_it() -> None:
    moved = b"new\n" * 7 + LINES
    hunks = b"@@ -4,3 +4,3 @@\n line 4\n-line 5\n+five\n line 6\n@@ -14 +14 @@\n-line 14\n+fourteen\n"
    done = fit(moved, hunks)
    assert done.content == moved.replace(b"line 5\n", b"five\n").replace(b"line 14\n", b"fourteen\n")
    assert (done.fuzz, done.offset_lines) == (0, 7)


def test_the_nearest_of_equal_places_is_taken() -> None:
    content = b"a\nx\n" * 10
    done = fit(content, b"@@ -11,2 +11,2 @@\n a\n-x\n+y\n")
    assert done.content == b"a\nx\n" * 5 + b"a\ny\n" + b"a\nx\n" * 4
    assert "is ambiguous: it matches at 10 places (lines 1, 3, 5, 7, 9)" in failure(content, b"@@\n a\n-x\n+y\n")


def test_fuzz_ignores_context_at_the_ends_and_keeps_the_files_own() -> None:
    hunk = b"@@ -3,5 +3,5 @@\n CHANGED\n line 4\n-line 5\n+five\n line 6\n CHANGED\n"
    assert fit(LINES, hunk) == Fit(LINES.replace(b"line 5\n", b"five\n"), 1, 0)
    assert "The closest place is line 3, where 3 of its 5 old lines match" in failure(LINES, hunk, fuzz=0)
    # never the changed lines themselves
    assert "does not apply" in failure(LINES, b"@@ -4,3 +4,3 @@\n line 4\n-other\n+five\n line 6\n", fuzz=3)


def test_insertions_by_number_alone() -> None:
    assert fit(b"a\nb\n", b"@@ -1,0 +2 @@\n+x\n").content == b"a\nx\nb\n"
    assert fit(b"", b"@@ -0,0 +1,2 @@\n+x\n+y\n").content == b"x\ny\n"
    assert "the file has 2 lines" in failure(b"a\nb\n", b"@@ -9,0 +10 @@\n+x\n")
    assert "neither context lines nor a line number" in failure(b"a\n", b"@@\n+x\n")


def test_line_ends_of_the_file_are_kept() -> None:
    crlf = LINES.replace(b"\n", b"\r\n")
    hunk = b"@@ -4,3 +4,4 @@\n line 4\n-line 5\n+five\n+more\n line 6\n"
    assert fit(crlf, hunk).content == crlf.replace(b"line 5\r\n", b"five\r\nmore\r\n")
    assert fit(LINES, hunk.replace(b"\n", b"\r\n")).content == LINES.replace(b"line 5\n", b"five\nmore\n")
    # a patch that changes line ends on purpose does
    assert fit(b"a\r\n", b"@@ -1 +1 @@\n-a\r\n+a\n").content == b"a\n"
    # and where they are mixed, other lines keep theirs
    assert fit(b"a\nb\r\nc\n", b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n").content == b"a\nB\r\nc\n"


def test_a_missing_last_newline() -> None:
    assert fit(b"a", b"@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n").content == b"b\n"
    assert fit(b"a\n", b"@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n").content == b"b"
    assert "does not apply" in failure(b"a", b"@@ -1 +1 @@\n-a\n+b\n", fuzz=0)


def test_a_newline_that_is_missing_is_named() -> None:
    """Whichever side lacks it, and whether the last line is changed, removed, or what lines are added after."""
    for hunk in (b"@@ -1,2 +1,3 @@\n a\n b\n+c\n", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n", b"@@ -1,2 +1 @@\n a\n-b\n"):
        text = failure(b"a\nb", hunk)
        assert "     2 ! b\n       ? b   <- what the patch expects, with a newline at its end\n" in text
        assert (
            "The file's last line has no newline: '\\ No newline at end of file' must be below it in the patch." in text
        )
    text = failure(b"a\nb\n", b"@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n")
    assert "       ? b   <- what the patch expects, without a newline at its end\n" in text
    assert "Line 2 of the file ends with a newline" in text
    right = b"@@ -1,2 +1,3 @@\n a\n-b\n\\ No newline at end of file\n+b\n+c\n"
    assert fit(b"a\nb", right).content == b"a\nb\nc\n"
    with pytest.raises(InvalidArgumentsError, match=r"line 7: '\\ No newline at end of file' is before this line"):
        fit(b"a\nb", b"@@ -1,2 +1,3 @@\n a\n b\n\\ No newline at end of file\n+c\n")


def test_a_carriage_return_at_the_very_end_is_kept_unless_the_whole_patch_was_given_them() -> None:
    hunk = b"@@ -1,2 +1,2 @@\n a\n-b\n+b\r\n\\ No newline at end of file\n"
    assert fit(b"a\nb\n", hunk).content == b"a\nb\r"
    assert fit(b"a\nb\n", hunk.replace(b"+b\r", b"+c").replace(b"\n", b"\r\n")).content == b"a\nc"


def test_insertions_by_number_get_other_line_ends_only_where_the_patch_shows_that_it_lost_them() -> None:
    crlf = LINES.replace(b"\n", b"\r\n")
    alone = b"@@ -1,0 +2 @@\n+x\n"
    assert fit(crlf, alone, 0).content == crlf.replace(b"line 2\r", b"x\nline 2\r", 1)
    beside = b"@@ -9 +10 @@\n-line 9\n+nine\n"
    done = fit(crlf, alone + beside, 0).content
    assert done == crlf.replace(b"line 2\r", b"x\r\nline 2\r", 1).replace(b"line 9\r", b"nine\r")


def test_a_failure_shows_what_is_there_and_what_was_expected() -> None:
    text = failure(LINES, b"@@ -9,3 +9,3 @@\n line 9\n-line ten\n+10\n line 11\n", fuzz=0)
    assert text.startswith("hunk 1 of 1 (@@ -9,3 +9,3 @@, line 3 of the patch) does not apply.")
    assert "    10 ! line 10\n       ? line ten   <- what the patch expects\n    11   line 11" in text
    text = failure(LINES, b"@@ -9,2 +9,2 @@\n-nothing\n-like it\n+x\n")
    assert "none of its lines are in the file" in text
    assert "     9   line 9" in text


def test_applied_already_and_out_of_order_are_said() -> None:
    hunk = b"@@ -4,3 +4,3 @@\n line 4\n-line 5\n+five\n line 6\n"
    assert "it is already applied, at line 4" in failure(fit(LINES, hunk).content, hunk)
    swapped = b"@@ -14 +14 @@\n-line 14\n+x\n@@ -2 +2 @@\n-line 2\n+y\n"
    assert "hunk 2 of 2" in failure(LINES, swapped)
    assert "before the hunk above it" in failure(LINES, swapped)


text = st.lists(st.sampled_from(["a", "b", "c", "dd", ""]), max_size=30)


@settings(max_examples=40, deadline=None)
@given(text, text, st.booleans(), st.booleans(), st.integers(0, 3))
def test_what_diff_writes_is_what_comes_out(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str], last: bool, crlf: bool, context: int
) -> None:
    directory = tmp_path_factory.mktemp("diff")
    end = "\r\n" if crlf else "\n"
    contents = [(end.join(lines) + (end if last and lines else "")).encode() for lines in (old, new)]
    paths = [directory / "old", directory / "new"]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    diff = subprocess.run(["diff", f"-U{context}", *map(str, paths)], capture_output=True, check=False).stdout
    if not diff:
        return
    done = fit(contents[0], diff[diff.index(b"@@") :], 0)
    assert (done.content, done.offset_lines) == (contents[1], 0)
    assert Path(paths[0]).read_bytes() == contents[0]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sandbox.server.patch_reference.parse import PatchTextError, parse

GIT = b"""diff --git a/src/a.py b/src/a.py
index 111..222 100644
--- a/src/a.py
+++ b/src/a.py
@@ -1,2 +1,3 @@ def f():
 one
+two
 three
"""


def test_a_git_part_loses_its_prefixes() -> None:
    (part,) = parse(GIT, None)
    assert (part.old, part.new, part.git) == (b"src/a.py", b"src/a.py", True)
    (hunk,) = part.hunks
    assert (hunk.start, hunk.old, hunk.new) == (1, [b"one\n", b"three\n"], [b"one\n", b"two\n", b"three\n"])
    assert (hunk.before, hunk.after, hunk.at_line) == (1, 1, 5)


def test_a_plain_part_keeps_its_names_and_drops_times() -> None:
    (part,) = parse(b"--- a.txt\t2024-01-01 00:00:00\n+++ a.txt\t2024-01-02\n@@ -1 +1 @@\n-x\n+y\n", None)
    assert (part.old, part.new) == (b"a.txt", b"a.txt")
    (part,) = parse(b"--- old/dir/a.txt\n+++ new/dir/a.txt\n@@ -1 +1 @@\n-x\n+y\n", 1)
    assert part.new == b"dir/a.txt"


def test_new_deleted_renamed_and_mode_only() -> None:
    text = b"""diff --git a/new b/new
new file mode 100755
--- /dev/null
+++ b/new
@@ -0,0 +1 @@
+x
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/from b/to
similarity index 100%
rename from from
rename to to
diff --git a/run.sh b/run.sh
old mode 100644
new mode 100755
diff --git a/empty b/empty
new file mode 100644
index 000..e69
"""
    new, gone, renamed, mode, empty = parse(text, None)
    assert (new.old, new.new, new.creates, new.mode) == (None, b"new", True, 0o755)
    assert (gone.old, gone.new, gone.deletes) == (b"gone", None, True)
    assert (renamed.old, renamed.new, renamed.renames, renamed.hunks) == (b"from", b"to", True, [])
    assert (mode.new, mode.mode) == (b"run.sh", 0o755)
    assert (empty.new, empty.creates) == (b"empty", True)


def test_quoted_names_and_missing_newlines() -> None:
    text = b'--- "a/caf\\303\\251 x"\n+++ "b/caf\\303\\251 x"\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n'
    (part,) = parse(text, None)
    assert part.new == "café x".encode()
    assert (part.hunks[0].old, part.hunks[0].new) == ([b"a"], [b"b\n"])


def test_what_models_get_wrong_is_understood() -> None:
    # wrong counts; an empty line for an empty line of context; no numbers; a mail's signature
    (part,) = parse(b"--- a/x\n+++ b/x\n@@ -1,9 +1,2 @@\n one\n\n-two\n+2\n-- \n2.39\n", None)
    assert part.hunks[0].old == [b"one\n", b"\n", b"two\n"]
    (part,) = parse(b"--- a/x\n+++ b/x\n@@ def f():\n one\n\n-two\n+2\n\n", None)
    assert (part.hunks[0].start, part.hunks[0].old) == (None, [b"one\n", b"\n", b"two\n"])
    first, second = parse(b"--- a/x\n+++ b/x\n@@\n-1\n+2\n\n--- a/y\n+++ b/y\n@@\n-1\n+2\n", None)
    assert (first.hunks[0].old, second.new) == ([b"1\n"], b"y")
    # a removed line that looks like a header
    (part,) = parse(b"--- a/x\n+++ b/x\n@@ -1,2 +1,1 @@\n--- a\n+++ b\n one\n", None)
    assert part.hunks[0].old == [b"-- a\n", b"one\n"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"hello\n", "no file names"),
        (b"@@ -1 +1 @@\n-x\n+y\n", "line 1: a hunk comes before"),
        (b"--- a/x\n+++ b/x\nrubbish\n", "line 3: no '@@"),
        (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n", "line 3: the hunk .* has no lines"),
        (b"--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-x\n", "both names"),
        (b"diff --git a/x b/x\nGIT binary patch\n", "line 2: binary"),
        (b"diff --git a/x b/x\nnew file mode 120000\n", "not links"),
        (b"diff --git a/x b/x\nindex 1..2\n", "changes nothing"),
        (b"--- x\n+++ x\n@@ -1 +1 @@\n-x\n+y\n", "strip=3 removes all of"),
    ],
)
def test_what_is_no_diff_is_refused_with_its_line(text: bytes, why: str) -> None:
    with pytest.raises(PatchTextError, match=why):
        parse(text, 3 if "strip" in why else None)


PIECES = (
    *(b"--- a/x\n", b"+++ b/x\n", b"@@ -1 +1 @@\n", b" a\n", b"-b\n", b"+c\n", b"\n", b"diff --git a/x b/x\n"),
    *(b"\\ No newline\n", b"rename from x\n", b"new file mode 100644\n", b"@@", b"\r\n", b"--- /dev/null\n"),
    *(b'diff --git "a/\\xx" "b/\n', b"+++ ", b"old mode\n", b"new mode\n"),
)


@given(st.lists(st.sampled_from(PIECES)))
def test_no_text_breaks_the_parser(lines: list[bytes]) -> None:
    try:
        parts = parse(b"".join(lines), None)
    except PatchTextError:
        return
    assert all(part.old is not None or part.new is not None for part in parts)

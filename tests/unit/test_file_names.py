from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from agentenv.file_names import meant_path, readable_name

PIECES = (
    b"a",
    b"\\",
    b"x",
    b"\\x",
    b"ff",
    b"e9",
    b"\xff",
    b"\xe9",
    b"/",
    "é".encode(),
    b"\\xff",
    b"\\xFF",
    b"7f",
    b"\n",
)
names = st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3)), max_size=12).map(b"".join)


@given(names)
def test_what_is_shown_means_that_name(name: bytes) -> None:
    shown = readable_name(name)
    assert shown.encode().decode() == shown
    assert os.fsencode(meant_path(shown)) == name


@given(names, names)
def test_a_directorys_name_and_a_files_make_a_path(directory: bytes, file: bytes) -> None:
    assert readable_name(directory + b"/" + file) == f"{readable_name(directory)}/{readable_name(file)}"


@given(st.text(max_size=20))
def test_text_is_shown_as_it_is_unless_it_looks_like_the_notation(name: str) -> None:
    assert readable_name(name.encode()) == name or "\\x" in name
    assert "\\x" in name or meant_path(name) == name


def test_the_notation() -> None:
    assert readable_name(b"caf\xe9/a\\b/c\\d\xff") == "caf\\xe9/a\\b/c\\\\d\\xff"
    assert readable_name(b"a\\xff") == "a\\\\xff"
    assert readable_name(b"a\\xFF\\x7f") == "a\\xFF\\x7f"

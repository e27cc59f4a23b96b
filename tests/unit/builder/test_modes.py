"""--chmod and --chown as data."""

from __future__ import annotations

import pytest

from agentenv.builder.modes import directory_mode, ids, mode_of, owner_of

PASSWD = "root:x:0:0::/root:/bin/sh\nbroken\napp:x:7:8::/:\nbad:x:seven:8::/:\n"
GROUPS = "root:x:0:\nstaff:x:50:app\n"


@pytest.mark.parametrize(
    ("text", "mode", "directory", "expected"),
    [
        ("", 0o644, False, 0o644),
        ("755", 0o644, False, 0o755),
        ("04711", 0o644, True, 0o4711),
        ("+x", 0o644, False, 0o755),
        ("u+x,go-r", 0o644, False, 0o700),
        ("a=r", 0o7777, False, 0o444),
        ("u=rwX,go=rX", 0o600, False, 0o644),
        ("u=rwX,go=rX", 0o600, True, 0o755),
        ("u=rwX,go=rX", 0o700, False, 0o755),
        ("u+s,g+s", 0o755, False, 0o6755),
        ("+t", 0o777, True, 0o1777),
        ("g=u", 0o700, False, None),
        ("9", 0o644, False, None),
        ("77777", 0o644, False, None),
        ("rw", 0o644, False, None),
        ("u+x,", 0o644, False, None),
    ],
)
def test_chmod(text: str, mode: int, directory: bool, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is not a mode"):
            mode_of(text)
    else:
        assert mode_of(text)(mode, directory) == expected


def test_only_numbers_count_for_directories_on_the_way() -> None:
    assert [directory_mode(text) for text in ("", "700", "u=rwx")] == [0o755, 0o700, 0o755]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", (5, 5)),
        ("5:6", (5, 6)),
        ("app", (7, 8)),
        ("app:staff", (7, 50)),
        ("5:staff", (5, 50)),
        ("root:3", (0, 3)),
        ("app:", (7, 8)),
    ],
)
def test_chown(text: str, expected: tuple[int, int]) -> None:
    assert ids(*owner_of(text), PASSWD, GROUPS) == expected


@pytest.mark.parametrize("text", ["nobody", "bad", "broken", "app:nogroup"])
def test_an_unknown_owner(text: str) -> None:
    with pytest.raises(LookupError, match="no user or group"):
        ids(*owner_of(text), PASSWD, GROUPS)


def test_an_owner_needs_a_user() -> None:
    with pytest.raises(ValueError, match="is not a user"):
        owner_of(":staff")

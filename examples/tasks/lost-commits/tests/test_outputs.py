"""What is asked of /app/notes."""

import subprocess
from pathlib import Path

NOTES = Path("/app/notes")


def git(*arguments: str) -> list[str]:
    """The lines that git prints."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=NOTES, check=True, capture_output=True, text=True).stdout.splitlines()


def test_all_five_commits_are_on_main_in_order() -> None:
    """With the one that came after the reset on top, and who wrote each."""
    assert git("log", "--reverse", "--format=%an: %s", "main") == [
        "ana: Begin a list for the garden",
        "ben: And one for the house",
        "cem: The apple tree",
        "dora: The door",
        "ana: The cellar",
    ]


def test_there_are_no_merges() -> None:
    """The history is a line."""
    assert git("rev-list", "--merges", "main") == []


def test_the_files_have_what_was_lost() -> None:
    """Nothing is left to be committed."""
    assert git("status", "--porcelain") == []
    assert git("symbolic-ref", "--short", "HEAD") == ["main"]
    assert (NOTES / "garden.txt").read_text() == "sow the peas\nprune the apple tree\n"
    assert (NOTES / "house.txt").read_text() == "mend the roof\npaint the door\n"
    assert (NOTES / "cellar.txt").read_text() == "sort the jars\n"

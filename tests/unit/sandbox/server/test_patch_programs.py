"""slotfiles against git and GNU patch: a diff that git or diff(1) has written gives the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentenv.sandbox.slotagent.build import ensure_built
from tests.sweeps import Sweep

ENDS = ("\n", "\n", "\n", "\r\n", "\r\r\n", "\r")
WORDS = (
    "",
    "x",
    "end ",
    "\tq",
    "- m",
    "+ p",
    "é",
    "--- a/x",
    "+++ b/x",
    "@@ -1 +1 @@",
    "rename from x",
    "-- ",
    "\\ No",
)
NAMES = (
    *(
        "a",
        "b.txt",
        "dir/c",
        "dir/sub/d e",
        "trail ",
        "@@",
        "a b/c d",
        "#hash",
        "dev/null",
        "é/ü",
        'q"uote',
        "back\\slash",
    ),
    *("--- a", "b/in b", "w/in w", "tab\tname", "x{1}", "new\nline", "cr\r", "caf\udce9", "very/deep/er/f"),
)
IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false")


@dataclass(frozen=True)
class File:
    """A file's content, and whether it is executable."""

    content: bytes
    executable: bool = False


Tree = Mapping[str, File]


def some_text(chance: random.Random, most: int) -> bytes:
    style = chance.choice(["\n", "\n", "\r\n", "mixed"])
    lines = [
        chance.choice(WORDS) + str(chance.choice(["", chance.randrange(9)]))
        + (chance.choice(ENDS) if style == "mixed" else style)
        for _ in range(chance.randrange(most))
    ]  # fmt: skip
    text = "".join(lines).encode()
    return text if chance.random() < 0.6 else text.rstrip(b"\n")


def edited(chance: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(lines) + 1)
        lines[at : at + chance.randrange(3)] = some_text(chance, 4).splitlines(keepends=True)
    return b"".join(lines) if chance.random() < 0.8 else b"".join(lines).rstrip(b"\n")


def some_trees(chance: random.Random) -> tuple[Tree, Tree]:
    """Two trees: in the other, files are edited, removed, renamed, copied, exchanged, or of another mode."""
    names = chance.sample(NAMES, 9)
    old = {name: File(some_text(chance, chance.choice([2, 8, 60])), chance.random() < 0.3) for name in names[:5]}
    new = dict(old)
    for name, spare in zip(names[:5], [*names[5:], ""], strict=True):
        match chance.choice(["edit", "edit", "remove", "rename", "copy", "mode", "exchange", "keep"]):
            case "edit":
                new[name] = File(edited(chance, old[name].content), old[name].executable)
            case "remove":
                new.pop(name, None)
            case "rename" if spare and name in new:
                new[spare] = File(chance.choice([bytes, lambda text: edited(chance, text)])(new.pop(name).content))
            case "copy" if spare:
                new[spare] = File(edited(chance, old[name].content), chance.random() < 0.5)
                new[name] = File(edited(chance, old[name].content), old[name].executable)
            case "mode":
                new[name] = File(old[name].content, not old[name].executable)
            case "exchange":
                other = chance.choice(names[:5])
                new[name], new[other] = old[other], old[name]
    if chance.random() < 0.5:
        new["created/by it"] = File(some_text(chance, 5), chance.random() < 0.5)
    return old, new


def write(tree: Tree, root: Path) -> None:
    for name, file in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(0o755 if file.executable else 0o644)


def read(root: Path) -> Tree:
    files = (path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {
        str(path.relative_to(root)): File(path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in sorted(files)
    }


def ran(*command: str, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CEILING_DIRECTORIES": str(cwd.parent)}
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, env=environment, timeout=60, check=False)


def by_slotfiles(root: Path, patch: bytes, fuzz: int = 0) -> subprocess.CompletedProcess[bytes]:
    command = (str(ensure_built().files), str(root), "patch", ".", "-", str(fuzz), str(len(patch)))
    return ran(*command, cwd=root, stdin=patch)


def git(root: Path, *words: str) -> bytes:
    done = ran("git", *IDENTITY, *words, cwd=root)
    assert not done.returncode, done.stderr
    return done.stdout


def git_diff(top: Path, old: Tree, new: Tree, *options: str) -> bytes:
    """What git says of the two trees."""
    repository = top / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    trees = []
    for tree in (old, new):
        for path in repository.iterdir():
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write(tree, repository)
        git(repository, "add", "-A")
        trees.append(git(repository, "write-tree").decode().strip())
    return git(repository, "diff", *trees, *options)


def git_case(top: Path, seed: int) -> bool:
    """Whether git's own diff could be applied by git. slotfiles applies it always, but for what ``-B`` makes of a file
    that another takes the place of: a copy to a name that is taken, without what was there; git refuses that, too."""
    chance = random.Random(seed)
    old, new = some_trees(chance)
    context = chance.randrange(4)
    options = chance.choice([["-M"], ["-M", "-C"], ["-M", "-C", "-C"], ["-B", "-M"], ["--no-renames"]])
    prefix = chance.choice([[], [], ["--no-prefix"]])
    diff = git_diff(top, old, new, f"-U{context}", *options, *prefix, *chance.choice([[], ["--full-index"]]))
    if not diff:
        return False
    ours, theirs = top / "ours", top / "theirs"
    for root in (ours, theirs):
        root.mkdir()
        write(old, root)
    done = by_slotfiles(ours, diff)
    strip = ["-p0"] if prefix else []
    applied = ran("git", "apply", *strip, "--unidiff-zero", "--whitespace=nowarn", "-", cwd=theirs, stdin=diff)
    assert applied.returncode or read(theirs) == new, seed
    if b"the new name is taken" in done.stdout and b"already exists" in applied.stderr:
        assert ("-B" in options, read(ours)) == (True, old), (seed, diff, done.stdout)
    else:
        assert (done.returncode, read(ours)) == (0, new), (seed, diff, done.stdout)
    return not applied.returncode


@pytest.mark.parametrize("first", range(0, 48, 16))
def test_what_git_diff_writes_gives_the_tree_that_git_apply_gives(tmp_path: Path, first: int) -> None:
    applied = 0
    for seed in range(first, first + 16):
        top = tmp_path / str(seed)
        top.mkdir()
        applied += git_case(top, seed)
    assert applied > 12, "git can apply most of what it writes"


def test_any_diff_of_git_gives_its_tree(tmp_path: Path, sweep: Sweep) -> None:
    for seed in sweep.seeds():
        (top := tmp_path / str(seed)).mkdir()
        git_case(top, seed)


def test_what_diff_writes_gives_the_file_that_gnu_patch_gives(tmp_path: Path) -> None:
    applied = 0
    for seed in range(100):
        chance = random.Random(seed)
        old = some_text(chance, 30)
        new = edited(chance, old)
        for name, content in (("old", old), ("new", new), ("ours", old), ("theirs", old)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "f").write_bytes(content)
        diff = ran("diff", "-a", f"-U{chance.randrange(4)}", "old/f", "new/f", cwd=tmp_path).stdout
        if not diff:
            continue
        diff = diff.replace(b"--- old/f", b"--- a/f", 1).replace(b"+++ new/f", b"+++ b/f", 1)
        done = by_slotfiles(tmp_path / "ours", diff)
        theirs = ran("patch", "--binary", "-F0", "-p1", "-s", cwd=tmp_path / "theirs", stdin=diff)
        got = (tmp_path / "ours/f").read_bytes() if (tmp_path / "ours/f").exists() else b""
        assert (done.returncode, got) == (0, new), (seed, old, diff, done.stdout)
        if not theirs.returncode:
            applied += 1
            assert not new or (tmp_path / "theirs/f").read_bytes() == new, seed
    assert applied > 80, "patch can apply what diff writes"


def renamed(old: str, new: str, hunk: str = "") -> str:
    names = f"--- a/{old}\n+++ b/{new}\n" if hunk else ""
    return f"diff --git a/{old} b/{new}\nrename from {old}\nrename to {new}\n{names}{hunk}"


def changed(name: str, old: str, new: str) -> str:
    return f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-{old}\n+{new}\n"


SERIES = {
    "exchanged": (renamed("a", "b") + renamed("b", "a"), {"a": "B", "b": "A", "c": "C"}),
    "passed on": (renamed("a", "b") + renamed("b", "c") + renamed("c", "a"), {"a": "C", "b": "A", "c": "B"}),
    "changed, then renamed": (changed("a", "A", "new") + renamed("a", "d"), {"b": "B", "c": "C", "d": "new"}),
    "renamed, then changed": (renamed("a", "d") + changed("d", "A", "new"), {"b": "B", "c": "C", "d": "new"}),
    "renamed twice": (renamed("a", "d") + renamed("d", "e"), {"b": "B", "c": "C", "e": "A"}),
    "copied when changed": (
        changed("a", "A", "new") + "diff --git a/a b/d\ncopy from a\ncopy to d\n",
        {"a": "new", "b": "B", "c": "C", "d": "A"},
    ),
    "copied when gone": (
        renamed("a", "d") + "diff --git a/a b/e\ncopy from a\ncopy to e\n",
        {"b": "B", "c": "C", "d": "A", "e": "A"},
    ),
}


@pytest.mark.parametrize("kind", SERIES)
def test_parts_begin_with_the_files_before_the_patch_or_with_what_others_did(tmp_path: Path, kind: str) -> None:
    patch, wanted = SERIES[kind]
    write({name: File(name.upper().encode() + b"\n") for name in "abc"}, tmp_path)
    done = by_slotfiles(tmp_path, patch.encode())
    assert not done.returncode, done.stdout
    assert {name: file.content.decode() for name, file in read(tmp_path).items()} == {
        name: content + "\n" for name, content in wanted.items()
    }


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    write({name: File(name.encode()) for name in "abc"}, tmp_path)
    for patch in (renamed("a", "b"), renamed("a", "b") + renamed("c", "b"), renamed("a", "c") + renamed("b", "c")):
        assert b"the new name is taken" in by_slotfiles(tmp_path, patch.encode()).stdout
    assert read(tmp_path) == {name: File(name.encode()) for name in "abc"}


def test_the_directory_of_a_patch_stays_when_its_last_file_goes(tmp_path: Path) -> None:
    write({"keep/f": File(b"x\n"), "keep/sub/g": File(b"x\n")}, tmp_path)
    patch = b"".join(b"--- %b\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n" % name for name in (b"f", b"sub/g"))
    command = (str(ensure_built().files), str(tmp_path), "patch", "keep/", "-", "0", str(len(patch)))
    assert ran(*command, cwd=tmp_path, stdin=patch).returncode == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["keep"]

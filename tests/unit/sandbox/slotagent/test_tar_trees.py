"""slottar and GNU tar read each other's tars of odd trees alike."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from agentenv.sandbox.slotagent.build import ensure_built
from tests.odd_trees import below, described, make
from tests.sweeps import Sweep

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices are root's")

SEEDS: Final = range(12)
XATTRS: Final = ("--xattrs", "--xattrs-include=user.*")


@pytest.fixture(scope="module")
def slottar(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_built(tmp_path_factory.mktemp("cache")).tar)


def gnu_tar(*arguments: str, given: bytes = b"") -> bytes:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["tar", *arguments], input=given, capture_output=True, check=True, env=environment).stdout


def unpacked_by_gnu_tar(tar: bytes, into: Path) -> dict[str, dict[str, Any]]:
    into.mkdir()
    gnu_tar("-xpf", "-", "-C", str(into), "--numeric-owner", *XATTRS, given=tar)
    return described(into)


def unpacked_by_slottar(slottar: str, tar: bytes, into: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run([slottar, "unpack", str(into), "0", "0", "493"], input=tar, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    return described(into)


def grown(place: Path, seed: int, *without: str) -> dict[str, dict[str, Any]]:
    place.mkdir()
    make(place, random.Random(seed), without)
    return described(place)


def test_gnu_tar_unpacks_what_slottar_has_packed(slottar: str, tmp_path: Path, sweep: Sweep) -> None:
    for seed in sweep.seeds():
        (top := tmp_path / str(seed)).mkdir()
        tree = grown(top / "tree", seed, "sockets")
        packed = subprocess.run([slottar, "pack", str(top / "tree")], capture_output=True, check=True).stdout
        assert unpacked_by_gnu_tar(packed, top / "copy") == tree
        assert described(top / "tree") == tree


@pytest.mark.parametrize("form", ["pax", "gnu"])
def test_slottar_unpacks_what_gnu_tar_has_packed(slottar: str, tmp_path: Path, sweep: Sweep, form: str) -> None:
    for seed in sweep.seeds():
        (top := tmp_path / str(seed)).mkdir()
        tree = grown(top / "tree", seed, "sockets", "devices", *(() if form == "pax" else ("attributes",)))
        xattrs = XATTRS if form == "pax" else ()
        packed = gnu_tar("-cf", "-", f"--format={form}", *xattrs, "-C", str(top / "tree"), ".")
        copy = unpacked_by_slottar(slottar, packed, top / "copy")
        assert copy == unpacked_by_gnu_tar(packed, top / "by-gnu")
        assert form == "gnu" or copy == tree


@pytest.mark.parametrize("order", ["without directories", "directories last", "backwards"])
@pytest.mark.parametrize("seed", SEEDS)
def test_directories_need_no_entries_before_what_is_in_them(
    slottar: str, tmp_path: Path, seed: int, order: str
) -> None:
    top = tmp_path / "tree"
    expected = grown(top, seed, "sockets", "devices", "links", "attributes")
    found = {path: stat.S_ISDIR(os.lstat(path).st_mode) for path in below(os.fsencode(top))}
    paths = sorted(found, key=lambda path: (found[path], path), reverse=order == "backwards")
    if order == "without directories":
        paths = [path for path in paths if not found[path]]
    listed = b"".join(os.path.relpath(path, os.fsencode(top)) + b"\0" for path in paths)
    options = ("-C", str(top), "--no-recursion", "--null", "--verbatim-files-from", "--files-from=-")
    packed = gnu_tar("-cf", "-", "--format=pax", *options, given=listed)
    copy = unpacked_by_slottar(slottar, packed, tmp_path / "copy")
    if order == "without directories":  # they are made with the usual mode, now
        expected = unpacked_by_gnu_tar(packed, tmp_path / "by-gnu")
        for entry in (*copy.values(), *expected.values()):
            entry["modified_ns"] *= entry["kind"] != "d"
    assert copy == expected


@pytest.mark.parametrize("name", [b"a/../../out", b"../out", b"up/out", b"up/new/out", b"here/../../out", b"/out"])
def test_a_name_never_leads_out_while_its_parents_are_made(slottar: str, tmp_path: Path, name: bytes) -> None:
    into = tmp_path / "into"
    into.mkdir()
    (into / "up").symlink_to("..")
    (into / "here").mkdir()
    header = gnu_tar("-cf", "-", "--format=pax", "-C", "/", "--transform", f"s,.*,{name.decode()},", "-P", "etc/passwd")
    assert name in header
    done = subprocess.run(
        [slottar, "unpack", str(into), "0", "0", "493"], input=header, capture_output=True, check=False
    )
    assert done.returncode != 0
    assert not list(tmp_path.rglob("out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["into"]

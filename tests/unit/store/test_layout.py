"""Files appear whole or not at all, one process writes each, and what is used is not removed."""

from __future__ import annotations

import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.locks import hold
from agentenv.store.layout import Layout, begin_to_disk, digest_of, downloading, part_of, replace, sweep, written
from tests.ordinary_user import as_ordinary_user, own_directory
from tests.waiting import START_S


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "store")
    made.create()
    return made


def test_names_and_digests_match(layout: Layout) -> None:
    digest = "sha256:" + "a" * 64
    for path in (layout.layer(digest), layout.index(digest), layout.manifest(digest), layout.blob(digest)):
        assert digest_of(path) == digest
        assert path.parent.parent == layout.directory


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "f"
    with written(final) as file:
        assert file is not None
        file.write(b"whole")
        assert not final.exists()
    assert final.read_bytes() == b"whole"
    with written(final) as file:
        assert file is None
    assert list(tmp_path.iterdir()) == [final]


def test_the_disk_may_begin_before_the_end(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.write(b"whole")
        file.flush()
        begin_to_disk(file, 0, 5)
    assert (tmp_path / "f").read_bytes() == b"whole"
    begin_to_disk(io.BytesIO(b"not on a disk"), 0, 5)


def test_nothing_stays_of_a_failed_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), written(tmp_path / "f"):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_writer_left_is_written_over(tmp_path: Path) -> None:
    part_of(tmp_path / "f").write_bytes(b"left " * 100)
    with written(tmp_path / "f") as file:
        assert file is not None
        file.write(b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_writer_waits_and_writes_only_if_the_first_fails(tmp_path: Path, fails: bool) -> None:
    final = tmp_path / "f"
    waits = threading.Event()
    wrote: list[bool] = []

    def second() -> None:
        with written(final, waits.set) as file:
            wrote.append(file is not None)
            if file is not None:
                file.write(b"second")

    thread = threading.Thread(target=second)
    try:
        with written(final) as file:
            assert file is not None
            thread.start()
            assert waits.wait(START_S)
            file.write(b"first")
            if fails:
                raise ValueError
    except ValueError:
        pass
    thread.join(START_S)
    assert wrote == [fails]
    assert final.read_bytes() == (b"second" if fails else b"first")
    assert list(tmp_path.iterdir()) == [final]


def test_a_replaced_file_is_always_whole(tmp_path: Path) -> None:
    replace(tmp_path / "f", b"one")
    replace(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_sweep_removes_what_nobody_writes(layout: Layout) -> None:
    part_of(layout.layers / "dead.tar").touch()
    orphan = layout.images / "sha256-0.idx"
    orphan.touch()
    kept = layout.images / "sha256-1.idx"
    kept.touch()
    kept.with_suffix(".json").touch()
    with written(layout.layers / "live.tar") as file, written(layout.images / "sha256-2.json"):
        assert file is not None
        (layout.images / "sha256-2.idx").touch()
        sweep(layout)
        assert part_of(layout.layers / "live.tar").exists()
        assert (layout.images / "sha256-2.idx").exists()
    names = {path.name for place in (layout.layers, layout.images) for path in place.iterdir()}
    assert names == {"live.tar", "sha256-1.idx", "sha256-1.json", "sha256-2.idx", "sha256-2.json"}


def test_a_download_that_ended_is_removed_and_one_that_may_continue_stays(layout: Layout) -> None:
    directory = layout.pull("r")

    def fail(error: Exception) -> None:
        with downloading(directory):
            (directory / "half").touch()
            raise error

    with pytest.raises(ImageUnavailableError):
        fail(ImageUnavailableError("the registry is away"))
    assert (directory / "half").exists()
    with pytest.raises(BadImageError):
        fail(BadImageError("it is broken"))
    assert not directory.exists()
    with downloading(directory):
        assert list(directory.iterdir()) == []
    assert not directory.exists()


def test_only_a_thorough_sweep_removes_downloads_and_only_dead_ones(layout: Layout) -> None:
    dead, live = layout.pull("dead"), layout.pull("live")
    dead.mkdir()
    with downloading(live):
        sweep(layout)
        assert dead.exists()
        sweep(layout, downloads=True)
        assert not dead.exists()
        assert live.exists()


def test_a_download_waits_for_another_of_the_same(layout: Layout) -> None:
    waits, done = threading.Event(), threading.Event()

    def second() -> None:
        with downloading(layout.pull("r"), waits.set):
            done.set()

    thread = threading.Thread(target=second)
    with downloading(layout.pull("r")):
        thread.start()
        assert waits.wait(START_S)
        assert not done.is_set()
    thread.join(START_S)
    assert done.is_set()


def test_downloads_of_the_same_may_begin_while_others_end(layout: Layout) -> None:
    def download() -> None:
        for _ in range(300):
            with downloading(layout.pull("r")):
                pass

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(download) for _ in range(4)]:
            one.result()
    assert list(layout.pulls.iterdir()) == []


def test_a_held_file_that_is_replaced_while_it_is_waited_for_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    first = hold(path)
    waits = threading.Event()
    found: list[bytes] = []

    def second() -> None:
        descriptor = hold(path, waiting=waits.set)
        found.append(os.read(descriptor, 9))
        os.close(descriptor)

    thread = threading.Thread(target=second)
    thread.start()
    assert waits.wait(START_S)
    (tmp_path / "new").write_text("new")
    (tmp_path / "new").replace(path)
    os.close(first)
    thread.join(START_S)
    assert found == [b"new"]


def test_a_lock_of_nothing_is_an_error_and_a_held_one_can_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hold(tmp_path / "none")
    (tmp_path / "f").touch()
    shared = [hold(tmp_path / "f", shared=True) for _ in range(2)]
    with pytest.raises(BlockingIOError):
        hold(tmp_path / "f", wait=False)
    for descriptor in shared:
        os.close(descriptor)


_MADE_AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from agentenv.store.layout import Layout
for number in range(2):
    layout = Layout(Path(sys.argv[1], str(number)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: layout.create(), range(4)))
"""


def test_a_store_is_made_by_several_of_an_ordinary_user_at_once() -> None:
    with own_directory() as directory:
        done = as_ordinary_user([sys.executable, "-c", _MADE_AT_ONCE, str(directory)])
    assert (done.returncode, done.stderr) == (0, "")

"""Processes that share a store: killed at any step, or pulling the same at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.store import Store
from agentenv.store.layout import digest_of
from tests.image_sources import OciLayout, member, oci_layout, sha256, tar_of

LAYERS = [tar_of(member(f"f{n}", os.urandom(300_000) if n else b"x")) for n in range(3)]
KILLER = Path(__file__).with_name("store_killer.py")
PULL = "import sys; from agentenv.store import Store; from pathlib import Path; sys.stdin.readline(); " + (
    "print(Store.open(Path(sys.argv[1])).ensure(sys.argv[2]).digest)"
)


@pytest.mark.parametrize(("what", "least"), [("pull", 30), ("gc", 15), ("unpack", 15)])
def test_killed_at_any_step_the_next_run_makes_it_good(tmp_path: Path, what: str, least: int) -> None:
    oci_layout(tmp_path / "oci", *LAYERS[:2])
    argv = [sys.executable, str(KILLER), what, str(tmp_path / "store"), f"oci:{tmp_path}/oci"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least


def test_processes_that_pull_at_once_share_the_work(tmp_path: Path) -> None:
    """Two images with common layers, each pulled by three processes; and a collection meanwhile, which finds nothing
    that it may remove."""
    layout = OciLayout(tmp_path / "oci")
    layout.name(layout.manifest(LAYERS), "0")
    layout.name(layout.manifest(LAYERS[1:]), "1")
    store = Store.open(tmp_path / "store")
    pullers = [
        subprocess.Popen(
            [sys.executable, "-c", PULL, tmp_path / "store", f"oci:{tmp_path}/oci:{n % 2}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for n in range(6)
    ]  # fmt: skip
    for puller in pullers:
        assert puller.stdin is not None
        puller.stdin.write("go\n")
        puller.stdin.flush()
    while any(puller.poll() is None for puller in pullers):
        store.gc(budget_bytes=0, keep_s=3600)
    said = [puller.communicate()[0].strip() for puller in pullers]
    assert [puller.returncode for puller in pullers] == [0] * 6
    assert {*said} == {image.digest for image in store.images()}
    assert len({*said}) == 2
    assert {digest_of(path) for path in store.layout.layers.iterdir()} == {sha256(layer) for layer in LAYERS}
    assert list(store.layout.pulls.iterdir()) == []


def test_a_pin_of_a_process_that_is_killed_is_gone(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', *LAYERS).directory}")
    code = "import sys; from agentenv.store import Store; from pathlib import Path\n" + (
        "with Store(Path(sys.argv[1])).pin(sys.argv[2]): print(flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "store"), image.digest]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline()
        assert store.gc(budget_bytes=0, keep_s=0).images == ()
        user.kill()
    assert store.gc(budget_bytes=0, keep_s=0).images == (image.digest,)

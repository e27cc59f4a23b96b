"""The entries of unpacked layers below one overlay, which this mounts in a namespace of its own when it is run as a
program (root): ``mounted_trees.py XATTR,… DIRECTORY…``, the uppermost first."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.integration.mounted_index import CLONE_NEWNS, MS_PRIVATE, MS_REC, Listing, listing


def overlaid(layers: Sequence[Path], xattrs: Sequence[str] = ()) -> Listing:
    """The listing of an overlay of these directories, the lowest first, as image slots mount theirs."""
    argv = [sys.executable, "-m", "tests.integration.mounted_trees", ",".join(xattrs), *map(str, reversed(layers))]
    done = subprocess.run(argv, capture_output=True)
    assert done.returncode == 0, done.stderr
    found: Listing = pickle.loads(done.stdout)
    return found


def main(xattrs: str, *layers: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as at:
        below = Path(at, "below")  # an overlay has at least two
        below.mkdir()
        shown = Path(at, "shown")
        shown.mkdir()
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
            raise OSError(ctypes.get_errno(), "no mount namespace")
        for number, layer in enumerate(layers):  # mount(2) has room for 4 KiB of options
            Path(at, str(number)).symlink_to(layer)
        os.chdir(at)
        names = ":".join([*map(str, range(len(layers))), "below"])
        if libc.mount(b"overlay", os.fsencode(shown), b"overlay", 1, f"lowerdir={names},userxattr".encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            sys.stdout.buffer.write(pickle.dumps(listing(shown, xattrs.split(","))))
        finally:
            libc.umount2(os.fsencode(shown), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A small image for tests: some of this machine's own programs, with their libraries, as one layer of an OCI layout."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.image_sources import oci_layout

PROGRAMS = (
    "bash",
    "sh",
    "cat",
    "id",
    "ls",
    "rm",
    "sleep",
    "mkdir",
    "head",
    "tty",
    "stat",
    "env",
    "chmod",
    "script",
    "stty",
)
PASSWD = "root:x:0:0:root:/root:/bin/bash\nbroken line\napp:x:1234:1234:An app:/home/app:/bin/bash\n::::::\n"
GROUP = "root:x:0:\napp:x:1234:\nextra:x:777:other,app\nstaff:x:50:\n"


def small_image(directory: Path, *above: bytes, user: str = "", **config: Any) -> str:
    """A reference to the image, whose layout is made in ``directory``; ``above``: more layers, ``config``: of its
    configuration."""
    config.update({"User": user} if user else {})
    oci_layout(directory, _layer(), *above, tag="small", config=config)
    return f"oci:{directory}:small"


def _layer() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("bin", "etc", "root", "home", "home/app", "tmp", "opt"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            entry.uid = entry.gid = 1234 if name == "home/app" else 0
            tar.addfile(entry)
        _add(tar, "etc/passwd", PASSWD.encode(), 0o644)
        _add(tar, "etc/group", GROUP.encode(), 0o644)
        for path, content in _programs().items():
            _add(tar, path, content, 0o755)
    return packed.getvalue()


def _programs() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None, name
        found[f"bin/{name}"] = Path(program).read_bytes()
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            found[library.lstrip("/")] = Path(library).read_bytes()
    return found


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(path)
    entry.mode, entry.size = mode, len(content)
    tar.addfile(entry, io.BytesIO(content))

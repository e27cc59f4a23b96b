"""Files that are not Python but belong to the program: the image's recipe, the job file, pinned versions.

In a source checkout they are links to where a reader looks for them (``docker/``, ``nomad/``); a wheel
carries copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_HERE = Path(__file__).resolve().parent

PACKAGE: Final = _HERE.parent
"""The directory of the package ``agentenv``."""


def path(name: str) -> Path:
    """The file (or directory) of that name below the repository's top, such as ``nomad/sandbox.nomad.hcl``.

    Raises FileNotFoundError: nothing of that name is shipped.
    """
    found = (_HERE / name).resolve()
    if not found.exists():
        raise FileNotFoundError(f"agentenv ships no {name}")
    return found

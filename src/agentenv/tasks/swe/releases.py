"""``python -m agentenv.tasks.swe.releases OUT``: SWE-bench-shaped records of real repairs, from releases of SymPy.

Some releases repaired a few defects of the one before it, and tests came with each repair. A record's repository is
the release before; what the next one changed below the repair's directory is its gold patch and its ``test_patch``. The
sources are fetched by pip; what SymPy needs comes from Debian.

Writes OUT/records.jsonl and OUT/images. Needs root, PyPI, Debian's archive, and mmdebstrap where no
registry is reached.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.tasks.pinned import Artifact, fetch_artifact
from agentenv.tasks.scripted import busy
from agentenv.tasks.swe.making import AS_COMMIT, Draft, image_of, written
from agentenv.tasks.swe.records import DEFAULT_WORKDIR

NEEDS: Final = ("git", "patch", "python3", "python3-hypothesis", "python3-mpmath", "python3-pytest")
SOURCES: Final = {
    version: Artifact("sympy", version, f"sympy-{version}.tar.gz", sha256)
    for version, sha256 in (
        ("1.11", "1fe96b4c56bb7a7630cdf150a6cd98bc97a79e6be233e30502aba1cf54dee33d"),
        ("1.11.1", "e32380dce63cb7c0108ed525570092fd45168bdae2faa17e528221ef72e88658"),
        ("1.13.0", "3b6af8f4d008b9a1a6a4268b335b984b23835f26d1d60b0526ebc71d48a25f57"),
        ("1.13.1", "9cebf7e04ff162015ce31c9c6c9144daa34a93bd082f54fd8f12deca4f47515f"),
    )
}


@dataclass(frozen=True)
class Repair:
    """What a release repaired."""

    before: str
    after: str
    """The two releases."""
    below: str
    """The directory of the sources in which the repair and its tests are."""
    problem_statement: str

    @property
    def name(self) -> str:
        """The record's ``instance_id``."""
        return f"sympy__sympy-{self.after}-{self.below.rpartition('/')[2]}"


REPAIRS: Final = (
    Repair(
        "1.13.0",
        "1.13.1",
        "sympy/physics/vector",
        "Pretty printing a zero vector fails: with a reference frame A, vpprint(0*A.x) raises a TypeError. It should "
        "print 0, as the other printers do.",
    ),
    Repair(
        "1.13.0",
        "1.13.1",
        "sympy/matrices",
        "The inverse of a matrix of symbols with float coefficients has enormous coefficients (1e15 and more), so that "
        "M*M.inv() is not the identity. It was right in earlier versions. The exponential of such a matrix is wrong "
        "for the same reason.",
    ),
    Repair(
        "1.11",
        "1.11.1",
        "sympy/utilities",
        "lambdify with cse=True returns a list when the expression is a single one: lambdify(((f, g), z), expr, "
        "cse=True)((1.0, 2.0), 3.0) gives [300.0]. It should be the number, as with cse=False.",
    ),
)


def dockerfile(base: str) -> str:
    """The image of a record; its release lies next to its Dockerfile."""
    install = f"apt-get update -q && apt-get install -y -q --no-install-recommends {' '.join(NEEDS)}"
    return f"""\
FROM {base}
ENV DEBIAN_FRONTEND=noninteractive PYTHONDONTWRITEBYTECODE=1
RUN {install} && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY prepare.sh release.tar.gz /usr/src/
RUN bash /usr/src/prepare.sh
WORKDIR {DEFAULT_WORKDIR}
"""


PREPARE: Final = rf"""#!/bin/bash
# The release in {DEFAULT_WORKDIR}, as one commit.
set -e
mkdir {DEFAULT_WORKDIR}
cd {DEFAULT_WORKDIR}
tar -xzf /usr/src/release.tar.gz --strip-components=1 --no-same-owner
{AS_COMMIT}
rm -rf /usr/src/*
"""


async def drafts(repairs: Sequence[Repair], out: Path, base: str) -> AsyncIterator[Draft]:
    """One for each repair; its image is built on demand. Raises DownloadError."""
    for repair in repairs:
        with busy(f"{repair.name}: its sources"):
            before, after = [
                await asyncio.to_thread(fetch_artifact, SOURCES[one]) for one in (repair.before, repair.after)
            ]
        files: dict[str, str | Path] = {
            "Dockerfile": dockerfile(base),
            "prepare.sh": PREPARE,
            "release.tar.gz": before,
        }
        image = await image_of(out / "images" / repair.name, files, repair.name)
        patch = await asyncio.to_thread(difference, before, after, repair.below)
        yield Draft(repair.name, "sympy/sympy", repair.problem_statement, patch, image)


def difference(before: Path, after: Path, below: str) -> str:
    """The patch from one archive of sources to another below a directory, for ``patch -p1``; of files that
    both have."""
    old, new = _files(before, below), _files(after, below)
    parts = []
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            lines = difflib.unified_diff(
                old[name].splitlines(keepends=True), new[name].splitlines(keepends=True), f"a/{name}", f"b/{name}"
            )
            parts.append("".join(lines))
    return "".join(parts)


def _files(archive: Path, below: str) -> dict[str, str]:
    """The Python files of an archive below a directory, by their paths in the repository."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(f"{below}/") and name.endswith(".py"):
                content = tar.extractfile(member)
                assert content is not None
                found[name] = content.read().decode()
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.tasks.swe.releases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [repair.name for repair in REPAIRS]
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--base", default="debian:bookworm-slim", help="image to begin with")
    options = parser.parse_args()
    chosen = [repair for repair in REPAIRS if not options.only or repair.name in options.only]
    return written(options.out, [lambda _farm: drafts(chosen, options.out, options.base)], len(chosen))


if __name__ == "__main__":
    sys.exit(main())

"""``python -m agentenv.tasks.swe.debian OUT``: SWE-bench-shaped records of real repairs, from Debian's source packages.

A source package has the patches that Debian put on a release, many of them repairs of security holes that came with
tests. Each such patch is a record: the repository is the release with the patches before it, what it changes below its
tests is the ``test_patch``, the rest the gold patch. Its image is a Dockerfile of three steps over one base: what all
packages need, the package and what its tests need, the repository at ``base_commit``; so images share their layers.
Which tests fail before and pass after is found by running them, in slots of these images.

Writes OUT/records.jsonl and OUT/images. Needs root, Debian's archive, and mmdebstrap where no registry is reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv import AsyncFarm, ImageRoot
from agentenv.tasks.swe.making import AS_COMMIT, PYTEST, Draft, image_of, output_of, written
from agentenv.tasks.swe.records import DEFAULT_WORKDIR, TestLog
from agentenv.tasks.swe.scoring import controls_tests

DJANGO: Final = "PYTHONPATH=. python3 tests/runtests.py --verbosity 2 --parallel 1 {labels}"
_KEPT: Final = "/usr/share/debian-of-testbed/patches"
"""Where the image of no record has all patches. The images of records have none: the solution is among them."""


@dataclass(frozen=True)
class Package:
    """A source package, what its tests need in addition, and how they are run."""

    source: str
    repo: str
    needs: tuple[str, ...]
    command: str = PYTEST
    log: TestLog = "pytest"


PACKAGES: Final = {
    package.source: package
    for package in (
        Package("jinja2", "pallets/jinja", ("python3-pytest", "python3-markupsafe"), f"PYTHONPATH=src {PYTEST}"),
        Package(
            "python-django",
            "django/django",
            ("python3-asgiref", "python3-sqlparse", "python3-tz", "python3-yaml", "python3-jinja2", "python3-pil"),
            DJANGO,
            "unittest",
        ),
    )
}

PREPARE: Final = rf"""#!/bin/bash
# prepare PATCH: the release in {DEFAULT_WORKDIR} with the patches before PATCH, as one commit; with all and with the
# patches themselves beside it if PATCH is none.
set -e
rm -rf {DEFAULT_WORKDIR}
dpkg-source --skip-patches --no-check -x /usr/src/*.dsc {DEFAULT_WORKDIR} > /dev/null
mv {DEFAULT_WORKDIR}/debian /usr/src/debian
cd {DEFAULT_WORKDIR}
for patch in $(grep -v '^#' /usr/src/debian/patches/series); do
    [ "$patch" = "$1" ] && break
    patch -p1 --quiet --no-backup-if-mismatch < "/usr/src/debian/patches/$patch"
done
{AS_COMMIT}
[ "$1" != none ] || mv /usr/src/debian {_KEPT.rpartition("/")[0]}
rm -rf /usr/src/*
"""


def dockerfile(package: Package, patch: str, base: str) -> str:
    """The image of a record."""
    needed = " ".join(("dpkg-dev", "git", "patch", "python3", *package.needs))
    sources = "/etc/apt/sources.list.d/sources.list"
    install = f"apt-get update -q && apt-get install -y -q --no-install-recommends {needed}"
    fetch = f"apt-get source -q --download-only {package.source} && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin"
    return f"""\
FROM {base}
ENV DEBIAN_FRONTEND=noninteractive PYTHONDONTWRITEBYTECODE=1
RUN sed -n '/security/!s/^deb /deb-src /p' /etc/apt/sources.list > {sources} && {install} && apt-get clean
WORKDIR /usr/src
RUN apt-get update -q && {fetch}
COPY prepare.sh /usr/local/bin/prepare
RUN bash /usr/local/bin/prepare {patch}
WORKDIR {DEFAULT_WORKDIR}
"""


async def drafts(
    farm: AsyncFarm, package: Package, chosen: Sequence[str], out: Path, base: str
) -> AsyncIterator[Draft]:
    """One for each patch that changes tests and more, in their order; the image of each is built on demand.
    ``chosen``: only these patches; empty: all."""
    texts = await _patches(farm, package, out, base)
    for name, text in texts.items():
        if name in chosen or (not chosen and _repairs(text)):
            instance = _instance(package, name)
            image = await image_of(out / "images" / instance, _files(package, name, base), instance)
            yield Draft(instance, package.repo, description(text, name), text, image, package.command, package.log)


async def _patches(farm: AsyncFarm, package: Package, out: Path, base: str) -> dict[str, str]:
    """The package's patches, by name."""
    directory = out / "images" / f"{package.source}-patches"
    image = await image_of(directory, _files(package, "none", base), f"{package.source}'s patches")
    async with farm.sandbox(ImageRoot(image)) as box:
        series = await output_of(box, f"grep -v '^#' {_KEPT}/series")
        return {name: await output_of(box, f"cat '{_KEPT}/{name}'") for name in series.split()}


def _files(package: Package, patch: str, base: str) -> dict[str, str | Path]:
    return {"Dockerfile": dockerfile(package, patch, base), "prepare.sh": PREPARE}


def _repairs(text: str) -> bool:
    """Whether a patch changes tests and more."""
    paths = [line.split()[1] for line in text.splitlines() if line.startswith("+++ ")]
    return len({controls_tests(path) for path in paths}) == 2


def description(text: str, name: str) -> str:
    """The words before a patch's first file, without the fields of mail and of Debian (DEP-3)."""
    head = f"\n{text}".partition("\n---")[0].partition("\ndiff --git")[0]
    words = []
    for line in head.splitlines():
        field, colon, rest = line.partition(":")
        if colon and field in ("Subject", "Description"):
            words.append(rest.strip())
        elif not (colon and field.replace("-", "").isalpha() and " " not in field) and not line.startswith(
            ("From ", "---")
        ):
            words.append(line.strip())
    return "\n".join(words).strip() or f"The repair that Debian calls {name}."


def _instance(package: Package, patch: str) -> str:
    name = patch.removesuffix(".patch").removesuffix(".diff")
    return f"{package.repo.replace('/', '__')}-{''.join(c if c.isalnum() or c in '_.+-' else '-' for c in name)}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.tasks.swe.debian",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", action="append", choices=tuple(PACKAGES), help="only this one; repeatable")
    parser.add_argument("--patch", action="append", default=[], help="only this patch of one package; repeatable")
    parser.add_argument("--most", type=int, default=1000, help="at most so many records of a package")
    parser.add_argument("--base", default="debian:bookworm-slim", help="image to begin with")
    options = parser.parse_args()
    chosen = [PACKAGES[name] for name in options.package or PACKAGES]
    makers = [lambda farm, one=one: drafts(farm, one, options.patch, options.out, options.base) for one in chosen]
    return written(options.out, makers, options.most)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m examples.swe.debian OUT``: SWE-bench-shaped records of real repairs, from Debian's source packages.

A source package has the patches that Debian put on a release, many of them repairs of security holes that came with
tests. Each such patch is a record: the repository is the release with the patches before it, what it changes below its
tests is the ``test_patch``, the rest the gold patch. Its image is a Dockerfile of three steps over one base: what all
packages need, the package and what its tests need, the repository at ``base_commit``; so images share their layers.
Which tests fail before and pass after is found by running them, in slots of these images.

Writes OUT/records.jsonl and OUT/images. Needs root, Debian's archive, and mmdebstrap where no registry is reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv import AsyncFarm, ImageRoot
from agentenv.errors import AgentEnvError, TaskError
from agentenv.sdk.async_sandbox import AsyncSandbox
from agentenv.sdk.image_builds import BuildLimits, build_image
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.store.dockerfile.build import Listeners
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.spec import SlotLimits
from examples.scripted import busy
from examples.swe.fresh_root import LOG
from examples.swe.outcomes import outcomes
from examples.swe.records import DEFAULT_WORKDIR, TestLog
from examples.swe.scoring import controls_tests

DJANGO: Final = "PYTHONPATH=. python3 tests/runtests.py --verbosity 2 --parallel 1 {labels}"
PYTEST: Final = "python3 -m pytest -rA -p no:cacheprovider {files}"
TESTS_TIMEOUT_S: Final = 1500.0
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class Package:
    """A source package, what its tests need beside it, and how they are run."""

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

PREPARE: Final = r"""#!/bin/bash
# prepare PATCH: the release in /testbed with the patches before PATCH, as one commit, and PATCH split into two files.
set -e
rm -rf /testbed
dpkg-source --skip-patches --no-check -x /usr/src/*.dsc /testbed > /dev/null
mv /testbed/debian /usr/src/debian
cd /testbed
for patch in $(grep -v '^#' /usr/src/debian/patches/series); do
    [ "$patch" = "$1" ] && break
    patch -p1 --quiet --no-backup-if-mismatch < "/usr/src/debian/patches/$patch"
done
export GIT_AUTHOR_NAME=agentenv GIT_AUTHOR_EMAIL=agentenv@localhost GIT_AUTHOR_DATE='2020-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=agentenv GIT_COMMITTER_EMAIL=agentenv@localhost GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
git init --quiet --initial-branch=main
git add --all --force
git commit --quiet --message 'The repository before the task'
mv /usr/src/debian /usr/share/debian-of-testbed
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


async def records_of(package: Package, patches: Sequence[str], out: Path, base: str, most: int) -> list[dict[str, Any]]:
    """Build images, and keep the records that a test tells apart. At most ``most`` of them."""
    store = await asyncio.to_thread(Store.open, store_directory())
    made: list[dict[str, Any]] = []
    limits = SlotLimits(memory_bytes=3072 * _MIB)
    async with AsyncFarm("local", slots=1, limits=limits, timeout_s=TESTS_TIMEOUT_S) as farm:
        for patch in patches or await _patches(farm, package, store, out, base):
            if len(made) == most:
                break
            try:
                record = await _record(farm, package, patch, store, out, base)
            except TaskError as error:
                print(f"    {package.source} {patch}: left out: {error}", file=sys.stderr)
                continue
            made.append(record)
            print(f"ok  {record['instance_id']}: {len(record['FAIL_TO_PASS'])} tests tell it apart", file=sys.stderr)
    return made


async def _image(package: Package, patch: str, store: Store, out: Path, base: str) -> tuple[str, str]:
    """The reference of a record's image, and its digest."""
    directory = out / "images" / _instance(package, patch)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "Dockerfile").write_text(dockerfile(package, patch, base))
    (directory / "prepare.sh").write_text(PREPARE)
    with busy(f"{package.source} {patch}: its image") as say:
        listeners = Listeners(on_step=lambda step: say(f"{package.source} {patch}: its image: {step.place.text}"))
        limits = BuildLimits(network=NetworkPolicy("public"))
        built = await build_image(directory, store, limits=limits, listeners=listeners)
    return f"dockerfile:{directory.absolute()}", built.image


async def _patches(farm: AsyncFarm, package: Package, store: Store, out: Path, base: str) -> list[str]:
    """The package's patches that change tests and more, in their order."""
    reference, _ = await _image(package, "none", store, out, base)
    async with farm.sandbox(ImageRoot(reference)) as box:
        series = await _said(box, "grep -v '^#' /usr/share/debian-of-testbed/patches/series")
        texts = {
            name: await _said(box, f"cat '/usr/share/debian-of-testbed/patches/{name}'") for name in series.split()
        }
    paths = {
        name: [line.split()[1] for line in text.splitlines() if line.startswith("+++ ")] for name, text in texts.items()
    }
    return [name for name, found in paths.items() if len({controls_tests(path) for path in found}) == 2]


async def _record(farm: AsyncFarm, package: Package, patch: str, store: Store, out: Path, base: str) -> dict[str, Any]:
    """Raises TaskError when no test tells the patch apart."""
    reference, _ = await _image(package, patch, store, out, base)
    root = ImageRoot(reference, memory_mib=3072, workdir=DEFAULT_WORKDIR)
    with busy(f"{package.source} {patch}: its tests, with the patch and without"):
        async with farm.sandbox(root) as box:
            return await _told_apart(box, package, patch, reference)


async def _told_apart(box: AsyncSandbox, package: Package, patch: str, reference: str) -> dict[str, Any]:
    base_commit = (await _said(box, "git rev-parse HEAD")).strip()
    text = await _said(box, f"cat '/usr/share/debian-of-testbed/patches/{patch}'")
    await _said(box, f"patch -p1 --quiet --no-backup-if-mismatch < '/usr/share/debian-of-testbed/patches/{patch}'")
    names = (await _said(box, "git add --all && git diff --cached --name-only HEAD")).split()
    tests = [name for name in names if controls_tests(name)]
    rest = [name for name in names if not controls_tests(name)]
    gold, test_patch = [
        await _said(box, f"git diff --cached --no-renames HEAD -- {' '.join(part)}") for part in (rest, tests)
    ]
    command = command_of(package, tests)
    after = await _outcomes(box, package, command)
    await _said(box, f"git reset -q --hard HEAD && git apply <<'END_OF_PATCH'\n{test_patch}\nEND_OF_PATCH")
    before = await _outcomes(box, package, command)
    fail_to_pass = sorted(name for name, good in after.items() if good and not before.get(name, False))
    if not gold or not fail_to_pass:
        raise TaskError("no test fails before and passes after")
    return {
        "instance_id": _instance(package, patch),
        "repo": package.repo,
        "base_commit": base_commit,
        "problem_statement": description(text, patch),
        "patch": gold,
        "test_patch": test_patch,
        "FAIL_TO_PASS": fail_to_pass,
        "PASS_TO_PASS": sorted(name for name, good in after.items() if good and before.get(name, False)),
        "image": reference,
        "workdir": DEFAULT_WORKDIR,
        "test_command": command,
        "test_log": package.log,
    }


async def _outcomes(box: AsyncSandbox, package: Package, command: str) -> dict[str, bool]:
    ran = await box.run(f"{{ {command}; }} > {LOG} 2>&1", TESTS_TIMEOUT_S)
    if ran.timed_out:
        raise TaskError("its tests take too long")
    return dict(outcomes(package.log, await box.read_file(LOG)))


async def _said(box: AsyncSandbox, command: str) -> str:
    done = await box.run(command)
    if done.exit_code:
        raise TaskError(f"{command[:60]}: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def command_of(package: Package, tests: Sequence[str]) -> str:
    """What runs the files of a test patch."""
    files = [path for path in tests if path.endswith(".py") and (path.rpartition("/")[2].startswith("test"))]
    labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
    return package.command.format(files=" ".join(files), labels=" ".join(labels))


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


async def _main(given: argparse.Namespace) -> int:
    """The number of records."""
    chosen = [PACKAGES[name] for name in given.package or PACKAGES]
    found = [await records_of(package, given.patch, given.out, given.base, given.most) for package in chosen]
    lines = [json.dumps(record) + "\n" for records in found for record in records]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "records.jsonl").write_text("".join(lines))
    return len(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.swe.debian", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", action="append", choices=tuple(PACKAGES), help="only this one; repeatable")
    parser.add_argument("--patch", action="append", default=[], help="only this patch of one package; repeatable")
    parser.add_argument("--most", type=int, default=1000, help="at most so many records of a package")
    parser.add_argument("--base", default="debian:bookworm-slim", help="image to begin with")
    given = parser.parse_args()
    try:
        count = asyncio.run(_main(given))
    except AgentEnvError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{count} records in {given.out / 'records.jsonl'}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())

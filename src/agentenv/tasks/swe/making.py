"""From a repository in an image and a patch to an SWE-bench-shaped record: which tests detect the patch is found by
running them, in slots of that image."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv import AsyncFarm, ImageRoot
from agentenv.builder.build import Listeners
from agentenv.errors import AgentEnvError, TaskError
from agentenv.sdk.async_sandbox import AsyncSandbox
from agentenv.sdk.image_builds import BuildLimits, build_image
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.scripted import busy
from agentenv.tasks.swe.fresh_root import LOG
from agentenv.tasks.swe.outcomes import PASSED, outcomes
from agentenv.tasks.swe.records import DEFAULT_WORKDIR, TestLog
from agentenv.tasks.swe.scoring import controls_tests
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.spec import SlotLimits

PYTEST: Final = "python3 -m pytest -rA -p no:cacheprovider {files}"
TESTS_TIMEOUT_S: Final = 1500.0
MEMORY_MIB: Final = 3072
_PATCH: Final = "/tmp/solution.patch"

AS_COMMIT: Final = r"""
export GIT_AUTHOR_NAME=agentenv GIT_AUTHOR_EMAIL=agentenv@localhost GIT_AUTHOR_DATE='2020-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=agentenv GIT_COMMITTER_EMAIL=agentenv@localhost GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
git init --quiet --initial-branch=main
git add --all --force
git commit --quiet --message 'The repository before the task'
"""
"""Bash text that makes the working directory a repository of one commit."""


@dataclass(frozen=True)
class Draft:
    """A record before its tests were run."""

    instance_id: str
    repo: str
    problem_statement: str
    patch: str
    """What ``patch -p1`` applies: the solution and its tests."""
    image: str
    """A reference; it has the repository in ``DEFAULT_WORKDIR``."""
    command: str = PYTEST
    log: TestLog = "pytest"


Maker = Callable[[AsyncFarm], AsyncIterator[Draft]]


async def image_of(directory: Path, files: Mapping[str, str | Path], doing: str) -> str:
    """Build the Dockerfile among these files (texts, or files to be copied) in ``directory``; with a network. Returns
    its reference. Raises what :func:`agentenv.sdk.image_builds.build_image` raises."""
    context = await asyncio.to_thread(_laid, directory, files)
    store = await asyncio.to_thread(Store.open, store_directory())
    with busy(f"{doing}: its image") as say:
        listeners = Listeners(on_step=lambda step: say(f"{doing}: its image: {step.place.text}"))
        limits = BuildLimits(network=NetworkPolicy("public"))
        await build_image(context, store, limits=limits, listeners=listeners)
    return f"dockerfile:{context}"


def _laid(directory: Path, files: Mapping[str, str | Path]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.read_bytes() if isinstance(content, Path) else content.encode()
        (directory / name).write_bytes(data)
    return directory.absolute()


async def record_of(farm: AsyncFarm, draft: Draft) -> dict[str, Any]:
    """The record. Raises TaskError when no test fails before the patch and passes after it."""
    root = ImageRoot(draft.image, memory_mib=MEMORY_MIB, workdir=DEFAULT_WORKDIR)
    with busy(f"{draft.instance_id}: its tests, with the patch and without"):
        async with farm.sandbox(root) as box:
            return await _told_apart(box, draft)


async def _told_apart(box: AsyncSandbox, draft: Draft) -> dict[str, Any]:
    base_commit = (await output_of(box, "git rev-parse HEAD")).strip()
    await box.write_file(_PATCH, draft.patch)
    await output_of(box, f"patch -p1 --quiet --no-backup-if-mismatch < {_PATCH}")
    names = (await output_of(box, "git add --all && git diff --cached --name-only HEAD")).split()
    tests = [name for name in names if controls_tests(name)]
    rest = [name for name in names if not controls_tests(name)]
    gold, test_patch = [
        await output_of(box, f"git diff --cached --no-renames HEAD -- {' '.join(part)}") for part in (rest, tests)
    ]
    command = command_of(draft.command, tests)
    after = await _outcomes(box, draft, command)
    await output_of(box, f"git reset -q --hard HEAD && git apply <<'END_OF_PATCH'\n{test_patch}\nEND_OF_PATCH")
    before = await _outcomes(box, draft, command)
    fail_to_pass = sorted(name for name, good in after.items() if good and not before.get(name, False))
    if not gold or not fail_to_pass:
        raise TaskError("no test fails before and passes after")
    return {
        "instance_id": draft.instance_id,
        "repo": draft.repo,
        "base_commit": base_commit,
        "problem_statement": draft.problem_statement,
        "patch": gold,
        "test_patch": test_patch,
        "FAIL_TO_PASS": fail_to_pass,
        "PASS_TO_PASS": sorted(name for name, good in after.items() if good and before.get(name, False)),
        "image": draft.image,
        "workdir": DEFAULT_WORKDIR,
        "test_command": command,
        "test_log": draft.log,
    }


async def _outcomes(box: AsyncSandbox, draft: Draft, command: str) -> dict[str, bool]:
    ran = await box.run(f"{{ {command}; }} > {LOG} 2>&1", TESTS_TIMEOUT_S)
    if ran.timed_out:
        raise TaskError("its tests take too long")
    printed = await box.read_file(LOG, errors="replace")
    if not (found := outcomes(draft.log, printed)):
        raise TaskError(f"its tests do not run: {printed.strip()[-200:]}")
    return {name: status in PASSED for name, status in found.items()}


async def output_of(box: AsyncSandbox, command: str) -> str:
    """What a command prints. Raises TaskError when it fails."""
    done = await box.run(command)
    if done.exit_code:
        raise TaskError(f"{command[:60]}: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def command_of(template: str, tests: Sequence[str]) -> str:
    """What runs the files of a test patch. Pure."""
    files = [path for path in tests if path.endswith(".py") and (path.rpartition("/")[2].startswith("test"))]
    labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
    return template.format(files=" ".join(files), labels=" ".join(labels))


def written(out: Path, makers: Sequence[Maker], most: int) -> int:
    """Write ``out``/records.jsonl: of each maker's drafts at most ``most`` that a test detects. Returns the exit
    code: 1 when there are none, or something failed."""
    try:
        records = asyncio.run(_records(makers, most))
    except AgentEnvError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} records in {out / 'records.jsonl'}")
    return 0 if records else 1


async def _records(makers: Sequence[Maker], most: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    limits = SlotLimits(memory_bytes=MEMORY_MIB * 2**20)
    async with AsyncFarm("local", slots=1, limits=limits, timeout_s=TESTS_TIMEOUT_S) as farm:
        for maker in makers:
            count = 0
            async for draft in maker(farm):
                try:
                    records.append(await record_of(farm, draft))
                except TaskError as error:
                    print(f"    {draft.instance_id}: left out: {error}", flush=True)
                    continue
                failing = len(records[-1]["FAIL_TO_PASS"])
                print(f"ok  {draft.instance_id}: {failing} tests fail without the patch", flush=True)
                if (count := count + 1) == most:
                    break
    return records

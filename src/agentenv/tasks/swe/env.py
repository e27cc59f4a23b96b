"""SweEnv: an issue and its repository in a slot; the tests that came with the solution decide the score.

    python -m agentenv.tasks.swe.env process --env.dataset_name records.jsonl --env.repositories DIRECTORY \\
        --openai.base_url URL --openai.model_name MODEL ...

See ``docs/swe.md``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agentenv import AgentEnv, AgentEnvConfig, AgentResult, ToolContext
from agentenv.agent.datasets import load_items
from agentenv.config import cache_dir
from agentenv.env.farm import expect_in_slots
from agentenv.env.farm_fields import Names
from agentenv.errors import ConfigError
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.tasks.pinned import fetch_runner
from agentenv.tasks.swe import repositories
from agentenv.tasks.swe.kinds import NEED_IMAGES
from agentenv.tasks.swe.records import PatchIs, SweRecord, Wanted, read_records
from agentenv.tasks.swe.repositories import Checkouts
from agentenv.tasks.swe.scoring import SOURCE_ROOTS, Found, Ground, resolved, share, tested
from agentenv.wire.spec import Bind

logger = logging.getLogger(__name__)

RUNNER = "/opt/test-runner"
DEPENDENCIES = "/opt/dependencies"
"""Path of the dependencies in slots, read-only. The unpacked test runner is mounted as well."""

TASK = """\
[task:{record.instance_id}]
The workspace holds the repository {record.repo} (one git commit: the state before the work). Resolve this issue:

<issue>
{record.problem_statement}
</issue>

Change the repository's sources, and only as much as needed. You may add tests, but they do not count: your work
is judged by other tests. python3 and pytest are installed, there is no network; run tests with
`{command}`.
Say in one sentence what you changed when you are done."""


class SweConfig(AgentEnvConfig):
    """An environment's settings, and which records are played with which repositories."""

    verification: Literal["live", "sealed"] = "sealed"
    dataset_split: str = "test"
    repositories: str | None = Field(default=None, description="Directory of local git repositories, owner/name[.git]")
    clone_url: str = Field(
        default="https://github.com/{repo}.git", description="URL to clone missing ones from; empty: do not clone"
    )
    only_repos: Names = Field(default_factory=list, description="Records of these repositories")
    only_instances: Names = Field(default_factory=list, description="These records")
    only_versions: Names = Field(default_factory=list, description="Records of these versions")
    python_only: bool = Field(default=False, description="Leave out records with tests that are not pytest ids")
    max_records: int | None = Field(default=None, ge=1, description="Use only this many of the remaining records")
    patch_is: PatchIs = Field(
        default="fix", description="What `patch` is: fix (SWE-bench), or bug, which the solution takes back (SWE-smith)"
    )
    reward: Literal["resolved", "share"] = Field(
        default="resolved", description="resolved: 1 or 0; share: of FAIL_TO_PASS, 0 when PASS_TO_PASS breaks"
    )
    dependencies: str | None = Field(
        default=None, description="Directory of the repositories' dependencies: owner__name/version or owner__name"
    )
    tests_timeout_s: float = Field(default=300.0, ge=1, le=3000, description="Time limit of a record's tests")
    keep_checkouts: int = Field(default=8, ge=1, description="Unused checkouts kept on this machine's disk")


class SweEnv(AgentEnv):
    """Resolve an issue of a real repository. 1 when all of FAIL_TO_PASS pass and none of PASS_TO_PASS breaks."""

    name = "swe"
    env_config_cls = SweConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises: ConfigError."""
        super().__init__(*args, **kwargs)
        config: SweConfig = self.config
        if config.verification != "sealed":
            raise ConfigError("verification", "these tasks are verified sealed", next_step="leave it unset")
        if config.clone_url and "{repo}" not in config.clone_url:
            raise ConfigError("clone_url", f"got {config.clone_url!r}", next_step="allowed: a URL with {repo} in it")
        if config.dependencies is not None and not Path(config.dependencies).is_dir():
            raise ConfigError("dependencies", f"{config.dependencies} is not a directory", next_step="make it")
        chosen = Path(config.repositories) if config.repositories else cache_dir() / "swe"
        self._repositories = chosen.absolute()
        self._checkouts = Checkouts(self._repositories, config.clone_url, keep=config.keep_checkouts)
        self._runner: Path
        self._order: Iterator[str]
        self.records: dict[str, SweRecord] = {}

    async def setup(self) -> None:
        """Read the records and fetch their test runner, then set up like every environment.

        Raises: ConfigError naming a record and its field, or what the slots of a farm service lack; DownloadError, and
        what AgentEnv.setup raises.
        """
        self.records = {record.instance_id: record for record in await asyncio.to_thread(self._read)}
        self._order = itertools.cycle(self.records)
        self._runner = await asyncio.to_thread(fetch_runner)
        await self._checkouts.__aenter__()
        try:
            await super().setup()
            if self.config.tool_pool_mode == "farm":
                await expect_in_slots(self._opened().sessions, self._binds, self._slot_env)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close like every environment, and remove the checkouts."""
        try:
            await super().close()
        finally:
            await self._checkouts.__aexit__(None, None, None)

    def _read(self) -> tuple[SweRecord, ...]:
        config: SweConfig = self.config
        wanted = Wanted(
            tuple(config.only_repos),
            tuple(config.only_instances),
            tuple(config.only_versions),
            config.python_only,
            config.max_records,
        )
        rows = load_items(config.dataset_name, config.dataset_split)
        if unused := [name for name in NEED_IMAGES if any(row.get(name) for row in rows)]:
            logger.warning("%s of the records: not used without images; pytest runs their tests", ", ".join(unused))
        records = read_records(rows, wanted, config.patch_is)
        repositories.check(self._repositories, records, may_clone=bool(config.clone_url))
        return records

    def build_backend(self) -> ContainerBackend:
        """The configured backend; its slots see the test runner and the dependencies. On Nomad the nodes must have
        them under the same paths."""
        config: SweConfig = self.config
        settings = config.container_settings()
        shown = settings.model_copy(
            update={
                "binds": () if self._fake else (*settings.binds, *self._binds),
                "env": {**self._slot_env, **settings.env},
            }
        )
        return make_backend(
            config.tool_pool_mode, shown, nomad=config.nomad_settings(), start_timeout_s=config.start_timeout_s
        )

    async def get_next_item(self) -> dict[str, Any]:
        """The records, repeated endlessly."""
        return self.item_of(self.records[next(self._order)])

    def item_of(self, record: SweRecord) -> dict[str, Any]:
        """A record as the item in its transcripts; its patches are not included."""
        return record.item(version=record.version)

    def build_task(self, item: Any) -> str:
        """The task's text: the issue, and how tests are run, but not which tests."""
        record = self.records[item["instance_id"]]
        paths = [*SOURCE_ROOTS, *self._dependencies_of(record), "$PYTHONPATH"]
        return TASK.format(record=record, command=f"PYTHONPATH={':'.join(paths)} python3 -m pytest -q PATH")

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **_: Any) -> dict[str, Any]:
        """Upload the repository at the record's base commit."""
        record = self.records[item["instance_id"]]
        async with self._checkouts.of(record) as checkout:
            sent = await exec_tool.upload(checkout.workspace, ".")
        return {"repo": record.repo, "files": len(checkout.known), "bytes": sent.total_bytes}

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,  # noqa: ARG002 - what counts is what it did
        *,
        exec_tool: ToolContext,
        agent_result: AgentResult,
        **_: Any,
    ) -> tuple[float, dict[str, Any]]:
        """Run the record's tests over the policy's changes.

        Anything the policy did to its files leads to a verdict, not an error; only InfraError propagates.
        """
        record = self.records[item["instance_id"]]
        found = await self.run_tests(exec_tool, record)
        score = resolved(record, found.verdict) if self.config.reward == "resolved" else share(record, found.verdict)
        details = {name: value for name, value in found.details(record).items() if value not in ("", [])}
        return score, {**details, "model faults": agent_result.model_faults}

    async def run_tests(self, exec_tool: ToolContext, record: SweRecord) -> Found:
        """The outcome of the record's tests in this slot, run with pytest. Override it for another runner."""
        ground = Ground(self._seen_runner, self._dependencies_of(record), self.config.tests_timeout_s)
        async with self._checkouts.of(record) as checkout:
            return await tested(exec_tool, record, checkout, ground)

    @property
    def _fake(self) -> bool:
        """Whether commands run as plain processes on this machine, and see its own paths."""
        return bool(self.config.tool_pool_mode == "fake")

    @property
    def _binds(self) -> list[Bind]:
        """The test runner and the dependencies, in every slot."""
        binds = [Bind(str(self._runner), RUNNER)]
        if self.config.dependencies is not None:
            binds.append(Bind(str(Path(self.config.dependencies).resolve()), DEPENDENCIES))
        return binds

    @property
    def _slot_env(self) -> dict[str, str]:
        return {"PYTHONPATH": self._seen_runner, "PYTHONDONTWRITEBYTECODE": "1"}

    @property
    def _seen_runner(self) -> str:
        return str(self._runner) if self._fake else RUNNER

    def _dependencies_of(self, record: SweRecord) -> tuple[str, ...]:
        """The directory of the record's dependencies, as seen by its slot."""
        if self.config.dependencies is None:
            return ()
        there = Path(self.config.dependencies).resolve()
        flat = record.repo.replace("/", "__")
        for name in (f"{flat}/{record.version}", flat) if record.version else (flat,):
            if (there / name).is_dir():
                return (str(there / name) if self._fake else f"{DEPENDENCIES}/{name}",)
        return ()


if __name__ == "__main__":
    SweEnv.cli()

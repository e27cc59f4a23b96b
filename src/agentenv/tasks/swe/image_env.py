"""SweImageEnv: records with an image each, which has the repository and all that its tests need.

    python -m agentenv.tasks.swe.image_env process --env.dataset_name records.jsonl \\
        --openai.base_url URL --openai.model_name MODEL ...

See ``docs/swe.md``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from agentenv import AgentEnv, AgentEnvConfig, AgentResult, AgentSettings, ImageRoot, ToolContext
from agentenv.agent.datasets import load_items
from agentenv.env.farm_fields import Names
from agentenv.errors import ConfigError
from agentenv.tasks.swe.fresh_root import Beginning, begun, check_names, tried
from agentenv.tasks.swe.kinds import Options, normalised
from agentenv.tasks.swe.records import SweRecord, Wanted, is_wanted, read_records

logger = logging.getLogger(__name__)

TASK: Final = """\
[task:{record.instance_id}]
{record.workdir} holds the repository {record.repo} (one git commit: the state before the work). Resolve this issue:

<issue>
{record.problem_statement}
</issue>

Change the repository's sources, and only as much as needed. You may add tests, but they do not count: your work
is judged by other tests, on a machine as this one was at the beginning: only what git sees as a change below
{record.workdir} is taken there. There is no network. Say in one sentence what you changed when you are done."""
SYSTEM: Final = """\
You solve tasks on a Linux machine of your own by calling tools. You are root there, and commands start in {workdir}. \
Each bash call starts a new shell: files persist, variables and directory changes do not. Work step by step, verify \
your result by running it, and when the task is done answer without calling a tool."""


class SweImageConfig(AgentEnvConfig):
    """An environment's settings, and which records are played."""

    dataset_split: str = "test"
    image: str = Field(
        default="",
        description="Image of records that name none; {instance_id} in it is the record's, {image_id} as in "
        "the names of SWE-bench's images, {gym_id} as in those of SWE-Gym's",
    )
    run_scripts: Path | None = Field(
        default=None, description="Directory run_scripts of SWE-bench Pro's repository, for its records"
    )
    only_repos: Names = Field(default_factory=list, description="Records of these repositories")
    only_instances: Names = Field(default_factory=list, description="These records")
    only_versions: Names = Field(default_factory=list, description="Records of these versions")
    max_records: int | None = Field(default=None, ge=1, description="Use only this many of the remaining records")
    strict: bool = Field(
        default=False, description="Refuse to start when a record cannot be played, instead of leaving it out"
    )
    reward: Literal["resolved", "share"] = Field(
        default="resolved", description="resolved: 1 or 0; share: of FAIL_TO_PASS, 0 when PASS_TO_PASS breaks"
    )
    tests_timeout_s: float = Field(default=1800.0, ge=1, le=3000, description="Time limit of a record's tests")


class SweImageEnv(AgentEnv):
    """Resolve an issue of a real repository in its own image. 1 when all of FAIL_TO_PASS pass and none of PASS_TO_PASS
    breaks."""

    name = "swe-images"
    env_config_cls = SweImageConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises: ConfigError."""
        super().__init__(*args, **kwargs)
        if self.config.tool_pool_mode not in ("local", "nomad", "farm"):
            raise ConfigError(
                "tool_pool_mode", "these records have images of their own", next_step="allowed: local, nomad, farm"
            )
        self.refused: dict[str, ConfigError] = {}
        """Records that are left out, and why."""

    async def setup(self) -> None:
        """Read the records, then set up like every environment. Raises: ConfigError naming record and field, and what
        AgentEnv.setup raises."""
        self.records = {record.instance_id: record for record in await asyncio.to_thread(self._read)}
        self._order: Iterator[str] = itertools.cycle(self.records)
        await super().setup()

    def _read(self) -> tuple[SweRecord, ...]:
        config: SweImageConfig = self.config
        names = tuple(config.only_repos), tuple(config.only_instances), tuple(config.only_versions)
        wanted, options = Wanted(*names, limit=config.max_records), Options(config.run_scripts)
        rows = []
        for row in load_items(config.dataset_name, config.dataset_split):
            try:
                rows.append(self._with_image(normalised(row, options)))
            except ConfigError as error:
                if is_wanted(row, wanted):
                    self.refused[str(row.get("instance_id") or row.get("commit_hash"))] = error
        records = read_records(rows, wanted, check=_check, refused=self.refused)
        if self.refused and (config.strict or not records):
            raise next(iter(self.refused.values()))
        return records

    async def setup_agent_env(self) -> None:
        """Log which records are left out, and why."""
        self.list_refused()

    def list_refused(self) -> None:
        """Log which records are left out, and why."""
        for error in self.refused.values():
            logger.warning("left out: %s", error)

    def _with_image(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of a row that names none, that of the setting."""
        name = str(row.get("instance_id"))
        image_id = name.lower().replace("__", "_1776_")  # as SWE-bench calls its images
        of_setting = self.config.image.replace("{instance_id}", name).replace("{image_id}", image_id)
        of_setting = of_setting.replace("{gym_id}", name.lower().replace("__", "_s_"))
        return {**row, "image": row.get("image") or of_setting}

    async def get_next_item(self) -> dict[str, Any]:
        """The records, repeated endlessly."""
        return self.item_of(self.records[next(self._order)])

    def item_of(self, record: SweRecord) -> dict[str, Any]:
        """A record as the item in its transcripts; its patches are not included."""
        return record.item(image=record.image)

    def task_image(self, item: Any) -> ImageRoot:
        """The record's image."""
        record = self.records[item["instance_id"]]
        own = self.config.tool_pool_mode != "farm"  # whose slots have the farm's limits
        return ImageRoot(record.image, memory_mib=self.config.slot_memory_mib if own else None, workdir=record.workdir)

    def build_task(self, item: Any) -> str:
        """The task's text: the issue, but not which tests."""
        return TASK.format(record=self.records[item["instance_id"]])

    def build_agent_config(self, item: Any) -> AgentSettings:
        """As configured; the system prompt names the working directory."""
        settings = self.config.agent_settings()
        prompt = SYSTEM.format(workdir=self.records[item["instance_id"]].workdir)
        return replace(settings, system_prompt=prompt) if settings.system_prompt is None else settings

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **_: Any) -> dict[str, Any]:
        """Keep the files as they are, for the verifier."""
        return vars(await begun(exec_tool, self.records[item["instance_id"]]))

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,  # noqa: ARG002 - what counts is what it did
        *,
        exec_tool: ToolContext,
        agent_result: AgentResult,
        workspace_meta: dict[str, Any],
        **_: Any,
    ) -> tuple[float, dict[str, Any]]:
        """Run the record's tests over the policy's change, in the files the slot began with."""
        record = self.records[item["instance_id"]]
        config: SweImageConfig = self.config
        found = await tried(exec_tool, record, Beginning(**workspace_meta), config.tests_timeout_s)
        score = found.score(record, share=config.reward == "share")
        return score, {**found.details(record), "model faults": agent_result.model_faults}


def _check(record: SweRecord) -> None:
    """Raises ConfigError when a record cannot be played."""
    if not record.image:
        raise ConfigError(
            "image",
            f"record {record.instance_id} names none",
            next_step="set image, with {instance_id}, {image_id} or {gym_id} in it",
        )
    check_names(record)


if __name__ == "__main__":
    SweImageEnv.cli()

"""RepairEnv: a package with injected bugs in a slot; the package's own tests decide the score.

    python -m examples.repair.env process --openai.base_url URL --openai.model_name MODEL ...

The tasks are made once (minutes) and cached; see ``docs/repair.md``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agentenv import AgentEnv, AgentEnvConfig, AgentResult, ToolContext
from agentenv.env.farm import expect_in_slots
from agentenv.errors import ConfigError
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend
from agentenv.tasks.judging import packed
from agentenv.wire.spec import Bind
from examples.repair.packages import Catalogue, Package, fetch
from examples.repair.tasks import Task, injected, make_tasks
from examples.repair.verify import repaired_share, suite_in_slot

if TYPE_CHECKING:
    from agentenv.api.tool_server.core import ToolServer

logger = logging.getLogger(__name__)

RUNNER = "/opt/test-runner"
"""Path of the unpacked test runner in slots, read-only."""
SLOT_ENV = {"PYTHONPATH": RUNNER, "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment variables of every slot."""

TASK = """\
[task:{id}]
The workspace holds {package} {version}, a Python package, with {bugs} in it: {count} of its tests fail.
Find and fix the cause. Do not change the tests: they are restored before your work is judged. Only changes
to these files count: {files}.

Run tests with `python3 -m pytest -q {tests}` (python3 and pytest are installed, there is no network).
Say in one sentence what was wrong when you are done."""


class RepairConfig(AgentEnvConfig):
    """An environment's settings, and the choice of tasks."""

    verification: Literal["live", "sealed"] = "sealed"
    agent_max_steps: int = Field(default=30, ge=1)
    tool_server_url: str | None = Field(default="inprocess", description="External tools: a URL, or inprocess")
    task_seed: int = Field(default=1, description="Which bugs are injected: the same seed gives the same tasks")


class RepairEnv(AgentEnv):
    """Repair a real package. The score is the share of the broken tests that pass again, 0 if others break."""

    name = "repair"
    env_config_cls = RepairConfig

    def __init__(
        self, *args: Any, catalogue: Catalogue | None = None, tasks: Sequence[Task] | None = None, **kwargs: Any
    ) -> None:
        """``catalogue`` and ``tasks``: created by :meth:`setup` unless given. Raises: ConfigError."""
        super().__init__(*args, **kwargs)
        if self.config.tool_pool_mode == "fake":
            raise ConfigError(
                "tool_pool_mode",
                "the tests of these tasks need real slots",
                next_step="use tool_pool_mode='local' or 'nomad'",
            )
        if self.config.verification != "sealed":
            raise ConfigError("verification", "these tasks are verified sealed", next_step="leave it unset")
        self.catalogue = catalogue
        self.tasks = {task.id: task for task in tasks or ()}
        self._order = itertools.cycle(self.tasks)

    async def setup(self) -> None:
        """Fetch the packages and make the tasks unless they were given, then set up like every environment.

        Raises: DownloadError, SandboxUnavailableError and what AgentEnv.setup raises; ConfigError when the slots of a
        farm service lack the test runner.
        """
        if self.catalogue is None:
            self.catalogue = await asyncio.to_thread(fetch)
        if not self.tasks:
            logger.info("making tasks: minutes the first time, seconds from then on")
            made = await asyncio.to_thread(make_tasks, self.catalogue, seed=self.config.task_seed)
            self.tasks = {task.id: task for task in made}
            self._order = itertools.cycle(self.tasks)
        await super().setup()
        if self.config.tool_pool_mode == "farm":
            try:
                await expect_in_slots(self._opened().sessions, self.shown, SLOT_ENV)
            except BaseException:
                await self.close()
                raise

    @property
    def shown(self) -> tuple[Bind, ...]:
        """Directories of this machine that slots see, read-only: the test runner."""
        assert self.catalogue is not None, "setup() has fetched it"
        return (Bind(str(self.catalogue.runner), RUNNER),)

    def build_backend(self) -> ContainerBackend:
        """The configured backend; its slots see the test runner. On Nomad the nodes must have it under the same
        path, as in a cluster on this machine."""
        settings = self.config.container_settings()
        shown = settings.model_copy(
            update={"binds": (*settings.binds, *self.shown), "env": {**SLOT_ENV, **settings.env}}
        )
        nomad = self.config.nomad_settings()
        mode = self.config.tool_pool_mode
        return make_backend(mode, shown, nomad=nomad, start_timeout_s=self.config.start_timeout_s)

    def build_tool_server(self) -> ToolServer:
        """The task tracker's server with the tool ``bug_report``; or only the one ``tool_server_config`` describes."""
        from examples.repair.tracker import Tracker  # late, as its tool server: aiohttp, and what [farm] brings

        if self.config.tool_server_config is not None:
            return super().build_tool_server()
        return Tracker(self.tasks).tool_server()

    def item_of(self, task: Task) -> dict[str, Any]:
        """A task as the item in its record; the diff is what was injected, and is not shown to a model."""
        return {
            "id": task.id,
            "package": f"{task.package} {task.version}",
            "bugs": len(task.bugs),
            "broken tests": list(task.broken),
            "injected": task.diff,
        }

    async def get_next_item(self) -> dict[str, Any]:
        """The tasks, repeated endlessly."""
        return self.item_of(self.tasks[next(self._order)])

    def build_task(self, item: Any) -> str:
        """The task's text: how many tests fail and where to look, but not which."""
        task, package = self._task(item)
        tests = [argument for argument in package.tests if not argument.startswith("-")]
        return TASK.format(
            id=task.id,
            package=task.package,
            version=task.version,
            bugs="a bug" if len(task.bugs) == 1 else f"{len(task.bugs)} bugs",
            count=len(task.broken),
            files=", ".join(package.mutable),
            tests=tests[0] if len(tests) == 1 else "tests/test_NAME.py",
        )

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **_: Any) -> dict[str, Any]:
        """Upload the package with its bugs, as one archive."""
        task, package = self._task(item)
        files = injected(package, task.bugs)
        unpacked = await exec_tool.extract(await asyncio.to_thread(packed, files), ".")
        return {"package": f"{task.package} {task.version}", "files": len(unpacked.files)}

    async def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,  # noqa: ARG002 - what counts is what it did
        *,
        exec_tool: ToolContext,
        agent_result: AgentResult,
        **_: Any,
    ) -> tuple[float, dict[str, Any]]:
        """Judge the policy's version of the package's files, with everything else as released.

        Anything the policy did to its files leads to a verdict, not an error; only InfraError propagates.
        """
        task, package = self._task(item)
        found = await suite_in_slot(exec_tool, task, package, RUNNER)
        return repaired_share(task, found.verdict), {
            **found.details(task),
            "model faults": agent_result.model_faults,
        }

    def _task(self, item: Any) -> tuple[Task, Package]:
        assert self.catalogue is not None, "setup() has fetched it"
        task = self.tasks[item["id"]]
        return task, self.catalogue.by_name[task.package]


if __name__ == "__main__":
    RepairEnv.cli()

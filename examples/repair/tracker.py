"""The tracker: a service on loopback with user reports for each task, and the tool that queries it.

It answers only requests with its key. The tool server holds the key, so a policy sees reports and never the key;
slots have no network, so the tool works wherever they are.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Annotated, Any, Self

import aiohttp
from aiohttp import web
from pydantic import Field

from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.tool import ToolFailure, ToolRun, external_tool
from examples.repair.tasks import Task

MOST_TESTS = 5
CALLS_PER_TRAJECTORY = 20


def report(task: Task) -> dict[str, Any]:
    """The user report of a task: some of its failing tests, without their parameters. The same in every run."""
    failing = sorted({test.partition("[")[0] for test in task.broken})
    title = f"{task.package} {task.version}: wrong results since the last change"
    return {"task": task.id, "title": title, "failing": failing[:MOST_TESTS], "more": len(failing[MOST_TESTS:])}


class Tracker:
    """The service: ``GET /reports/TASK`` with its key. Open as long as the tool server is."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.key = secrets.token_urlsafe(24)
        self._tasks = tasks
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/reports/{task}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/reports/"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def ended(self, trajectory: str) -> None:
        """Does nothing: there is no state."""

    async def _answer(self, request: web.Request) -> web.Response:
        shown = request.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.key}".encode()):
            return web.json_response({"error": "wrong key"}, status=401)
        task = self._tasks.get(request.match_info["task"])
        if task is None:
            return web.json_response({"error": "nothing was reported of it"}, status=404)
        return web.json_response(report(task))

    async def bug_report(
        self,
        task: Annotated[
            str, Field(pattern=r"^[\w.-]{1,100}$", description="The task's id, as in the task's first line: [task:ID].")
        ],
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Look up the user reports of a task: the names of tests that fail for users."""
        headers = {"Authorization": f"Bearer {run.secrets['tracker_key']}"}
        async with aiohttp.ClientSession() as session, session.get(self._url + task, headers=headers) as answer:
            told: dict[str, Any] = await answer.json()
            if answer.status != 200:
                raise ToolFailure(f"{task}: {told['error']}", keep=answer.status == 404)
            return told

    def tool_server(self) -> ToolServer:
        """A tool server with this one tool; the key is its secret."""
        tool = external_tool(
            self.bug_report,
            timeout_s=10,
            per_trajectory=CALLS_PER_TRAJECTORY,
            secrets=("tracker_key",),
            repeatable=True,
        )
        return ToolServer([tool], secrets=Secrets({"tracker_key": self.key}), resources=[self])

"""The page over HTTP: what it is made of, and who may ask."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from agentenv.report.live import served
from tests.browser import synthetic
from tests.waiting import eventually


async def test_its_version_is_the_files(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    async with served(file, title="Mine") as url, aiohttp.ClientSession(url) as client:

        async def asked(path: str) -> tuple[int, str]:
            async with client.get(path) as reply:
                return reply.status, await reply.text()

        assert await asked("/version") == (200, "none")
        status, page = await asked("/")
        assert (status, "<title>Mine</title>" in page) == (200, True)
        file.write_text(synthetic.few()[0].model_dump_json() + "\n")

        async def shown() -> bool:
            return "boltons-g1" in (await asked("/"))[1]

        await eventually(shown)  # not at once: a page is not made again and again while a file grows
        _, version = await asked("/version")
        assert f'data-version="{version}"' in (await asked("/"))[1]
        file.write_text('{"no": "record"}\n')

        async def refused() -> bool:
            return (await asked("/"))[0] == 500

        await eventually(refused)


async def test_names_of_other_machines_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path / "r.jsonl", title="x") as url, aiohttp.ClientSession() as client:
        for host, status in (("rebound.example:80", 403), ("localhost:80", 200)):
            async with client.get(url, headers={"Host": host}) as reply:
                assert reply.status == status

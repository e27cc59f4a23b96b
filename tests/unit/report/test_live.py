"""The page over HTTP: what it is made of, and who may ask."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from agentenv.report.live import OnePage, RunsPages, page_of, served
from agentenv.report.overview import OverviewSettings
from agentenv.runs.records import Source, find
from tests import run_directories
from tests.browser import synthetic
from tests.run_directories import Played
from tests.waiting import eventually


async def test_its_version_is_the_files(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    async with served(OnePage(page_of(Source.file(file), "Mine"))) as url, aiohttp.ClientSession(url) as client:

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
        with file.open("a") as lines:
            lines.write('{"no": "record"}\n')

        async def left_out() -> bool:
            return "1 line of the records is not on this page" in (await asked("/"))[1]

        await eventually(left_out)
        file.write_text('{"tokens": [[1]], "masks": [[-100]], "scores": [1.0]}\n')

        async def refused() -> bool:
            return (await asked("/"))[0] == 500

        await eventually(refused)


async def test_names_of_other_machines_are_refused(tmp_path: Path) -> None:
    async with served(OnePage(page_of(Source.file(tmp_path / "r.jsonl")))) as url, aiohttp.ClientSession() as client:
        for host, status in (("rebound.example:80", 403), ("localhost:80", 200)):
            async with client.get(url, headers={"Host": host}) as reply:
                assert reply.status == status


async def test_runs_that_begin_and_go_on_are_on_the_page(tmp_path: Path) -> None:
    run_directories.write(tmp_path, first := Played("first", items=4), groups=2)
    pages = RunsPages(lambda: find(below=tmp_path), "Runs", OverviewSettings())
    async with served(pages) as url, aiohttp.ClientSession(url) as client:

        async def asked(path: str) -> tuple[int, str]:
            async with client.get(path) as reply:
                return reply.status, await reply.text()

        status, page = await asked("/")
        assert (status, "8 rollouts of 1 run at 2 tasks" in page) == (200, True)
        assert "data-groups" not in page
        status, page = await asked(f"/run/{next(tmp_path.iterdir()).name}/")
        assert (status, '"item":"boltons-001"' in page) == (200, True)
        assert (await asked("/run/second/"))[0] == 404
        run_directories.write(tmp_path, Played("second", began_unix_s=first.began_unix_s + 60, items=3))

        async def there() -> bool:
            return "20 rollouts of 2 runs at 3 tasks" in (await asked("/"))[1]

        await eventually(there)
        assert (await asked("/run/second-20260225-061420/version"))[0] == 200

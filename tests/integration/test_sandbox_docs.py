"""The examples of docs/sandbox.md and of the README do what they say, on real containers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from pathlib import Path

import pytest

from tests.small_image import small_image
from tests.waiting import START_S

ROOT = Path(__file__).resolve().parents[2]
ISOLATION = "full" if os.geteuid() == 0 else "user"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


async def output_of(example: str, directory: Path) -> str:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", example,
        cwd=directory, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "AGENTENV_STATE_DIR": str(directory / "state"), "AGENTENV_ISOLATION": ISOLATION},
    )  # fmt: skip
    stdout, _ = await asyncio.wait_for(child.communicate(), START_S)
    assert child.returncode == 0
    return stdout.decode()


async def test_one_sandbox(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/numbers").write_bytes(bytes(2_000_000))
    one, *_ = examples("docs/sandbox.md")
    listed = f"{hashlib.sha256(bytes(2_000_000)).hexdigest()} 2000000 numbers\n"
    expected = f"hello\n\nhello.py 1 print('bye')\nhi from /tmp\n\n2000000\n\n{listed}"
    assert await output_of(one, tmp_path) == expected
    assert (tmp_path / "back").read_bytes() == bytes(2_000_000)


async def test_output_as_it_comes(tmp_path: Path) -> None:
    shown = (await output_of(examples("docs/sandbox.md")[1], tmp_path)).splitlines()
    assert "stderr 'done\\n'" in shown
    steps = [line.removeprefix("stdout ") for line in shown if line.startswith("stdout")]
    assert "".join(step.strip("'") for step in steps) == "".join(f"step {n}\\n" for n in (1, 2, 3))


async def test_many_sandboxes(tmp_path: Path) -> None:
    many = examples("docs/sandbox.md")[2]
    assert "Farm(slots=50)" in many
    assert await output_of(many, tmp_path) == f"{sum(n * n for n in range(100))}\n"


async def test_one_farm_for_all_of_a_process(tmp_path: Path) -> None:
    assert await output_of(examples("docs/sandbox.md")[3], tmp_path) == "3 3\nfrom any thread\n\n"


async def test_the_pool_and_the_executor(tmp_path: Path) -> None:
    assert await output_of(examples("docs/sandbox.md")[4], tmp_path) == "0 42\n\n"


async def test_the_one_of_the_readme(tmp_path: Path) -> None:
    (shown,) = [example for example in examples("README.md") if "Sandbox" in example]
    assert await output_of(shown, tmp_path) == "42\n\n"


async def test_programs_and_servers(tmp_path: Path) -> None:
    expected = f"0 {b'ONE * IS ONE *' + bytes([255])!r}\nHTTP/1.0 200 OK\n137\n"
    assert await output_of(examples("docs/sandbox.md")[5], tmp_path) == expected


async def test_servers_without_asyncio(tmp_path: Path) -> None:
    assert await output_of(examples("docs/sandbox.md")[6], tmp_path) == "from the sandbox\nHTTP/1.0 200 OK\n"


async def test_what_programs_of_the_sandbox_reach(tmp_path: Path) -> None:
    assert await output_of(examples("docs/sandbox.md")[7], tmp_path) == '{"score": 6}\n'


async def test_streams(tmp_path: Path) -> None:
    expected = '3000015\nasked: {"size": 3000000} 0\n'
    assert await output_of(examples("docs/sandbox.md")[8], tmp_path) == expected


async def test_a_terminal_for_a_person(tmp_path: Path) -> None:
    shown = await output_of(examples("docs/sandbox.md")[9], tmp_path)
    assert re.fullmatch(r"look inside with: \S+ -P -m agentenv.cli shell --attach \S+\n", shown)


async def test_python_cells(tmp_path: Path) -> None:
    expected = "3 of [3, 1, 4, 1, 5]\nIndexError list index out of range\nTrue 5\n"
    assert await output_of(examples("docs/sandbox.md")[10], tmp_path) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")
async def test_images_checkpoints_and_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    small_image(tmp_path / "layout")
    expected = "app\n['prepared', '0']\n['prepared', '1']\n['prepared']\n"
    assert await output_of(examples("docs/sandbox.md")[11], tmp_path) == expected

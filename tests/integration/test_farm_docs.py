"""The curl examples of docs/farm.md do what they say, with curl and bash, on a farm of `agentenv farm serve`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from tests.farm_process import FarmProcess
from tests.waiting import START_S

PAGE = Path(__file__).resolve().parents[2] / "docs/farm.md"
EXAMPLE = re.compile(r"```bash\n(.*?)```\n\n```(json|text)\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, str, str]]:
    """Command, kind and text of what it is said to print."""
    _, _, section = PAGE.read_text().partition("\n## Without Python\n")
    section, _, _ = section.partition("\n## ")
    assert section.count("```bash") == len(EXAMPLE.findall(section)), "every command has its reply"
    return EXAMPLE.findall(section)


async def printed(command: str, environment: dict[str, str], directory: Path) -> str:
    child = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", command,
        cwd=directory, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, stderr = await asyncio.wait_for(child.communicate(), START_S)
    assert (child.returncode, stderr.decode()) == (0, ""), command
    return stdout.decode()


def shortened(reply: Any, shown: Any) -> Any:
    """The reply, as far as it is shown; lists may be longer than shown."""
    if isinstance(shown, dict) and isinstance(reply, dict):
        return {name: shortened(reply.get(name), value) for name, value in shown.items()}
    if isinstance(shown, list) and isinstance(reply, list):
        return [shortened(one, value) for one, value in zip(reply, shown, strict=False)]
    return reply


async def test_the_curl_examples_do_what_they_say(tmp_path: Path) -> None:
    farm = FarmProcess(tmp_path, f"[plain]\nacquire_timeout_s = {START_S}\n")
    try:
        await farm.start()
        environment = {**farm.environment, "FARM": farm.url, "TOKEN": await farm.token("exp7")}
        shown = examples()
        assert len(shown) >= 7
        for command, kind, text in shown:
            reply = await printed(command, environment, tmp_path)
            if kind == "text":
                assert reply == text
            else:
                assert shortened(json.loads(reply), json.loads(text)) == json.loads(text), reply
    finally:
        await farm.end()

"""The examples of docs/environments.md, run as they stand there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "environments.md"


async def test_the_documented_environment_and_its_test_work(tmp_path: Path) -> None:
    environment, _, usage = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "documented", "tmp_path": tmp_path}
    exec(compile(environment, "environment", "exec"), names)
    body = textwrap.indent(usage, "    ")
    exec(compile(f"async def documented_test():\n{body}\n    return group", "usage", "exec"), names)
    group = await names["documented_test"]()
    assert group["group_overrides"]["group_size"] == 2

"""The example of docs/files.md does what it says, on a real container."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ISOLATION = "full" if os.geteuid() == 0 else "user"


async def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/files.md").read_text(), re.DOTALL)
    opened = "Sandbox()"
    assert opened in example
    named = f"from agentenv import ContainerSettings\nhere = ContainerSettings(isolation={ISOLATION!r})\n" + example
    (tmp_path / "data").mkdir()
    (tmp_path / "data/numbers").write_bytes(bytes(2_000_000))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", named.replace(opened, "Sandbox(settings=here)"),
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "AGENTENV_STATE_DIR": str(tmp_path / "state")},
    )  # fmt: skip
    stdout, _ = await asyncio.wait_for(child.communicate(), timeout=90)
    assert child.returncode == 0
    listed = f"{hashlib.sha256(bytes(2_000_000)).hexdigest()} 2000000 numbers\n"
    assert stdout.decode() == f"hello\n\nhello.py 1 print('bye')\nhi from /tmp\n\n2000000\n\n{listed}"
    assert (tmp_path / "back").read_bytes() == bytes(2_000_000)

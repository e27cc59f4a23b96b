"""What tmux sessions showed is in the rollouts' records to its end, and comes out as docs/terminal.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.testing import Call, Reply
from tests.unit.env.env_stubs import IDLE, AnswerEnv, environment

DOCUMENT = Path(__file__).parents[2] / "docs" / "terminal.md"


def tmux(action: str, **more: Any) -> Call:
    return Call("tmux", {"action": action, **more})


LATE = [
    Reply("", (tmux("start", command="bash --norc"), tmux("start", session="other", record=False))),
    Reply("", (tmux("send_keys", text="echo ear''ly; until [ -e go ]; do sleep 0.02; done; echo la''te; >gone\n"),)),
    Reply("", (Call("bash", {"command": "touch go; until [ -e gone ]; do sleep 0.02; done"}),)),
    Reply("done"),
]
STOPPED = [
    Reply("", (tmux("start", command="echo brief; sleep 60"), tmux("wait", text="brief"), tmux("stop"))),
    Reply("done"),
]


def written(rollouts: Path, directory: Path) -> dict[str, list[Any]]:
    """The recordings as the documented function writes them, by file."""
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (example,) = [code for code in examples if ".cast" in code]
    names: dict[str, Any] = {}
    exec(compile(example, "documented", "exec"), names)
    directory.mkdir()
    names["write_recordings"](rollouts, directory)
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in directory.iterdir()}


@pytest.mark.parametrize("mode", ["fake", "local"])
async def test_a_recording_goes_on_after_the_models_last_look(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    script = {"*": [LATE, STOPPED, IDLE]}
    changed: dict[str, Any] = {"tool_pool_mode": mode, "group_size": 3, "max_containers": 1}
    async with environment(AnswerEnv, tmp_path, script, **changed) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
    found = written(tmp_path / "rollouts.jsonl", tmp_path / "casts")
    assert len(found) == 2, sorted(found)
    late, stopped = (next(cast for cast in found.values() if word in json.dumps(cast)) for word in ("early", "brief"))
    for header, *events in (late, stopped):
        assert (header["version"], header["width"], header["height"]) == (2, 120, 40)
        times = [at for at, _, _ in events]
        assert times == sorted(times)
    assert re.search(r"early.*late\r\n", "".join(text for _, kind, text in late[1:] if kind == "o"), re.DOTALL)

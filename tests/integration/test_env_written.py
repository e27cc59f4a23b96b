"""Whole rollouts: a file in the slot has the bytes that the policy wrote, or the policy was told that nothing ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.testing import Reply
from tests.unit.agent.raw_forms import BARE_FAMILIES, MARKS, raw_text
from tests.unit.env.env_stubs import AnswerEnv
from tests.unit.env.managed_stubs import managed

ALIKE = ["    x = 1\ny = 2\n", "\n", "null", "007\n", "<job>\n  <parameter>5</parameter>\n</job>\n", "ü🙂\r\n\t"]
"""Texts that every family's models can write."""


class KeptFiles(AnswerEnv):
    """Remembers the files of every slot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.files: dict[str, bytes] = {}

    async def verify_and_score_trajectory(
        self, item: Any, final_response: str, *, exec_tool: Any, **_: Any
    ) -> tuple[float, dict[str, Any]]:
        names = (await exec_tool.terminal("ls")).stdout.split()
        self.files |= {name: await exec_tool.read_file(name, binary=True) for name in names}
        return float(len(names)), {}


@pytest.mark.parametrize("family", ["hermes", *BARE_FAMILIES])
async def test_a_file_has_the_bytes_that_the_policy_wrote(tmp_path: Path, family: str) -> None:
    texts = {f"{number}.txt": text for number, text in enumerate([*ALIKE, *(f"a\n{m} b\n" for m in MARKS[family])])}
    players = [
        [Reply(raw_text(family, [("write_file", {"path": name, "text": text})])), Reply("done")]
        for name, text in texts.items()
    ]
    async with managed(KeptFiles, tmp_path, {"item-0": players}, parser=family, group_size=len(players)) as (env, _):
        await env.collect_trajectories(await env.get_next_item())
        written = env.files
    assert {name: data for name, data in written.items() if data != texts[name].encode()} == {}
    record = GroupRecord.model_validate_json((tmp_path / "rollouts.jsonl").read_text())
    results = [(each, each.steps[0].tool_calls[0].result) for each in record.trajectories]
    refused = [each for each, result in results if result is not None and result.fault == "model"]
    assert len(refused) + len(written) == len(texts)
    assert all("error: " in str(each.messages) for each in refused)
    assert {name for name, text in texts.items() if text in ALIKE or family == "hermes"} <= written.keys()

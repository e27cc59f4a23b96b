"""Runs the ported environments with policies that speak their harnesses' tools, on any backend."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv.agent.transcript import GroupRecord
from agentenv.tasks.pinned import fetch_runner
from agentenv.testing import Call, Player, Reply, ScriptedPolicy, Turn, build_tokenizer
from tests.porting.sandbox_terminal_smoke_env import COMMAND, SandboxTerminalSmokeEnv
from tests.porting.swe_smith_oracle_env import SweSmithOracleEnv
from tests.porting.terminal_test_env import TRAIN_TASKS, TerminalTestEnv
from tests.unit.tasks.swe_repos import SLUG_TESTS, SLUGS, git, write

RUNNER = "/opt/test-runner"
IDLE: Player = [Reply("Nothing to do.")]


async def play(kind: type[Any], players: Sequence[Player], directory: Path, changed: dict[str, Any]) -> GroupRecord:
    """One group of the environment's own configuration, but for ``changed``: its record, without a model's fault."""
    async with ScriptedPolicy({"*": list(players)}) as policy:
        config, servers = kind.config_init()
        given = config.model_dump(exclude_unset=True) | {
            "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
            "group_size": len(players),
            "send_trajectory_id": True,
            "rollouts_path": str(directory / "rollouts.jsonl"),
            "slots_per_container": 4,
            "max_containers": 1,
            **changed,
        }
        servers = [server.model_copy(update={"base_url": policy.base_url}) for server in servers]
        async with kind(type(config)(**given), servers) as env:
            await env.collect_trajectories(await env.get_next_item())
    record = GroupRecord.model_validate_json((directory / "rollouts.jsonl").read_text().splitlines()[-1])
    assert [member.model_faults for member in record.trajectories] == [0] * len(players), record.trajectories
    return record


def scores(record: GroupRecord) -> list[float | None]:
    return [member.score for member in record.trajectories]


def honest_file(turn: Turn) -> Reply:
    """Write what the task asks for, with the file tools' arguments of those harnesses."""
    task = next(task for task in TRAIN_TASKS if task["prompt"] in str(turn.messages))
    replies = [
        Reply(calls=(Call("write_file", {"path": task["path"], "content": task["expected"]}),)),
        Reply(calls=(Call("search", {"query": task["expected"][:1], "path": "."}),)),
    ]
    return replies[turn.step] if turn.step < len(replies) else Reply("Done.")


async def play_terminal_test(directory: Path, changed: dict[str, Any]) -> GroupRecord:
    nearly = Call("terminal", {"command": "echo Good morning, all > ~/greeting.txt", "timeout": 20})
    players: list[Player] = [honest_file, [Reply(calls=(nearly,)), Reply("Done.")], [Reply("Done.")]]
    return await play(TerminalTestEnv, players, directory, changed)


async def play_smoke(directory: Path, changed: dict[str, Any]) -> GroupRecord:
    call = Call("terminal_stateful", {"command": COMMAND, "timeout": 30})
    silent = Call("terminal", {"command": "true", "workdir": "/tmp"})

    def honest(turn: Turn) -> Reply:
        if turn.step < 3:
            return Reply(calls=((call, silent, silent)[turn.step],))
        return Reply(re.findall(r"^[0-9a-f]{32}$", str(turn.messages).replace("\\n", "\n"), re.MULTILINE)[0])

    players: list[Player] = [honest, [Reply(calls=(call,)), Reply("0" * 32)]]
    return await play(SandboxTerminalSmokeEnv, players, directory, {"accept_tool_aliases": True, **changed})


async def play_swe(directory: Path, changed: dict[str, Any]) -> GroupRecord:
    fix = "cd slugs && sed -i 's/text.lower().*/\"-\".join(text.lower().split())/' slugs.py"
    look = Call("terminal", {"command": "cd slugs && git status --short; cd ..", "timeout": 30})
    fixer = [Reply(calls=(look,)), Reply(calls=(Call("terminal", {"command": fix, "timeout": 60}),)), Reply("Fixed.")]
    changed = {
        "dataset_name": str(swe_rows(directory)),
        "sandbox_binds": [f"{directory / 'repositories'}:/repositories", f"{fetch_runner()}:{RUNNER}"],
        "sandbox_env": {"PYTHONPATH": f"{RUNNER}:."},
        "install_command": "true",
        **changed,
    }
    return await play(
        SweSmithOracleEnv, [fixer, [Reply(calls=(look,)), Reply("Looks fine.")], IDLE], directory, changed
    )


def swe_rows(directory: Path) -> Path:
    """A dataset of one row, whose tests are in the repository at its base commit; and the repository."""
    repository = directory / "repositories/acme/slugs.git"
    more = SLUG_TESTS + '\n\ndef test_spaces():\n    assert slug("a  b ") == "a-b"\n'
    write(repository, {"slugs.py": SLUGS, "tests/test_slugs.py": more})
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "base")
    row = {
        "instance_id": "acme__slugs-1",
        "repo": "acme/slugs",
        "base_commit": git(repository, "rev-parse", "HEAD").strip(),
        "problem_statement": "slug() makes two dashes of two spaces.",
        "PASS_TO_PASS": ["tests/test_slugs.py::test_lower", "tests/test_slugs.py::test_space"],
        "FAIL_TO_PASS": ["tests/test_slugs.py::test_spaces"],
    }
    (rows := directory / "rows").mkdir()
    (rows / "train.jsonl").write_text(json.dumps(row) + "\n")
    return rows

"""``python -m agentenv.tasks.harbor DIRECTORY``: checks tasks. Each is played by two scripted agents.

The oracle runs the task's own solution and must score 1; the empty agent changes nothing and must score 0.
Tasks that cannot be played are listed at the end. Exit code 1 when a task fails this check, 2 when a setting is
malformed or no task can be played; with --strict also when one cannot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.agent.transcript import GroupRecord
from agentenv.tasks.scripted import EXPECTED, Table, comma_separated, play, report

if TYPE_CHECKING:
    from agentenv.tasks.harbor.task import HarborTask


async def check(directory: Path, table: Table, **fields: object) -> list[GroupRecord]:
    """Play every task once with each of the table's agents. Raises: ConfigError and what the environment's setup
    raises."""
    from agentenv.tasks.harbor import players

    def records(env: players.CheckedEnv) -> Mapping[str, HarborTask]:
        table.refused = {name: str(error) for name, error in env.refused.items()}
        return env.tasks

    return await play(
        directory,
        players.CheckedEnv,
        {"group_size": len(table.names), "players": list(table.names), "tool_timeout_s": 3000.0, **fields},
        records,
        lambda task: [getattr(players, name)(task) for name in table.names],
        table,
    )


def main() -> int:
    """See the module."""
    options = _arguments()
    names = [options.agent] if options.agent else list(EXPECTED)
    fields = {
        "tasks": str(options.tasks),
        "only_tasks": options.only_tasks,
        "image": options.image,
        "image_from": options.image_from,
        "strict": options.strict,
        "host_env": options.host_env,
        "allow_network": options.network,
        "storage": options.storage,
        "max_cpus": options.max_cpus,
        "max_memory_mib": options.max_memory_mib,
        "verification": "sealed" if options.sealed else "live",
    }
    return report(names, lambda directory, table: check(directory, table, **fields), options.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.tasks.harbor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", type=Path, help="a task directory, or a directory of task directories")
    parser.add_argument("--agent", choices=tuple(EXPECTED), help="only this one plays; both by default")
    parser.add_argument("--only-tasks", type=comma_separated, default=[], help="names, separated by commas")
    parser.add_argument("--image", default="", help="in place of each task's own; {task} is the task's name")
    parser.add_argument(
        "--image-from",
        choices=("image", "dockerfile"),
        default="image",
        help="of a task that names an image and has a Dockerfile: which of them is used",
    )
    parser.add_argument(
        "--host-env", type=comma_separated, default=[], help="this machine's variables that tasks may name"
    )
    parser.add_argument("--network", action="store_true", help="give tasks the network they request")
    parser.add_argument("--strict", action="store_true", help="play nothing when one of the tasks is refused")
    parser.add_argument("--storage", choices=("auto", "memory", "disk"), default="auto", help="where slots write")
    parser.add_argument("--max-cpus", type=float, help="limit of CPU cores; a task that requests more gets this many")
    parser.add_argument("--max-memory-mib", type=int, help="limit of memory; a task that requests more gets this much")
    parser.add_argument("--sealed", action="store_true", help="the agent's processes are killed before the verifier")
    parser.add_argument("--out", type=Path, help="keep rollouts.jsonl here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""``python -m agentenv.tasks.swe DATASET``: checks records. Each is played by two scripted players.

The oracle applies the gold patch and must score 1; the empty player changes nothing and must score 0. Exit code 1
when a record fails this check, 2 when a setting is malformed or no record can be played; with --strict also when one
cannot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from agentenv.agent.transcript import GroupRecord
from agentenv.tasks import scripted
from agentenv.tasks.scripted import EXPECTED, Table, comma_separated, report
from agentenv.tasks.swe.records import SweRecord
from agentenv.testing import Call, Reply
from agentenv.testing.scripted_policy import MEMBER_MARK

if TYPE_CHECKING:
    from agentenv import AgentEnv, ToolContext


SOLUTION: Final = ".agentenv-solution.patch"
"""Where the oracle of a check finds its record's patch, in its working directory: through its calls a large one would
be made of tokens."""


def oracle(record: SweRecord, *, uploaded: bool = False) -> list[Reply]:
    """Applies the gold patch, or takes the bug back: must score 1. ``uploaded``: the patch is in ``SOLUTION``."""
    apply = f"git apply{' --reverse' if record.patch_is == 'bug' else ''} --whitespace=nowarn --unidiff-zero"
    # --unidiff-zero: a hunk may lack the lines around it, which the patch tool does not need either
    if uploaded:
        call = Call("bash", {"command": f"{apply} {SOLUTION} && rm {SOLUTION}"})
    elif record.patch_is == "bug":
        call = Call("bash", {"command": f"{apply} -", "stdin": record.patch})
    else:
        call = Call("patch", {"patch": record.patch})
    return [
        Reply("I apply the known solution.", (call,)),
        Reply("Done: this is the solution the repository got."),
    ]


def empty(_record: SweRecord) -> list[Reply]:
    """Changes nothing: must score 0."""
    return [
        Reply("I look around.", (Call("bash", {"command": "git log --oneline | head -3; ls"}),)),
        Reply("I leave it as it is."),
    ]


PLAYERS: Final[Mapping[str, Callable[[SweRecord], list[Reply]]]] = {
    "oracle": partial(oracle, uploaded=True),
    "empty": empty,
}
"""Their scores say nothing about any model: they show that records and scoring are sound."""


_OF_IMAGES: Final = ("only_repos", "only_instances", "max_records", "image", "run_scripts", "strict")
"""Options that are settings of records with images."""


async def play(directory: Path, table: Table, **fields: Any) -> list[GroupRecord]:
    """Play every record once with each of the table's players. Raises: ConfigError and what SweEnv.setup raises."""
    from agentenv.tasks.swe.env import SweEnv

    return await _played(SweEnv, directory, table, fields)


async def play_on_images(directory: Path, table: Table, **fields: Any) -> list[GroupRecord]:
    """As :func:`play`, with records that have images. Raises: ConfigError and what SweImageEnv.setup raises."""
    from agentenv.tasks.swe.image_env import SweImageEnv

    return await _played(SweImageEnv, directory, table, {"tool_timeout_s": 300.0, **fields})


async def _played(
    kind: type[AgentEnv[Any]], directory: Path, table: Table, fields: Mapping[str, Any]
) -> list[GroupRecord]:
    def records(env: Any) -> Mapping[str, SweRecord]:
        table.refused = {name: str(error) for name, error in getattr(env, "refused", {}).items()}
        return cast("Mapping[str, SweRecord]", env.records)

    return await scripted.play(
        directory,
        _with_solutions(kind, table.names),
        {"group_size": len(table.names), **fields},
        records,
        lambda record: [PLAYERS[name](record) for name in table.names],
        table,
    )


def _with_solutions(kind: type[Any], players: Sequence[str]) -> type[AgentEnv[Any]]:
    """The environment, which gives the oracle's slot its record's patch before it begins. No one else has it."""

    class Checked(kind):  # type: ignore[misc]
        def list_refused(self) -> None:
            """The table of the check has them."""

        async def setup_trajectory_workspace(
            self, item: Any, *, exec_tool: ToolContext, **named: Any
        ) -> dict[str, Any]:
            workspace: dict[str, Any] = await super().setup_trajectory_workspace(item, exec_tool=exec_tool, **named)
            member = MEMBER_MARK.search(named["trajectory_id"])
            if member and players[int(member[1])] == "oracle":
                patch = self.records[item["instance_id"]].patch
                await exec_tool.write_file(SOLUTION, patch.encode("utf-8", "surrogateescape"))
            return workspace

    return Checked


def main() -> int:
    """See the module."""
    options = _arguments()
    names = [name for name in EXPECTED if getattr(options, name)] or list(EXPECTED)
    playing = partial(play_on_images, **_of_images(options)) if options.images else partial(play, **_settings(options))
    return report(names, playing, options.out, resume=options.resume)


def _of_images(options: argparse.Namespace) -> dict[str, Any]:
    chosen = {name: getattr(options, name) for name in _OF_IMAGES}
    return {"dataset_name": options.dataset, "dataset_split": options.split, "slot_memory_mib": 3072, **chosen}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "dataset_name": options.dataset,
        "dataset_split": options.split,
        "repositories": str(options.repositories) if options.repositories else None,
        "clone_url": options.clone_url,
        "only_repos": options.only_repos,
        "only_instances": options.only_instances,
        "python_only": options.python_only,
        "max_records": options.max_records,
        "patch_is": options.patch_is,
        "dependencies": options.dependencies,
        "tool_pool_mode": "fake" if options.fake else "local",
        "isolation": options.isolation,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.tasks.swe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", help="a .jsonl file of records, or a dataset's name")
    parser.add_argument("--split", default="test")
    parser.add_argument("--images", action="store_true", help="each record has an image, which has its repository")
    parser.add_argument(
        "--image", default="", help="of records without one, with {instance_id}, {image_id} or {gym_id} in it"
    )
    parser.add_argument("--run-scripts", type=Path, help="directory run_scripts of SWE-bench Pro's repository")
    parser.add_argument("--strict", action="store_true", help="play nothing when one of the records is refused")
    parser.add_argument("--repositories", type=Path, help="local git repositories: owner/name[.git]")
    parser.add_argument("--clone-url", default="", help="clone missing ones from here, with {repo} in it")
    parser.add_argument("--oracle", action="store_true", help="only the oracle plays")
    parser.add_argument("--empty", action="store_true", help="only the empty player plays")
    parser.add_argument("--only-repos", type=comma_separated, default=[], help="separated by commas")
    parser.add_argument("--only-instances", type=comma_separated, default=[], help="separated by commas")
    parser.add_argument("--python-only", action="store_true", help="only records with pytest ids")
    parser.add_argument("--max-records", type=int)
    parser.add_argument("--patch-is", choices=("fix", "bug"), default="fix", help="bug: as in SWE-smith")
    parser.add_argument("--dependencies", help="directory of the repositories' dependencies")
    parser.add_argument("--fake", action="store_true", help="no sandbox at all: only for code you trust")
    parser.add_argument("--isolation", choices=("auto", "full", "user"), default="auto")
    parser.add_argument("--out", type=Path, help="keep rollouts.jsonl here")
    parser.add_argument("--resume", action="store_true", help="go on with the check in --out, and play the rest")
    options = parser.parse_args()
    if options.resume and options.out is None:
        parser.error("--resume needs the directory of the check that was interrupted: --out DIRECTORY")
    return options


if __name__ == "__main__":
    sys.exit(main())

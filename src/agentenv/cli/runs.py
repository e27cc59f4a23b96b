"""``agentenv runs list | show | resume | compare | view | rm``: runs of ``process``, ``evaluate`` and ``serve``."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv.cli.options import JsonOption, group
from agentenv.cli.output import err, escape, out, print_json, verb
from agentenv.cli.runs_compare import compare
from agentenv.cli.view import view_runs
from agentenv.durations import duration
from agentenv.errors import ConfigError
from agentenv.runs import LAST, ROOT

if TYPE_CHECKING:
    from agentenv.runs.directory import FoundRun
    from agentenv.runs.manifest import RunManifest
    from agentenv.runs.recorded import Recorded

runs = group("Runs of environments: list and show them, resume one, compare several, see them on one page.")
runs.command()(compare)
runs.command("view")(view_runs)

RootOption = Annotated[
    Path, typer.Option("--runs-dir", "-d", metavar="DIR", help="Where runs are: --env.runs_dir of their commands.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help=f"Its name or id, or a beginning of one; its directory; or {LAST}.")
]
_COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow", "killed": "yellow"}
_RESUMABLE = ("failed", "interrupted", "killed")


@runs.command("list")
@verb
def list_runs(runs_dir: RootOption = Path(ROOT), as_json: JsonOption = False) -> None:
    """List the runs, the newest last: state, groups, mean score and faults.

    A run whose state is killed ended without a word (kill -9, a reboot, a full disk): its figures are counted from its
    records. Failed, interrupted and killed ones can be resumed.

    \b
    Examples:
      agentenv runs list
      agentenv runs list --json | jq -r '.[] | select(.state == "killed") | .name'
    """
    from rich.table import Table

    from agentenv.runs.directory import runs_in

    found = list(runs_in(runs_dir))
    if as_json:
        print_json([_row(run) for run in found])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "began", "command", "model", "state", "groups", "mean", "faults"):
        table.add_column(heading, no_wrap=heading != "faults", overflow="fold")
    for row in map(_row, found):
        goal = "" if row["goal"] is None else f"/{row['goal']}"
        mean = "–" if row["mean"] is None else f"{row['mean']:.3f}"
        faults = ", ".join(f"{count} {fault}" for fault, count in row["faults"].items())
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["began_unix_s"]))
        state = f"[{_COLOURS[row['state']]}]{row['state']}[/]"
        table.add_row(
            escape(row["name"]), began, row["verb"], escape(row["model"] or "?"), state,
            f"{row['groups']}{goal}", mean, escape(faults or "none"),
        )  # fmt: skip
    if found:
        out().print(table)
    err().print(f"{len(found)} run{'' if len(found) == 1 else 's'} in {runs_dir}/", highlight=False)


def _row(run: FoundRun) -> dict[str, Any]:
    from agentenv.runs.recorded import recorded

    manifest, results = run.manifest, recorded(run).results
    return {
        "name": run.name,
        "id": manifest.id,
        "directory": str(run.path),
        "began_unix_s": manifest.began_unix_s,
        "verb": manifest.verb,
        "model": manifest.model,
        "state": run.state,
        "groups": results.get("groups", 0),
        "goal": manifest.goal_groups,
        "mean": results.get("mean"),
        "faults": results.get("faults", {}),
    }


@runs.command()
@verb
def show(name: RunArgument, runs_dir: RootOption = Path(ROOT), as_json: JsonOption = False) -> None:
    """Show one run: what it is, its results so far, its errors, its tokens, its files, and what to do next.

    \b
    Examples:
      agentenv runs show last
      agentenv runs show hello-2026 --json
    """
    from agentenv.runs.directory import run_named
    from agentenv.runs.recorded import open_rollouts, recorded

    run = run_named(runs_dir, name)
    found, waiting = recorded(run), open_rollouts(run)
    if as_json:
        here = {"state": run.state, "run_directory": str(run.path.resolve()), "open_rollouts": waiting}
        print_json(run.manifest.model_dump(mode="json") | {"results": found.results} | here)
        return
    own = run.manifest.verb == "evaluate" and not run.manifest.resumable
    notes = [("note", found.note)] if found.note else []
    for heading, text in [
        *_facts(run, found, waiting),
        *_results(found.results, own=own),
        *notes,
        *_files_and_next(run),
    ]:
        out().print(f"{heading:<9}{escape(text)}", soft_wrap=True, highlight=False)


def _facts(run: FoundRun, found: Recorded, waiting: int) -> list[tuple[str, str]]:
    from agentenv.agent.results import counted

    manifest = run.manifest
    goal = "" if manifest.goal_groups is None else f" of {manifest.goal_groups}"
    more = f"; {counted(waiting, 'rollout')} of others" if waiting else ""
    resumed = f", resumed {len(manifest.resumed_unix_s)} ×" if manifest.resumed_unix_s else ""
    took = duration(manifest.ended_unix_s - manifest.began_unix_s) if manifest.ended_unix_s else ""
    ended = f", ended after {took}" if took and not manifest.resumed_unix_s else ""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.began_unix_s))
    return [
        ("run", f"{run.name} (id {manifest.id})"),
        ("command", f"{manifest.verb} of {manifest.name}, model {manifest.model or '?'}"),
        ("state", _state(run, found)),
        ("began", f"{began}{ended}{resumed}"),
        ("groups", f"{found.results.get('groups', 0)}{goal}, {counted(manifest.group_size, 'rollout')} each{more}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]


def _state(run: FoundRun, found: Recorded) -> str:
    if run.state == "failed" and run.manifest.error:
        return f"failed: {run.manifest.error}"
    if run.state != "killed":
        return run.state
    heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.heard_unix_s)) if found.heard_unix_s else ""
    last = f", last heard of at {heard}" if heard else ""
    return f"killed: it ended without a word{last}"


def _results(results: dict[str, Any], *, own: bool) -> list[tuple[str, str]]:
    from agentenv.agent.program_totals import program_rows
    from agentenv.agent.results import scored_text

    if not results:
        return []
    rows = [("scored", scored_text(results["scored"], results["rollouts"], own=own))]
    rows += [("returned", f"{name} {value:g}") for name, value in (results.get("returned") or {}).items()]
    if results.get("mean") is not None:
        stderr = results.get("stderr")
        rows.append(("mean", f"{results['mean']:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")))
    if estimates := results.get("pass_at"):
        rows.append(("pass@k", ", ".join(f"pass@{k} {estimate:.3f}" for k, estimate in estimates.items())))
    rows += program_rows(results)
    rows.append(("faults", ", ".join(f"{count} {fault}" for fault, count in results["faults"].items()) or "none"))
    errors = results.get("errors", [])
    rows += [("" if number else "errors", f"{each['count']} × {each['text']}") for number, each in enumerate(errors)]
    rows += [(each["what"], each["text"]) for each in results.get("missing", [])]
    tokens = results.get("tokens") or {}
    if tokens:
        rows.append(("tokens", ", ".join(f"{count:,} {kind}" for kind, count in tokens.items())))
    return rows


def _files_and_next(run: FoundRun) -> list[tuple[str, str]]:
    from agentenv.runs.manifest import LOG, ROLLOUTS

    here = [path.name for path in sorted(run.path.iterdir()) if path.name != "lock"]
    rows = [("files", f"{run.path}: {', '.join(here)}")]
    rows += [("", f"{name}: {where}") for name, where in run.manifest.files.items()]
    records = run.manifest.files.get("records", str(run.path / ROLLOUTS))
    name = shlex.quote(run.name if run.path.parent == Path(ROOT) else str(run.path))
    following = [f"agentenv runs resume {name}"] if run.state in _RESUMABLE and run.manifest.resumable else []
    if Path(records).exists():
        following.append(f"agentenv {'view' if run.state == 'running' else 'report'} {shlex.quote(records)}")
    if (run.path / LOG).exists() and (run.path / LOG).stat().st_size:
        following.append(f"less {shlex.quote(str(run.path / LOG))}")
    return rows + [("" if number else "next", command) for number, command in enumerate(following)]


@runs.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@verb
def resume(context: typer.Context, name: RunArgument, runs_dir: RootOption = Path(ROOT)) -> None:
    """Go on with a run that was interrupted, killed, or failed: play what is missing, and nothing twice.

    The same command is run in the same directory with the same settings. Rollouts that infrastructure has failed are
    played again; those with a score, or without one by the task's or the policy's doing, are not. Further flags are
    passed on: secrets, which are not kept (--openai.api_key KEY; or OPENAI_API_KEY), or --openai.base_url of a model
    server that has moved.

    \b
    Examples:
      agentenv runs resume last
      agentenv runs resume hello-20261128-180043 --openai.api_key KEY
    """
    from agentenv.runs.directory import run_named

    run = run_named(runs_dir, name)
    manifest = run.manifest
    if run.is_running:
        raise ConfigError("RUN", f"{run.name} is running", next_step="stop it first")
    if manifest.verb == "serve":
        raise ConfigError(
            "RUN",
            f"{run.name} fed a trainer, and what that has not fetched is gone with it",
            next_step="start serve again",
        )
    if not manifest.resumable:
        raise ConfigError("RUN", f"{run.name} is an evaluate() of one's own: nothing says what it has done")
    if not Path(manifest.directory).is_dir():
        raise ConfigError("RUN", f"its working directory {manifest.directory} is gone")
    words = _words_again(manifest, context.args)
    if not os.access(words[0], os.X_OK):
        raise ConfigError("RUN", f"its interpreter {words[0]} is gone", next_step="make that environment again")
    path = run.path.resolve()
    os.chdir(manifest.directory)
    os.execv(words[0], [*words, "--resume", str(path)])  # noqa: S606 - the run's own command


def _words_again(manifest: RunManifest, further: Sequence[str]) -> list[str]:
    """The words of a run's command, with further ones. Raises: ConfigError when a secret is missing."""
    flags = {word.partition("=")[0] for word in further if word.startswith("--")}
    words, rest = list[str](), list(manifest.command)
    while rest:
        words.append(word := rest.pop(0))
        if word.partition("=")[0] in flags:  # given anew
            words.pop()
            if "=" not in word and rest and not rest[0].startswith("--"):
                rest.pop(0)
    words += further
    for flag in manifest.omitted:
        if flag in flags:
            continue
        if flag != "--openai.api_key" or not (key := os.environ.get("OPENAI_API_KEY")):
            other = " (or set OPENAI_API_KEY)" if flag == "--openai.api_key" else ""
            raise ConfigError(
                flag, "was given with the command, and is not kept", next_step=f"give it again: {flag} …{other}"
            )
        words += [flag, key]
    return words


@runs.command()
@verb
def rm(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names, ids or directories of runs.")],
    runs_dir: RootOption = Path(ROOT),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs with everything in their directories. One that is running is refused."""
    from agentenv.runs.directory import run_named

    found = [run_named(runs_dir, name) for name in names]
    for run in found:
        if run.is_running:
            raise ConfigError("RUN", f"{run.name} is running", next_step="stop it first")
    listed = ", ".join(run.name for run in found)
    if not yes and not typer.confirm(f"Remove {listed}?", err=True):
        raise typer.Exit(1)
    for run in found:
        shutil.rmtree(run.path)
    err().print(escape(f"removed {listed}"), soft_wrap=True)

"""``agentenv runs compare``: the figures of runs beside each other, and what differs between them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import err, escape, out, print_json, print_problems, verb
from agentenv.durations import duration
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.runs.compare import Comparison, Figures, Prices
    from agentenv.runs.records import Run, Source
    from agentenv.runs.statistics import Interval

MOST_ITEMS = 5
"""Items of a difference that are named."""
RunsDirOption = Annotated[
    Path, typer.Option("--runs-dir", "-d", metavar="DIR", help="Where runs are: --env.runs_dir of their commands.")
]
SuccessOption = Annotated[
    float, typer.Option("--success", metavar="SCORE", help="The score from which on an attempt counts in pass@k.")
]
PriceInOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price-in",
        metavar="[MODEL=]PRICE",
        envvar="AGENTENV_PRICE_IN",
        help="Price of a million prompt tokens, of one model or of all others; repeatable.",
    ),
]
PriceOutOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price-out",
        metavar="[MODEL=]PRICE",
        envvar="AGENTENV_PRICE_OUT",
        help="Price of a million completion tokens, likewise.",
    ),
]


@verb
def compare(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Directories or names of runs, or files of rollouts; the first is the base."
        ),
    ],
    runs_dir: RunsDirOption = Path("runs"),
    success: SuccessOption = 1.0,
    price_in: PriceInOption = None,
    price_out: PriceOutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: mean scores, pass@k, faults, tokens and time, and how the others differ from the first.

    Errors are clustered by item, pass@k is the unbiased estimate, intervals are of 95 %. Differences are paired: taken
    item by item, over the items with a score in both runs, so that it does not count how hard the items are. What else
    differs (settings, items, attempts) is said.

    \\b
    Examples:
      agentenv runs compare repair-small repair-large
      agentenv runs compare runs/a-20260301-101500 runs/b-20260302-090000 --json
      agentenv runs compare small large --price-in small-1=0.2 --price-in 2.5 --price-out small-1=0.8 --price-out 10
    """
    from agentenv.runs.compare import compare as compared
    from agentenv.runs.compare import document, summary_of

    prices = prices_of(price_in, price_out)
    runs = loaded(given, runs_dir)
    if len(runs) < 2:
        raise ConfigError(
            "RUN", f"only {runs[0].label} was found" if runs else "no run was found", next_step="name two"
        )
    summaries = [summary_of(run, success=success, prices=prices) for run in runs]
    pairs = [compared(summaries[0], other) for other in summaries[1:]]
    problems = [problem for run in runs for problem in run.problems]
    if as_json:
        rows = [document(summary.figures) for summary in summaries]
        print_json({"runs": rows, "differences": [document(pair) for pair in pairs], "left_out": problems})
        return
    _print_table([summary.figures for summary in summaries])
    for pair in pairs:
        _print_difference(pair, len(pairs) > 1)
    print_problems(problems)


def loaded(given: list[str], below: Path) -> list[Run]:
    """The runs that are meant. Raises: ConfigError: there is none of a name, or a file has no records."""
    from agentenv.runs.records import find

    return [run for source in find(*given, below=below) for run in read_source(source)]


def read_source(source: Source) -> list[Run]:
    """Its runs. Raises: ConfigError: the file has no records of rollouts, or cannot be read."""
    from agentenv.runs.manifest import ROLLOUTS
    from agentenv.runs.records import RecordError, read

    beside = source.path.parent / ROLLOUTS
    hint = f"give {beside}" if beside.is_file() and beside != source.path else "give the file of --env.rollouts_path"
    try:
        runs = read(source)
    except RecordError as error:
        raise ConfigError("RUN", str(error), next_step=hint) from error
    except OSError as error:
        raise ConfigError("RUN", str(error)) from error
    if not source.is_directory and not any(run.groups for run in runs) and any(run.problems for run in runs):
        raise ConfigError("RUN", runs[0].problems[0], next_step=hint)
    return runs


def prices_of(price_in: list[str] | None, price_out: list[str] | None) -> Prices:
    """Of the two options. Raises: ConfigError."""
    from agentenv.runs.compare import Prices

    return Prices(_by_model("--price-in", price_in or []), _by_model("--price-out", price_out or []))


def _by_model(option: str, given: list[str]) -> dict[str, float]:
    found = {}
    for text in given:
        model, _, price = text.rpartition("=")
        try:
            found[model] = float(price)
        except ValueError:
            raise ConfigError(option, f"got {text!r}", next_step="write a number, or MODEL=NUMBER") from None
    return found


def _print_table(found: list[Figures]) -> None:
    from rich.table import Table

    from agentenv.agent.results import counted

    ks = sorted({estimate.k for figures in found for estimate in figures.pass_at_k})
    has_programs = any(figures.programs for figures in found)
    has_cost = any(figures.cost is not None for figures in found)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ["run", "model", "state", "scored", "mean ± se", *(f"pass@{k}" for k in ks), "faults", "tokens in, out"]
    names[3:3] = ["agent", "failed"] * has_programs
    for name in [*names, *(["cost"] if has_cost else []), "a rollout", "in all"]:
        table.add_column(name, overflow="fold")
    for one in found:
        passes = {estimate.k: estimate for estimate in one.pass_at_k}
        tokens = [_thousands(count) for count in (one.prompt_tokens, one.completion_tokens)]
        table.add_row(
            escape(one.run), escape(one.model), one.state, *map(escape, program_texts(one) * has_programs),
            f"{one.scored} of {one.rollouts}", mean_text(one),
            *(f"{passes[k].value:.3f} {interval_text(passes[k].interval)}" if k in passes else "–" for k in ks),
            ", ".join(f"{count} {fault}" for fault, count in one.faults.items()) or "none", ", ".join(tokens),
            *(["–" if one.cost is None else f"{one.cost:,.2f}"] if has_cost else []),
            duration(one.rollout_s), duration(one.took_s),
        )  # fmt: skip
    out().print(table)
    for one in found:
        for estimate in one.pass_at_k:
            if (fewer := one.items - estimate.items) > 0:
                said = f"{one.run}: pass@{estimate.k} is without {counted(fewer, 'item')} of fewer scored attempts"
                err().print(f"[yellow]note[/] {escape(said)}", soft_wrap=True)


def program_texts(figures: Figures) -> list[str]:
    """The agent programs that played, and how many of their rollouts ended with another exit code than 0."""
    failed = sum(counted["failed"] for counted in figures.programs.values())
    return [", ".join(figures.programs) or "built-in", str(failed) if figures.programs else "–"]


def mean_text(figures: Figures) -> str:
    """``0.612 ± 0.034``."""
    if figures.mean is None:
        return "–"
    error = "" if figures.standard_error is None else f" ± {figures.standard_error:.3f}"
    return f"{figures.mean:.3f}{error}"


def interval_text(interval: Interval | None) -> str:
    """``[0.512, 0.701]``; empty without one."""
    return "" if interval is None else f"[{interval.low:.3f}, {interval.high:.3f}]"


def _thousands(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _print_difference(pair: Comparison, is_one_of_many: bool) -> None:
    console = out()
    found = pair.difference
    between = f"{pair.second} minus {pair.first}"
    if found is None:
        console.print(escape(f"\n{between}: no item has a score in both"), soft_wrap=True)
    else:
        same = found.items - len(found.better) - len(found.worse)
        interval = escape(interval_text(found.interval)) or "(no interval: nothing varies)"
        console.print(
            f"\n{escape(between)}: [bold]{found.value:+.3f}[/] {interval} over {found.items} items: "
            f"{len(found.better)} better, {len(found.worse)} worse, {same} equal",
            soft_wrap=True,
        )
        for name, items in (("better", found.better), ("worse", found.worse)):
            if items:
                more = f" and {len(items) - MOST_ITEMS} more" if len(items) > MOST_ITEMS else ""
                console.print(escape(f"  {name:6}  {', '.join(items[:MOST_ITEMS])}{more}"), soft_wrap=True)
    about = f"{pair.second}: " if is_one_of_many else ""
    for note in pair.notes:
        err().print(f"[yellow]note[/] {escape(about + note)}", soft_wrap=True)

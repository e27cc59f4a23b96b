"""Writes the report page: a template with style and script, and the records as inert data."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from agentenv import shipped
from agentenv.agent.transcript import GroupRecord
from agentenv.report.overview import OverviewSettings, RunView, lede, overview, run_view
from agentenv.report.shaping import group_row, text_cap, trajectory_body
from agentenv.report.summary import score_axis, summarise
from agentenv.runs.records import Run, runs_of

HERE = Path(__file__).parent
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""Characters that could begin or end markup inside a data block; in JSON they occur only inside strings."""


def write_report(
    records: Iterable[GroupRecord],
    path: Path,
    *,
    title: str,
    run: Mapping[str, object] | None = None,
    problems: Sequence[str] = (),
) -> Path:
    """Write the page for these groups to ``path`` (atomically) and return it.

    ``run``: facts about the run for the head of the page, by name, in place of those in the records of a single run;
    groups of several runs are listed by run. A true ``run["scripted"]`` adds a banner saying
    that no model was involved; a string there is the banner's second sentence. ``problems``: lines of the records that
    are not among them. The page is self-contained: it works from a file, without a network. Long outputs are cut in
    the middle on the page, with a note; text from the records never becomes markup or script.

    Raises: OSError: the page cannot be written; an older one is left unchanged.
    """
    return _written(path, render(records, title=title, run=run, problems=problems))


def write_overview(runs: Sequence[Run], path: Path, *, title: str, settings: OverviewSettings | None = None) -> Path:
    """Write one page about these runs, with every rollout, to ``path`` (atomically) and return it; it is as that of
    :func:`write_report`. Raises: OSError."""
    settings = settings or OverviewSettings()
    views = [run_view(run, settings) for run in runs]
    return _written(path, render_overview(views, title=title, settings=settings, runs=runs))


def _written(path: Path, page: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(page)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path


def title_of(runs: Sequence[Run], path: Path) -> str:
    """What a page about these runs is called: environment, model and date of one run, otherwise the file's name."""
    if len(runs) != 1 or (began := runs[0].began_unix_s) is None:
        return path.name
    return " · ".join(filter(None, [runs[0].name, runs[0].model, time.strftime("%Y-%m-%d", time.localtime(began))]))


def embed(value: Any) -> Markup:
    """``value`` as JSON that is safe inside a ``<script type="application/json">``: plain ASCII, no ``<``."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)
    for character, escape in UNSAFE.items():
        text = text.replace(character, escape)
    return Markup(text)  # noqa: S704 - nothing that could be markup is left in it


def render(
    records: Iterable[GroupRecord],
    *,
    title: str,
    run: Mapping[str, object] | None = None,
    version: str = "",
    problems: Sequence[str] = (),
) -> Iterator[str]:
    """The page in parts; see :func:`write_report`. With a ``version`` it requests ``version`` from its server every few
    seconds, and loads itself again when the answer is another."""
    groups = list(records)
    runs = runs_of(groups)
    facts = dict(run or (runs[0].facts() if len(runs) == 1 else {}))
    content = _of_groups(groups, [(each.id, each.id) for each in runs for _ in each.groups] if len(runs) > 1 else [])
    if tokens := content["summary"]["tokens"]:
        facts["Tokens"] = "{:,} in, {:,} out".format(*tokens)
    content |= {"run": facts, "scripted": facts.pop("scripted", None), "problems": problems}
    return _generated(["scores", "page", "live"], title=title, version=version, **content)


def render_overview(
    views: Sequence[RunView], *, title: str, settings: OverviewSettings, version: str = "", runs: Sequence[Run] = ()
) -> Iterator[str]:
    """The page about many runs in parts. With ``runs``, which have their records, every rollout is on it as well;
    without, it links to a page of each run."""
    content: dict[str, Any] = {"axis": embed(score_axis([s for view in views for s in view.scores])), "summary": None}
    if runs:
        groups = [group for run in runs for group in run.groups]
        content = _of_groups(groups, [(run.key, run.label) for run in runs for _ in run.groups])
    data = overview(views, settings, inside=bool(runs))
    content["overview"] = {"data": embed(data), "lede": lede(views), "success": settings.success}
    content["problems"] = [problem for view in views for problem in view.summary.run.problems]
    scripts = ["scores", "overview", *(["page"] if runs else []), "live"]
    return _generated(scripts, title=title, version=version, **content)


def _of_groups(groups: Sequence[GroupRecord], runs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What the page has of these groups; ``runs``: key and name of each one's run, if there are several."""
    cap = text_cap(groups)
    rows, first = [], 0
    for number, group in enumerate(groups):
        rows.append(group_row(group, first, cap))
        if runs:
            rows[-1]["run"], rows[-1]["runName"] = runs[number]
        first += len(group.trajectories)
    summary = summarise(groups)
    return {
        "summary": summary,
        "axis": embed(summary["axis"]),
        "run_names": dict(runs),
        "groups": embed(rows),
        "bodies": (embed(trajectory_body(t, cap)) for group in groups for t in group.trajectories),
    }


def _generated(scripts: Sequence[str], **content: Any) -> Iterator[str]:
    empty: dict[str, Any] = {
        "overview": None,
        "run": {},
        "scripted": None,
        "bodies": (),
        "run_names": {},
        "problems": (),
        "groups": "",
    }
    style, script = (
        shipped.path(f"page/base.{kind}").read_text()
        + "".join(path.read_text() for part in parts if (path := HERE / f"{part}.{kind}").exists())
        for kind, parts in (("css", dict.fromkeys(["page", *scripts])), ("js", scripts))
    )
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").generate(
        **(empty | content),
        style=Markup(style),  # noqa: S704 - our own files
        script=Markup(script),  # noqa: S704
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
    )


def _csp_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

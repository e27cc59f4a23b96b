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
from agentenv.report.shaping import group_row, text_cap, trajectory_body
from agentenv.report.summary import summarise
from agentenv.runs.records import Run, runs_of

HERE = Path(__file__).parent
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""Characters that could begin or end markup inside a data block; in JSON they occur only inside strings."""


def write_report(
    records: Iterable[GroupRecord], path: Path, *, title: str, run: Mapping[str, object] | None = None
) -> Path:
    """Write the page for these groups to ``path`` (atomically) and return it.

    ``run``: facts about the run for the head of the page, by name, in place of those in the records of a single run;
    groups of several runs are listed by run. A true ``run["scripted"]`` adds a banner saying
    that no model was involved; a string there is the banner's second sentence. The page is self-contained: it works
    from a file, without a network. Long outputs are cut in the middle on the page, with a note; text from the
    records never becomes markup or script.

    Raises: OSError: the page cannot be written; an older one is left unchanged.
    """
    page = render(records, title=title, run=run)
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
    records: Iterable[GroupRecord], *, title: str, run: Mapping[str, object] | None = None, version: str = ""
) -> Iterator[str]:
    """The page in parts; see :func:`write_report`. With a ``version`` it requests ``version`` from its server every few
    seconds, and loads itself again when the answer is another."""
    groups = list(records)
    runs = runs_of(groups)
    run = dict(run or (runs[0].facts() if len(runs) == 1 else {}))
    summary = summarise(groups)
    if summary["tokens"]:
        run["Tokens"] = "{:,} in, {:,} out".format(*summary["tokens"])
    cap = text_cap(groups)
    bodies = (trajectory_body(t, cap) for group in groups for t in group.trajectories)
    rows, first = [], 0
    for group in groups:
        rows.append(group_row(group, first, cap))
        if len(runs) > 1:
            rows[-1]["run"] = group.run.id if group.run else ""
        first += len(group.trajectories)
    style, script = (
        shipped.path(f"page/base.{kind}").read_text() + (HERE / f"page.{kind}").read_text() for kind in ("css", "js")
    )
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").generate(
        title=title,
        version=version,
        scripted=run.pop("scripted", None),
        run=run,
        summary=summary,
        groups=embed({"axis": summary["axis"], "groups": rows}),
        bodies=map(embed, bodies),
        style=Markup(style),  # noqa: S704 - our own files
        script=Markup(script),  # noqa: S704
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
    )


def _csp_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

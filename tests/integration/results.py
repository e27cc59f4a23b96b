"""The table that checks of records and tasks print."""

from __future__ import annotations

import re


def rows(table: str) -> list[str]:
    """Its rows below the heading, with one blank between columns and S for the seconds."""
    return [re.sub(r" \d+\.\d( |$)", r" S\1", " ".join(line.split())) for line in table.splitlines()[1:]]

"""Scripted players. They show that records and scoring are sound; their scores say nothing about any model."""

from __future__ import annotations

from agentenv.testing import Call, Reply
from examples.swe.records import SweRecord


def oracle(record: SweRecord) -> list[Reply]:
    """Applies the gold patch, or takes the bug back: must score 1."""
    call = Call("patch", {"patch": record.patch})
    if record.patch_is == "bug":
        call = Call("bash", {"command": "git apply --reverse --whitespace=nowarn -", "stdin": record.patch})
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

"""What is shown of a build while it runs: a line for each step, and the output of its commands."""

from __future__ import annotations

from types import TracebackType

from agentenv.builder.build import Listeners, StepEvent
from agentenv.cli.output import err, escape

_COLOURS = {"done": "green", "cached": "cyan", "failed": "red"}


class Shown:
    """A context manager whose value are the listeners of a build. ``quiet``: nothing is shown; without ``cached`` no
    step that need not run is."""

    def __init__(self, *, quiet: bool, cached: bool = True) -> None:
        self._quiet = quiet
        self._cached = cached

    def __enter__(self) -> Listeners:
        return Listeners() if self._quiet else Listeners(on_step=self._on_step, on_output=_output)

    def _on_step(self, event: StepEvent) -> None:
        if self._cached or event.state != "cached":
            _step(event)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _step(event: StepEvent) -> None:
    text = event.place.text.splitlines()[0] if event.place.text else event.place.keyword
    if event.state == "started":
        err().print(f"[bold]{event.number}/{event.total}[/] {escape(text)}", soft_wrap=True)
    else:
        colour, took = _COLOURS[event.state], f" {event.seconds:.1f} s" if event.state != "cached" else ""
        shown = f" {escape(text)}" if event.state == "cached" else ""
        err().print(f"[{colour}]{event.number}/{event.total} {event.state}[/]{took}{shown}", soft_wrap=True)


def _output(output: bytes) -> None:
    err().print(output.decode("utf-8", "replace"), end="", markup=False, highlight=False, soft_wrap=True)

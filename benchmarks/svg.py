"""Line charts as SVG text: enough for the plots of the docs, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 44, 30
STYLE = "text{font:11px system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}.grid{stroke:#e4e4e4}"


@dataclass(frozen=True)
class Line:
    """``stepped``: a value holds until the next. ``filled``: the area below is shaded."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    stepped: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart; both axes begin at 0."""

    title: str
    subtitle: str
    x_label: str
    lines: Sequence[Line]


def page(panels: Sequence[Panel], columns: int = 2) -> str:
    """All panels in a grid, one legend above (every panel has the same lines)."""
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        _legend(panels[0].lines),
    ]
    for number, panel in enumerate(panels):
        x, y = number % columns * WIDTH, number // columns * HEIGHT + 30
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _legend(lines: Sequence[Line]) -> str:
    parts, x = [], LEFT
    for line in lines:
        parts.append(f'<rect x="{x}" y="12" width="18" height="8" fill="{line.colour}"/>')
        parts.append(f'<text x="{x + 24}" y="20">{escape(line.name)}</text>')
        x += 60 + 7 * len(line.name)
    return "".join(parts)


def _panel(panel: Panel) -> str:
    right = max(x for line in panel.lines for x, _ in line.points)
    top = _round_up(max(y for line in panel.lines for _, y in line.points))
    across, down = (WIDTH - LEFT - RIGHT) / (right or 1), (HEIGHT - TOP - BOTTOM) / (top or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x * across, HEIGHT - BOTTOM - y * down

    parts = [
        f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>',
        f'<text x="{LEFT}" y="34">{escape(panel.subtitle)}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        _, y = place(0, top * share)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * share:,.0f}</text>')
        x, _ = place(right * share, 0)
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        label = f"{right * share:g}" + (f" {panel.x_label}" if share == 1.0 else "")
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="{anchor}">{escape(label)}</text>')
    parts += [_path(line, [place(x, y) for x, y in line.points]) for line in panel.lines]
    return "".join(parts)


def _path(line: Line, points: Sequence[tuple[float, float]]) -> str:
    x, y = points[0]
    steps = [f"M{x:.1f} {y:.1f}"]
    for x, y in points[1:]:
        steps.append(f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}")
    shape = "".join(steps)
    drawn = f'<path d="{shape}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>'
    if not line.filled:
        return drawn
    floor = HEIGHT - BOTTOM
    area = f"{shape}L{x:.1f} {floor}L{points[0][0]:.1f} {floor}Z"
    return f'<path d="{area}" fill="{line.colour}" fill-opacity="0.25"/>{drawn}'


def _round_up(value: float) -> float:
    """The next number that makes a good end of an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(value))) - 1)
    return next(power * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if power * step >= value)

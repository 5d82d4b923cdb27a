"""Charts as inline SVG, from nothing but numbers: strips with boxes, points with spread, bars.

A chart is a text that an HTML page can hold as it is. Sizes are in pixels of a 720 px wide drawing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 120, 24, 16, 52
INK, GRID, REFERENCE = "#334155", "#e2e8f0", "#94a3b8"


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values between the ends, six at most besides zero."""
        step = round_step((self.high - self.low) / 6)
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, int(self.high / step + 1e-9) + 1)]


def round_step(wanted: float) -> float:
    """The smallest of 1, 2, 5, 10 times a power of ten that is not below `wanted`."""
    power: float = 10.0 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))


def strips(
    rows: Mapping[str, Sequence[float]],
    axis: str,
    colors: Mapping[str, str],
    reference: float | None = None,
) -> str:
    """A row for each name: a point for each value, a box over its quartiles, a line at its mean."""
    band = 54
    height = TOP + band * len(rows) + BOTTOM
    values = [value for row in rows.values() for value in row]
    scale = Scale(0.0, max(values) * 1.05 or 1.0, LEFT, WIDTH - RIGHT)
    parts = _x_axis(scale, axis, height) + _reference_x(scale, reference, height)
    for index, (name, row) in enumerate(rows.items()):
        middle = TOP + band * (index + 0.5)
        color = colors[name]
        parts.append(_text(LEFT - 10, middle + 4, name, "end"))
        low, high = quartiles(row)
        parts.append(
            f'<rect x="{scale(low):.1f}" y="{middle - 16:.1f}" height="32" rx="3" '
            f'width="{max(scale(high) - scale(low), 1):.1f}" fill="{color}" fill-opacity=".22"/>'
        )
        for number, value in enumerate(row):
            # Spread out by the golden ratio, which never puts neighbours at one height.
            offset = (number * 0.618) % 1 * 28 - 14
            parts.append(_dot(scale(value), middle + offset, 2.5, color, 0.7))
        mean = statistics.mean(row)
        parts.append(_line(scale(mean), middle - 20, scale(mean), middle + 20, color, 2.5))
        parts.append(_text(scale(mean) + 5, middle - 19, f"{mean:.2f}", "start", 11))
    return _svg(height, parts, axis)


def spread(points: Mapping[str, Sequence[float]], x_axis: str, y_axis: str, color: str) -> str:
    """For each name, evenly spaced: the mean of its values, and a bar over their quartiles."""
    height = 320
    values = [value for point in points.values() for value in (*quartiles(point), _mean(point))]
    scale = Scale(0.0, max(*values, 1.0) * 1.15, height - BOTTOM, TOP)
    parts = _y_axis(scale, y_axis) + _reference_y(scale, 1.0)
    step = (WIDTH - LEFT - RIGHT) / len(points)
    centers = [LEFT + step * (index + 0.5) for index in range(len(points))]
    tops = [scale(_mean(point)) for point in points.values()]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(centers, tops, strict=True))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
    for x, (name, point) in zip(centers, points.items(), strict=True):
        low, high = (scale(value) for value in quartiles(point))
        parts.append(_line(x, low, x, high, color, 2))
        parts += [_line(x - 7, end, x + 7, end, color, 2) for end in (low, high)]
        parts.append(_dot(x, scale(_mean(point)), 5, color, 1))
        parts.append(_text(x + 12, scale(_mean(point)) - 8, f"{_mean(point):.2f}", "start"))
        parts.append(_text(x, height - BOTTOM + 18, name, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 10, x_axis, "middle"))
    return _svg(height, parts, y_axis)


def bars(
    series: Mapping[str, Mapping[str, float]], y_axis: str, x_axis: str, colors: Mapping[str, str]
) -> str:
    """A cluster for each group, with a bar for each series that has it: series[name][group]."""
    height = 340
    groups = list(dict.fromkeys(group for values in series.values() for group in values))
    highest = max(value for values in series.values() for value in values.values())
    top = TOP + 24
    scale = Scale(0.0, max(highest, 1.0) * 1.1, height - BOTTOM, top)
    parts = _y_axis(scale, y_axis) + _legend(list(series), colors)
    cluster = (WIDTH - LEFT - RIGHT) / len(groups)
    width = min(cluster * 0.8 / len(series), 48)
    for index, group in enumerate(groups):
        center = LEFT + cluster * (index + 0.5)
        parts.append(_text(center, height - BOTTOM + 18, group, "middle", 11))
        for position, (name, values) in enumerate(series.items()):
            if group in values:
                x = center + width * (position - len(series) / 2)
                parts += _bar(x, width, scale, values[group], colors[name])
    parts += _reference_y(scale, 1.0)
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 10, x_axis, "middle"))
    return _svg(height, parts, y_axis)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile; the value itself if there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _x_axis(scale: Scale, label: str, height: float) -> list[str]:
    bottom = height - BOTTOM
    parts = []
    for tick in scale.ticks:
        parts.append(_line(scale(tick), TOP, scale(tick), bottom, GRID, 1))
        parts.append(_text(scale(tick), bottom + 18, f"{tick:g}", "middle", 11))
    return [*parts, _text((scale.start + scale.end) / 2, height - 10, label, "middle")]


def _y_axis(scale: Scale, label: str) -> list[str]:
    parts = []
    for tick in scale.ticks:
        parts.append(_line(LEFT, scale(tick), WIDTH - RIGHT, scale(tick), GRID, 1))
        parts.append(_text(LEFT - 8, scale(tick) + 4, f"{tick:g}", "end", 11))
    middle = (scale.start + scale.end) / 2
    turned = f'transform="rotate(-90 {LEFT - 56} {middle:.1f})"'
    return [*parts, _text(LEFT - 56, middle, label, "middle", extra=turned)]


def _reference_x(scale: Scale, value: float | None, height: float) -> list[str]:
    if value is None or not scale.low <= value <= scale.high:
        return []
    return [_line(scale(value), TOP, scale(value), height - BOTTOM, REFERENCE, 1.5, dashed=True)]


def _reference_y(scale: Scale, value: float) -> list[str]:
    return [_line(LEFT, scale(value), WIDTH - RIGHT, scale(value), REFERENCE, 1.5, dashed=True)]


def _legend(names: Sequence[str], colors: Mapping[str, str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = LEFT + index * 110
        parts.append(f'<rect x="{x}" y="{TOP - 10}" width="12" height="12" fill="{colors[name]}"/>')
        parts.append(_text(x + 18, TOP, name, "start"))
    return parts


def _bar(x: float, width: float, scale: Scale, value: float, color: str) -> list[str]:
    y = scale(value)
    return [
        f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" '
        f'height="{scale.start - y:.1f}" fill="{color}"/>',
        _text(x + width / 2, y - 4, f"{value:.2f}", "middle", 10),
    ]


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float, *, dashed: bool = False
) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}" stroke-width="{width:g}"{dashes}/>'
    )


def _dot(x: float, y: float, radius: float, color: str, opacity: float) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{color}" '
        f'fill-opacity="{opacity:g}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, size: float = 12, *, extra: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" '
        f'fill="{INK}" {extra}>{escape(text)}</text>'
    )

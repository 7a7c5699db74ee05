"""Small plots as SVG inside HTML: lines, dots, bars and stacked areas over the last minutes.

Colours are classes of the style sheet, so that plots follow the theme at once; each has a sentence for readers who do not
see it. Knows nothing of what is plotted. Called by `ui/status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 520, 120
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points (0 to 1 from the window's start to now, value) with a name and a colour class."""

    name: str
    points: Sequence[Point]
    colour: str = "accent"


def plot_html(
    title: str, now: str, series: Sequence[Series], *, kind: Literal["line", "dots", "bars", "stacked"], top: float,
    top_label: str, span: str, empty: str,
) -> str:  # fmt: skip
    """One plot.

    Args:
        title: what is plotted.
        now: the latest value in words; with `title` it is the plot's text for screen readers.
        series: drawn one upon the other.
        kind: how.
        top: the value at the upper edge, above 0.
        top_label: that value in words.
        span: what the left edge is, such as “3 min ago”.
        empty: what to say where there is not a single point.
    """
    has_points = any(each.points for each in series)
    marks = "".join(_marks(each, lower, kind, top) for each, lower in zip(series, _lower(series, kind), strict=True))
    legend = ""
    if series and (len(series) > 1 or kind == "stacked"):
        names = "".join(f"<li><span class='mark {each.colour}'></span>{escape(each.name)}</li>" for each in series)
        legend = f"<ul class='legend'>{names}</ul>"
    note = "" if has_points else f"<p class='quiet'>{escape(empty)}</p>"
    return (
        f"<figure class='plot'><figcaption>{escape(title)} <strong>{escape(now)}</strong></figcaption>"
        f"<span class='axis'>{escape(top_label)}</span>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio='none' role='img' "
        f"aria-label='{escape(title)}: {escape(now)}'>{marks}</svg>"
        f"<div class='axis ends' aria-hidden='true'><span>{escape(span)}</span></div>{legend}{note}</figure>"
    )


def _lower(series: Sequence[Series], kind: str) -> list[list[float]]:
    """What each point stands on: the sum of the series below it where they are stacked, which share their places."""
    sums: list[list[float]] = []
    for index, each in enumerate(series):
        if kind != "stacked" or index == 0:
            sums.append([0.0] * len(each.points))
        else:
            below = series[index - 1].points
            sums.append([floor + value for floor, (_, value) in zip(sums[-1], below, strict=True)])
    return sums


def _marks(series: Series, lower: Sequence[float], kind: str, top: float) -> str:
    places = [
        (_x(at), _y(floor + value, top), _y(floor, top))
        for (at, value), floor in zip(series.points, lower, strict=True)
    ]
    if kind == "dots":
        return "".join(f"<circle class='{series.colour}' cx='{x}' cy='{y}' r='3.5'/>" for x, y, _ in places)
    if kind == "bars":
        return "".join(
            f"<rect class='{series.colour}' x='{x - 2:.1f}' y='{y}' width='4' height='{floor - y:.1f}'/>"
            for x, y, floor in places
            if floor > y
        )
    if len(places) < 2:
        return ""
    upper = " ".join(f"{x},{y}" for x, y, _ in places)
    if kind == "line":
        return f"<polyline class='{series.colour}' points='{upper}'/>"
    floor = " ".join(f"{x},{y}" for x, _, y in reversed(places))
    return f"<polygon class='{series.colour}' points='{upper} {floor}'/>"


def _x(share: float) -> float:
    return round(WIDTH * min(max(share, 0.0), 1.0), 1)


def _y(value: float, top: float) -> float:
    return round(HEIGHT * (1 - min(max(value / top, 0.0), 1.0)), 1)


def round_up(value: float) -> float:
    """A round number at or above a value: 1, 2 or 5 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1 ** (_leading_zeros(value) + 1)
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def _leading_zeros(value: float) -> int:
    zeros = 0
    while value < 0.1:
        value *= 10
        zeros += 1
    return zeros

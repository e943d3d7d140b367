"""Line charts as inline SVG, on an x axis that is divided into the stages of a run. Pure functions of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from agentrl_jax.report.markup import empty, tag

WIDTH, HEIGHT = 520, 226
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 14, 38
NOTHING = "\N{EN DASH}"  # stands for a number that was not measured
_LAST_STAGE_SHARE = 0.68  # of the width; the stages before it are context


@dataclass(frozen=True)
class Point:
    stage: str
    step: float
    y: float
    low: float | None = None  # confidence interval, where one is known
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    style: str  # CSS class: s1 (training), s2 (held out), s3 (validation)
    dots: bool = False  # marks each point, for few and precious measurements
    smooth: bool = False  # draws the raw values faintly and their moving average on top


@dataclass(frozen=True)
class _Axis:
    """Where a (stage, step) stands: each stage has a span of pixels and a range of steps."""

    stages: dict[str, tuple[float, float, float, float]]  # stage -> (pixel from, to, first step, last step)

    def x(self, point: Point) -> float:
        left, right, first, last = self.stages[point.stage]
        return (left + right) / 2 if last == first else left + (right - left) * (point.step - first) / (last - first)


def line_chart(series: Sequence[Series], *, kind: str = "number", top: float | None = None, label: str = "") -> str:
    """An SVG of the series over the stages they have points in. `kind`: "percent" or "number".

    `top` fixes the upper end of the y axis (1.0 for shares). The points are repeated as JSON in `data-points`, which
    the page's script reads for its crosshair.
    """
    series = [s for s in series if s.points]
    if not series:
        return empty("Nothing was recorded for this curve.")
    axis = _axis([p for s in series for p in s.points])
    low, high, ticks = _range(
        [v for s in series for p in s.points for v in (p.y, p.high) if v is not None], top, series
    )
    scale = _Scale(low, high)
    body = [_grid(ticks, scale, kind), _stage_bands(axis)]
    for item in series:
        body.append(_draw(item, axis, scale))
    points = [
        [
            round(axis.x(p), 1),
            round(scale.y(p.y), 1),
            s.name,
            s.style,
            p.stage,
            p.step,
            show(p.y, kind),
            _interval(p, kind),
        ]
        for s in series
        for p in s.points
    ]
    data = json.dumps(points, separators=(",", ":"))
    hover = '<g class="hover"><line class="cross"/></g>'
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *body, hover, css="chart", viewBox=size, role="img", aria_label=label, data_points=data)


def legend(series: Sequence[Series]) -> str:
    keys = (f'<span class="key {s.style}">{escape(s.name)}</span>' for s in series if s.points)
    return f'<div class="legend">{"".join(keys)}</div>'


def sparkline(values: Sequence[float]) -> str:
    """A small curve without axes, its last value marked."""
    width, height, pad = 132, 30, 3
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = (width - 2 * pad) / max(1, len(values) - 1)
    flat = high == low
    places = [
        (pad + i * step, height / 2 if flat else height - pad - (v - low) / span * (height - 2 * pad))
        for i, v in enumerate(values)
    ]
    last = places[-1]
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true"><path class="line" d="{_path(places)}"/>'
        f'<circle cx="{last[0]:.1f}" cy="{last[1]:.1f}" r="2.2"/></svg>'
    )


def between(low: float, high: float, kind: str = "percent") -> str:
    """An interval in words."""
    return f"{show(low, kind)} {NOTHING} {show(high, kind)}"


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share measured on `count` independent episodes (Wilson, 1927)."""
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(max(0.0, share * (1 - share)) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def smoothed(values: Sequence[float]) -> list[float]:
    """A centred moving average, narrower at the ends, over about a twelfth of the curve."""
    half = max(1, len(values) // 24)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(w) / len(w) for w in windows]


def show(value: float | None, kind: str = "number") -> str:
    """A number for people: percents with one decimal where it matters, three figures otherwise."""
    if value is None:
        return NOTHING
    if kind == "percent":
        return f"{100 * value:.1f} %" if 0 < abs(value) < 0.9995 else f"{100 * value:.0f} %"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{value:.1e}"


class _Scale:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.span = low, (high - low) or 1.0

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, (value - self.low) / self.span))
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _axis(points: Sequence[Point]) -> _Axis:
    ranges: dict[str, list[float]] = {}
    for p in points:
        ranges.setdefault(p.stage, []).append(p.step)
    names, width = list(ranges), WIDTH - LEFT - RIGHT
    gap = 12 if len(names) > 1 else 0
    room = width - gap * (len(names) - 1)
    shares = [1.0] if len(names) == 1 else [(1 - _LAST_STAGE_SHARE) / (len(names) - 1)] * (len(names) - 1)
    if len(names) > 1:
        shares.append(_LAST_STAGE_SHARE)
    stages, left = {}, float(LEFT)
    for name, share in zip(names, shares, strict=True):
        steps = ranges[name]
        stages[name] = (left, left + share * room, min(steps), max(steps))
        left += share * room + gap
    return _Axis(stages)


def _range(values: list[float], top: float | None, series: Sequence[Series]) -> tuple[float, float, list[float]]:
    low = min(0.0, min(p.y for s in series for p in s.points))
    high = top if top is not None else max(0.0, *values)
    if high - low < 1e-9:  # all zero: an axis of unit length says so
        high = 1.0
    step = _nice((high - low) / 4)
    low = math.floor(low / step) * step
    high = high if top is not None else math.ceil(high / step) * step
    count = round((high - low) / step)
    return low, high, [low + i * step for i in range(count + 1) if low + i * step <= high + 1e-9]


def _nice(raw: float) -> float:
    unit = 10 ** math.floor(math.log10(raw))
    return next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)


def _grid(ticks: Sequence[float], scale: _Scale, kind: str) -> str:
    parts = []
    for tick in ticks:
        y = scale.y(tick)
        text = f"{100 * tick:g} %" if kind == "percent" else f"{round(tick, 10):g}"
        base = " base" if abs(tick) < 1e-12 else ""
        parts.append(f'<line class="grid{base}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _stage_bands(axis: _Axis) -> str:
    parts, bottom, many = [], HEIGHT - BOTTOM, len(axis.stages) > 1
    for index, (name, (left, right, first, last)) in enumerate(axis.stages.items()):
        if many and index < len(axis.stages) - 1:
            box = {
                "x": f"{left - 6:.1f}",
                "y": TOP - 6,
                "width": f"{right - left + 12:.1f}",
                "height": bottom - TOP + 6,
            }
            parts.append(tag("rect", css="band", rx=3, **box))
        ends = [(first, "middle", left)] if first == last else [(first, "start", left), (last, "end", right)]
        for step, anchor, x in ends:
            x = (left + right) / 2 if first == last else x
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="{anchor}">{step:g}</text>')
        middle = f"{(left + right) / 2:.1f}"
        parts.append(tag("text", f"{escape(name)} step", css="stage", x=middle, y=bottom + 30, text_anchor="middle"))
    return "".join(parts)


def _draw(series: Series, axis: _Axis, scale: _Scale) -> str:
    parts = [f'<g class="{series.style}">']
    for stage in axis.stages:
        points = [p for p in series.points if p.stage == stage]
        if not points:
            continue
        places = [(axis.x(p), scale.y(p.y)) for p in points]
        bounded = [
            (axis.x(p), scale.y(p.low), scale.y(p.high)) for p in points if p.low is not None and p.high is not None
        ]
        if len(bounded) > 1:
            outline = [(x, high) for x, _, high in bounded] + [(x, low) for x, low, _ in reversed(bounded)]
            parts.append(f'<path class="area" d="{_path(outline)}Z"/>')
        parts += [
            f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{lo:.1f}" y2="{hi:.1f}"/>' for x, lo, hi in bounded
        ]
        if series.smooth and len(points) > 8:
            parts.append(f'<path class="line raw" d="{_path(places)}"/>')
            means = smoothed([p.y for p in points])
            places = [(x, scale.y(m)) for (x, _), m in zip(places, means, strict=True)]
        parts.append(f'<path class="line" d="{_path(places)}"/>')
        if series.dots or len(points) == 1:
            parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    return "".join(parts) + "</g>"


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _interval(point: Point, kind: str) -> str:
    if point.low is None or point.high is None:
        return ""
    return between(point.low, point.high, kind)

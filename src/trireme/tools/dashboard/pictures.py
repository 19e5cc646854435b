"""Pictures in the words of ECharts. No NiceGUI here, and no colour that is wrong on black or on white."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trireme.tools.dashboard.curves import Curve, Frame

TEXT = "#8a93a5"
GRID = "rgba(138, 147, 165, 0.18)"
SHORT = (
    "v => v == null ? '–' : v === 0 ? '0' : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) "
    ": String(+v.toPrecision(5))"
)
TICK = (
    "v => v === 0 ? '0' : Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3 ? v.toExponential(0) "
    ": Math.abs(v) >= 1e4 ? +(v / 1000).toPrecision(3) + 'k' : String(+v.toPrecision(3))"
)

PLAIN = "v => String(+v.toPrecision(6))"
POINTED = {"step": "p => 'step ' + Math.round(p.value)", "hours": "p => (+p.value).toFixed(3) + ' h'"}


class Line(NamedTuple):
    """One curve of a chart."""

    name: str
    color: str
    curve: Curve


def line_chart(lines: Sequence[Line], frame: Frame, *, marks: Sequence[int] = (), log: bool = False) -> dict[str, Any]:
    """
    Args:
        marks: steps at which a run went on after it had been further.
    """
    return {
        "animation": False,
        "grid": {"left": 52, "right": 14, "top": 12, "bottom": 26},
        "tooltip": _tooltip(),
        "xAxis": _x_axis(frame),
        "yAxis": {
            "type": "log" if log else "value",
            "scale": True,
            "axisLabel": {"color": TEXT, "fontSize": 11, ":formatter": TICK},
            "splitLine": {"lineStyle": {"color": GRID}},
        },
        "series": _series(lines, marks if frame.axis == "step" else ()),
    }


def _tooltip() -> dict[str, Any]:
    return {
        "trigger": "axis",
        "confine": True,
        "axisPointer": {"type": "line", "lineStyle": {"color": TEXT}},
        ":valueFormatter": SHORT,
        "textStyle": {"fontSize": 12},
        "order": "valueDesc",
    }


def _x_axis(frame: Frame) -> dict[str, Any]:
    return {
        "type": "value",
        "min": "dataMin" if frame.begin is None else frame.begin,
        "max": "dataMax" if frame.end is None else frame.end,
        "axisLabel": {"color": TEXT, "fontSize": 11, "hideOverlap": True, ":formatter": PLAIN},
        "axisLine": {"lineStyle": {"color": GRID}},
        "axisTick": {"show": False},
        "splitLine": {"show": False},
        "axisPointer": {"label": {"show": False, ":formatter": POINTED[frame.axis]}},
    }


def _series(lines: Sequence[Line], marks: Sequence[int]) -> list[dict[str, Any]]:
    series = [one for line in lines for one in _of_line(line)]
    if series and marks:
        series[0]["markLine"] = _mark_lines(marks)
    return series


def _of_line(line: Line) -> list[dict[str, Any]]:
    """Where it is smoothed, what it is made of stays behind it, faintly."""
    raw = line.curve.points()
    if line.curve.smooth is None:
        return [_stroke(line, raw, width=1.8)]
    behind = _stroke(line, raw, width=1.0) | {"silent": True, "tooltip": {"show": False}, "z": 1}
    behind["lineStyle"]["opacity"] = 0.25
    return [_stroke(line, line.curve.smooth_points(), width=2.0), behind]


def _stroke(line: Line, points: list[list[float | None]], *, width: float) -> dict[str, Any]:
    alone = len(points) == 1
    return {
        "type": "line",
        "name": line.name,
        "data": points,
        "showSymbol": alone or len(points) < 25,
        "symbolSize": 5,
        "color": line.color,
        "lineStyle": {"width": width, "color": line.color},
        "emphasis": {"disabled": True},
        "markLine": {"data": []},
    }


def _mark_lines(steps: Sequence[int]) -> dict[str, Any]:
    return {
        "silent": True,
        "symbol": "none",
        "lineStyle": {"color": TEXT, "type": "dashed", "width": 1},
        "label": {"show": False},
        "data": [{"xAxis": step} for step in dict.fromkeys(steps)],
    }

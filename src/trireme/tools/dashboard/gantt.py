"""The picture of the lanes in the words of ECharts: one row for each lane, one block for each thing that it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.tools.dashboard.lane_view import LaneView
from trireme.tools.dashboard.pictures import GRID, TEXT

ROW_PX = 46
AROUND_PX = 46

RENDER = """(params, api) => {
  const lane = api.value(0), begin = api.coord([api.value(1), lane]), end = api.coord([api.value(2), lane]);
  const height = api.size([0, 1])[1] * 0.72, area = params.coordSys;
  const left = Math.max(begin[0], area.x), right = Math.min(end[0], area.x + area.width);
  if (right < left) return;
  return {type: 'rect', shape: {x: left, y: begin[1] - height / 2, width: Math.max(right - left, 0.7), height},
          style: {fill: api.visual('color')}};
}"""

SAFE = "(text => String(text).replace(/[&<>\"]/g, c => '&#' + c.charCodeAt(0) + ';'))"

TOOLTIP = f"""p => {{
  const v = p.value, safe = {SAFE};
  const long = v[2] - v[1], seconds = long >= 10 ? long.toFixed(1) : long >= 0.01 ? long.toFixed(3) : long.toFixed(6);
  const begins = new Date(1000 * v[6]).toLocaleTimeString();
  return '<b>' + safe(v[3]) + '</b> ' + seconds + ' s' + (v[4] >= 0 ? ', step ' + v[4] : '')
    + '<br>' + safe(v[7]) + ', from ' + begins + (v[5] ? '<br>' + safe(v[5]) : '');
}}"""

ELAPSED = """v => {
  const s = Math.abs(v), sign = v < 0 ? '-' : '';
  const h = Math.floor(s / 3600), m = Math.floor(s % 3600 / 60), r = s % 60;
  const two = x => String(x).padStart(2, '0');
  if (h) return sign + h + ':' + two(m) + ':' + two(Math.floor(r));
  if (m) return sign + m + ':' + two(Math.floor(r)) + (r % 1 ? (r % 1).toFixed(1).slice(1) : '');
  return sign + (+r.toPrecision(4)) + ' s';
}"""


def gantt(view: LaneView, colors: Mapping[str, str], *, zero_s: float) -> dict[str, Any]:
    """
    Args:
        zero_s: unix time that the axis counts from.
    """
    return {
        "animation": False,
        "grid": {"left": 148, "right": 16, "top": 8, "bottom": 28},
        "tooltip": {"trigger": "item", "confine": True, ":formatter": TOOLTIP, "textStyle": {"fontSize": 12}},
        "xAxis": _time_axis(view.begin_s - zero_s, view.end_s - zero_s),
        "yAxis": _lane_axis(view.lanes),
        "series": [
            {
                "type": "custom",
                ":renderItem": RENDER,
                "encode": {"x": [1, 2], "y": 0},
                "emphasis": {"disabled": True},
                "data": _data(view, colors, zero_s),
            }
        ],
    }


def _data(view: LaneView, colors: Mapping[str, str], zero_s: float) -> list[dict[str, Any]]:
    data = []
    for lane, since_s, seconds, what, step, why in view.blocks():
        begin = view.begin_s - zero_s + since_s
        value = [lane, round(begin, 6), round(begin + seconds, 6), what, step, why]
        value += [round(view.begin_s + since_s, 3), view.lanes[lane]]
        data.append({"value": value, "itemStyle": {"color": colors.get(what, colors["other"])}})
    return data


def _time_axis(begin: float, end: float) -> dict[str, Any]:
    return {
        "type": "value",
        "min": begin,
        "max": end,
        "axisLabel": {
            "color": TEXT,
            "fontSize": 11,
            "hideOverlap": True,
            ":formatter": ELAPSED,
            "showMinLabel": False,
            "showMaxLabel": False,
        },
        "axisLine": {"lineStyle": {"color": GRID}},
        "splitLine": {"lineStyle": {"color": GRID}},
    }


def _lane_axis(lanes: list[str]) -> dict[str, Any]:
    return {
        "type": "category",
        "data": lanes,
        "inverse": True,
        "axisLabel": {"color": TEXT, "fontSize": 12, "width": 136, "overflow": "truncate"},
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"show": False},
    }


def height_px(num_lanes: int) -> int:
    return num_lanes * ROW_PX + AROUND_PX

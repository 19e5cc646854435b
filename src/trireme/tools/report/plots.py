"""Plots as SVG: small, the same bytes for the same numbers, with the reader's fonts and nothing that is fetched."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from trireme.tools.report.page import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

COLOURS = ("#1f5fa8", "#c1552b", "#2f7d4f", "#7a4fa0", "#9a7b1f", "#5d6470")
WHAT_COLOURS = {
    "train": "#2f7d4f",
    "generate": "#1f5fa8",
    "transfer": "#c1552b",
    "wait": "#d9b44a",
    "idle": "#e6cf8f",
    "evaluate": "#7a4fa0",
    "save": "#5d6470",
    "journal": "#8a94a3",
    "start": "#b9c0ca",
    "other": "#dfe3e8",
}
"""As the lanes of the dashboard: what is done, in the colour of who gains by it."""

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trireme",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a3",
    "axes.grid": True,
    "grid.color": "#e6e9ee",
    "axes.axisbelow": True,
    "text.parse_math": False,
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
}
FEW_POWERS = 30  # of highest to lowest: below, numbers between powers of ten are named too
LEAST_SHARE = 0.005  # that is told
LEGEND_COLUMNS = 5
PNG_DPI = 110
SAYS_NOTHING: dict[str, Any] = {"svg": {"Date": None}, "png": {"Software": None}}
"""Of when and by what it was drawn: the same numbers give the same bytes."""

MOST_POINTS = 800  # of a line; more are drawn as means of equal shares
SMOOTH_FROM = 40  # points from which on a line is smoothed
WINDOWS = 25  # that a smoothed line's window fits into its length
OUTSIDE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>\s*|<style.*?</style>\s*|<!--.*?-->\s*", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One series."""

    label: str
    points: Points  # ascending; y may be NaN
    dots: bool = False  # each point for itself, as of evaluations


def line_figure(
    name: str, title: str, lines: Sequence[Line], *, wide: bool = False, log: bool = False, across: str = "step"
) -> Figure:
    """Lines over steps. A long one is drawn faintly, and smoothed above that."""

    def draw(axes: Axes) -> None:
        for number, line in enumerate(lines):
            _draw_line(axes, line, COLOURS[number % len(COLOURS)])
        if log and all(y > 0 for line in lines for _, y in line.points if math.isfinite(y)):
            _scale_by_powers(axes)
        axes.set_xlabel(across)
        axes.margins(x=0.01)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)

    return Figure(name, title, _drawing(draw, (9.0, 3.2) if wide else (4.4, 2.4)), _in_words(lines, across), wide)


def _scale_by_powers(axes: Axes) -> None:
    """Named in plain numbers: what stands between dollar signs is not taken for mathematics here."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.yaxis.set_minor_formatter(plain if high / low < FEW_POWERS else NullFormatter())


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    points = thinned(line.points, MOST_POINTS)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if line.dots:
        axes.plot(xs, ys, "o-", color=colour, label=line.label, markersize=4, linewidth=1)
        return
    is_long = len(line.points) >= SMOOTH_FROM
    axes.plot(xs, ys, color=colour, label=None if is_long else line.label, linewidth=1, alpha=0.3 if is_long else 1)
    if is_long:
        smoothed = smooth(ys, max(2, len(ys) // WINDOWS))
        axes.plot(xs, smoothed, color=colour, label=line.label, linewidth=1.6)


def thinned(points: Points, most: int) -> Points:
    """Means of equal shares where there are more points than that."""
    if len(points) <= most:
        return points
    edges = [number * len(points) // most for number in range(most + 1)]
    shares = (points[begin:end] for begin, end in pairwise(edges))
    return [(_mean([x for x, _ in share]), _mean([y for _, y in share])) for share in shares]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of the values around each: as many before as after it, fewer at both ends."""
    found = []
    for place in range(len(values)):
        reach = min(window // 2, place, len(values) - 1 - place)
        found.append(_mean(values[place - reach : place + reach + 1]))
    return found


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN where none is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def shares_figure(name: str, title: str, shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """A bar for each lane, in parts that add up to all of its time."""
    lanes = list(shares)
    whats = [what for what in WHAT_COLOURS if any(shares[lane].get(what, 0.0) >= LEAST_SHARE for lane in lanes)]
    whats += sorted({what for lane in lanes for what in shares[lane]} - set(WHAT_COLOURS))

    def draw(axes: Axes) -> None:
        left = [0.0] * len(lanes)
        for what in whats:
            widths = [100 * shares[lane].get(what, 0.0) for lane in lanes]
            axes.barh(lanes, widths, left=left, label=what, color=WHAT_COLOURS.get(what, "#333333"), height=0.6)
            left = [sum(both) for both in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the time")
        axes.grid(axis="y", visible=False)
        axes.legend(frameon=False, fontsize=8, ncols=LEGEND_COLUMNS, loc="lower left", bbox_to_anchor=(0, 1.0))

    alt = "; ".join(f"{lane}: {share_words(shares[lane])}" for lane in lanes)
    return Figure(name, title, _drawing(draw, (9.0, 1.4 + 0.35 * len(lanes))), alt, wide=True)


def share_words(shares: Mapping[str, float]) -> str:
    """
    Example:
        share_words({"train": 0.62, "wait": 0.38})  # "train 62 %, wait 38 %"
    """
    often = sorted(((share, what) for what, share in shares.items() if share >= LEAST_SHARE), reverse=True)
    return ", ".join(f"{what} {share:.0%}".replace("%", " %") for share, what in often)


def _in_words(lines: Sequence[Line], across: str) -> str:
    """
    Example:
        "reward from 0.4 to 0.97 over steps 1 to 150"
    """
    told = []
    for line in lines:
        finite = [(x, y) for x, y in line.points if math.isfinite(y)]
        if finite:
            (begin, first), (end, last) = finite[0], finite[-1]
            told.append(f"{line.label} from {first:.4g} to {last:.4g} over {across}s {begin:g} to {end:g}")
    return "; ".join(told) or "nothing was measured"


def _drawing(draw: Callable[[Axes], None], inches: tuple[float, float]) -> Callable[[Literal["svg", "png"]], bytes]:
    def drawn(kind: Literal["svg", "png"]) -> bytes:
        import matplotlib
        from matplotlib.figure import Figure as Canvas

        out = io.BytesIO()
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of letters that its own font lacks: the reader's is taken
            canvas = Canvas(figsize=inches, layout="constrained")
            draw(canvas.subplots())
            canvas.savefig(out, format=kind, dpi=PNG_DPI, metadata=SAYS_NOTHING[kind])
        return out.getvalue() if kind == "png" else OUTSIDE.sub("", out.getvalue().decode()).strip().encode()

    return drawn

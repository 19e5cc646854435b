"""Plots of the report, by matplotlib: the same bytes for the same numbers, with the reader's fonts."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image

from trireme.journal.pictures import to_data_uri
from trireme.monitor.timeline import WORTH_TELLING, in_words
from trireme.tools.dashboard.colours import ACTIVITIES, RUNS
from trireme.tools.dashboard.history import CURVE_POINTS, Values, extremes, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trireme",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a3",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e9ee",
    "axes.axisbelow": True,
    "text.parse_math": False,
}
WIDE, NARROW = (9.0, 3.2), (4.4, 2.4)  # inches
PICTURE_PIXELS = 320  # of the longer side of a rollout's picture
OUTSIDE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>\s*|<style.*?</style>\s*|<!--.*?-->\s*", re.DOTALL)
SMOOTH_FROM = 40  # points from which on a curve is smoothed
SMOOTHING = 0.8  # weight of the past


def picture(digest: str, png: bytes) -> Markup:
    """Return a picture that a rollout showed, made small enough for a page."""
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
        file = io.BytesIO()
        image.save(file, "PNG")
    return Markup('<span class="figure"><img src="{}" width="{}" height="{}" alt="picture {}…"></span>').format(
        to_data_uri(file.getvalue()), image.width, image.height, digest[:8]
    )


class Line(NamedTuple):
    """One series over steps."""

    label: str
    x: Values  # ascending
    y: Values  # may be NaN
    has_dots: bool = False  # at each point, as of evaluations


def line_plot(title: str, lines: Sequence[Line], *, is_wide: bool = False, log: bool = False) -> Markup:
    """Plot lines. A long one is drawn faintly, and smoothed above that."""

    def draw(axes: Axes) -> None:
        for colour, line in zip(RUNS, lines, strict=False):
            at = extremes(line.x, line.y, CURVE_POINTS)
            marker = "o" if line.has_dots else None
            is_smoothed = not line.has_dots and len(line.x) >= SMOOTH_FROM
            if is_smoothed:
                axes.plot(line.x[at], line.y[at], color=colour, linewidth=1, alpha=0.3)
            y = smoothed(line.y, SMOOTHING) if is_smoothed else line.y
            axes.plot(line.x[at], y[at], color=colour, label=line.label, linewidth=1.4, marker=marker, markersize=4)
        values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
        if log and (values > 0).all():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("step")
        axes.margins(x=0.01)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)

    words = []
    for line in lines:
        at = np.flatnonzero(np.isfinite(line.y))
        if len(at):
            (begin, end), (first, last) = line.x[at[[0, -1]]], line.y[at[[0, -1]]]
            words.append(f"{line.label} from {first:.4g} to {last:.4g} over steps {begin:g} to {end:g}")
    return _plot(title, "; ".join(words), draw, WIDE if is_wide else NARROW)


def shares_plot(title: str, shares: Mapping[str, Mapping[str, float]]) -> Markup:
    """Plot a bar for each process, in parts that add up to its time."""
    processes = list(shares)
    seen = [what for what in ACTIVITIES if any(shares[each].get(what, 0.0) >= WORTH_TELLING for each in processes)]

    def draw(axes: Axes) -> None:
        left = np.zeros(len(processes))
        for what in seen:
            widths = np.array([100 * shares[process].get(what, 0.0) for process in processes])
            axes.barh(processes, widths, left=left, label=what, color=ACTIVITIES[what], height=0.6)
            left += widths
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the time")
        axes.grid(axis="y", visible=False)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    words = "; ".join(f"{process}: {in_words(shares[process])}" for process in processes)
    return _plot(title, words, draw, (WIDE[0], 1.4 + 0.35 * len(processes)))


def _plot(title: str, words: str, draw: Callable[[Axes], None], inches: tuple[float, float]) -> Markup:
    """Return a plot as an SVG in the page, with its title and what it shows in words for readers who do not see it."""
    import matplotlib
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that its own font lacks: the reader's is used
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title)
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = Markup(OUTSIDE.sub("", out.getvalue().decode()).strip())  # matplotlib escapes texts
    return Markup('<span class="figure" role="img" aria-label="{}">{}</span>').format(
        f"{title}: {words or 'nothing was measured'}", svg
    )

"""Plots of the report, by matplotlib: the same bytes for the same numbers, with the reader's fonts."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image

from trireme.journal.pictures import to_data_uri
from trireme.tools.dashboard.colours import RUNS
from trireme.tools.dashboard.history import CURVE_POINTS, Values, extremes, smoothed

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
    """Return a plot as an SVG, with what it shows in words for readers who do not see it.

    A long line is drawn faintly, and smoothed above that.
    """
    import matplotlib
    from matplotlib.figure import Figure

    words, out = [], io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that its own font lacks: the reader's is used
        figure = Figure(figsize=WIDE if is_wide else NARROW, layout="constrained")
        axes = figure.subplots()
        for colour, line in zip(RUNS, lines, strict=False):
            at = extremes(line.x, line.y, CURVE_POINTS)
            marker = "o" if line.has_dots else None
            is_smoothed = not line.has_dots and len(line.x) >= SMOOTH_FROM
            if is_smoothed:
                axes.plot(line.x[at], line.y[at], color=colour, linewidth=1, alpha=0.3)
            y = smoothed(line.y, SMOOTHING) if is_smoothed else line.y
            axes.plot(line.x[at], y[at], color=colour, label=line.label, linewidth=1.4, marker=marker, markersize=4)
            finite = np.flatnonzero(np.isfinite(line.y))
            if len(finite):
                (begin, end), (first, last) = line.x[finite[[0, -1]]], line.y[finite[[0, -1]]]
                words.append(f"{line.label} from {first:.4g} to {last:.4g} over steps {begin:g} to {end:g}")
        if log and all((line.y[np.isfinite(line.y)] > 0).all() for line in lines):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("step")
        axes.set_title(title)
        axes.margins(x=0.01)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = Markup(OUTSIDE.sub("", out.getvalue().decode()).strip())  # matplotlib escapes texts
    return Markup('<span class="figure" role="img" aria-label="{}">{}</span>').format(
        f"{title}: {'; '.join(words) or 'nothing was measured'}", svg
    )

"""Plots of the report, by matplotlib: the same bytes for the same numbers, with the reader's fonts."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from trireme.journal.pictures import to_data_uri
from trireme.monitor.timeline import in_words
from trireme.tools.dashboard.colours import ACTIVITIES, RUNS
from trireme.tools.dashboard.history import CURVE_POINTS, Values, extremes, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Format = Literal["svg", "png"]

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
PNG_DPI = 110
PICTURE_PIXELS = 320  # of the longer side of a rollout's picture
NO_DATES: dict[Format, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}
OUTSIDE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>\s*|<style.*?</style>\s*|<!--.*?-->\s*", re.DOTALL)
LEAST_SHARE = 0.005  # of the time, that is named
SMOOTH_FROM = 40  # points from which on a curve is smoothed
SMOOTHING = 0.8  # weight of the past


class Figure(NamedTuple):
    """A plot.

    Example:
        Figure("reward", "Mean reward: in training from 0.4 to 0.97 over steps 1 to 150", draw).draw("svg")
    """

    name: str  # of its file
    alt: str  # its title, and what it shows in words
    draw: Callable[[Format], bytes]  # one `<svg>` element, or a PNG file


def picture_figure(digest: str, png: bytes) -> Figure:
    """Return a picture that a rollout showed, made small enough for a page."""

    def draw(form: Format) -> bytes:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
            file = io.BytesIO()
            image.save(file, "PNG")
        if form == "png":
            return file.getvalue()
        size = f'width="{image.width}" height="{image.height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {image.width} {image.height}" {size}>'
            f'<image href="{to_data_uri(file.getvalue())}" {size}/></svg>'
        ).encode()

    return Figure(f"picture-{digest[:16]}", f"picture {digest[:8]}…", draw)


class Line(NamedTuple):
    """One series over steps."""

    label: str
    x: Values  # ascending
    y: Values  # may be NaN
    has_dots: bool = False  # at each point, as of evaluations


def line_figure(name: str, title: str, lines: Sequence[Line], *, is_wide: bool = False, log: bool = False) -> Figure:
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
    return _figure(name, title, "; ".join(words), draw, WIDE if is_wide else NARROW)


def shares_figure(name: str, title: str, shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Plot a bar for each process, in parts that add up to its time."""
    processes = list(shares)
    seen = [what for what in ACTIVITIES if any(shares[each].get(what, 0.0) >= LEAST_SHARE for each in processes)]

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
    return _figure(name, title, words, draw, (WIDE[0], 1.4 + 0.35 * len(processes)))


def _figure(name: str, title: str, words: str, draw: Callable[[Axes], None], inches: tuple[float, float]) -> Figure:
    def drawn(format: Format) -> bytes:
        import matplotlib
        from matplotlib.figure import Figure as Canvas

        out = io.BytesIO()
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of letters that its own font lacks: the reader's is used
            canvas = Canvas(figsize=inches, layout="constrained")
            axes = canvas.subplots()
            draw(axes)
            axes.set_title(title)
            canvas.savefig(out, format=format, dpi=PNG_DPI, metadata=NO_DATES[format])
        return out.getvalue() if format == "png" else OUTSIDE.sub("", out.getvalue().decode()).strip().encode()

    return Figure(name, f"{title}: {words or 'nothing was measured'}", drawn)

"""Parts of a report in Markdown, and the whole of it as Markdown or as one HTML file that needs nothing else.

Text of models and environments goes through `plain` or `fenced`: it is shown, and never becomes markup or an address.
"""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markupsafe import Markup

from trireme.base.paths import atomic_write
from trireme.tools.report.plots import Figure
from trireme.tools.templates import render

DETAILS = re.compile(r"<details><summary>[\w ]+</summary>|</details>")
"""The only HTML in a report."""


class Report(NamedTuple):
    """A page about a run."""

    title: str
    lead: str  # Markdown: what came of the run, in a sentence or two
    sections: dict[str, str]  # by title: Markdown, with a figure's name as the address of its picture
    figures: dict[str, Figure]  # by name


def plain(value: object) -> str:
    """Return text without any markup, on one line. Pairs of backticks become apostrophes."""
    return re.sub(r"([\\<>*_\[\]|&#])", r"\\\1", " ".join(str(value).split())).replace("`", "'")


def code(value: object) -> str:
    return "`{}`".format(" ".join(str(value).split()).replace("`", "'").replace("|", "\\|"))


def fenced(text: str, language: str = "") -> str:
    """Return text between fences that are longer than any in it."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """
    Args:
        rows: cells in Markdown.
    """
    head = head or [""] * len(rows[0])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def picture(figure: Figure) -> str:
    return f"![{plain(figure.alt)}]({figure.name})"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def to_markdown(report: Report, figures: Path | None = None, *, out: Path) -> str:
    """
    Args:
        figures: a folder that plots are written to as SVG; without it, they are embedded as PNG, because readers that
            are careful show no embedded SVG.
        out: the file that the Markdown will be written to, from which it links the plots.
    """
    sections = [f"## {title}\n\n{text}" for title, text in report.sections.items()]
    text = "\n\n".join([f"# {plain(report.title)}", report.lead, *sections]) + "\n"
    for figure in report.figures.values():
        if figures is None:
            address = f"data:image/png;base64,{base64.b64encode(figure.draw('png')).decode()}"
        else:
            with atomic_write(figures / f"{figure.name}.svg") as file:
                file.write(figure.draw("svg"))
            address = Path(os.path.relpath(figures, out.parent), f"{figure.name}.svg").as_posix()
        text = text.replace(picture(figure), picture(figure._replace(name=address)))
    return text


def to_html(report: Report) -> str:
    def image(_renderer: Any, tokens: Any, index: int, *_: Any) -> str:
        """Put the plot itself in the place of its picture."""
        figure = report.figures.get(tokens[index].attrs["src"])
        if figure is None:
            return html.escape(tokens[index].content)
        alt = html.escape(figure.alt, quote=True)
        return f'<span class="figure" role="img" aria-label="{alt}">{figure.draw("svg").decode()}</span>'

    def raw_html(_renderer: Any, tokens: Any, index: int, *_: Any) -> str:
        content = tokens[index].content
        return content if DETAILS.fullmatch(content.strip()) else html.escape(content)

    markdown = MarkdownIt("commonmark").enable("table")
    for kind, rule in (("image", image), ("html_block", raw_html), ("html_inline", raw_html)):
        markdown.add_render_rule(kind, rule)
    sections = [(title, Markup(markdown.render(text))) for title, text in report.sections.items()]
    lead = Markup(markdown.render(report.lead))
    return render(Path(__file__).parent, "page.html", title=report.title, lead=lead, sections=sections)

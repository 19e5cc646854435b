"""Parts of a report as HTML. Text is escaped, so that what a model wrote is shown and never becomes markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup, escape

from trireme.base.safe_text import clean
from trireme.tools.templates import render


class Report(NamedTuple):
    """A page about a run."""

    title: str
    lead: str  # what came of the run, in a sentence or two
    sections: dict[str, Markup]  # by title


def prose(value: object) -> Markup:
    """Return a text with what is between backticks as code; what is HTML already stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(clean(str(value))))))


def paragraphs(parts: Iterable[str]) -> Markup:
    """Return texts as paragraphs, and parts that are HTML already as they are."""
    return Markup("\n").join(
        part if isinstance(part, Markup) else Markup("<p>{}</p>").format(prose(part)) for part in parts
    )


def block(text: str) -> Markup:
    """Return text as it is, line by line."""
    return Markup("<pre>{}</pre>").format(clean(text))


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> Markup:
    lines = [Markup("<tr>{}</tr>").format(_cells("td", row)) for row in rows]
    heading = Markup("<thead><tr>{}</tr></thead>").format(_cells("th", head)) if head else ""
    return Markup("<table>{}<tbody>{}</tbody></table>").format(heading, Markup("\n").join(lines))


def _cells(tag: str, cells: Sequence[object]) -> Markup:
    return Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(prose(cell)) for cell in cells)


def folded(title: str, inside: Markup) -> Markup:
    return Markup("<details><summary>{}</summary>{}</details>").format(title, inside)


def to_html(report: Report) -> str:
    """Return one HTML file that needs nothing else."""
    return render(Path(__file__).parent, "page.html", **report._asdict() | {"lead": prose(report.lead)})

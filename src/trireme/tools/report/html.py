"""A page as one HTML file that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import re

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from trireme.tools.report.page import Page

TEMPLATE = "page.html.j2"


def to_html(page: Page) -> str:
    """What a model wrote is text in it, whatever it looks like."""
    environment = Environment(
        loader=PackageLoader("trireme.tools.report", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"marked": marked, "kind": lambda block: type(block).__name__, "drawn": Markup}
    return environment.get_template(TEMPLATE).render(page=page)


def marked(text: str) -> Markup:
    """`code` as code; all else as it is."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))

"""The pictures of rollouts: the route that serves them, and how a page shows them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from urllib.parse import urlencode

from fastapi import FastAPI, Response

from trireme.base.errors import JournalCorrupt
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.tools.dashboard.runs import Library

PATH = "/pictures"
HEADERS = {"cache-control": "private, max-age=31536000, immutable"}  # a digest has one picture


def serve_pictures(app: FastAPI, library: Library) -> None:
    """Serve the pictures of the library's runs, by their digests."""

    @app.get(f"{PATH}/{{digest}}")
    def picture(digest: str, run: str = "") -> Response:
        found = library.named(run)
        try:
            png = PictureFiles(pictures_folder(found.paths.journal)).read(digest) if found else None
        except (ValueError, OSError, JournalCorrupt):
            png = None
        return Response(status_code=404) if png is None else Response(png, media_type="image/png", headers=HEADERS)


def pictures_html(digests: Sequence[str], run: str) -> str:
    """Return an image for each digest, which opens in full in a tab of its own when it is clicked.

    Args:
        run: its name in the library.
    """
    parts = []
    for digest in digests:
        address = html.escape(f"{PATH}/{digest}?{urlencode({'run': run})}", quote=True)
        image = f'<img class="tr-picture" src="{address}" alt="picture {digest[:8]}…" loading="lazy">'
        parts.append(f'<a href="{address}" target="_blank" rel="noopener" title="Open in full">{image}</a>')
    return f'<div class="tr-pictures">{"".join(parts)}</div>' if parts else ""

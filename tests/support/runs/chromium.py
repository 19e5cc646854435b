"""A real browser without a screen: Chromium as the machine has it, driven by Playwright. It notes what goes wrong in a
page, and every address that is asked for.

Also for the benchmark and the pictures of the dashboard.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, expect, sync_playwright

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--hide-scrollbars"),
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",),
)
"""Disable what a browser does by itself, and resolve no host but this machine."""
SIZE = (1440, 900)
PATIENCE_MS = 20_000.0


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Watched:
    def __init__(self, page: Page) -> None:
        self.page = page
        self.troubles: list[str] = []  # errors of its scripts, and requests that failed
        self.asked: list[str] = []  # addresses
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.troubles.append(f"script: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("requestfailed", lambda request: self.troubles.append(f"failed: {request.url} {request.failure}"))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"{message.type}: {message.text}")

    def elsewhere(self) -> list[str]:
        """Addresses that are not of this machine; what a page carries in itself (`data:`) is from nowhere."""
        return [url for url in self.asked if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "", None)]


@contextmanager
def open_chromium(*, size: tuple[int, int] = SIZE, dark: bool = False) -> Iterator[Watched]:
    """An empty page of a browser that knows nothing and remembers nothing.

    Raises: FileNotFoundError where there is no Chromium.
    """
    executable = find_chromium()
    if executable is None:
        raise FileNotFoundError("chromium is not installed - install it: apt-get install chromium")
    with TemporaryDirectory(prefix="chromium-") as folder, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder, executable_path=executable, headless=True, args=list(FLAGS),
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light",
        )  # fmt: skip
        try:
            context.set_default_timeout(PATIENCE_MS)
            expect.set_options(timeout=PATIENCE_MS)
            yield Watched(context.pages[0] if context.pages else context.new_page())
        finally:
            context.close()


def picture(page: Page, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=file, animations="disabled")
    return file

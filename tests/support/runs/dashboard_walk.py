"""Starts the dashboard as its user does, and goes through its views with mouse and keys. For tests and for pictures."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from playwright.sync_api import Page, expect

END_S = 20.0


@contextmanager
def dashboard_of(runs: Sequence[Path], cache: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "trireme.cli.trireme", "dashboard", *map(str, runs), "--port", "0"]
    env = {name: value for name, value in os.environ.items() if name != "TRIREME_TOKEN"}
    env |= {"XDG_CACHE_HOME": str(cache), "COVERAGE_PROCESS_START": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "http://" in line), "")
        assert line, f"the dashboard ended with {process.wait(END_S)} before it printed its address"
        yield re.search(r"http://\S+", line)[0].rstrip("/")  # type: ignore[index]
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End it with Ctrl-C, and require that all its child processes end with it."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
        assert psutil.wait_procs(started, END_S)[1] == [], "the dashboard left processes behind"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def tab(page: Page, name: str) -> None:
    """Click on a tab and wait until it is the current one; by way of another tab where it is already."""
    link = page.locator("nav a.tr-tab", has_text=name)
    if link.get_attribute("aria-current"):
        tab(page, "Overview" if name != "Overview" else "Logs")
    link.click()
    expect(link).to_have_attribute("aria-current", "page")


def overview(page: Page) -> None:
    tab(page, "Overview")
    expect(page.locator(".tr-main .tr-card").first).to_be_visible()


def metrics(page: Page) -> None:
    tab(page, "Metrics")
    expect(page.locator(".tr-main canvas").first).to_be_visible()


def timeline(page: Page) -> None:
    tab(page, "Timeline")
    expect(page.locator(".tr-main canvas").first).to_be_visible()
    expect(page.locator(".tr-main .tr-bar").first).to_be_visible()


def rollouts(page: Page) -> None:
    tab(page, "Rollouts")
    expect(page.locator(".tr-list tbody tr").first).to_be_visible()
    expect(page.locator(".tr-reading .tr-said").last).to_be_visible()


def search(page: Page, line: str, *, says: str) -> None:
    page.locator(".tr-main input").first.fill(line)
    expect(page.locator(".tr-main [aria-live=polite]").first).to_have_text(re.compile(f"^{says}"))


def tokens(page: Page) -> None:
    """From the rollout that is read, by its link; then the pointer rests on a token that was sampled."""
    rollouts(page)
    page.get_by_role("link", name="Token by token").click()
    expect(page.locator("nav a.tr-tab", has_text="Tokens")).to_have_attribute("aria-current", "page")
    expect(page.locator(".tr-token").first).to_be_visible()


def colour(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    expect(page.locator(".tr-token").first).to_be_visible()


def logs(page: Page) -> None:
    tab(page, "Logs")
    expect(page.get_by_role("log")).to_contain_text(re.compile(r"\w"))


VIEWS = {view.__name__: view for view in (overview, metrics, timeline, rollouts, tokens, logs)}
"""Every one of them, by its name: how one gets there."""

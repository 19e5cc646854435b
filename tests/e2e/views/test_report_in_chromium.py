"""A report as its reader sees it: in a real browser, which asks for nothing and has nothing to complain about."""

from pathlib import Path

import pytest

from trireme.cli.runs.report import report
from viewing import write_evaluations
from written_run import write_whole_run

pytestmark = pytest.mark.slow


def test_a_browser_shows_all_of_it_and_asks_for_nothing(tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="drives the browser")
    from chromium import find_chromium, open_chromium

    if find_chromium() is None:
        pytest.skip("there is no chromium on the PATH")
    run = tmp_path / "run"
    write_whole_run(run)
    write_evaluations(run)
    assert report([str(run)]) == 0
    with open_chromium() as watched:
        page = watched.page
        page.goto((run / "report.html").as_uri())
        assert page.locator("h1").inner_text() == "run"
        assert page.locator(".figure svg").count() > 5
        for plot in page.locator(".figure svg").all():
            box = plot.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) > 100, "a plot that takes its place"
        assert page.get_by_text("Nothing was lost, and nothing was trained twice").is_visible()
        page.get_by_text("All keys").click()
        assert page.get_by_text("rollout_timeout_s").last.is_visible()
        wide = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert wide, "nothing reaches beyond the page"
        assert watched.troubles == []
        assert watched.elsewhere() == []

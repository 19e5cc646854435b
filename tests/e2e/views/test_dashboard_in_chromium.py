"""The dashboard in a real browser. Every page is used, and no page fails or asks another machine."""

import re
from contextlib import suppress

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: uv sync")

from playwright.sync_api import expect

from support.models.tiny_pictures import picture_file, shown
from support.runs.chromium import find_chromium, open_chromium
from support.runs.dashboard_walk import VIEWS, colour, dashboard_of, metrics, rollouts, search, tab, tokens
from support.runs.real_run import run_command
from support.runs.scripted_kills import SCRIPTED
from support.runs.written_run import rewrite_batch
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.records import BatchRecord

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("chromium"),
    pytest.mark.skipif(find_chromium() is None, reason="there is no chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "watched"
    run_command(*SCRIPTED, "--output-dir", folder)
    digest = PictureFiles(pictures_folder(RunPaths(folder).journal)).add(picture_file(64, 48, 200))

    def show(batch: BatchRecord) -> None:
        batch.rollouts[0].prompt[-1]["content"] = [shown(digest), {"type": "text", "text": "Which colour?"}]

    rewrite_batch(read_run(RunConfig, find_run_file(folder, "trainer")), 2, show)
    return folder


@pytest.fixture(scope="module")
def watched(folder, tmp_path_factory):
    with dashboard_of([folder], tmp_path_factory.mktemp("cache")) as address, open_chromium() as watched:
        watched.page.goto(address)
        yield watched
        assert watched.troubles == []
        assert watched.elsewhere() == []


def test_pages_that_only_show_are_drawn(watched):
    """The other pages are used in the tests below. The fixture checks that no script failed."""
    for name in ("overview", "timeline", "logs"):
        VIEWS[name](watched.page)
        expect(watched.page.get_by_text("could not be drawn")).to_have_count(0)


def test_rollouts_are_searched_sorted_and_read_as_the_journal_has_them(watched, folder):
    page, journal = watched.page, Journal(RunPaths(folder).journal)
    batches = [journal.read(step) for step in journal.steps()]
    rollouts(page)
    everything = sum(len(record.rollouts) + len(record.dropped) for record in batches)
    expect(page.locator(".tr-main [aria-live=polite]").first).to_have_text(f"{everything:,} rollouts")
    expect(page.locator(".tr-list .q-table__bottom")).to_contain_text(f"of {everything}")
    trained = [one for record in batches for one in record.rollouts]
    low = sum(one.reward < 0.5 for one in trained)
    search(page, "reward<0.5 -is:failed", says=f"{low} rollouts")
    expect(page.locator(".tr-list tbody tr")).to_have_count(min(50, low))
    search(page, "rewrd<0.5", says=r".*Did you mean reward<0\.5\?")

    search(page, "step=2 -is:failed", says=f"{len(batches[2].rollouts)} rollouts")
    page.locator(".tr-list tbody tr").nth(1).click()
    chosen = batches[2].rollouts[1]
    reading = page.locator(".tr-reading")
    expect(reading).to_contain_text(f"example {chosen.example} · rollout {chosen.place}")
    expect(reading).to_contain_text(str(chosen.prompt[-1]["content"]))
    for name in chosen.metrics:
        expect(reading).to_contain_text(name)

    page.locator(".tr-list tbody tr").first.click()
    expect(reading).to_contain_text(re.compile(r"\[picture \w{8}…\]\s*Which colour\?"))
    image = page.get_by_role("img", name="picture")
    expect(image).to_be_visible()
    page.wait_for_function("image => image.naturalWidth === 64", arg=image.element_handle())

    search(page, "-is:failed", says=f"{len(trained)} rollouts")
    for extreme in (min, max):
        page.locator(".tr-list th", has_text="reward").click()
        reward = extreme(one.reward for one in trained)
        expect(page.locator(".tr-list tbody tr").first).to_contain_text(f"{reward:.3f}")


def test_dragging_over_a_chart_zooms_and_a_double_click_shows_all_again(watched):
    page = watched.page
    metrics(page)
    chart = page.locator(".tr-chart-card canvas").first
    stretch = page.get_by_role("button", name=re.compile(r"^\d+ – \d+: show all$"))
    for _ in range(10):  # a chart that is drawn already may not listen yet
        chart.drag_to(chart, source_position={"x": 150, "y": 80}, target_position={"x": 300, "y": 80})
        with suppress(AssertionError):
            expect(stretch).to_be_visible(timeout=5_000)
            break
    begin, end = map(int, re.findall(r"\d+", stretch.inner_text()))
    assert begin < end
    chart.dblclick()
    expect(stretch).to_have_count(0)


def test_dashboard_shows_engine_and_trainer_probability_of_a_token(watched):
    page = watched.page
    tokens(page)
    sampled = page.locator(".tr-token:not(.given)").first
    sampled.hover()
    told = sampled.evaluate("token => getComputedStyle(token, '::after').content")
    for line in (r"engine +p [01]\.\d+", r"trainer +p [01]\.\d+", r"ratio +\d+\.\d+", "advantage", "version"):
        assert re.search(line, told), told
    for name in ("engine p", "trainer p", "ratio", "advantage", "version", "mask"):
        colour(page, name)
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Step").fill("1")
    expect(page.get_by_text("step 1 ·")).to_be_visible()
    expect(page).to_have_url(re.compile("step=1&"))
    address, heading = page.url, page.locator(".tr-main .tr-title").first.inner_text()
    tab(page, "Overview")
    page.goto(address)
    expect(page.locator(".tr-main .tr-title").first).to_have_text(heading)
    expect(page.locator(".tr-token").first).to_be_visible()


def test_a_printed_page_has_figures_and_no_controls(watched):
    metrics(watched.page)
    watched.page.emulate_media(media="print")
    assert not watched.page.locator(".tr-header").is_visible()
    assert not watched.page.locator(".tr-controls").first.is_visible()
    assert watched.page.locator(".tr-chart-card").first.is_visible()
    watched.page.emulate_media(media="screen")

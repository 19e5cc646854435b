"""Pictures of each view of the dashboard, and of the viewer in a terminal, of a run's folder, for the documentation.

python scripts/dashboard_pictures.py RUN [--out docs/dashboard] [--dark]
python scripts/dashboard_pictures.py RUN --agent        only docs/dashboard/agent.png, of a run with an agent program
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from PIL import Image
from playwright.sync_api import Page, expect

from support.runs.chromium import open_chromium, picture
from support.runs.dashboard_walk import VIEWS, colour, dashboard_of, search
from support.runs.viewing import Viewer, view

SIZE = (1440, 900)
MOST_BYTES = 200_000  # of a picture in the repository
SETTLE_MS = 700  # charts draw themselves after they are there
VIEWER_KEYS = (*["down"] * 4, "enter", "down", "enter")  # to a rollout of an evaluation
FETCHED = re.compile(r"@font-face\s*\{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


def main() -> None:
    parser = ArgumentParser(description="Takes pictures of each view of the dashboard, in a real browser.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, default=Path("docs/dashboard"))
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--agent", action="store_true", help="one session of an agent program")
    arguments = parser.parse_args()
    with TemporaryDirectory() as cache, dashboard_of([arguments.run], Path(cache)) as address:
        with open_chromium(size=SIZE, dark=arguments.dark) as watched:
            watched.page.goto(address)
            for name in ["agent"] if arguments.agent else VIEWS:
                take(watched.page, name, arguments.out / f"{name}.png")
            assert not watched.troubles, watched.troubles
    if arguments.agent:
        return
    view(
        arguments.run, lambda viewer: take_viewer(viewer, arguments.out.parent / "evaluation-view.svg"), size=(120, 30)
    )


async def take_viewer(viewer: Viewer, file: Path) -> None:
    """Write the screen in the fonts of its reader, so that nothing is fetched."""
    await viewer.press(*VIEWER_KEYS)
    file.write_text(FETCHED.sub("", viewer.app.export_screenshot(title=viewer.app.TITLE, simplify=True)))
    print(f"{file}: {file.stat().st_size:,} bytes")


def take(page: Page, name: str, file: Path) -> None:
    VIEWS["rollouts" if name == "agent" else name](page)
    POSES.get(name, lambda page: None)(page)
    page.wait_for_timeout(SETTLE_MS)
    picture(page, file)
    Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)
    size = file.stat().st_size
    assert size < MOST_BYTES, f"{file} has {size:,} bytes, {MOST_BYTES:,} are allowed: take it of a smaller run"
    print(f"{file}: {size:,} bytes")


def pose_rollouts(page: Page) -> None:
    """Those that went badly, when all of them are indexed."""
    expect(page.get_by_text("are indexed")).to_have_count(0, timeout=60_000)
    search(page, "reward<0.6 -is:failed step>5", says=r"[\d,]+ rollouts")
    page.locator(".tr-list th", has_text="reward").click()
    page.wait_for_timeout(SETTLE_MS)
    page.locator(".tr-list tbody tr").nth(2).click()
    page.wait_for_timeout(SETTLE_MS)


def pose_agent(page: Page) -> None:
    """One that went well and took several turns."""
    expect(page.get_by_text("are indexed")).to_have_count(0, timeout=60_000)
    search(page, "reward=1 -is:failed turns>1", says=r"[\d,]+ rollouts")
    page.locator(".tr-list tbody tr").first.click()
    page.wait_for_timeout(SETTLE_MS)


def pose_tokens(page: Page) -> None:
    """Of a step at which the model was not yet sure, with the pointer on the token that it was least sure of."""
    page.get_by_label("Step").fill("3")
    expect(page.get_by_text("step 3 ·")).to_be_visible()
    colour(page, "engine p")
    unsure = page.locator(".tr-token:not(.given)[style]")
    expect(unsure.first).to_be_visible()
    strongest = max(unsure.all(), key=_strength)
    strongest.scroll_into_view_if_needed()
    strongest.hover()
    page.evaluate("scrollTo(0, 0)")


def _strength(token) -> float:  # type: ignore[no-untyped-def]
    return float((token.get_attribute("style") or "0,0)").rpartition(",")[2].rstrip(")"))


POSES = {"rollouts": pose_rollouts, "agent": pose_agent, "tokens": pose_tokens}


if __name__ == "__main__":
    main()

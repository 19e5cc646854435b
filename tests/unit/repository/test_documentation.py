"""Documentation names files that exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/reliability.md"])
def test_files_that_a_page_names_exist(page):
    places = (*(REPOSITORY / name for name in ("src/trireme", "packages/trireme-worker", "tests")), REPOSITORY)
    text = (REPOSITORY / page).read_text()
    named = re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", text)
    braced = re.findall(r"`((?:[a-z_0-9]+/)*)\{([a-z_,0-9]+)\}\.py`", text)
    named += [f"{folder}{name}.py" for folder, names in braced for name in names.split(",")]
    bare = {path.name for path in (REPOSITORY / "src").rglob("*.py")} | {"shout.py"}
    found = {name for name in named if name in bare or any((place / name).exists() for place in places)}
    assert set(named) - found == set()

"""Documentation names files that exist, and every package of an installation is pinned."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[3]
LOCK = REPOSITORY / "uv.lock"


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


@pytest.mark.skipif(not LOCK.exists(), reason="uv writes what it resolved to uv.lock, and did not install this")
def test_every_package_of_every_resolution_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    uv, groups = project["tool"]["uv"], project["dependency-groups"].values()
    texts = [*project["project"]["dependencies"], *(text for group in groups for text in group)]
    texts += uv["override-dependencies"] + uv["constraint-dependencies"]
    pinned = {(each.name, str(each.specifier).removeprefix("==")) for each in map(Requirement, texts)}
    resolved = {(each["name"], each["version"]) for each in tomllib.loads(LOCK.read_text())["package"]}
    assert resolved - pinned == {("trireme", project["project"]["version"])}

"""An installation, with either engine and on any Python, has the versions that the project was tested with."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[3]
LOCK = REPOSITORY / "uv.lock"


@pytest.mark.skipif(not LOCK.exists(), reason="uv writes what it resolved to uv.lock, and did not install this")
def test_every_package_of_every_resolution_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    uv, groups = project["tool"]["uv"], project["dependency-groups"].values()
    texts = [*project["project"]["dependencies"], *(text for group in groups for text in group)]
    texts += uv["override-dependencies"] + uv["constraint-dependencies"]
    pinned = {(each.name, str(each.specifier).removeprefix("==")) for each in map(Requirement, texts)}
    resolved = {(each["name"], each["version"]) for each in tomllib.loads(LOCK.read_text())["package"]}
    assert resolved - pinned == {("trireme", project["project"]["version"])}

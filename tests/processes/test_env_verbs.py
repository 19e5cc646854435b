"""`trireme env init`, `install` and `list`: what they write, what they refuse, and what they say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from local_packages import write_package
from trireme.base.errors import ConfigError
from trireme.cli.env import env
from trireme.orchestrator.environments.catalog import list_environments
from trireme.orchestrator.environments.template import KINDS, checked_name, suggested_name
from trireme.orchestrator.environments.venv import find_environment

REPOSITORY = Path(__file__).parents[2]
PLAIN = "def dataset():\n    return [{'prompt': 'p'}]\n\n\ndef reward(completion):\n    return 1.0\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty project, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "better"),
    [("My Env!", "my-env"), ("2048", "env-2048"), ("json", "json-env"), ("", "my-env"), ("x" * 61, "x" * 50 + "-env")],
)
def test_a_name_that_will_not_do_is_refused_with_one_that_does(name, better):
    with pytest.raises(ConfigError, match=f"Try `trireme env init {better}`"):
        checked_name(name)
    assert checked_name(better) == better == suggested_name(name)
    assert checked_name("x" * 60) == "x" * 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_package_is_found_and_pins_exactly_what_the_shipped_ones_do(here, kind):
    name = f"try-{kind}"
    assert env(["init", f"try_{kind.replace('-', '_')}", "--kind", kind]) == 0
    source = find_environment(name)
    assert (source.kind, source.module) == ("package", name.replace("-", "_"))
    written = tomllib.loads((source.folder / "pyproject.toml").read_text())
    shipped = tomllib.loads((REPOSITORY / "environments/reverse_text/pyproject.toml").read_text())
    for project in (written, shipped) if kind == "plain" else ():
        project["project"]["dependencies"] = []
    assert written["build-system"] == shipped["build-system"]
    assert all(written["project"][key] == shipped["project"][key] for key in ("dependencies", "requires-python"))
    texts = {file.name: file.read_text() for file in source.folder.iterdir()}
    assert sorted(texts) == ["README.md", "pyproject.toml", f"{source.module}.py"]
    [entry] = list_environments(here / "environments")
    assert (entry.id, entry.kind, entry.venv) == (name, "package", None)


@pytest.mark.parametrize("there", ["my_env", "my-env", "my_env.py"])
def test_nothing_is_overwritten(here, there):
    (here / "environments" / there).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"exists already - .*my-env-2"):
        env(["init", "my-env"])
    assert list((here / "environments").rglob("*")) == [here / "environments" / there]


def test_an_environment_is_installed_once_and_found_offline_from_then_on(here, monkeypatch, capsys):
    root = here / "environments"
    write_package(root, "verifiers", "__version__ = '0'\n")
    needs_verifiers = {"verifiers": '{ path = "../verifiers" }'}
    write_package(root, "toy", PLAIN + "raise SystemExit('imported')\n", sources=needs_verifiers)
    assert env(["install", "owner/toy"]) == 0
    said, place = capsys.readouterr().out.strip().split(", in ")
    assert said.startswith("owner/toy installed in ")
    assert place.startswith(str(here / "cache" / "trireme" / "environments" / "toy-"))
    monkeypatch.setenv("PATH", "/nowhere")  # no uv any more
    monkeypatch.delenv("UV", raising=False)
    assert env(["install", "toy", "--path", "environments"]) == 0
    assert f"installed already, in {place}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="uv was not found"):
        env(["install", "toy", "--again"])
    with pytest.raises(ConfigError, match=r"'tyo' was not found .*did you mean 'toy'\?"):
        env(["install", "tyo"])
    assert env(["list", "--json"]) == 0
    [toy, _] = json.loads(capsys.readouterr().out)
    assert (toy["id"], toy["kind"], toy["verifiers"], toy["venv"]) == ("toy", "package", "0", place)
    (here / "file.py").write_text(PLAIN)
    assert env(["install", "file.py"]) == 0
    assert "needs no virtual environment of its own" in capsys.readouterr().out


def test_the_list_tells_environments_from_libraries_and_imports_neither(here, capsys):
    root = here / "environments"
    (root / "examples").mkdir(parents=True)
    write_package(root, "toy", PLAIN + "raise SystemExit('imported')\n")
    write_package(root, "box", "value = 1\n")
    (root / "examples" / "shout.py").write_text('"""Shout.\n\nMore."""\n' + PLAIN)
    (root / "broken").mkdir()
    (root / "broken" / "pyproject.toml").write_text("[project\n")
    entries = {Path(entry.id).name: entry for entry in list_environments(root)}
    kinds = {"toy": "package", "box": "library", "shout.py": "file", "broken": "package"}
    assert {name: entry.kind for name, entry in entries.items()} == kinds
    assert "no readable [project] name" in entries["broken"].trouble
    assert entries["shout.py"].description == "Shout."
    assert env(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "not yet" in lines["toy"]
    assert "broken" in lines["broken"].split(None, 1)[1]

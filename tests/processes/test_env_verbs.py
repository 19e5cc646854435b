"""`trireme env init`, `install` and `list`: what they write, what they refuse, and what they say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from local_packages import write_package
from trireme.base.errors import ConfigError
from trireme.cli.env import VERBS, env
from trireme.orchestrator.environments.catalog import list_environments
from trireme.orchestrator.environments.template import (
    KINDS,
    checked_name,
    suggested_name,
    template_files,
    write_environment,
)
from trireme.orchestrator.environments.venv import find_environment

REPOSITORY = Path(__file__).parents[2]
PLAIN = "def dataset():\n    return [{'prompt': 'p'}]\n\n\ndef reward(completion):\n    return 1.0\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path


def test_help_names_every_verb_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        env(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert set(VERBS) == {"init", "install", "list", "check"}
    assert all(f"{name:7}  {verb.line}" in said for name, verb in VERBS.items())
    assert env([]) == 2


def test_an_unknown_verb_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no `trireme env chekc` - .*Did you mean `trireme env check`\?"):
        env(["chekc", "reverse-text"])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        env([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: trireme env {verb}" in capsys.readouterr().out


# init


@pytest.mark.parametrize(
    ("name", "better"),
    [("My Env!", "my-env"), ("MyEnv", "my-env"), ("2048", "env-2048"), ("json", "json-env"), ("class", "class-env"),
     ("verifiers", "verifiers-env"), ("-x-", "x"), ("a--b", "a-b"), ("é", "my-env"), ("", "my-env"),
     ("trireme-guard", "my-trireme-guard"), ("x" * 70, "x" * 50 + "-env")],
)  # fmt: skip
def test_a_name_that_will_not_do_is_refused_with_one_that_does(name: str, better: str) -> None:
    with pytest.raises(ConfigError, match=f"Try `trireme env init {better}`"):
        checked_name(name)
    assert checked_name(better) == better == suggested_name(name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_package_is_found_and_pins_exactly(here: Path, kind: str) -> None:
    assert env(["init", f"try_{kind.replace('-', '_')}", "--kind", kind]) == 0
    name = f"try-{kind}"
    source = find_environment(name)
    assert (source.kind, source.module) == ("package", name.replace("-", "_"))
    project = tomllib.loads((source.folder / "pyproject.toml").read_text())
    pinned = project["project"]["dependencies"] + project["build-system"]["requires"]
    assert all("==" in dependency for dependency in pinned)
    assert sorted(file.name for file in source.folder.iterdir()) == [
        "README.md",
        "pyproject.toml",
        f"{source.module}.py",
    ]
    texts = [file.read_text() for file in source.folder.iterdir()]
    assert not any("@NAME@" in text or "@MODULE@" in text or "@REWARD@" in text for text in texts)
    [entry] = list_environments(here / "environments")
    assert (entry.id, entry.kind, entry.venv) == (name, "package", None)


def test_the_pins_are_those_of_the_shipped_environment() -> None:
    shipped = tomllib.loads((REPOSITORY / "environments" / "reverse_text" / "pyproject.toml").read_text())
    written = tomllib.loads(template_files("my-env", kind="verifiers")["pyproject.toml"])
    assert written["build-system"] == shipped["build-system"]
    assert written["project"]["dependencies"] == shipped["project"]["dependencies"]
    assert written["project"]["requires-python"] == shipped["project"]["requires-python"]


@pytest.mark.parametrize("there", ["environments/my_env", "environments/my-env", "environments/my_env.py"])
def test_nothing_is_overwritten(here: Path, there: str) -> None:
    (here / there).mkdir(parents=True)
    (here / there / "precious").touch()
    with pytest.raises(ConfigError, match=r"exists already - .*my-env-2"):
        env(["init", "my-env"])
    assert [path.name for path in (here / "environments").iterdir()] == [Path(there).name]
    assert (here / there / "precious").exists()


def test_a_write_that_breaks_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_environment("my-env", kind="plain", root=here / "environments")
    assert list((here / "environments").iterdir()) == []


# install


def test_an_environment_is_installed_once_and_found_offline_from_then_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_package(here / "environments", "toy", PLAIN)
    assert env(["install", "owner/toy"]) == 0
    assert "owner/toy installed in " in (said := capsys.readouterr().out)
    assert (place := said.split(", in ")[1].strip()).startswith(
        str(here / "cache" / "trireme" / "environments" / "toy-")
    )
    monkeypatch.setenv("PATH", "/nowhere")  # no uv any more
    monkeypatch.delenv("UV", raising=False)
    assert env(["install", "toy"]) == 0
    assert f"installed already, in {place}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="uv was not found"):
        env(["install", "toy", "--again"])


def test_an_environment_elsewhere_is_installed_by_its_folder_or_the_one_around_it(here: Path) -> None:
    folder = write_package(here / "elsewhere", "toy", PLAIN)
    assert env(["install", "toy", "--path", "elsewhere"]) == 0
    assert env(["install", "toy", "--path", str(folder)]) == 0
    [venv] = (here / "cache" / "trireme" / "environments").glob("toy-*/")
    assert venv.is_dir()


def test_a_file_needs_no_installation(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "toy.py").write_text(PLAIN)
    assert env(["install", "toy.py"]) == 0
    assert "needs no virtual environment of its own" in capsys.readouterr().out


def test_an_unknown_environment_is_refused_with_one_that_is_near(here: Path) -> None:
    write_package(here / "environments", "toy-box", PLAIN)
    with pytest.raises(ConfigError, match=r"'toy-bxo' was not found .*did you mean 'toy_box'\?"):
        env(["install", "toy-bxo"])


# list


def test_the_list_tells_environments_from_libraries_and_imports_neither(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = here / "environments"
    write_package(root, "toy", PLAIN + "raise SystemExit('imported')\n")
    write_package(root, "box", "value = 1\n")
    (root / "examples").mkdir()
    (root / "examples" / "shout.py").write_text('"""Shout.\n\nMore."""\n' + PLAIN)
    (root / "examples" / "notes.py").write_text("value = 1\n")
    (root / "broken").mkdir()
    (root / "broken" / "pyproject.toml").write_text("[project\n")
    entries = {Path(entry.id).name: entry for entry in list_environments(root)}
    assert {name: entry.kind for name, entry in entries.items()} == {
        "toy": "package", "box": "library", "shout.py": "file", "broken": "package",
    }  # fmt: skip
    assert "no readable [project] name" in entries["broken"].trouble
    assert entries["shout.py"].description == "Shout."
    assert env(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "not yet" in lines["toy"]
    assert "broken" in lines["broken"].split(None, 1)[1]


def test_the_list_shows_what_is_installed_and_the_version_of_verifiers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = here / "environments"
    write_package(root, "verifiers", "__version__ = '0'\n")
    write_package(root, "toy", "def load_environment(): ...\n", sources={"verifiers": '{ path = "../verifiers" }'})
    env(["install", "toy"])
    capsys.readouterr()
    assert env(["list", "--json"]) == 0
    [toy, _] = json.loads(capsys.readouterr().out)
    assert (toy["id"], toy["kind"], toy["verifiers"]) == ("toy", "package", "0")
    assert Path(toy["venv"]).is_dir()


@pytest.mark.parametrize(
    ("asked", "version"),
    [("verifiers==0.4.0", "0.4.0"), ("verifiers[rl] >= 0.2 ; extra == 'x'", ">= 0.2"), ("verifiers-extras==1", None)],
)
def test_the_version_that_is_asked_for_is_read_from_the_requirements(
    here: Path, asked: str, version: str | None
) -> None:
    folder = write_package(here / "environments", "toy", PLAIN)
    text = (folder / "pyproject.toml").read_text().replace("dependencies = []", f"dependencies = [{asked!r}]")
    (folder / "pyproject.toml").write_text(text.replace("'verifiers", '"verifiers').replace("']", '"]'))
    [entry] = list_environments(here / "environments")
    assert entry.verifiers == version


def test_an_empty_folder_says_how_to_begin(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "environments").mkdir()
    assert env(["list"]) == 0
    assert "trireme env init" in capsys.readouterr().out


def test_every_environment_that_is_shipped_has_a_line_in_the_docs() -> None:
    entries = list_environments(REPOSITORY / "environments")
    shipped = [entry.id for entry in entries if entry.kind == "package"]
    docs = (REPOSITORY / "docs" / "environments.md").read_text()
    assert len(shipped) >= 3
    assert [id for id in shipped if f"[{id}](" not in docs] == []
    assert [entry.trouble for entry in entries if entry.trouble] == []

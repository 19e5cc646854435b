"""Finding environments by id, and the virtual environments that they get."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from local_packages import write_package
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.neighbours import neighbours_of
from trireme.orchestrator.environments.venv import (
    COMPLETE,
    EnvironmentSource,
    environment_python,
    find_environment,
    installed_venv,
)

# Does what `uv venv DIR` and `uv pip install` leave behind, and notes that it was called.
FAKE_UV = """#!/bin/sh
echo "$@" >> "{calls}"
case "$1" in
  venv) for last; do :; done; sleep 0.1; mkdir -p "$last/bin"; ln -s "{python}" "$last/bin/python" ;;
  pip) echo "Resolving..."; {install} ;;
esac
"""


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "environments" / "word_count"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "word-count"\nversion = "0"\n')
    (folder / "word_count.py").write_text("")
    return tmp_path / "environments"


@pytest.fixture
def fake_uv(tmp_path):
    def write(install: str = "true") -> str:
        path = tmp_path / "uv"
        path.write_text(FAKE_UV.format(calls=tmp_path / "calls", python=sys.executable, install=install))
        path.chmod(0o755)
        return str(path)

    return write


def num_installs(tmp_path: Path) -> int:
    calls = tmp_path / "calls"
    return calls.read_text().count("pip install") if calls.exists() else 0


@pytest.mark.parametrize("id", ["word-count", "word_count", "someone/word-count"])
def test_a_package_is_found_under_each_of_its_spellings(root, id):
    source = find_environment(id, root=root)
    assert (source.kind, source.module, source.folder) == ("package", "word_count", (root / "word_count").resolve())


def test_a_package_is_found_by_its_path(root):
    assert find_environment(f"{root}/word_count", root=Path("/nowhere")).module == "word_count"


def test_a_file_needs_no_virtual_environment(root):
    source = find_environment(str(root / "word_count" / "word_count.py"))
    assert (source.kind, source.module) == ("file", str(root / "word_count" / "word_count.py"))
    assert environment_python(source, cache=root) == Path(sys.executable)


def test_a_missing_file_is_named_with_its_whole_path(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/gone.py"):
        find_environment(str(tmp_path / "gone.py"))


def test_an_installed_distribution_runs_with_this_interpreter(root):
    source = find_environment("safetensors", root=root)
    assert (source.kind, source.module) == ("installed", "safetensors")
    assert environment_python(source) == Path(sys.executable)


def test_an_unknown_id_lists_what_was_searched_and_what_comes_near(root):
    with pytest.raises(ConfigError) as raised:
        find_environment("wrod-count", root=root)
    assert str(root / "wrod_count") in str(raised.value)
    assert "did you mean 'word_count'?" in str(raised.value)


def test_a_hub_id_that_is_not_here_says_what_to_do(root):
    with pytest.raises(ConfigError, match="Fetching 'owner/thing' from a hub is not possible here: download"):
        find_environment("owner/thing", root=root)


def test_a_virtual_environment_is_made_once_and_used_without_uv_from_then_on(root, tmp_path, fake_uv):
    source = find_environment("word-count", root=root)
    python = environment_python(source, cache=tmp_path / "cache", uv=fake_uv())
    assert subprocess.run([python, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
    assert environment_python(source, cache=tmp_path / "cache", uv="/no/uv/here") == python
    assert num_installs(tmp_path) == 1


def test_editing_code_keeps_the_virtual_environment_and_editing_dependencies_makes_another(root, tmp_path, fake_uv):
    source = find_environment("word-count", root=root)
    first = environment_python(source, cache=tmp_path / "cache", uv=fake_uv())
    (root / "word_count" / "word_count.py").write_text("changed = True")
    assert environment_python(source, cache=tmp_path / "cache", uv=fake_uv()) == first
    with open(root / "word_count" / "pyproject.toml", "a") as project:
        project.write('dependencies = ["numpy"]\n')
    assert environment_python(source, cache=tmp_path / "cache", uv=fake_uv()) != first


def test_a_cache_that_cannot_be_written_to_is_named_with_what_to_set(root, tmp_path, fake_uv):
    (tmp_path / "cache").touch()  # a file, where a folder is to be
    with pytest.raises(ConfigError, match=rf"installed in {tmp_path}/cache/environments.*set XDG_CACHE_HOME"):
        environment_python(find_environment("word-count", root=root), cache=tmp_path / "cache", uv=fake_uv())


def test_a_half_made_virtual_environment_is_made_again(root, tmp_path, fake_uv):
    source = find_environment("word-count", root=root)
    python = environment_python(source, cache=tmp_path / "cache", uv=fake_uv())
    venv = python.parents[1]
    (venv / COMPLETE).unlink()
    (venv / "half").touch()
    assert environment_python(source, cache=tmp_path / "cache", uv=fake_uv()) == python
    assert not (venv / "half").exists()
    assert num_installs(tmp_path) == 2


def test_a_virtual_environment_whose_python_is_gone_is_made_again(root, tmp_path, fake_uv):
    source = find_environment("word-count", root=root)
    python = environment_python(source, cache=tmp_path / "cache", uv=fake_uv())
    python.unlink()
    python.symlink_to("/no/python/here")
    assert environment_python(source, cache=tmp_path / "cache", uv=fake_uv()).exists()


def test_those_who_want_the_same_one_at_once_wait_for_the_one_who_builds(root, tmp_path, fake_uv):
    source = find_environment("word-count", root=root)
    uv = fake_uv()
    builders = [
        threading.Thread(target=environment_python, args=(source,), kwargs={"cache": tmp_path / "cache", "uv": uv})
        for _ in range(4)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert num_installs(tmp_path) == 1


def test_a_failed_install_shows_the_last_words_of_uv_and_is_tried_again(root, tmp_path, fake_uv):
    source = find_environment("word-count", root=root)
    log = tmp_path / "install.log"
    broken = fake_uv('echo "no version of numpie"; exit 2')
    with pytest.raises(ConfigError) as raised:
        environment_python(source, cache=tmp_path / "cache", uv=broken, log_file=log)
    assert "uv ended with code 2" in str(raised.value)
    assert "no version of numpie" in str(raised.value)
    assert str(log) in str(raised.value)
    assert environment_python(source, cache=tmp_path / "cache", uv=fake_uv()).exists()


def test_without_uv_the_error_says_how_to_get_it(root, tmp_path, monkeypatch):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"uv was not found(.|\n)*pip install uv"):
        environment_python(find_environment("word-count", root=root), cache=tmp_path / "cache")


@pytest.mark.e2e
def test_the_pins_of_the_project_around_it_do_not_reach_an_environment(tmp_path, monkeypatch):
    """uv takes constraints from the nearest [tool.uv] above the folder it runs in."""
    package = tmp_path / "environments" / "tiny"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.uv]\nconstraint-dependencies = ["iniconfig<0"]\n')
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling==1.33.0"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "tiny"\nversion = "0"\ndependencies = ["iniconfig"]\n'
        '[tool.hatch.build.targets.wheel]\ninclude = ["tiny.py"]\n'
    )
    (package / "tiny.py").write_text("import iniconfig\nvalue = 1\n")
    monkeypatch.chdir(tmp_path)
    python = environment_python(find_environment("tiny"), cache=tmp_path / "cache")
    show = [python, "-c", "import tiny; print(tiny.value)"]
    assert subprocess.run(show, capture_output=True, check=True, cwd="/").stdout == b"1\n"
    (package / "tiny.py").write_text("value = 22\n")
    assert subprocess.run(show, capture_output=True, check=True, cwd="/").stdout == b"22\n"


@pytest.mark.e2e
def test_our_cache_may_lie_inside_uvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both follow XDG_CACHE_HOME on some machines; uv refuses to work in a folder of its own cache."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "environments" / "nothing"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "nothing"\nversion = "0"\n[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n'
    )
    (folder / "backend.py").write_text("")
    source = EnvironmentSource(id="nothing", kind="package", module="nothing", folder=folder)
    log_file = tmp_path / "install.log"
    with pytest.raises(ConfigError):  # the package cannot be built, but uv has run
        environment_python(source, cache=tmp_path / "trireme", log_file=log_file)
    assert "inside the cache directory" not in log_file.read_text()
    assert "uv pip install" in log_file.read_text()


# packages beside it, with real uv and without any index

USES_BOX = "import box\nvalue = box.value\n"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")


def value_of(python: Path) -> str:
    show = [python, "-c", "import game; print(game.value)"]
    return subprocess.run(show, capture_output=True, check=True, text=True, cwd="/").stdout.strip()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("editable", [True, False])
def test_a_package_beside_it_is_installed_with_it_and_is_never_stale(tmp_path: Path, editable: bool) -> None:
    write_package(tmp_path, "box", "value = 1\n")
    line = f'{{ path = "../box", editable = {str(editable).lower()} }}'
    write_package(tmp_path, "game", USES_BOX, sources={"box": line})
    source = find_environment("game", root=tmp_path)
    first = environment_python(source, cache=tmp_path / "cache")
    assert value_of(first) == "1"
    (tmp_path / "box" / "box.py").write_text("value = 22\n")
    second = environment_python(source, cache=tmp_path / "cache")
    assert value_of(second) == "22"
    assert (second == first) is editable


@pytest.mark.usefixtures("offline")
def test_dependencies_of_packages_beside_it_decide_which_virtual_environment_it_gets(tmp_path: Path) -> None:
    """Also of those that these take from beside themselves."""
    write_package(tmp_path, "lid", "value = 3\n")
    write_package(tmp_path, "box", "from lid import value\n", sources={"lid": '{ path = "../lid", editable = true }'})
    write_package(tmp_path, "game", USES_BOX, sources={"box": '{ path = "../box", editable = true }'})
    source = find_environment("game", root=tmp_path)
    first = environment_python(source, cache=tmp_path / "cache")
    assert value_of(first) == "3"
    assert [each.name for each in neighbours_of(tmp_path / "game")] == ["box", "lid"]
    with open(tmp_path / "lid" / "pyproject.toml", "a") as project:
        project.write("\n[tool.other]\nchanged = true\n")
    assert installed_venv(source, cache=tmp_path / "cache") is None
    assert value_of(environment_python(source, cache=tmp_path / "cache")) == "3"


def test_a_package_beside_it_that_is_not_there_is_named_before_uv_is_asked(tmp_path: Path) -> None:
    write_package(tmp_path, "game", USES_BOX, sources={"box": '{ path = "../gone", editable = true }'})
    with pytest.raises(ConfigError, match=rf"takes 'box' from '../gone', and there is nothing at {tmp_path}/gone"):
        environment_python(find_environment("game", root=tmp_path), cache=tmp_path / "cache", uv="/no/uv/here")


def test_packages_that_name_each_other_are_each_read_once(tmp_path: Path) -> None:
    write_package(tmp_path, "box", "", sources={"game": '{ path = "../game", editable = true }'})
    write_package(tmp_path, "game", "", sources={"box": '[{ path = "../box", editable = true, marker = "True" }]'})
    assert [each.name for each in neighbours_of(tmp_path / "game")] == ["box"]


@pytest.mark.usefixtures("offline")
def test_built_again_it_is_whole_and_in_the_same_place(tmp_path: Path) -> None:
    write_package(tmp_path, "game", "value = 1\n")
    source = find_environment("game", root=tmp_path)
    python = environment_python(source, cache=tmp_path / "cache")
    (python.parents[1] / "stray").touch()
    assert environment_python(source, cache=tmp_path / "cache", again=True) == python
    assert not (python.parents[1] / "stray").exists()
    assert value_of(python) == "1"

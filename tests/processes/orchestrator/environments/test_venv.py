"""Finding environments by id, and the virtual environments that they get."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.runs.local_packages import write_package
from trireme.base.errors import ConfigError
from trireme.config.orchestrator import Environment
from trireme.orchestrator.environments.venv import (
    COMPLETE,
    environment_python,
    find_environment,
    installed_venv,
    local_packages,
    verifiers_of,
)

# Does what `uv venv DIR` and `uv pip install` leave behind, and notes that it was called.
FAKE_UV = """#!/bin/sh
echo "$@" >> "{calls}"
case "$1" in
  venv) for last; do :; done; sleep 0.1; mkdir -p "$last/bin"; ln -s "{python}" "$last/bin/python" ;;
  pip) echo "Resolving..."; eval "$INSTALL" ;;
esac
"""


@pytest.fixture
def root(tmp_path) -> Path:
    return write_package(tmp_path / "environments", "word-count", "").parent


@pytest.fixture
def build(root, tmp_path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text(FAKE_UV.format(calls=tmp_path / "calls", python=sys.executable))
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))

    def build(install: str = "true", **options) -> Path:
        monkeypatch.setenv("INSTALL", install)
        source = find_environment("word-count", root=root)
        return environment_python(source, **{"cache": tmp_path / "cache"} | options)

    return build


def num_installs(tmp_path: Path) -> int:
    return (tmp_path / "calls").read_text().count("pip install")


def test_environment_id_names_a_package_a_file_or_a_distribution(root):
    found = [find_environment(id, root=root) for id in ("word-count", "word_count", "someone/word-count")]
    found.append(find_environment(f"{root}/word_count", root=Path("/nowhere")))
    package = ("package", "word_count", (root / "word_count").resolve())
    assert [(source.kind, source.module, source.folder) for source in found] == [package] * 4
    file = str(root / "word_count" / "word_count.py")
    for id, kind in [(file, "file"), ("safetensors", "installed")]:
        source = find_environment(id, root=root)
        assert (source.kind, source.module, environment_python(source, cache=root)) == (kind, id, Path(sys.executable))


@pytest.mark.parametrize("id", [".", "./", "..", "../word_count", "./src/.."])
def test_a_package_is_found_by_its_path_from_any_folder(root, monkeypatch, id):
    folder = root / "word_count"
    (folder / "src").mkdir()
    monkeypatch.chdir(folder / "src" if id == ".." else folder)
    source = find_environment(id)
    assert (source.kind, source.module, source.folder) == ("package", "word_count", folder.resolve())
    assert Environment(id=id).resolved_name == "word_count"


UNKNOWN = [
    ("gone.py", "gone.py"),
    ("wrod-count", "did you mean 'word_count'"),
    ("owner/thing", "Fetching .* from a hub"),
]


@pytest.mark.parametrize(("id", "words"), UNKNOWN)
def test_an_unknown_id_is_refused_with_what_was_searched_and_what_to_do(root, id, words):
    with pytest.raises(ConfigError, match=words):
        find_environment(id, root=root)


def test_virtual_environment_is_built_once_for_concurrent_callers(root, build, tmp_path, monkeypatch):
    """Those who want it at the same time wait for the one who builds it."""
    builders = [threading.Thread(target=build) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    (root / "word_count" / "word_count.py").write_text("changed = True")  # another code is no other environment
    monkeypatch.setenv("UV", "/no/uv/here")
    python = build()
    assert subprocess.run([python, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
    assert num_installs(tmp_path) == 1


MAKES_ONE = "def load_environment():"
VERSIONS = [  # dependencies, code, the API of its verifiers, and what is required for its import
    ('["datasets"]', "import verifiers.v1 as vf", "v1", ("verifiers",)),
    ('["verifiers[ta]"]', "from verifiers.v1.tasksets import x", "v1", ()),
    ('["verifiers>=0.3.0"]', "from verifiers import (\n    v1 as vf,\n)", "v1", ()),
    ('["verifiers>=0.1.8"]', f"import verifiers as vf\n{MAKES_ONE}", "v0", ()),
    ('["verifiers>=0.1.8"]', f"try:\n    import verifiers.v1\nexcept: \n    import verifiers\n{MAKES_ONE}", "v0", ()),
    ('["verifiers"]', "import verifiers\nimport verifiers.v1 as vf", "v1", ()),
    (
        '[]\n[project.optional-dependencies]\nrl = ["verifiers[rl]>=0.1.5"]',
        "import verifiers",
        "v0",
        ("verifiers[rl]>=0.1.5",),
    ),
    ('["verifiers-extras"]', "from verifiers.types import State", "v0", ("verifiers",)),
    ("[]", f"from other import *\n{MAKES_ONE}", "v0", ()),
    ("[]", "# import verifiers", None, ()),
]


@pytest.mark.parametrize(("dependencies", "code", "api", "required"), VERSIONS)
def test_the_imports_of_a_package_choose_its_verifiers(tmp_path, dependencies, code, api, required):
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "a"\ndependencies = {dependencies}\n')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tasks.py").write_text(f"import re\n\n{code}\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("import verifiers.v1\n")
    choice = verifiers_of(tmp_path)
    assert (choice.api, choice.requirements) == (api, required)


FAKE_RESOLVER = """import re, sys
from packaging.requirements import Requirement
from packaging.version import Version

constraints = open("constraints.txt").read().split("\\n") if "--constraints" in sys.argv else []
ranges = [Requirement(each) for each in [{declared!r}, *constraints]]
ranges = [each.specifier for each in ranges if each.name == "verifiers"]
fits = [each for each in {versions} if all(range.contains(each, prereleases=True) for range in ranges)]
if not fits:
    sys.exit("No solution found: word-count depends on {declared}")
open("{chosen}", "w").write(max(fits, key=Version))
print(" + verifiers==" + max(fits, key=Version))
"""
PUBLISHED = ["0.1.5", "0.1.11", "0.1.12", "0.1.14", "0.2.0", "0.2.1", "0.3.1", "0.3.2.dev210", "0.4.0", "0.4.1.dev86"]
RANGES = [
    ("verifiers>=0.1.8", "v0", "0.2.0"),
    ("verifiers>=0.1.15.dev7", "v0", "0.2.0"),
    ("verifiers[rl]>=0.2.1", "v0", "0.3.1"),
    ("verifiers<0.2", "v0", "0.1.14"),
    ("verifiers>=0.3.0", "v1", "0.4.0"),
    ("verifiers>=0.4.1.dev1", "v1", "0.4.1.dev86"),
    ("verifiers>=0.1.9,<0.1.12", "v0", r"verifiers 0\.1\.11 .*verifiers>=0\.1\.9,<0\.1\.12.*pin verifiers==0\.2\.0"),
    ("verifiers>=0.4", "v0", r"verifiers 0\.4\.1.*pin verifiers==0\.2\.0"),
    ("verifiers<0.4", "v1", r"verifiers 0\.3\.2.*pin verifiers==0\.4\.0"),
]


@pytest.mark.parametrize(("declared", "api", "outcome"), RANGES)
def test_verifiers_is_of_the_declared_range_or_the_range_is_named(root, build, tmp_path, declared, api, outcome):
    code = root / "word_count" / "word_count.py"
    code.write_text("import verifiers.v1" if api == "v1" else f"import verifiers\n{MAKES_ONE}\n    pass")
    resolver, chosen = tmp_path / "resolver.py", tmp_path / "chosen"
    resolver.write_text(FAKE_RESOLVER.format(declared=declared, versions=PUBLISHED, chosen=chosen))
    install = f'{sys.executable} {resolver} "$@"'
    if outcome[0].isdigit():
        build(install)
        assert chosen.read_text() == outcome
    else:
        with pytest.raises(ConfigError, match=outcome):
            build(install)


def test_what_trains_models_is_not_installed_for_the_extra_of_verifiers(root, build, tmp_path):
    (root / "word_count" / "word_count.py").write_text("import verifiers\n")
    declared = '["verifiers[rl]>=0.1.5", "vllm==0.11.0"]'
    project = f'[project]\nname = "word-count"\nversion = "1"\ndependencies = {declared}\n'
    (root / "word_count" / "pyproject.toml").write_text(project)
    build(f'cp overrides.txt "{tmp_path}"')
    never = [line.partition(";")[0] for line in (tmp_path / "overrides.txt").read_text().splitlines()]
    assert never == ["deepspeed", "flash-attn", "liger-kernel"]  # the package names vllm itself


def test_incomplete_or_broken_virtual_environment_is_rebuilt(build, tmp_path):
    python = build()
    (python.parents[1] / COMPLETE).unlink()
    (half := python.parents[1] / "half").touch()
    assert build() == python
    assert not half.exists()
    python.unlink()
    python.symlink_to("/no/python/here")
    assert build().exists()
    assert num_installs(tmp_path) == 3


def test_a_package_that_supports_another_python_gets_that_one(root, build, tmp_path):
    project = root / "word_count" / "pyproject.toml"
    for required, python in ((">=3.9", sys.executable), (">=3.99", ">=3.99")):
        project.write_text(f'[project]\nname = "word-count"\nversion = "1"\nrequires-python = "{required}"\n')
        build()
        assert f"--python {python} " in (tmp_path / "calls").read_text()


def test_what_stops_an_install_is_named_with_what_to_do_and_is_tried_again(build, tmp_path, monkeypatch):
    log = tmp_path / "install.log"
    with pytest.raises(ConfigError, match=rf"uv ended with code 2(.|\n)*no version of numpie(.|\n)*{log}"):
        build('echo "no version of numpie"; exit 2', log_file=log)
    assert build().exists()
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"uv was not found(.|\n)*pip install uv"):
        build(again=True)
    (tmp_path / "file").touch()  # where a folder is to be
    with pytest.raises(ConfigError, match=rf"installed in {tmp_path}/file/environments.*set XDG_CACHE_HOME"):
        build(cache=tmp_path / "file")


def value_of(python: Path) -> str:
    show = [python, "-c", "import game; print(game.value)"]
    return subprocess.run(show, capture_output=True, check=True, text=True, cwd="/").stdout.strip()


def test_environment_is_installed_apart_from_the_outer_project(tmp_path, monkeypatch):
    """uv takes constraints from the nearest [tool.uv] above its folder, and refuses to run in its own cache."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text('[tool.uv]\nconstraint-dependencies = ["box<0"]\n')
    write_package(tmp_path, "box", "value = 1\n")
    write_package(tmp_path, "game", "from box import value\n", sources={"box": '{ path = "../box", editable = true }'})
    monkeypatch.chdir(tmp_path)
    source = find_environment("game", root=tmp_path)
    python = environment_python(source, cache=tmp_path / "trireme")
    assert value_of(python) == "1"
    (python.parents[1] / "stray").touch()
    assert environment_python(source, cache=tmp_path / "trireme", again=True) == python
    assert not (python.parents[1] / "stray").exists()
    assert value_of(python) == "1"


@pytest.mark.parametrize("editable", [True, False])
def test_a_package_beside_it_is_installed_with_it_and_is_never_stale(tmp_path, monkeypatch, editable):
    monkeypatch.setenv("UV_OFFLINE", "1")
    write_package(tmp_path, "box", "value = 1\n")
    line = f'{{ path = "../box", editable = {str(editable).lower()} }}'
    write_package(tmp_path, "game", "import box\nvalue = box.value\n", sources={"box": line})
    source = find_environment("game", root=tmp_path)
    first = environment_python(source, cache=tmp_path / "cache")
    assert value_of(first) == "1"
    (tmp_path / "box" / "box.py").write_text("value = 22\n")
    second = environment_python(source, cache=tmp_path / "cache")
    assert value_of(second) == "22"
    assert (second == first) is editable


def test_changed_local_dependency_gets_a_new_virtual_environment(tmp_path, build):
    """Also of those that these take from beside themselves; and each is read once, where they name each other."""
    root = tmp_path / "environments"
    write_package(root, "lid", "", sources={"word-count": '[{ path = "../word_count", editable = true }]'})
    write_package(root, "box", "", sources={"lid": '{ path = "../lid", editable = true }'})
    with open(root / "word_count" / "pyproject.toml", "a") as project:
        project.write('\n[tool.uv.sources]\nbox = { path = "../box", editable = true }\n')
    assert [each.name for each in local_packages(root / "word_count")] == ["box", "lid"]
    first, source = build(), find_environment("word-count", root=root)
    assert installed_venv(source, cache=tmp_path / "cache") == first.parents[1]
    with open(root / "lid" / "pyproject.toml", "a") as project:
        project.write("\n[tool.other]\nchanged = true\n")
    assert installed_venv(source, cache=tmp_path / "cache") is None
    second = build()
    own = root / "word_count" / "pyproject.toml"
    own.write_text(own.read_text().replace("dependencies = []", 'dependencies = ["numpy"]'))
    assert len({first, second, build()}) == 3


def test_a_source_of_verifiers_without_v0_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    write_package(tmp_path, "verifiers", "")
    line = '{ path = "../verifiers", editable = true }'
    write_package(tmp_path, "game", "import verifiers as vf\n", sources={"verifiers": line})
    with pytest.raises(
        ConfigError, match=r"verifiers file:\S+ from the declared range \(verifiers in .*pin verifiers==0\.2\.0"
    ):
        environment_python(find_environment("game", root=tmp_path), cache=tmp_path / "cache")

"""`trireme lab setup`: an empty folder becomes one in which what people know can be typed."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from trireme.base.errors import ConfigError
from trireme.cli.other_formats import run_translated
from trireme.cli.rl import rl
from trireme.tools.environments.catalog import list_environments
from trireme.tools.policies.endpoint_file import read_endpoints
from trireme.tools.workspace import IN_PACKAGE, PARTS, Workspace, find_shipped
from trireme.tools.workspace import command as lab

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = {"alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle"}


@pytest.fixture
def lab_folder(tmp_path, monkeypatch):
    folder = tmp_path / "My Lab"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_folder_of_the_tutorial(lab_folder, capsys):
    assert lab(["setup", "--vf-rl", "--size", "cpu"]) == 0
    assert (lab_folder / "environments" / "AGENTS.md").is_file()
    assert capsys.readouterr().out.splitlines()[-1] == "Next: uv run vf-rl @ configs/vf-rl/reverse-text.toml"
    assert 'name = "my-lab"' in Path("pyproject.toml").read_text(), "a name that a project may have"
    listed = {entry.id for entry in list_environments(Path("environments")) if not entry.id.endswith(".py")}
    assert listed == ENVIRONMENTS | {"python-sandbox"}
    assert all(endpoint.url for endpoint in read_endpoints(Path("configs/endpoints.py")).values())
    lab(["setup", "--vf-rl", "--path", "new/lab", "--size", "one-gpu"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("Next: cd new/lab && uv run vf-rl @")
    text = Path("new/lab/configs/vf-rl/reverse-text.toml").read_text()
    assert 'model = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"\n' in text
    assert "#|" not in text


OURS = {"agent", "color-squares", *ENVIRONMENTS}
COMMANDS = {"vf-rl": "vf-rl", "prime-rl": "prime-rl", "rl": "prime-rl"}  # by folder; `rl` for ours


@pytest.mark.parametrize(
    ("kind", "folders"), [(["--vf-rl"], {"vf-rl"}), (["--prime-rl"], {"prime-rl"} | OURS), ([], {"rl", "gepa"} | OURS)]
)
def test_lab_setup_writes_runnable_examples_of_the_chosen_format(kind, folders, lab_folder, capsys):
    lab(["setup", *kind, "--size", "cpu"])
    files = sorted(Path("configs").glob("*/*.toml"))
    names = {folder: {"rl"} if folder in OURS else ENVIRONMENTS for folder in folders - {"gepa"}}
    assert {folder: {file.stem for file in Path("configs", folder).glob("*.toml")} for folder in names} == names
    assert {file.parent.name for file in files} == folders
    # Ours are tried once. The plan of color-squares imports transformers, for 30 s: `test_pictures_run.py` starts that.
    tried = folders - {"gepa", "color-squares"} - (OURS if kind else set())
    for file in (file for file in files if file.parent.name in tried):
        program = COMMANDS.get(file.parent.name)
        command = partial(run_translated, program) if program else rl
        assert command(["@", str(file), "--dry-run", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "not ready" in line and "is in use" not in line] == []


def test_nothing_that_is_there_is_written_over(lab_folder, capsys):
    def files() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in Path().rglob("*.*") if file.is_file()}

    Path("pyproject.toml").write_bytes('[project]\nname = "mine"\nversion = "1"  # été\n'.encode("latin-1"))
    lab(["setup", "--vf-rl", "--size", "cpu"])
    before = files()
    assert before["pyproject.toml"].startswith(b'[project]\nname = "mine"\n')
    assert not Path(".venv").is_symlink(), "a sync of that project would follow it"
    assert "✓ Kept the Python project that was here" in capsys.readouterr().out
    Path("configs/vf-rl/wordle.toml").write_bytes(b"# \xe9\n")
    Path("configs/vf-rl/gsm8k.toml").unlink()
    lab(["setup", "--vf-rl", "--size", "cpu"])
    assert files() == before | {"configs/vf-rl/wordle.toml": b"# \xe9\n"}
    assert "kept configs/vf-rl/wordle.toml" in capsys.readouterr().out


def test_environments_are_copied_out_of_an_installed_package(tmp_path):
    """The package is not to be written in, and results of an environment are written beside it."""
    package = tmp_path / "site-packages" / "trireme"
    for part in PARTS:
        ignored = shutil.ignore_patterns("__pycache__", "outputs")
        shutil.copytree(ROOT / part, package / IN_PACKAGE / part, ignore=ignored)
    shipped = find_shipped(package)
    assert shipped == package / IN_PACKAGE
    workspace = Workspace(tmp_path / "lab", shipped)
    workspace.bring_environments()
    workspace.bring_models()
    assert not (workspace.root / "environments" / "wordle").is_symlink()
    assert (workspace.root / "models" / "wordle-tiny").is_symlink()


def test_what_cannot_be_set_up_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        lab(["setup", "--path", str(tmp_path / "lab"), "--vf-rl", "--prime-rl"])
    with pytest.raises(ConfigError, match=r"file cannot be set up: .* Expected a folder .* Name another by `--path`"):
        lab(["setup", "--path", str(tmp_path / "file")])
    with pytest.raises(ConfigError, match=r"in none of .* Expected configs, environments, models .* Install it again"):
        find_shipped(tmp_path / "lib" / "python" / "trireme")


def test_in_the_checkout_itself_nothing_is_touched(capsys):
    before = (ROOT / "configs" / "reverse-text" / "rl.toml").read_text()
    assert lab(["setup", "--path", str(ROOT), "--size", "eight-gpus"]) == 0
    assert (ROOT / "configs" / "reverse-text" / "rl.toml").read_text() == before
    assert "--path ../lab --size eight-gpus" in capsys.readouterr().out

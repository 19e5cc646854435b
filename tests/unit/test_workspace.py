"""`trireme lab setup`: an empty folder becomes one in which what people know can be typed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from trireme.base.errors import ConfigError
from trireme.cli.lab import lab
from trireme.cli.prime_rl import prime_rl
from trireme.cli.rl import rl
from trireme.cli.vf_rl import vf_rl
from trireme.config.endpoints import read_endpoints
from trireme.launch.workspace.setup import Workspace
from trireme.launch.workspace.shipped import IN_PACKAGE, PARTS, find_shipped
from trireme.orchestrator.environments.catalog import list_environments

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle"}


@pytest.fixture
def lab_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are typed in."""
    folder = tmp_path / "My Lab"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files_in(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.*") if file.is_file()}


def test_the_folder_of_the_tutorial(lab_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(["setup", "--vf-rl", "--size", "cpu"]) == 0
    expected = {f"{name}.toml" for name in ENVIRONMENTS}
    assert {file.name for file in (lab_folder / "configs" / "vf-rl").iterdir()} == expected
    assert (lab_folder / "environments" / "AGENTS.md").is_file()
    said = capsys.readouterr().out
    marked = [line.partition(":")[0] for line in said.splitlines() if line.startswith("✓")]
    assert marked == [
        "✓ Created Python project",
        "✓ Created workspace structure",
        "✓ Wrote endpoints",
        "✓ Wrote example configs for a CPU",
    ]
    assert said.splitlines()[-1] == "Next: uv run vf-rl @ configs/vf-rl/reverse-text.toml"


@pytest.mark.parametrize(
    ("kind", "folders", "command"),
    [
        (["--vf-rl"], ("vf-rl",), vf_rl),
        (["--prime-rl"], ("prime-rl",), prime_rl),
        (["--prime-rl"], ENVIRONMENTS, rl),
        ([], ("rl",), prime_rl),
    ],
    ids=["vf-rl", "prime-rl", "ours", "hosted"],
)
def test_every_example_that_was_set_up_is_ready_to_run_from_there(
    kind: list[str],
    folders: Iterable[str],
    command: Callable[[list[str]], int],
    lab_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab(["setup", *kind, "--size", "cpu"])
    files = [file for folder in folders for file in Path("configs", folder).glob("*.toml")]
    assert len(files) == len(ENVIRONMENTS)
    for file in files:
        assert command(["@", str(file), "--dry-run", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "not ready" in line and "is in use" not in line] == []


def test_environments_and_endpoints_are_found_from_there(lab_folder: Path) -> None:
    lab(["setup"])
    listed = {entry.id for entry in list_environments(Path("environments")) if entry.kind == "package"}
    assert listed == ENVIRONMENTS
    assert all(endpoint.url for endpoint in read_endpoints(Path("configs/endpoints.py")).values())


def test_nothing_that_is_there_is_written_over(lab_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab(["setup", "--vf-rl", "--size", "cpu"])
    before = files_in(lab_folder)
    lab(["setup", "--vf-rl", "--size", "cpu"])
    assert files_in(lab_folder) == before
    assert "kept" not in capsys.readouterr().out
    mine = lab_folder / "configs" / "vf-rl" / "wordle.toml"
    mine.write_text("# mine\n")
    (lab_folder / "configs" / "vf-rl" / "gsm8k.toml").unlink()
    lab(["setup", "--vf-rl", "--size", "cpu"])
    assert files_in(lab_folder) == before | {"configs/vf-rl/wordle.toml": "# mine\n"}
    assert "kept configs/vf-rl/wordle.toml" in capsys.readouterr().out


def test_each_kind_of_examples_comes_when_it_is_asked_for(lab_folder: Path) -> None:
    def folders() -> set[str]:
        return {folder.name for folder in (lab_folder / "configs").iterdir() if folder.is_dir()}

    lab(["setup", "--vf-rl"])
    assert folders() == {"vf-rl"}
    lab(["setup", "--prime-rl"])
    assert folders() == {"vf-rl", "prime-rl", *ENVIRONMENTS}
    lab(["setup"])
    assert folders() >= {"vf-rl", "prime-rl", "rl", *ENVIRONMENTS}
    with pytest.raises(SystemExit):
        lab(["setup", "--vf-rl", "--prime-rl"])


def test_examples_are_for_the_size_that_was_asked_for(lab_folder: Path) -> None:
    lab(["setup", "--vf-rl", "--size", "one-gpu"])
    text = (lab_folder / "configs" / "vf-rl" / "reverse-text.toml").read_text()
    assert 'model = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"\n' in text
    assert "#|" not in text


def test_data_is_linked_so_that_there_is_one_copy_and_copied_where_that_is_asked_for(tmp_path: Path) -> None:
    shipped = find_shipped()
    linked = Workspace(tmp_path / "linked", shipped, copies=False)
    copied = Workspace(tmp_path / "copied", shipped, copies=True)
    for workspace in (linked, copied):
        workspace.root.mkdir()
        assert (workspace.bring_environments(), workspace.bring_models()) == (7, 4)
    for part in ("environments/wordle", "models/wordle-tiny"):
        assert (linked.root / part).resolve() == ROOT / part
        assert not (copied.root / part).is_symlink()
        assert (copied.root / part).is_dir()


def test_environments_are_copied_out_of_an_installed_package(tmp_path: Path) -> None:
    """Nobody is to write in there, and results of an environment are written beside it."""
    package = tmp_path / "site-packages" / "trireme"
    for part in PARTS:
        shutil.copytree(
            ROOT / part, package / IN_PACKAGE / part, ignore=shutil.ignore_patterns("__pycache__", "outputs")
        )
    shipped = find_shipped(package)
    assert (shipped.root, shipped.is_checkout) == (package / IN_PACKAGE, False)
    workspace = Workspace(tmp_path / "lab", shipped, copies=False)
    workspace.bring_environments()
    workspace.bring_models()
    assert not (workspace.root / "environments" / "wordle").is_symlink()
    assert (workspace.root / "models" / "wordle-tiny").is_symlink()


def test_without_examples_the_error_says_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in none of .* expected configs, environments, models .* Install it again"):
        find_shipped(tmp_path / "lib" / "python" / "trireme")


def test_a_link_to_what_is_gone_is_made_anew(lab_folder: Path) -> None:
    for name in (".venv", "models/wordle-tiny", "environments/wordle"):
        link = lab_folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(lab_folder / "gone")
    lab(["setup"])
    assert (lab_folder / "models" / "wordle-tiny" / "config.json").is_file()
    assert (lab_folder / "environments" / "wordle" / "pyproject.toml").is_file()
    assert (lab_folder / ".venv").resolve() == Path(sys.prefix).resolve()


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_project_that_is_there_never_gets_a_link_that_its_own_sync_would_follow(
    is_synced: bool, lab_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project, venv = lab_folder / "pyproject.toml", lab_folder / ".venv"
    project.write_text('[project]\nname = "mine"\nversion = "1"\n')
    if is_synced:
        venv.mkdir()
    lab(["setup"])
    assert project.read_text() == '[project]\nname = "mine"\nversion = "1"\n'
    assert not venv.is_symlink()
    assert venv.exists() == is_synced
    assert f"✓ Kept the Python project that was here: `uv run` uses that. Trireme is in {sys.prefix}" in (
        capsys.readouterr().out
    )


def test_trireme_in_no_virtual_environment_is_found_without_a_project(tmp_path: Path) -> None:
    assert Workspace(tmp_path, find_shipped(), copies=False).link_python(tmp_path / "usr") == "needless"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file cannot be set up: .* expected a folder .* Name another by `--path`"):
        lab(["setup", "--path", str(tmp_path / "file")])


def test_a_name_that_no_project_may_have_becomes_one_that_it_may(lab_folder: Path) -> None:
    lab(["setup"])
    assert 'name = "my-lab"' in (lab_folder / "pyproject.toml").read_text()


@pytest.mark.parametrize(("size", "told"), [("cpu", False), ("eight-gpus", True)])
def test_in_the_checkout_itself_nothing_is_touched(size: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / "configs" / "reverse-text" / "rl.toml").read_text()
    assert lab(["setup", "--path", str(ROOT), "--size", size]) == 0
    assert (ROOT / "configs" / "reverse-text" / "rl.toml").read_text() == before
    assert (f"--path ../lab --size {size}" in capsys.readouterr().out) == told


def test_an_unknown_verb_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no `trireme lab setpu` - expected setup. Did you mean `trireme lab setup`"):
        lab(["setpu"])


def test_another_folder_is_named_in_what_to_type_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab(["setup", "--vf-rl", "--path", str(tmp_path / "new" / "lab")])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"Next: cd {tmp_path}/new/lab && uv run vf-rl @")

"""What a run depends on beside its configuration is on disk from its start: nobody can tell it afterwards."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import torch

from trireme.base.devices import Devices
from trireme.base.paths import RunPaths
from trireme.cli.surroundings import note_surroundings
from trireme.config.load import load_run_config
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.ledger.surroundings import digest_of_files, gpu_names, look_around, of_environment
from trireme.ledger.surroundings import read_surroundings as read
from trireme.ledger.surroundings import write_surroundings as write


def test_surroundings_say_what_runs_here(tmp_path: Path) -> None:
    around = look_around(Devices(cores=3), {"say": of_environment(tmp_path, None)}, ["rl", "@", "x.toml"])
    assert around["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert around["python"] == ".".join(map(str, sys.version_info[:3]))
    assert around["machine"]["cores"] == 3
    assert around["command"] == ["rl", "@", "x.toml"]
    assert around["environments"]["say"]["files"] == digest_of_files(tmp_path)
    paths = RunPaths(tmp_path / "run")
    write(paths, around)
    assert read(paths) == around


def test_surroundings_of_before_a_resumption_stay_and_what_cannot_be_read_is_as_if_it_were_not_there(tmp_path) -> None:
    paths = RunPaths(tmp_path)
    assert read(paths) == {}
    for number in (1, 1, 2, 3):
        write(paths, {"python": str(number)})
    kept = sorted(path.name for path in paths.configs.iterdir())
    assert kept == ["surroundings.earlier-1.json", "surroundings.earlier-2.json", "surroundings.json"]
    assert read(paths) == {"python": "3"}
    (paths.configs / "surroundings.json").write_text('{"python": ')
    assert read(paths) == {}


def test_a_digest_of_files_changes_with_any_file_and_not_with_byte_code(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "env.py").write_text("x = 1\n")
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    seen = [digest_of_files(tmp_path)]
    (tmp_path / "env.pyc").write_bytes(b"compiled")
    assert digest_of_files(tmp_path) == seen[0]
    for name, text in (("data/train.jsonl", "[]\n"), ("env.py", "x = 2\n"), ("more.py", "")):
        (tmp_path / name).write_text(text)
        seen.append(digest_of_files(tmp_path))
    assert len(set(seen)) == len(seen)


def test_gpus_and_packages_of_an_environment_are_named_as_they_lie_on_disk(tmp_path: Path) -> None:
    for number, model in enumerate(["NVIDIA H200", "NVIDIA A100"]):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t {model}\nIRQ:   \t 11\n")
    assert gpu_names(tmp_path) == ["NVIDIA H200", "NVIDIA A100"]
    for name in ("verifiers-0.1.9.dist-info", "datasets-4.0.0.dist-info", "idna-3.1.dist-info", "verifiers"):
        (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
    assert of_environment(None, tmp_path / "venv/bin/python") == {"verifiers": "0.1.9", "datasets": "4.0.0"}


def test_a_run_notes_the_code_of_its_environments_where_it_is_found(tmp_path: Path) -> None:
    config = load_run_config(["@", "configs/reverse-text/rl.toml"], program="rl")[0]
    config = updated(config, {"output_dir": tmp_path / "known"})
    note_surroundings(config, Devices(cores=2))
    noted = read(config.paths)
    assert noted["environments"]["reverse-text"]["files"] == digest_of_files(Path("environments/reverse_text"))
    assert noted["packages"]["transformers"] == version("transformers")
    gone = {"output_dir": str(tmp_path), "orchestrator": {"env": [{"id": "not-installed"}, {"id": "gone.py"}]}}
    config = RunConfig.model_validate(gone)
    note_surroundings(config, Devices(cores=2))
    assert read(config.paths)["environments"] == {"not-installed": {}, "gone.py": {}}

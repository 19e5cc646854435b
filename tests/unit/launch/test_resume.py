"""`--resume`: a run that cannot be resumed is refused before anything is started."""

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.processes.stage import write_checkpoint
from support.runs.written_run import build_config
from trireme.base.errors import ConfigError
from trireme.cli.command import open_process
from trireme.cli.rl import rl
from trireme.config.files import write_run
from trireme.config.resolve import updated
from trireme.config.resume import RUN, SFT, when_of
from trireme.config.run import RunConfig
from trireme.config.section import walk
from trireme.config.sft import SftConfig
from trireme.config.trainer import Lora, TrainerModel
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, State
from trireme.journal.settings import Settings
from trireme.journal.versions import Versions
from trireme.launch.resume import check_resume, is_trained, rewind
from trireme.launch.settings import print_changes, progress_of, write_settings


def written(config: RunConfig | SftConfig, *steps: int) -> RunConfig | SftConfig:
    write_run(config, config.paths.run_config)
    config.paths.metrics.touch()
    for step in steps:
        write_checkpoint(config.paths, step)
    return updated(config, {"resume": True})


@pytest.fixture
def earlier(tmp_path):
    return written(updated(build_config(tmp_path / "run"), {"max_steps": 4}), 2, 3)


@pytest.fixture
def fine_tuned(tmp_path):
    model = TrainerModel(name="models/a")
    return written(SftConfig(output_dir=tmp_path / "sft", data="x.jsonl", max_steps=3, model=model), 3)


@pytest.fixture
def adapted(fine_tuned):
    return written(updated(fine_tuned, LORA))


@pytest.fixture
def ahead(earlier):
    """Engines have confirmed two versions since the newest checkpoint, of step 3; batch 5 is waiting."""
    for step in range(6):
        Journal(earlier.paths.journal).append(BatchRecord(step, [], [], State(next_batch=step + 1)))
        Versions(earlier.paths.journal).record(step, ["engine"], {"a": "0"}, 0.0)
    return updated(earlier, {"max_steps": 9})


ENV = ("--orchestrator.env.0.id", "tests/e2e/say.py")
MUON = {"trainer.optim.type": "muon"}
OTHER = {"model.name": "models/other"}
LORA = {"model.lora": Lora(rank=4)}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 3},
        {"trainer.optim.type": "adamw_8bit"},
        MUON | {"trainer.ckpt.resume_step": 0},
        OTHER | {"max_steps": 1, "resume": False},
        {"model.name": f"/moved/{build_config(Path()).model.name}"},
    ],
)
def test_a_run_is_resumed_as_it_was_and_further(earlier, changes):
    check_resume(updated(earlier, changes))


@pytest.mark.parametrize("process", ["run", "orchestrator", "trainer"])
def test_every_process_refuses_to_resume_with_another_model(earlier, process):
    earlier.paths.run_config.rename(earlier.paths.configs / f"{process}.json")
    argv = ["--output-dir", str(earlier.paths.root), "--resume", "--model.name", "models/wordle-tiny", *ENV]
    with pytest.raises(ConfigError, match=r"trains the model .*`model.name` is 'models/wordle-tiny'"):
        rl(argv) if process == "run" else open_process(process, argv)


@pytest.mark.parametrize(("process", "words"), [("orchestrator", "holds 1 batches"), ("trainer", "steps 2, 3")])
def test_process_started_alone_refuses_the_folder_of_an_earlier_run(earlier, process, words):
    """A launcher would move its files aside."""
    Journal(earlier.paths.journal).append(BatchRecord(0, [], [], State(next_batch=1)))
    record = earlier.paths.configs / f"{process}.json"
    record.write_text("of the earlier run")
    with pytest.raises(ConfigError, match=rf"{words}.*--resume"):
        open_process(process, ["--output-dir", str(earlier.paths.root), *ENV])
    assert record.read_text() == "of the earlier run"


@pytest.mark.parametrize(
    ("run", "changes", "words"),
    [
        ("earlier", {"max_steps": 2}, r"step 3, .*`max_steps` is 2 - expected 3 or more"),
        ("earlier", MUON, r"adamw.*`trainer.optim.type` is .muon"),
        ("fine_tuned", {"max_steps": 2}, r"step 3, .* `max_steps` is 2 .*`--ckpt.resume-step N`"),
        ("fine_tuned", OTHER, r"models.a.*`model.name` is .models.other"),
        ("fine_tuned", {"optim.type": "sgd"}, r"adamw.*`optim.type` is .sgd"),
        ("fine_tuned", {"seed": 5}, r"`seed` = 5 - expected 0"),
        ("fine_tuned", LORA, r"trains the whole model.*\[model.lora\]"),
        ("adapted", {"model.lora": None}, r"adapters \(`model.lora.rank = 4`\).*these only.*--model.lora.rank 4"),
        ("adapted", {"model.lora.alpha": 64.0}, r"`model.lora.alpha` = 64.0 - expected 32.0"),
        ("adapted", {"model.lora.rank": 8, "model.lora.use_rslora": True}, r"rank` = 8, .*true - expected 4, false"),
        ("adapted", {"model.lora.target_modules": ("q_proj",)}, r"target_modules"),
        ("ahead", {"trainer.model.optimization_dtype": "bfloat16"}, r"step 3, and steps 3 to 4 .*resume-step 3"),
        ("ahead", {"orchestrator.env": ()}, r"without \['.*'\] in `orchestrator.env`"),
    ],
)
def test_what_would_make_the_run_another_one_is_refused_with_both_values(run, changes, words, request):
    config = request.getfixturevalue(run)
    check_resume(config)
    with pytest.raises(ConfigError, match=words):
        check_resume(updated(config, changes))


def test_run_is_trained_once_it_has_all_its_steps(earlier, fine_tuned):
    whole = updated(earlier, {"max_steps": 3})
    steps = {None: True, -1: True, 0: False, 2: False}
    found = {step: is_trained(updated(whole, {"trainer.ckpt.resume_step": step})) for step in steps}
    assert found == steps
    assert not is_trained(earlier)
    assert is_trained(fine_tuned)
    assert not is_trained(updated(fine_tuned, {"ckpt.resume_step": 0}))


def test_run_measured_in_epochs_is_not_finished_by_its_max_steps(fine_tuned, tmp_path):
    by_epochs = fine_tuned.model_copy(update={"num_epochs": 2.0, "max_steps": 1})
    check_resume(by_epochs)
    assert not is_trained(by_epochs)
    check_resume(updated(written(build_config(tmp_path / "run")), MUON))


def test_each_key_of_the_configuration_says_from_when_on_a_change_holds():
    """And nothing else does. Tables may have one entry for all of their keys."""
    known = {}
    for root, is_sft in ((RunConfig, False), (SftConfig, True)):
        known |= {key: when_of(key, is_sft=is_sft) for key, field in walk(root) if not field.section or field.optional}
        assert [key for key, when in known.items() if when is None] == []
    listed = [key for keys in chain(RUN.values(), SFT.values()) for key in keys.split()]
    names = {key for root in (RunConfig, SftConfig) for key, _ in walk(root)}
    assert [key for key in listed if key.removesuffix(".*") not in names] == []
    assert len(set(listed)) == len(listed) - 1  # `seq_len` decides what the samples of `sft` are


def scaled(folder: Path, name: str, factor: float = 1.0) -> Path:
    """Return a copy of a model, in a folder of that name."""
    shutil.copytree("models/reverse-text-tiny", folder / name)
    weights = folder / name / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = np.ascontiguousarray(tensors["model.norm.weight"] * np.float32(factor))
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder / name


@pytest.mark.parametrize("is_recorded", [True, False])
def test_base_model_may_move_but_not_be_replaced_by_a_namesake(tmp_path, capsys, is_recorded):
    """Runs of earlier versions did not write down what the model held: theirs is read again where it still is."""
    first, moved, other = scaled(tmp_path, "a/step_4"), scaled(tmp_path, "moved"), scaled(tmp_path, "b/step_4", 1.01)
    config = SftConfig(output_dir=tmp_path / "run", data="x", model=TrainerModel(name=str(first), lora=Lora()))
    if is_recorded:
        write_settings(config, config.paths.run_config)
        shutil.rmtree(first)
    config = written(config, 2)
    check_resume(updated(config, {"model.name": str(moved), "tokenizer.name": str(moved)}))
    with pytest.raises(ConfigError, match=rf"trains the model '{first}', but `model.name` is '{other}'.*weights"):
        check_resume(updated(config, {"model.name": str(other)}))
    if is_recorded:
        (moved / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
        print_changes(updated(config, {"model.name": str(moved)}), progress_of(config), where=config.paths.run_config)
        assert "the chat template, or a special token of it, is another" in capsys.readouterr().out
    (moved / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_resume(updated(config, {"model.name": str(moved)}))


def test_steps_that_are_repeated_have_the_settings_of_their_time(ahead, capsys):
    def resumed(**changes: Any) -> list[tuple[float, int, float]]:
        config = updated(ahead, {key.replace("__", "."): value for key, value in changes.items()})
        if (step := config.trainer.ckpt.resume_step) is not None:
            rewind(config.paths, step)
        write_settings(config, config.paths.run_config)
        found = [Settings(config).at(step) for step in range(7)]
        assert {each.trainer.num_ranks for each in found} == {config.trainer.num_ranks}
        return [(each.trainer.optim.lr, each.orchestrator.batch_size, each.trainer.loss.beta) for each in found]

    lr, size = ahead.trainer.optim.lr, ahead.orchestrator.batch_size
    then, new = (lr, size, 0.0), {"trainer__optim__lr": 0.5, "orchestrator__batch_size": 2 * size, "max_steps": 9}
    assert resumed(**new, trainer__num_ranks=2) == [then] * 5 + [(0.5, size, 0.0), (0.5, 2 * size, 0.0)]
    said = capsys.readouterr().out
    assert f"trainer.optim.lr: {lr} -> 0.5, from step 5 on\n" in said
    assert f"orchestrator.batch_size: {size} -> {2 * size}, from step 6 on\n" in said
    assert "steps 3 to 4 are repeated with the settings of their time" in said
    again = resumed(**new, trainer__num_ranks=2, trainer__loss__beta=0.1)  # nothing new was trained meanwhile
    assert again == [then] * 5 + [(0.5, size, 0.1), (0.5, 2 * size, 0.1)]
    back = resumed(**new, trainer__ckpt__resume_step=2)
    assert back == [then] * 2 + [(0.5, 2 * size, 0.0)] * 5
    assert resumed(**new) == back

"""`--resume`: a run that cannot be resumed is refused before anything is started."""

from pathlib import Path

import pytest

from stage import write_checkpoint
from trireme.base.errors import ConfigError
from trireme.cli.command import open_process
from trireme.cli.rl import rl
from trireme.config.files import write_run
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, State
from trireme.launch.resume import check_resume, is_trained
from written_run import build_config


def written(config: RunConfig | SftConfig, *steps: int) -> RunConfig | SftConfig:
    write_run(config, config.paths.run_config)
    config.paths.metrics.touch()
    for step in steps:
        write_checkpoint(config.paths, step)
    return updated(config, {"resume": True})


@pytest.fixture
def earlier(tmp_path: Path) -> RunConfig:
    return written(updated(build_config(tmp_path / "run"), {"max_steps": 4}), 2, 3)


@pytest.fixture
def fine_tuned(tmp_path: Path) -> SftConfig:
    model = TrainerModel(name="models/a")
    return written(SftConfig(output_dir=tmp_path / "sft", data="x.jsonl", max_steps=3, model=model), 3)


ENV = ("--orchestrator.env.0.id", "tests/e2e/say.py")
MUON = {"trainer.optim.type": "muon"}
OTHER = {"model.name": "models/other"}


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
def test_a_run_and_a_process_that_is_started_alone_refuse_to_resume_with_another_model(earlier, process):
    earlier.paths.run_config.rename(earlier.paths.configs / f"{process}.json")
    argv = ["--output-dir", str(earlier.paths.root), "--resume", "--model.name", "models/wordle-tiny", *ENV]
    with pytest.raises(ConfigError, match=r"trains the model .*`model.name` is 'models/wordle-tiny'"):
        rl(argv) if process == "run" else open_process(process, argv)


@pytest.mark.parametrize(("process", "words"), [("orchestrator", "holds 1 batches"), ("trainer", "steps 2, 3")])
def test_a_process_that_is_started_alone_is_refused_in_the_folder_of_an_earlier_run(earlier, process, words):
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
    ],
)
def test_fewer_steps_another_model_and_another_optimizer_are_refused_with_both_values(run, changes, words, request):
    config = request.getfixturevalue(run)
    check_resume(config)
    with pytest.raises(ConfigError, match=words):
        check_resume(updated(config, changes))


def test_a_run_is_trained_when_it_has_all_its_steps_and_is_not_asked_to_go_back(earlier, fine_tuned):
    whole = updated(earlier, {"max_steps": 3})
    steps = {None: True, -1: True, 0: False, 2: False}
    found = {step: is_trained(updated(whole, {"trainer.ckpt.resume_step": step})) for step in steps}
    assert found == steps
    assert not is_trained(earlier)
    assert is_trained(fine_tuned)
    assert not is_trained(updated(fine_tuned, {"ckpt.resume_step": 0}))


def test_epochs_say_nothing_of_steps_and_without_a_checkpoint_any_optimizer_will_do(fine_tuned, tmp_path):
    by_epochs = fine_tuned.model_copy(update={"num_epochs": 2.0, "max_steps": 1})
    check_resume(by_epochs)
    assert not is_trained(by_epochs)
    check_resume(updated(written(build_config(tmp_path / "run")), MUON))

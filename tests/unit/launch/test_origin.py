"""`resume_from`: a run begins from another run's checkpoint, which it neither changes nor needs any more."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from support.runs.written_run import WrittenRun, build_rich_config, write_whole_run
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import write_run
from trireme.config.resolve import resolve, updated
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import Lora
from trireme.journal.journal import Journal
from trireme.journal.manifest import complete_steps
from trireme.journal.origin import Origin, read_origin
from trireme.journal.records import State
from trireme.launch.origin import begin, check_origin
from trireme.launch.resume import check_resume, rewind
from trireme.launch.settings import progress_of
from trireme.messages import encode
from trireme.tools.audit.audit import audit_run

ALL = ("optimizer", "scheduler", "data", "progress")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with open groups, difficulty pools and a curriculum; its checkpoints are of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("other") / "run"
    write_whole_run(folder, rich=True)
    return folder


def new_run(other: Path, folder: Path, *without: str, **changes: Any) -> RunConfig:
    config = build_rich_config(folder, max_async_level=0, max_steps=8, resume_from=str(other))
    return updated(config, {"trainer.ckpt.resume_without": without} | changes)


def begun(*given: Any, **changes: Any) -> tuple[RunConfig, Origin]:
    config = new_run(*given, **changes)
    begin(config)
    origin = read_origin(config.paths.root)
    assert origin is not None
    return config, origin


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_other_run_stays_as_it_was_when_a_run_begins_from_it(other, tmp_path):
    before = contents(other)
    config, _ = begun(other, tmp_path / "new")
    for _ in WrittenRun(config).go_on(4, 6):
        pass
    rewind(config.paths, 4)
    assert contents(other) == before


@pytest.mark.parametrize("without", [(), ("progress",), ("data",), ALL])
def test_audit_follows_a_run_from_what_it_began_with(other, tmp_path, without):
    config, origin = begun(other, tmp_path / "new", *without)
    write_run(config, config.paths.run_config)
    run, first = WrittenRun(config), origin.begins_at
    run._confirm(first)
    for _ in run.go_on(first, first + 3):
        pass
    report = audit_run(config.paths.root)
    assert report.holds, report.text()
    assert f"version 4 of {other}" in report.text()

    # The checkpoint is a part of what the audit proves.
    manifest = origin.checkpoint(config.paths.root) / "manifest.json"
    manifest.unlink()
    shutil.copy(other / "checkpoints" / "step_2" / "manifest.json", manifest)
    assert not audit_run(config.paths.root).holds


def test_state_continues_where_the_other_run_was_at_its_checkpoint(other, tmp_path):
    then = Journal(other / "journal").read(3).state  # batch 3 made version 4
    assert all((then.open_groups, then.scores, then.baselines, then.stage))

    def begins_with(*without: str) -> bytes:
        return encode(begun(other, tmp_path / "".join(["with", *without]), *without)[1].state)

    assert begins_with() == encode(then)
    assert begins_with("progress") == encode(replace(then, next_batch=0, counters={}))
    assert begins_with("data") == encode(State(next_batch=4, counters=then.counters))
    assert begins_with(*ALL) == encode(State())


@pytest.mark.parametrize(
    ("without", "begins_at", "shift"),
    [((), 4, 0), (("progress",), 0, 4), (("scheduler",), 4, -4), (("scheduler", "progress"), 0, 0)],
)
def test_learning_rate_continues_or_begins_again(other, tmp_path, without, begins_at, shift):
    _, origin = begun(other, tmp_path / "new", *without)
    assert (origin.begins_at, origin.schedule_shift) == (begins_at, shift)


def test_third_run_in_a_chain_keeps_its_schedule(other, tmp_path):
    config, _ = begun(other, tmp_path / "second", "progress")  # step 0 here is step 4 of the schedule
    write_run(config, config.paths.run_config)
    for _ in WrittenRun(config).go_on(0, 2):
        pass
    _, third = begun(config.paths.root, tmp_path / "third", "progress")
    assert (third.version, third.begins_at, third.schedule_shift) == (2, 0, 6)


def test_newest_checkpoint_is_taken_unless_a_step_is_named(other, tmp_path):
    asked = {"trainer.ckpt.resume_step": 2}
    for number, (given, changes, version) in enumerate(
        [(other, {}, 4), (other, asked, 2), (other / "checkpoints" / "step_2", {}, 2)]
    ):
        config = resolve(new_run(given, tmp_path / str(number), **changes), Devices(cores=2))
        assert config.trainer.ckpt.resume_step is None, "a step by itself is one of this run"
        begin(config)
        origin = read_origin(config.paths.root)
        assert getattr(origin, "version", None) == version


def test_run_is_resumed_by_what_it_began_with_once_the_other_is_gone(other, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    config, _ = begun(copy, tmp_path / "new")
    shutil.rmtree(copy)
    write_run(config, config.paths.run_config)
    resumed = updated(config, {"resume": True})
    for each in (resumed, updated(resumed, {"resume_from": None})):
        check_resume(each)
        check_origin(each)
    assert (progress_of(resumed).saved, progress_of(resumed).is_empty) == (4, True)
    assert audit_run(config.paths.root).holds


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"resume_from": Path("nowhere")}, "nowhere does not exist"),
    ({"max_steps": 4}, "checkpoint of step 4, and max_steps = 4 ... max_steps = 8"),
    ({"trainer.model.lora": Lora(rank=4)}, "trains the whole model, and this one adapters"),
    ({"trainer.optim.type": "muon"}, 'state of "adamw" ... "optimizer" to `trainer.ckpt.resume_without`'),
    ({"orchestrator.env": ()}, 'environments a, b, and this one none ... "data" to `trainer.ckpt.resume_without`'),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(other, tmp_path, changes, words):
    config = new_run(other, tmp_path / "new", **changes)
    with pytest.raises(ConfigError) as refusal:
        check_origin(config)
    for part in words.split(" ... "):
        assert part in str(refusal.value).replace("'", '"')
    assert not config.paths.root.exists()


def test_places_that_are_no_other_run_with_a_checkpoint_are_refused(other, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(other, copy)
    with pytest.raises(ConfigError, match=r"is the run's own folder .* `--resume` to continue"):
        check_origin(new_run(copy, copy))
    with pytest.raises(ConfigError, match=r"no complete checkpoint of step 3 .* it has \[2, 4\]"):
        check_origin(new_run(copy / "checkpoints" / "step_3", tmp_path / "new"))
    shutil.rmtree(copy / "checkpoints")
    assert not complete_steps(copy / "checkpoints")
    with pytest.raises(ConfigError, match="there is no complete checkpoint in"):
        check_origin(new_run(copy, tmp_path / "new"))


def test_adapters_are_continued_only_in_their_own_form(other, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(other, copy)
    lora = Lora(rank=4, target_modules=("q_proj", "v_proj"))
    write_run(new_run(other, copy, **{"trainer.model.lora": lora}), copy / "configs" / "run.json")

    same = {"trainer.model.lora": Lora(rank=4, target_modules=("v_proj", "q_proj"))}
    check_origin(new_run(copy, tmp_path / "new", **same))
    for changed in ({"rank": 8}, {"alpha": 8.0}, {"target_modules": ("q_proj",)}):
        with pytest.raises(ConfigError, match=f"lora.{next(iter(changed))} = .* expected the same"):
            check_origin(new_run(copy, tmp_path / "new", **{"trainer.model.lora": updated(lora, changed)}))
    with pytest.raises(ConfigError, match="trains adapters, and this one the whole model"):
        check_origin(new_run(copy, tmp_path / "new"))


def test_run_of_another_command_shares_no_place_in_the_data(other, tmp_path):
    config = SftConfig(output_dir=tmp_path / "sft", data="x.jsonl", max_steps=8, resume_from=other)
    with pytest.raises(ConfigError, match=r'is of rl, .* Add "data" to `ckpt.resume_without`'):
        check_origin(config)
    check_origin(updated(config, {"ckpt.resume_without": ("data",)}))


def test_processes_that_are_started_alone_begin_from_one_checkpoint(other, tmp_path):
    config, _ = begun(other, tmp_path / "new")
    before = contents(config.paths.root)
    begin(config)  # as the second process does
    assert contents(config.paths.root) == before
    for changed in ({"resume_from": other / "checkpoints" / "step_2"}, {"trainer.ckpt.resume_without": ("optimizer",)}):
        with pytest.raises(ConfigError, match="expected the same for all of its processes"):
            begin(updated(config, changed))


def test_resumed_run_refuses_to_begin_from_elsewhere(other, tmp_path):
    config, _ = begun(other, tmp_path / "new")
    with pytest.raises(ConfigError, match="holds once"):
        check_origin(updated(config, {"resume": True, "resume_from": tmp_path / "elsewhere"}))

"""The audit finds nothing in a correct run at any moment of it, and finds and names every fault that is planted."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.runs import planted_faults
from support.runs.planted_faults import (
    FAULTS,
    RICH_FAULTS,
    Fault,
    change,
    change_column,
    change_lines,
    flip_last,
    replaced,
    row_of,
)
from support.runs.written_run import (
    WrittenRun,
    build_config,
    build_rich_config,
    digests_of,
    rewrite_batch,
    write_whole_run,
)
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.files import write_run
from trireme.config.orchestrator import Advantage, Buffer
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.journal.entry import write_entry
from trireme.journal.journal import Journal
from trireme.journal.model_turn import Turn
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.records import BatchRecord, Branch, Dropped, Rollout
from trireme.journal.turns import RolloutLog, prompt_digest, read_turns, turns_file
from trireme.journal.versions import Confirmation, Version, Versions
from trireme.launch.resume import rewind
from trireme.messages import COLUMNS, Picture, Tokens
from trireme.tools.audit.audit import audit_run
from trireme.tools.audit.audit import command as audit
from trireme.tools.audit.report import Report
from trireme.tools.replay_command import command as replay


def assert_holds(folder: Path) -> Report:
    report = audit_run(folder)
    assert report.holds, report.text()
    return report


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return {rich: write_whole_run(folder / str(rich), rich=rich) for rich in (False, True)}


def copied(config: RunConfig, folder: Path) -> RunConfig:
    shutil.copytree(config.paths.root, folder)
    return config.model_copy(update={"output_dir": folder})


@pytest.fixture
def config(written, tmp_path):
    """A run of five batches of the test's own, to plant a fault in."""
    return copied(written[False], tmp_path / "run")


@pytest.fixture
def rich_config(written, tmp_path):
    """One with difficulty pools, a curriculum, masks, a teacher and a running mean."""
    return copied(written[True], tmp_path / "rich")


@pytest.mark.parametrize(("build", "level"), [(build_config, 0), (build_rich_config, 1)])
def test_a_run_holds_whatever_file_was_written_last(tmp_path, build, level):
    run = WrittenRun(build(tmp_path, max_async_level=level, seed=level))
    moments = [(moment, assert_holds(tmp_path)) for moment in run.write(6)]
    first, last = moments[0][1].summary, moments[-1][1].summary
    assert (first.batches, len(moments) > 30) == (0, True)
    assert (last.batches, last.trained, last.checkpoints) == (6, 36, [2, 4, 6])
    assert (last.lag == (0, 0)) == (level == 0)
    assert len(last.dropped_for) > 1
    samples = [sample for rollout in trained_in(run.config, 6) for sample in rollout.samples]
    assert last.trained_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)


def trained_in(config: RunConfig, batches: int) -> list[Rollout]:
    journal = Journal(config.paths.journal)
    return [one for step in range(batches) for one in journal.read(step).rollouts if one.masked is None]


def test_audit_accepts_every_moment_of_a_rewind(config):
    root, twin = config.paths.root, config.paths.root.with_name("twin")
    shutil.copytree(root, twin)
    rewind(RunPaths(twin), 2)
    order = ["checkpoints/step_", "journal/version_", "weights/step_", "journal/batch_"]  # as `rewind` moves them
    moved = [path.relative_to(twin) for path in twin.glob("*/set_aside_*/*")]
    moved.sort(key=lambda path: path.name, reverse=True)
    moved.sort(key=lambda path: [f"{path.parts[0]}/{path.name}".startswith(kind) for kind in order].index(True))
    assert len(moved) > 6
    for path in moved:
        (root / path).parent.mkdir(exist_ok=True)
        (root / path.parts[0] / path.name).rename(root / path)
        assert_holds(root)
    for _ in WrittenRun(config).go_on(2, 5):
        assert_holds(root)
    report = assert_holds(root)
    assert report.summary.batches == 5
    assert report.summary.set_aside
    assert "ways not taken, set aside: checkpoints/set_aside_" in report.text()


def test_audit_judges_each_batch_by_the_settings_it_was_made_with(rich_config):
    root = rich_config.paths.root
    rewind(rich_config.paths, 2)
    other = build_rich_config(root, seed=5, max_async_level=0)
    fewer = {"curriculum": other.orchestrator.curriculum[:1], "buffer": Buffer(), "advantage": Advantage()}
    other = other.model_copy(update={"orchestrator": other.orchestrator.model_copy(update=fewer)})
    for first, settings in ((2, other), (4, build_rich_config(root, seed=6))):
        write_run(settings, settings.paths.run_config)
        for _ in WrittenRun(settings).go_on(first, first + 2):
            assert_holds(root)


def test_what_may_happen_to_the_files_of_a_run_is_no_contradiction(config, tmp_path):
    content = config.paths.metrics.read_bytes()
    newest = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(newest, len(content), 9):
        config.paths.metrics.write_bytes(content[:end])  # a line is on its way
        assert_holds(config.paths.root)
    config.paths.metrics.write_bytes(content)
    Versions(config.paths.journal).record(5, ["http://127.0.0.1:8001"], digests_of(5), 0.0)  # confirmed again
    assert assert_holds(config.paths.root).notes == []
    shutil.rmtree(config.paths.weights / "step_2")
    assert "no export of checkpoint 2" in assert_holds(config.paths.root).notes[0]
    shutil.move(config.paths.root, tmp_path / "elsewhere")
    assert_holds(tmp_path / "elsewhere")
    on_gpu = write_whole_run(tmp_path / "gpu", device="cuda")  # where a replay may round differently
    planted_faults.confirm_otherwise(on_gpu)
    (note,) = assert_holds(on_gpu.paths.root).notes
    assert "2. confirmation says that model.norm.weight" in note


def test_audit_exit_code_tells_whether_contradictions_were_found(config, tmp_path, capsys):
    def said(*flags: str) -> tuple[int | None, str]:
        return audit([str(config.paths.root), *flags]), capsys.readouterr().out

    def empty(record: BatchRecord) -> None:
        for rollout in record.rollouts:
            none = {name: getattr(rollout.samples[0], name)[:0] for name in COLUMNS}
            rollout.samples = [msgspec.structs.replace(rollout.samples[0], **none)]
        record.state.cursors["\x1b[2J"] = record.state.cursors["a"]

    code, text = said()
    assert (code, "nothing was lost, and nothing was trained twice" in text) == (0, True)
    rewrite_batch(config, 2, empty)
    code, text = said()
    assert (code, "has no token that is trained on" in text) == (1, True)
    assert ("␛[2J" in text, "\x1b" in text) == (True, False), "what a run holds moves no terminal"
    for step in (3, 1):
        rewrite_batch(config, step, lambda record: record.rollouts.pop(1))
    code, text = said()
    assert (code, "batch 1: group" in text, "more: `trireme audit --json` lists them" in text) == (1, True, True)
    found = json.loads(said("--json")[1])
    assert (found["holds"], found["contradictions"][0]["step"], found["summary"]["batches"]) == (False, 1, 5)
    assert found["num_contradictions"] == len(found["contradictions"]) > 0
    with pytest.raises(ConfigError, match=r"is not a run's folder"):
        audit([str(tmp_path)])


def test_no_code_that_a_run_names_is_run_unless_the_user_names_it_too(config, tmp_path):
    mark = tmp_path / "mark"

    def as_custom(path: str) -> Callable[[BatchRecord], None]:
        def change(record: BatchRecord) -> None:
            args = {"cmd": f"touch {mark}; cat > {os.devnull}"}
            custom = {"advantage": "custom", "advantage_path": path, "advantage_args": args}
            record.rules = msgspec.structs.replace(record.rules, **custom)

        return change

    rewrite_batch(config, 2, as_custom("pydoc:pipepager"))
    for run_code in (None, "mine:advantages"):
        (note,) = audit_run(config.paths.root, run_code=run_code).notes
        assert "pydoc:pipepager, which is called only with `--run-code`" in note
    rewrite_batch(config, 2, as_custom("gone.py:best"))
    (note,) = audit_run(config.paths.root, run_code="gone.py:best").notes
    assert "gone.py does not exist" in note
    write_run(updated(config, {"trainer.loss.path": "pydoc:pipepager"}), config.paths.run_config)
    with pytest.raises(ConfigError, match=r"names code that a replay runs .*pydoc:pipepager.*--run-code"):
        replay([str(config.paths.root)])
    assert not mark.exists()


def test_a_picture_that_is_missing_or_was_changed_is_found_once(config):
    files = PictureFiles(pictures_folder(config.paths.journal))
    digest = files.add(b"a picture")

    def show(record: BatchRecord) -> None:
        record.rollouts[0].samples[0].pictures.append(Picture(digest, 0, 1, 1))

    for step in (1, 2):
        rewrite_batch(config, step, show)
    assert_holds(config.paths.root)
    for damage in (lambda path: path.write_bytes(b"another"), Path.unlink):
        damage(files.path(digest))
        (found,) = audit_run(config.paths.root).in_order()
        assert (found.area, found.step) == ("journal", 1)
        assert digest in found.found


def play(config: RunConfig) -> None:
    """Make it a run of an agent program. Each rollout has one turn that no sample has, for a reason."""

    def as_played(record: BatchRecord) -> None:
        unscored = [Dropped(open.id, 0, 0, open.env, open.example, "") for open in record.state.open_groups]
        for one in (*record.rollouts, *record.dropped, *unscored):
            turns = [Turn(prompt="aside", ids=[1], logprobs=[0.0], versions=[0], finish_reason="", message={})]
            if isinstance(one, Rollout):
                one.branches, one.left_out = [Branch(why="first request")], {"not chosen": ["aside"]}
                turns += [turn for sample in one.samples for turn in turns_of(sample)]
            write_turns(turns_file(config.paths.journal, f"{one.group}-{one.place}", one.attempt), turns)

    for step in range(5):
        rewrite_batch(config, step, as_played)


def turns_of(sample: Tokens) -> Iterator[Turn]:
    sampled = np.flatnonzero(sample.loss_mask)
    for span in np.split(sampled, np.flatnonzero(np.diff(sampled) > 1) + 1):
        begin, end = int(span[0]), int(span[-1]) + 1
        parts = {name: getattr(sample, name)[begin:end].tolist() for name in ("ids", "logprobs", "versions")}
        prompt = prompt_digest(sample.ids[:begin].tolist())
        yield Turn(prompt=prompt, finish_reason="stop", message={}, **parts)


def write_turns(file: Path, turns: list[Turn]) -> None:
    file.unlink(missing_ok=True)
    log = RolloutLog(file)
    for turn in turns:
        log.write(turn)
    log.close()


def of_last_turn(**changed: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        *turns, last = read_turns(file)
        write_turns(file, [*turns, msgspec.structs.replace(last, **changed)])

    return change


TURN_FAULTS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda file: file.write_bytes(flip_last(file.read_bytes())), "that is missing on disk"),
    (lambda file: write_turns(file, read_turns(file)[1:]), "left out 1 turns that are missing on disk"),
    (lambda file: write_turns(file, read_turns(file)[:1] + read_turns(file)), "answered 1 turns that are in no"),
    (of_last_turn(ids=[7, 7]), "whose ids differ on disk"),
    (of_last_turn(versions=[99]), "whose versions differ on disk"),
    (of_last_turn(prompt="another"), "that is missing on disk"),
    (Path.unlink, "its file of turns is missing"),
    (lambda file: shutil.copy(file, file.with_name("0-9.0.turns")), "turns of an unknown rollout"),  # the last one
]


def test_a_turn_that_is_lost_or_changed_is_found_unless_it_was_removed(config):
    play(config)
    summary = assert_holds(config.paths.root).summary
    assert summary.turns["not chosen"] == 30
    assert summary.turns["trained"] >= 30
    assert min(summary.turns["of dropped rollouts"], summary.turns["under way"]) > 0
    rollout = Journal(config.paths.journal).read(2).rollouts[1]
    file = turns_file(config.paths.journal, f"{rollout.group}-{rollout.place}", rollout.attempt)
    content = file.read_bytes()
    for plant, words in TURN_FAULTS:
        file.write_bytes(content)
        plant(file)
        (found,) = audit_run(config.paths.root).in_order()
        assert words in str(found)
    file.write_bytes(content)
    file.with_name("0-9.0.turns").unlink()
    rewind(config.paths, 3)
    assert assert_holds(config.paths.root).summary.turns["not chosen"] == 18
    for folder in config.paths.journal.glob("**/turns"):
        shutil.rmtree(folder)
    assert "turns of agent programs are not compared" in assert_holds(config.paths.root).notes[0]


SYNCHRONOUS_FAULT = {"a token has lag one": (change_column("versions", 2), 3, "has 2 in `versions`")}
ALL_FAULTS: dict[str, Fault] = FAULTS | RICH_FAULTS | SYNCHRONOUS_FAULT


@pytest.mark.parametrize("name", ALL_FAULTS)
def test_a_fault_is_found_and_named_first(written, tmp_path, name):
    if name in SYNCHRONOUS_FAULT:
        config = write_whole_run(tmp_path, max_async_level=0)
    else:
        config = copied(written[name in RICH_FAULTS], tmp_path / "run")
    plant, step, words = ALL_FAULTS[name]
    plant(config)
    report = audit_run(config.paths.root)
    assert not report.holds
    first = report.in_order()[0]
    assert re.search(words, first.found), report.text()
    assert step in (-1, first.step)
    assert all((first.expected, first.meaning))


def sampled_in_the_future(rollouts: list[Rollout]) -> list[Rollout]:
    def moved(sample: Tokens) -> Tokens:
        return msgspec.structs.replace(sample, versions=np.where(sample.versions < 0, -1, 9).astype(np.int32))

    return [msgspec.structs.replace(each, samples=list(map(moved, each.samples))) for each in rollouts]


@pytest.mark.parametrize(
    ("kept", "fault", "words"),
    [
        ("running", change_column("oldest", lambda version: version - 1), "keep_prefix_cache = .running"),
        ("always", change_column("oldest", lambda version: version - 1), "keep_prefix_cache = .always"),
        ("always", change_column("oldest", 3), "at most its version"),
        ("running", change_column("oldest", 0, place=0), "at least 1, by max_off_policy_steps"),
        ("never", change(3, "rollouts.4.samples.0", lambda sample: msgspec.structs.replace(
            sample, oldest=np.where(sample.versions < 0, -1, sample.versions - 1).astype(np.int32)
        )), "keep_prefix_cache = .never"),
        ("running", change(3, "rollouts", sampled_in_the_future), "at most 3: a later version"),
    ],
)  # fmt: skip
def test_a_cache_older_than_the_run_allows_is_found(tmp_path, kept, fault, words):
    config = write_whole_run(tmp_path, inference={"keep_prefix_cache": kept})
    assert_holds(config.paths.root)
    fault(config)
    found = audit_run(config.paths.root).in_order()
    assert {one.step for one in found} == {3}
    assert any(re.search(words, one.expected) for one in found), found


def test_audit_does_not_repeat_a_fault_in_later_batches(tmp_path, rich_config):
    config = write_whole_run(tmp_path / "long", batches=10)
    in_rich_batch = ("a score is another", "a running mean is another", "a step's reward is of no token")
    for name in ("an open group is forgotten", "a counter is wrong", *in_rich_batch):
        run = rich_config if name in RICH_FAULTS else config
        path = Journal(run.paths.journal).path(3)
        content = path.read_bytes()
        ALL_FAULTS[name][0](run)
        assert audit_run(run.paths.root).total <= 3, name
        path.write_bytes(content)
    change_lines(lambda rows: rows.extend({"step": 10**6 + n, "process": "trainer"} for n in range(5000)))(config)
    shutil.rmtree(config.paths.journal)
    assert len(json.dumps(audit_run(config.paths.root).as_json())) < 200_000


@pytest.mark.parametrize(("gone", "rich"), [(0, True), (3, False)])
def test_after_a_missing_batch_the_others_are_still_audited(written, tmp_path, gone, rich):
    config = copied(written[rich], tmp_path / "run")
    Journal(config.paths.journal).path(gone).unlink()
    report = audit_run(config.paths.root)
    assert {one.area for one in report.in_order()} == {"journal"}, report.text()
    rewrite_batch(config, 4, lambda record: record.rollouts.pop(1))
    assert "batch 4: group" in audit_run(config.paths.root).text()


LEFT_TO_OTHERS = {
    *("rules", "ids", "logprobs", "prompt", "completion", "answer", "stop", "reason", "engines", "time"),
    *("difference", "kept", "routed", "top_logprobs", "restrained", "example_id"),
}
"""What nothing else on disk repeats (a replay of the run sees ids, logprobs and routes), or what decides nothing."""
INSTEAD_OF_NONE: dict[str, Any] = {
    "masked": "truncated",
    "stage_reward": 0.5,
    "num_sampled": 1_000_000,
    "num_tokens": 1_000_000,
    "oldest": np.int32([0]),
}


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__ if name not in LEFT_TO_OTHERS}
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        if value and path[-1] != "token_rewards":  # steps that all went alike push nothing, and may as well be gone
            yield path
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    else:
        yield path


def changed_value(value: Any, name: str | int, chance: random.Random) -> Any:
    match value:
        case None:
            return INSTEAD_OF_NONE[str(name)]
        case list():
            place = chance.randrange(len(value))
            return value[:place] + value[place + 1 :] if chance.random() < 0.5 else [*value, value[place]]
        case np.ndarray():
            array = value.copy()
            place = chance.choice(np.flatnonzero(~np.isnan(array)).tolist())
            array[place] = 1 - array[place] if array.dtype == np.uint8 else array[place] + chance.choice([-1, 1])
            return array
        case bool():
            return not value
        case int() | float():
            return value + chance.choice([-1, 1]) * (1 if isinstance(value, int) else 0.25)
        case _:
            return value + "x"


def changed_at(content: Any, path: tuple, chance: random.Random) -> Any:
    return replaced(content, path, lambda value: changed_value(value, path[-1], chance))


def kind_of(path: tuple) -> tuple:
    return path[:1] if path[0] == "metrics" else tuple(part for part in path if isinstance(part, str))


def test_any_change_of_a_batch_is_found_there(tmp_path):
    config = build_rich_config(tmp_path)
    # advantages are not cut: what is cut away would not be missed
    uncut = config.orchestrator.model_copy(update={"advantage": Advantage(type="ema")})
    config = config.model_copy(update={"orchestrator": uncut})
    for _ in WrittenRun(config).write(5):
        pass
    chance, journal = random.Random(0), Journal(config.paths.journal)
    by_kind: dict[tuple, list[tuple[int, tuple]]] = {}
    for step in range(5):
        for path in leaves(journal.read(step)):
            by_kind.setdefault(kind_of(path), []).append((step, path))
    assert len(by_kind) > 45
    for step, path in map(chance.choice, by_kind.values()):
        before = journal.read(step)
        write_entry(journal.path(step), step, changed_at(before, path, chance))
        report = audit_run(config.paths.root)
        assert not report.holds, f"batch {step}: {path} was changed"
        if "sizes" not in path:  # the first batch is believed, and the next one contradicts it
            assert report.in_order()[0].step == step, f"batch {step}: {path} was changed\n{report.text()}"
        write_entry(journal.path(step), step, before)
    assert_holds(config.paths.root)


def test_any_change_of_a_version_or_of_a_metric_is_found(config):
    versions, chance = Versions(config.paths.journal), random.Random(1)
    versions.record(2, ["http://127.0.0.1:8000"], digests_of(2), 0.0)
    before = versions.read(2)
    for path in leaves(before):
        if path == ("confirmations",):  # once or twice is the same
            continue
        write_entry(versions.path(2), 2, changed_at(before, path, chance))
        assert not audit_run(config.paths.root).holds, path
    write_entry(versions.path(2), 2, Version(2, [Confirmation([], digests_of(2), 0.0, 1.7e9)]))
    assert not audit_run(config.paths.root).holds
    write_entry(versions.path(2), 2, before)
    content = config.paths.metrics.read_bytes()
    for name in chance.sample(sorted(Journal(config.paths.journal).read(2).metrics), 8):
        change_lines(lambda rows, name=name: row_of(rows, "orchestrator", 2).update({name: 0.015625}))(config)
        assert f"in metrics.jsonl {name} is 0.015625" in audit_run(config.paths.root).text()
        config.paths.metrics.write_bytes(content)

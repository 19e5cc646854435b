"""`trireme diff`: of two runs that are not the same, the first thing that differs is named, and what leads to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import RunPaths
from trireme.cli.diff import diff
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.written import read_run, write_run
from trireme.ledger.journal import Journal
from trireme.ledger.logprobs import Scored, counting, identity, path_of, read_logprobs
from trireme.ledger.records import BatchRecord, Dropped, Rollout
from trireme.ledger.surroundings import look_around, write_surroundings
from trireme.messages import Kept, Tokens, encode
from trireme.monitor.diff.compare import Comparison, compare_runs
from trireme.monitor.diff.configuration import compare_configurations
from trireme.monitor.diff.differences import ASPECTS
from trireme.monitor.diff.meaning import meaning_of
from trireme.monitor.diff.report import as_text
from trireme.monitor.metrics import MetricsFile
from written_run import build_config, rewrite_batch, rewrite_version, write_whole_run

STEP = 2  # at which something is changed
DEADLINE_S = 60

Change = Callable[[RunConfig, int], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    write_whole_run(folder)
    return folder


@pytest.fixture
def pair(whole: Path, tmp_path: Path) -> tuple[Path, RunConfig]:
    """That run, and a copy of it that may be changed."""
    copy = tmp_path / "b"
    return whole, copied(whole, copy)


def copied(run: Path, to: Path) -> RunConfig:
    shutil.copytree(run, to)
    return build_config(to)


def with_sample(rollout: Rollout, **columns: Any) -> None:
    rollout.samples[0] = msgspec.structs.replace(rollout.samples[0], **columns)


def changed(column: np.ndarray, place: int, value: Any) -> np.ndarray:
    column = column.copy()
    column[place] = value
    return column


def given_token(sample: Tokens) -> int:
    return int(np.flatnonzero(sample.loss_mask == 0)[1])


def sampled_token(sample: Tokens) -> int:
    return int(np.flatnonzero(sample.loss_mask == 1)[1])


def change_batch(change: Callable[[BatchRecord], Any]) -> Change:
    return lambda config, step: rewrite_batch(config, step, change)


def change_rollout(change: Callable[[Rollout], Any]) -> Change:
    return change_batch(lambda record: change(record.rollouts[4]))


def change_column(name: str, find: Callable[[Tokens], int], value: Callable[[Any], Any]) -> Change:
    def change(rollout: Rollout) -> None:
        sample = rollout.samples[0]
        place, column = find(sample), getattr(sample, name)
        with_sample(rollout, **{name: changed(column, place, value(column[place]))})

    return change_rollout(change)


def change_example(record: BatchRecord) -> None:
    """Of a whole group, wherever it is named."""
    group = record.rollouts[3].group
    fates: list[Rollout | Dropped] = [*record.rollouts, *record.dropped]
    for fate in fates:
        if fate.group == group:
            fate.example += 1
    record.outcomes = [
        msgspec.structs.replace(outcome, example=outcome.example + (outcome.group == group))
        for outcome in record.outcomes
    ]


def change_group(record: BatchRecord) -> None:
    """Another group was finished first."""
    group = record.rollouts[3].group
    for rollout in record.rollouts:
        rollout.group += 100 * (rollout.group == group)


def next_float(value: np.float32) -> np.float32:
    return np.nextafter(value, np.float32(0))


def rewrite_rows(config: RunConfig, change: Callable[[dict[str, Any]], Any]) -> None:
    rows = [json.loads(line) for line in config.paths.metrics.read_text().splitlines()]
    for row in rows:
        change(row)
    config.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_metric(name: str) -> Change:
    def change(config: RunConfig, step: int) -> None:
        def raise_it(row: dict[str, Any]) -> None:
            if (row["process"], row["step"]) == ("trainer", step):
                row[name] = np.nextafter(row[name], 10)

        rewrite_rows(config, raise_it)

    return change


def change_scores(config: RunConfig, step: int) -> None:
    """Of one token of a rollout that nothing else changes."""
    samples = Journal(config.paths.journal).read(step).rollouts[0].samples
    scores = read_logprobs(config.paths.logprobs, step)
    ours = scores[identity(samples[-1])].copy()
    ours[-1] = next_float(ours[-1])
    save_scores(config, step, scores | {identity(samples[-1]): ours})


def save_scores(config: RunConfig, step: int, scores: dict[bytes, np.ndarray]) -> None:
    config.paths.logprobs.mkdir(exist_ok=True)
    counts = np.array([len(each) for each in scores.values()], np.int32)
    scored = Scored(step, list(scores), counts, np.concatenate(list(scores.values())))
    path_of(config.paths.logprobs, step, 0).write_bytes(encode(scored))


def change_digest(config: RunConfig, step: int) -> None:
    def change(entry: Any) -> None:
        entry.confirmations[-1].digests["model.norm.weight"] = "another"

    rewrite_version(config, step, change)


CHANGES: dict[str, Change] = {
    "weights": change_digest,
    "examples": change_batch(change_example),
    "attempts": change_rollout(lambda rollout: setattr(rollout, "attempt", rollout.attempt + 1)),
    "prompts": change_column("ids", given_token, lambda number: number + 1),
    "versions": change_column("versions", sampled_token, lambda number: number + 1),
    "tokens": change_column("ids", sampled_token, lambda number: number + 1),
    "logprobs": change_column("logprobs", sampled_token, next_float),
    "kept": change_rollout(
        lambda rollout: with_sample(
            rollout, kept=Kept(np.zeros(rollout.samples[0].length, np.int32), np.zeros(0, np.int32))
        )
    ),
    "texts": change_rollout(lambda rollout: setattr(rollout, "answer", "another")),
    "components": change_rollout(lambda rollout: rollout.metrics.update(num_turns=rollout.metrics["num_turns"] + 1)),
    "rewards": change_rollout(lambda rollout: setattr(rollout, "reward", float(np.nextafter(rollout.reward, 9)))),
    "teacher": change_rollout(lambda rollout: setattr(rollout, "teacher", [np.zeros(3, np.float32)])),
    "dropped": change_batch(lambda record: record.dropped.append(Dropped(90, 0, 0, "a", 1, "stale: begun too early"))),
    "groups": change_batch(change_group),
    "masks": change_rollout(lambda rollout: setattr(rollout, "masked", "truncated")),
    "advantages": change_column("advantages", sampled_token, next_float),
    "scored": change_scores,
    "lr": change_metric("lr"),
    "loss": change_metric("loss"),
    "grad_norm": change_metric("grad_norm"),
    "training": change_metric("policy/kl"),
}
"""One thing each, made different by as little as can be."""

ORDER = [aspect for aspect in ASPECTS if aspect in CHANGES]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trainer measured all that is compared."""
    folder = tmp_path_factory.mktemp("runs") / "measured"
    config = write_whole_run(folder)
    rewrite_rows(config, measure)
    for step in range(5):
        rollouts = Journal(config.paths.journal).read(step).rollouts
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        save_scores(config, step, {identity(sample): sample.logprobs[counting(sample)] for sample in samples})
    return folder


def measure(row: dict[str, Any]) -> None:
    row.update({"lr": 1e-3, "policy/kl": 0.01} if row["process"] == "trainer" else {})


def test_a_run_is_the_same_as_its_copy(pair: tuple[Path, RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    whole, copy = pair
    assert diff([str(whole), str(copy.paths.root)]) == 0
    said = capsys.readouterr().out
    assert "no difference: configuration, versions, batches and steps are the same to the bit\n" in said
    assert "the same, 5 compared: rules, examples" in said


def test_two_runs_of_one_seed_are_the_same(whole: Path, tmp_path: Path) -> None:
    """Whenever each was written: clocks do not count."""
    write_whole_run(tmp_path / "again")
    assert compare_runs(whole, tmp_path / "again").same


@pytest.mark.parametrize("aspect", CHANGES)
def test_exactly_what_was_changed_is_named(aspect: str, measured: Path, tmp_path: Path) -> None:
    config = copied(measured, tmp_path / "b")
    CHANGES[aspect](config, STEP)
    found = compare_runs(measured, config.paths.root).found
    assert list(found.firsts) == [aspect]
    assert found.first is not None
    assert found.first.step == STEP
    assert found.first.where.startswith(("version 2", "batch 2", "step 2"))
    assert found.first.a != found.first.b


def test_a_token_is_named_with_its_place_and_both_values(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    rollout = Journal(RunPaths(whole).journal).read(STEP).rollouts[4]
    place = sampled_token(rollout.samples[0])
    CHANGES["tokens"](copy, STEP)
    first = compare_runs(whole, copy.paths.root).found.first
    assert first is not None
    assert f"group {rollout.group}, place {rollout.place} (example {rollout.example} of {rollout.env})" in first.where
    assert first.where.endswith(f"token {place} of {rollout.samples[0].length}")
    number = int(rollout.samples[0].ids[place])
    texts = Tokenizer.from_file("models/reverse-text-tiny/tokenizer.json")
    assert [first.a, first.b] == [f"{texts.decode([each])!r} ({each})" for each in (number, number + 1)]
    assert first.note.endswith("in 1 of 6 rollouts")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.tuples(st.integers(1, 3), st.sampled_from(ORDER)),
    second=st.tuples(st.integers(1, 3), st.sampled_from(ORDER)),
)
def test_of_two_changes_the_one_that_leads_to_the_other_comes_first(
    measured: Path, tmp_path: Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    """By number of the batch, then by what follows from what."""
    shutil.rmtree(tmp_path / "b", ignore_errors=True)
    config = copied(measured, tmp_path / "b")
    for step, aspect in (first, second):
        CHANGES[aspect](config, step)
    expected = min(first, second, key=lambda one: (one[0], ORDER.index(one[1])))
    found = compare_runs(measured, config.paths.root).found
    assert found.first is not None
    assert found.first.step == expected[0]
    if first[0] != second[0] or "groups" not in (first[1], second[1]):  # a rollout of another group is another rollout
        assert found.first.aspect == expected[1]


def test_a_key_is_named_before_anything_that_happened(
    pair: tuple[Path, RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, copy = pair
    values = read_run(RunConfig, copy.paths.run_config).model_dump()
    values["trainer"]["optim"]["lr"] = 3e-6
    values["ports"]["batches"] = 4242
    write_run(RunConfig.model_validate(values), copy.paths.run_config)
    assert diff([str(whole), str(copy.paths.root)]) == 1
    said = capsys.readouterr().out
    assert "first difference: configuration, trainer.optim.lr: 1e-06 in A, 3e-06 in B\n" in said
    assert "In all that happened so far it made no difference." in said
    assert "of where it runs, 1 key: ports.batches\n" in said
    CHANGES["weights"](copy, 3)
    assert diff([str(whole), str(copy.paths.root), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first_key"] == {"key": "trainer.optim.lr", "a": "1e-06", "b": "3e-06"}
    assert (told["first"]["aspect"], told["first"]["step"]) == ("weights", 3)
    assert told["meaning"][0].startswith("It may follow from `trainer.optim.lr`")


def test_where_a_run_lies_and_which_ports_it_has_is_no_difference(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    values = read_run(RunConfig, copy.paths.run_config).model_dump()
    values |= {"output_dir": "/elsewhere", "name": "another", "log_level": "debug"}
    values["trainer"]["ckpt"]["interval"] = 7
    write_run(RunConfig.model_validate(values), copy.paths.run_config)
    compared = compare_runs(whole, copy.paths.root)
    assert compared.same
    assert {key.key for key in compared.keys} == {"output_dir", "name", "log_level", "trainer.ckpt.interval"}


def test_keys_of_lists_of_tables_and_keys_that_one_file_lacks_are_told() -> None:
    a = {"seed": 0, "env": [{"id": "x"}, {"id": "y", "weight": 1.0}], "old": True, "empty": {}}
    b = {"seed": 0, "env": [{"id": "x"}, {"id": "z", "weight": 1.0}], "new": {"deep": None}}
    told = [str(key) for key in compare_configurations(a, b)]
    assert told == [
        'env.1.id: "y" in A, "z" in B',
        "old: true in A, not there in B",
    ]


def test_a_run_that_ends_earlier_is_the_same_as_far_as_it_goes(whole: Path, tmp_path: Path) -> None:
    config = build_config(tmp_path / "short")
    write_whole_run(tmp_path / "short", batches=3)
    compared = compare_runs(config.paths.root, whole)
    assert compared.same
    assert "as far as A goes: to 3, B to 5" in as_text(compared, everything=False)


def test_weights_that_no_engine_confirmed_are_compared_as_they_were_exported(tmp_path: Path) -> None:
    """Runs of supervised training: no journal, no engine."""
    a, b = (supervised_run(tmp_path / name) for name in "ab")
    assert compare_runs(a, b).same
    tensors = {"norm": torch.ones(3), "head": torch.arange(6.0).reshape(2, 3)}
    save_file(tensors, b / "weights" / "step_2" / "model.safetensors")
    assert compare_runs(a, b).same, "the order of a file's tensors does not count"
    tensors["head"][1, 2] = float(np.nextafter(np.float32(5), np.float32(6)))
    save_file(tensors, b / "weights" / "step_2" / "model.safetensors")
    first = compare_runs(a, b).found.first
    assert first is not None
    assert (first.step, first.where) == (2, "version 2, head")
    assert first.note == "1 of 2 tensors differ, as exported"


def supervised_run(folder: Path) -> Path:
    config = SftConfig(output_dir=folder, data="x.jsonl")
    write_run(config, config.paths.run_config)
    for step in range(2):
        MetricsFile(config.paths.metrics, "trainer").append(step, {"loss": 0.5, "time/step": float(len(folder.name))})
    exported = folder / "weights" / "step_2"
    exported.mkdir(parents=True)
    save_file({"head": torch.arange(6.0).reshape(2, 3), "norm": torch.ones(3)}, exported / "model.safetensors")
    return folder


def test_an_evaluation_is_named_first_only_where_nothing_else_differs(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    evaluated = whole.with_name("evaluated")
    for folder, reward in ((evaluated, 0.5), (copy.paths.root, 0.25)):
        if folder == evaluated:
            shutil.copytree(whole, evaluated)
        MetricsFile(RunPaths(folder).metrics, "orchestrator").append(0, {"eval/a/reward": reward, "time/eval": reward})
    first = compare_runs(evaluated, copy.paths.root).found.first
    assert first is not None
    assert str(first) == "version 0, eval/a/reward: 0.5 in A, 0.25 in B"
    CHANGES["rewards"](copy, 3)
    first = compare_runs(evaluated, copy.paths.root).found.first
    assert first is not None
    assert first.aspect == "rewards"


# what follows from it


def meaning(whole: Path, copy: RunConfig) -> tuple[Comparison, str]:
    compared = compare_runs(whole, copy.paths.root)
    return compared, " ".join(meaning_of(compared))


def test_other_weights_from_the_same_batch_are_a_matter_of_arithmetic(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    CHANGES["weights"](copy, 3)
    _, said = meaning(whole, copy)
    assert "from the same batch and the same weights: the arithmetic is not the same" in said
    assert "`trireme replay RUN`" in said
    assert "Before version 3 everything that both runs wrote down is the same." in said


def test_another_beginning_is_told_from_another_step(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    CHANGES["weights"](copy, 0)
    assert "They began from other weights" in meaning(whole, copy)[1]


def test_a_token_after_the_same_probabilities_was_drawn_otherwise(pair: tuple[Path, RunConfig]) -> None:
    """Which is as it should be where turns have no seeds, and is not where they have."""
    whole, copy = pair
    CHANGES["tokens"](copy, STEP)
    assert "turns have no seeds of their own" in meaning(whole, copy)[1]
    seeded = whole.with_name("seeded")
    shutil.copytree(whole, seeded)
    for folder in (seeded, copy.paths.root):
        values = read_run(RunConfig, RunPaths(folder).run_config).model_dump()
        values["orchestrator"]["sampling"]["seed"] = 7
        write_run(RunConfig.model_validate(values), RunPaths(folder).run_config)
    assert "although each turn has its seed" in meaning(seeded, copy)[1]


def test_versions_that_arrive_at_another_token_are_a_matter_of_timing(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    CHANGES["versions"](copy, STEP)
    assert "`--max-async-level 0` is the way that repeats to the bit" in meaning(whole, copy)[1]


def test_every_aspect_has_a_meaning_where_no_key_explains_it(measured: Path, tmp_path: Path) -> None:
    said = {}
    for aspect, change in CHANGES.items():
        config = copied(measured, tmp_path / aspect.replace("/", "-"))
        change(config, STEP)
        said[aspect] = meaning(measured, config)[1]
    assert all(said.values())
    assert len(set(said.values())) >= len(said) - 1


# surroundings


def test_versions_and_machines_that_differ_are_told_and_are_no_difference(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    ours = whole.with_name("surrounded")
    shutil.copytree(whole, ours)
    around = look_around(Devices(cores=2), {}, ["rl"])
    write_surroundings(RunPaths(ours), around)
    write_surroundings(copy.paths, around | {"packages": around["packages"] | {"torch": "1.0"}})
    compared = compare_runs(ours, copy.paths.root)
    assert compared.same
    assert [(key.key, key.b) for key in compared.surroundings] == [("packages.torch", '"1.0"')]
    CHANGES["logprobs"](copy, STEP)
    assert "Beside the configuration, these differ: packages.torch: " in meaning(ours, copy)[1]


# the command


def test_a_folder_that_is_no_run_is_refused(whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trireme.cli.trireme", "diff", str(whole), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert f"{tmp_path} is not a run's folder" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ConfigError):
        diff([str(tmp_path / "nowhere"), str(whole)])


def test_a_damaged_batch_is_no_difference_but_an_error(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    path = Journal(copy.paths.journal).path(1)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JournalCorrupt, match="do not match its checksum"):
        compare_runs(whole, copy.paths.root)


def test_a_batch_that_is_gone_is_no_difference_but_an_error(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    Journal(copy.paths.journal).path(1).unlink()
    with pytest.raises(JournalCorrupt, match=r"misses batch 1 of \d+\. Restore .*batch_000001"):
        compare_runs(whole, copy.paths.root)


def test_nothing_is_written(pair: tuple[Path, RunConfig]) -> None:
    whole, copy = pair
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    compare_runs(whole, copy.paths.root)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before

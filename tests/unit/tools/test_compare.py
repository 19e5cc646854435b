"""`trireme diff`: of two runs that are not the same, the first thing that differs is named, and what leads to it."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
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

from support.runs.planted_faults import Plant, change, change_column, change_lines, edit, one_more, put, row_of
from support.runs.written_run import build_config, rewrite_version, write_whole_run
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import RunPaths
from trireme.config.files import read_run, write_run
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.journal import Journal
from trireme.journal.provenance import collect_provenance, write_provenance
from trireme.journal.records import BatchRecord, Dropped, OpenGroup
from trireme.messages import Kept, Picture, Tokens
from trireme.monitor.metrics import MetricsFile
from trireme.tools import record_differences
from trireme.tools.diff.aspects import ASPECTS, Difference
from trireme.tools.diff.compare import compare_runs
from trireme.tools.diff.report import command as diff
from trireme.tools.diff.report import meaning_of

STEP = 2  # at which something is changed

Change = Callable[[int], Plant]


def in_rollout(path: str, how: Callable[[Any], Any]) -> Change:
    return lambda step: change(step, f"rollouts.4.{path}", how)


def at_token(name: str, how: Callable[[Any], Any], *, masked: bool = True) -> Change:
    return lambda step: change_column(name, how, masked=masked, step=step, place=1)


def next_float(value: np.float32) -> np.float32:
    return np.nextafter(value, np.float32(0))


def change_example(record: BatchRecord) -> None:
    group = record.rollouts[3].group
    for fate in [*record.rollouts, *record.dropped]:
        fate.example += fate.group == group
    record.outcomes = [msgspec.structs.replace(it, example=it.example + (it.group == group)) for it in record.outcomes]


def change_group(record: BatchRecord) -> None:
    for rollout in record.rollouts[3:6]:
        rollout.group += 100


def raise_metric(name: str) -> Change:
    def in_rows(step: int, rows: list[dict[str, Any]]) -> None:
        row = row_of(rows, "trainer", step)
        row[name] = np.nextafter(row[name], 10)

    return lambda step: change_lines(partial(in_rows, step))


def change_digest(version: int) -> Plant:
    digest = {"model.norm.weight": "another"}
    return lambda config: rewrite_version(config, version, lambda it: it.confirmations[-1].digests.update(digest))


def keep_none(sample: Tokens) -> Tokens:
    return msgspec.structs.replace(sample, kept=Kept(np.zeros(sample.length, np.int32), np.zeros(0, np.int32)))


STALE = Dropped(90, 0, 0, "a", 1, "stale: begun too early")
CHANGES: dict[str, Change] = {
    "weights": change_digest,
    "rules": lambda step: change(step, "rules.max_attempts", one_more),
    "examples": lambda step: edit(step, change_example),
    "attempts": in_rollout("attempt", one_more),
    "prompts": at_token("ids", one_more, masked=False),
    "versions": at_token("versions", one_more),
    "tokens": at_token("ids", one_more),
    "logprobs": at_token("logprobs", next_float),
    "kept": in_rollout("samples.0", keep_none),
    "texts": in_rollout("answer", lambda _: "another"),
    "components": in_rollout("metrics.num_turns", one_more),
    "rewards": in_rollout("reward", lambda reward: float(np.nextafter(reward, 9))),
    "teacher": in_rollout("teacher", lambda _: [np.zeros(3, np.float32)]),
    "dropped": lambda step: change(step, "dropped", lambda dropped: [*dropped, STALE]),
    "groups": lambda step: edit(step, change_group),
    "masks": lambda step: put(step, "rollouts.4.masked", "truncated"),
    "advantages": at_token("advantages", next_float),
    "lr": raise_metric("lr"),
    "loss": raise_metric("loss"),
    "grad_norm": raise_metric("grad_norm"),
    "training": raise_metric("policy/kl"),
}
"""One thing each, made different by as little as can be."""

ORDER = [aspect for aspect in ASPECTS if aspect in CHANGES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = write_whole_run(tmp_path_factory.mktemp("runs") / "a")
    change_lines(lambda it: [row_of(it, "trainer", n).update({"lr": 0.1, "policy/kl": 1}) for n in range(5)])(config)
    return config.paths.root


@pytest.fixture
def copy(whole, tmp_path):
    return copied(whole, tmp_path / "b")


def copied(run: Path, to: Path) -> RunConfig:
    shutil.copytree(run, to)
    return build_config(to)


def first_difference(a: Path, b: Path) -> Difference:
    first = compare_runs(a, b).first
    assert first is not None
    return first


def configure(run: RunConfig, **keys: Any) -> None:
    """Write other values into the file of a run, like `trainer__optim__lr`."""
    written = read_run(RunConfig, run.paths.run_config)
    write_run(updated(written, {key.replace("__", "."): value for key, value in keys.items()}), run.paths.run_config)


def test_a_run_is_the_same_as_its_copy_and_nothing_is_written(whole, copy, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert diff([str(whole), str(copy.paths.root)]) == 0
    said = capsys.readouterr().out
    assert "no difference: configuration, versions, batches and steps are the same to the bit\n" in said
    assert "the same, 5 compared: rules, examples" in said
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
    for name in "xy":  # of one seed, written at different times
        write_whole_run(tmp_path / name)
    assert compare_runs(tmp_path / "x", tmp_path / "y").same


@pytest.mark.parametrize("aspect", CHANGES)
def test_exactly_what_was_changed_is_named_and_has_a_meaning(aspect, whole, copy):
    CHANGES[aspect](STEP)(copy)
    compared = compare_runs(whole, copy.paths.root)
    first = compared.first
    assert first is not None
    assert (list(compared.firsts), first.step) == ([aspect], STEP)
    assert first.where.startswith(("version 2", "batch 2", "step 2"))
    assert first.a != first.b
    assert "".join(meaning_of(compared))


def test_a_token_is_named_with_its_place_and_both_values(whole, copy):
    rollout = Journal(RunPaths(whole).journal).read(STEP).rollouts[4]
    sample = rollout.samples[0]
    place = int(np.flatnonzero(sample.loss_mask)[1])
    CHANGES["tokens"](STEP)(copy)
    first = first_difference(whole, copy.paths.root)
    assert f"group {rollout.group}, place {rollout.place} (example {rollout.example} of {rollout.env})" in first.where
    assert first.where.endswith(f"token {place} of {sample.length}")
    number, texts = int(sample.ids[place]), Tokenizer.from_file("models/reverse-text-tiny/tokenizer.json")
    assert [first.a, first.b] == [f"{texts.decode([each])!r} ({each})" for each in (number, number + 1)]
    assert first.note.endswith("in 1 of 6 rollouts")


def test_a_prompt_with_another_picture_of_the_same_size_is_named(whole, tmp_path):
    runs = [copied(whole, tmp_path / name) for name in "ab"]
    for run, letter in zip(runs, "ab", strict=True):
        put(STEP, "rollouts.4.samples.0.pictures", [Picture(letter * 64, 0, 1, 2)])(run)
    first = first_difference(*(run.paths.root for run in runs))
    assert (first.aspect, first.a) == ("prompts", "picture aaaaaaaa…, 1 x 2 tokens")


CHANGE = st.tuples(st.integers(1, 3), st.sampled_from(ORDER))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=CHANGE, second=CHANGE)
def test_of_two_changes_the_one_that_leads_to_the_other_comes_first(whole, tmp_path, first, second):
    """By number of the batch, then by what follows from what."""
    shutil.rmtree(tmp_path / "b", ignore_errors=True)
    config = copied(whole, tmp_path / "b")
    for step, aspect in (first, second):
        CHANGES[aspect](step)(config)
    expected = min(first, second, key=lambda one: (one[0], ORDER.index(one[1])))
    found = first_difference(whole, config.paths.root)
    assert found.step == expected[0]
    if first[0] != second[0] or "groups" not in (first[1], second[1]):  # a rollout of another group is another rollout
        assert found.aspect == expected[1]


def test_diff_names_a_configuration_key_before_any_event(whole, copy, capsys):
    def diff_of(*flags: str) -> str:
        assert diff([str(whole), str(copy.paths.root), *flags]) == 1
        return capsys.readouterr().out

    configure(copy, trainer__optim__lr=3e-6, ports__batches=4242)
    said = diff_of()
    assert "first difference: configuration, trainer.optim.lr: 1e-06 in A, 3e-06 in B\n" in said
    assert "In all that happened so far it made no difference." in said
    assert "of where it runs, 1 key: ports.batches\n" in said
    CHANGES["weights"](3)(copy)
    told = json.loads(diff_of("--json"))
    assert told["first_key"] == {"key": "trainer.optim.lr", "a": "1e-06", "b": "3e-06"}
    assert (told["first"]["aspect"], told["first"]["step"]) == ("weights", 3)
    assert told["meaning"][0].startswith("It may follow from `trainer.optim.lr`")
    assert told["meaning"][1] == ASPECTS["weights"]
    assert "Before version 3 everything that both runs wrote down is the same." in " ".join(told["meaning"])
    change(STEP, "rollouts.4.metrics", lambda metrics: metrics | {"\x1b[31m": 0.5})(copy)
    said = diff_of()
    assert ("␛[31m" in said, "\x1b" in said) == (True, False)


def test_where_a_run_lies_and_on_which_machine_is_no_difference(whole, copy, tmp_path):
    configure(copy, output_dir="/elsewhere", name="another", log_level="debug", trainer__ckpt__interval=7)
    ours = copied(whole, tmp_path / "surrounded").paths
    around = collect_provenance(Devices(cores=2), {}, ["rl"])
    write_provenance(ours, around)
    write_provenance(copy.paths, around | {"packages": around["packages"] | {"torch": "1.0"}})
    compared = compare_runs(ours.root, copy.paths.root)
    assert compared.same
    assert {key.key for key in compared.keys} == {"output_dir", "name", "log_level", "trainer.ckpt.interval"}
    assert [(key.key, key.b) for key in compared.surroundings] == [("packages.torch", '"1.0"')]
    CHANGES["logprobs"](STEP)(copy)
    said = " ".join(meaning_of(compare_runs(ours.root, copy.paths.root)))
    assert "Besides the configuration, these differ: packages.torch: " in said


def test_diff_compares_exported_weights_if_no_engine_confirmed_them(tmp_path):
    """Runs of supervised training: no journal, no engine."""
    tensors = {"head": torch.arange(6.0).reshape(2, 3), "norm": torch.ones(3)}
    for name, ordered in (("a", tensors), ("b", dict(reversed(tensors.items())))):
        config = SftConfig(output_dir=tmp_path / name, data="x.jsonl")
        write_run(config, config.paths.run_config)
        for step in range(2):
            MetricsFile(config.paths.metrics, "trainer").append(step, {"loss": 0.5, "time/step": float(ord(name))})
        (config.paths.weights / "step_2").mkdir(parents=True)
        save_file(ordered, file := config.paths.weights / "step_2" / "model.safetensors")
    assert compare_runs(tmp_path / "a", tmp_path / "b").same
    tensors["head"][1, 2] = float(np.nextafter(np.float32(5), np.float32(6)))
    save_file(tensors, file)
    first = first_difference(tmp_path / "a", tmp_path / "b")
    assert (first.step, first.where, first.note) == (2, "version 2, head", "in 1 of 2 tensors, as exported")


def test_what_is_no_run_or_is_damaged_is_an_error_and_no_difference(whole, copy, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"{folder} is not a run's folder"):
            diff([str(whole), str(folder)])
    path = Journal(copy.paths.journal).path(1)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JournalCorrupt, match="do not match its checksum"):
        compare_runs(whole, copy.paths.root)
    path.unlink()
    with pytest.raises(JournalCorrupt, match=r"misses batch 1 of \d+\. Restore .*batch_000001"):
        compare_runs(whole, copy.paths.root)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": [1, {"y": 2}]}, {"x": [1, {"y": 3}]}, (".x[1].y", 2, 3)),
        ([1, 2], [1, 2, 3], ("[2]", None, 3)),
        ({}, {"x": 1}, (".x", None, 1)),
        ({"x": None}, {}, None),
        (OpenGroup(7, "a", 1), OpenGroup(7, "a", 2), (".example", 1, 2)),
        (OpenGroup(7, "a", 1), None, ("", OpenGroup(7, "a", 1), None)),
        (math.nan, math.nan, None),
        (0.0, -0.0, ("", 0.0, -0.0)),
        (1.0, math.nextafter(1.0, 2), ("", 1.0, math.nextafter(1.0, 2))),
        (np.array([0.0, math.nan]), np.array([-0.0, math.nan]), ("[0]", 0.0, 0.0)),
        (np.array([math.nan, 1.0]), np.array([math.nan, 1.0]), None),
        (np.zeros((2, 2), np.uint8), np.array([[0, 0], [1, 0]], np.uint8), ("[2]", 0, 1)),
    ],
)
def test_the_first_place_that_differs_is_named_with_what_each_has_there(a, b, expected):
    assert record_differences.first_difference(a, b) == expected
    swapped = expected and (expected[0], expected[2], expected[1])
    assert record_differences.first_difference(b, a) == swapped


def test_columns_of_other_types_or_lengths_differ_as_a_whole():
    for other in (np.zeros(3, np.float64), np.zeros(2, np.float32), None):
        difference = record_differences.first_difference({"x": np.zeros(3, np.float32)}, {"x": other})
        assert difference is not None
        assert difference[0] == ".x"
    assert record_differences.first_difference({"x": [1.0]}, {"x": [1.0 + 1e-9]}, rtol=1e-6) is None
    assert record_differences.first_difference({"x": [1.0]}, {"x": [1.01]}, rtol=1e-6) == (".x[0]", 1.0, 1.01)

"""Every fault that is planted in a run is found, and named; and so is any change of what something else repeats."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from planted_faults import (
    FAULTS,
    Plant,
    change_column,
    change_lines,
    confirm_otherwise,
    exchange_an_open_groups_example,
    forget_an_open_group,
    row_of,
    set_counter,
    set_cursor,
)
from planted_rich_faults import RICH_FAULTS
from trireme.config.orchestrator import Advantage
from trireme.config.run import RunConfig
from trireme.ledger.entry import write_entry
from trireme.ledger.journal import Journal
from trireme.ledger.versions import Confirmation, Version, Versions
from trireme.monitor.audit.audit import audit_run
from written_run import WrittenRun, build_rich_config, digests_of, rewrite_batch, write_whole_run


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> RunConfig:
    return write_whole_run(tmp_path_factory.mktemp("written") / "run")


@pytest.fixture
def config(written, tmp_path) -> RunConfig:
    """A run of five batches of one's own, to plant a fault in."""
    shutil.copytree(written.paths.root, tmp_path / "run")
    return written.model_copy(update={"output_dir": tmp_path / "run"})


@pytest.fixture(scope="module")
def rich_written(tmp_path_factory) -> RunConfig:
    return write_whole_run(tmp_path_factory.mktemp("rich") / "run", rich=True)


@pytest.fixture
def rich_config(rich_written, tmp_path) -> RunConfig:
    """One with difficulty pools, a curriculum, masks, a teacher and a running mean."""
    shutil.copytree(rich_written.paths.root, tmp_path / "run")
    return rich_written.model_copy(update={"output_dir": tmp_path / "run"})


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named_first(config, name):
    assert_named_first(config, *FAULTS[name])


@pytest.mark.parametrize("name", RICH_FAULTS)
def test_a_fault_in_what_a_batch_goes_by_is_found_and_named_first(rich_config, name):
    assert_named_first(rich_config, *RICH_FAULTS[name])


def assert_named_first(config: RunConfig, plant: Plant, step: int, words: str) -> None:
    plant(config)
    report = audit_run(config.paths.root)
    assert not report.holds
    first = report.findings.in_order()[0]
    assert re.search(words, first.found), report.text(everything=True)
    assert step in (-1, first.step)
    assert first.expected
    assert first.meaning


def test_one_fault_is_not_told_of_for_ever(tmp_path):
    """What follows from it in each later batch is not a finding of its own."""
    config = write_whole_run(tmp_path, batches=30)
    for plant in (forget_an_open_group, set_counter, set_cursor, exchange_an_open_groups_example):
        before = Journal(config.paths.journal).read(3)
        rewrite_batch(config, 3, plant)
        assert audit_run(tmp_path).findings.total <= 3, plant
        write_entry(Journal(config.paths.journal).path(3), 3, before)


@pytest.mark.parametrize("gone", [0, 3, 11])
def test_after_a_batch_that_is_gone_the_others_are_still_looked_at(tmp_path, gone):
    config = write_whole_run(tmp_path, batches=12)
    (config.paths.journal / f"batch_{gone:06d}.msgpack").unlink()
    report = audit_run(tmp_path)
    rooms = {contradiction.room for contradiction in report.findings.in_order()}
    assert rooms <= ({"journal"} if gone < 11 else {"versions", "metrics"}), report.text(everything=True)
    if gone < 10:
        rewrite_batch(config, 10, lambda record: record.rollouts.pop(1))
        assert "batch 10: group" in audit_run(tmp_path).text(everything=True)


@pytest.mark.parametrize("name", ["a score is another", "a running mean is another", "a step's reward is of no token"])
def test_one_fault_in_what_a_batch_goes_by_is_not_told_of_for_ever(rich_config, name):
    RICH_FAULTS[name][0](rich_config)
    report = audit_run(rich_config.paths.root)
    assert report.findings.total <= 2, report.text(everything=True)


def test_on_a_gpu_a_version_that_was_replayed_otherwise_is_worth_a_note(tmp_path):
    config = write_whole_run(tmp_path, device="cuda")
    confirm_otherwise(config)
    report = audit_run(tmp_path)
    assert report.holds
    assert "2. confirmation says that model.norm.weight" in report.findings.notes[0]


def test_a_token_of_lag_one_contradicts_a_synchronous_run(tmp_path):
    config = write_whole_run(tmp_path, max_async_level=0)
    change_column("versions", 2)(config)
    first = audit_run(tmp_path).findings.in_order()[0]
    assert "has 2 in `versions`" in first.found
    assert "at least 3 (max_async_level = 0)" in first.expected


# any fault


LEFT_TO_OTHERS = {
    "rules",
    "ids",
    "logprobs",
    "prompt",
    "completion",
    "answer",
    "stop",
    "reason",
    "engines",
    "time",
    "difference",
    "kept",
    "routed",
}
"""What nothing else on disk repeats (a replay of the run sees ids, logprobs and routes), or what decides nothing."""


INSTEAD_OF_NONE = {"masked": "truncated", "stage_reward": 0.5}


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all numbers, texts and lists inside."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in LEFT_TO_OTHERS:
                yield from leaves(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        if value:
            yield (*path, "some entry")
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    else:
        yield path


def mutate(value: Any, path: tuple, chance: random.Random) -> Any:
    """A copy that differs at that path."""
    if not path:
        return changed(value, chance)
    if path[-1] in INSTEAD_OF_NONE and getattr(value, str(path[0]), value) is None:
        return msgspec.structs.replace(value, **{path[0]: INSTEAD_OF_NONE[path[0]]})
    step, rest = path[0], path[1:]
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{step: mutate(getattr(value, step), rest, chance)})
    if isinstance(value, dict):
        return value | {step: mutate(value[step], rest, chance)}
    if step == "some entry":
        place = chance.randrange(len(value))
        return value[:place] + value[place + 1 :] if chance.random() < 0.5 else [*value, value[place]]
    return [*value[:step], mutate(value[step], rest, chance), *value[step + 1 :]]


def changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, np.ndarray):
        array = value.copy()
        place = chance.choice(np.flatnonzero(~np.isnan(array)).tolist())
        array[place] = 1 - array[place] if array.dtype == np.uint8 else array[place] + chance.choice([-1, 1])
        return array
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + chance.choice([-1, 1])
    if isinstance(value, float):
        return value + chance.choice([-0.25, 0.25])
    assert isinstance(value, str), value
    return value + "x"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_changed_in_a_batch_is_found(config, seed):
    change_at_random(config, seed, times=40)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_changed_in_a_batch_with_everything_to_go_by_is_found(tmp_path, seed):
    """Advantages are not cut: what is cut away would not be missed."""
    orchestrator = build_rich_config(tmp_path).orchestrator
    uncut = orchestrator.model_copy(update={"advantage": Advantage(type="ema")})
    run = WrittenRun(build_rich_config(tmp_path).model_copy(update={"orchestrator": uncut}))
    for _ in run.write(5):
        pass
    change_at_random(run.config, seed, times=40)


def change_at_random(config: RunConfig, seed: int, *, times: int) -> None:
    chance = random.Random(seed)
    journal = Journal(config.paths.journal)
    for _ in range(times):
        step = chance.randrange(5)
        before = journal.read(step)
        by_kind: dict[tuple, list[tuple]] = {}
        for path in leaves(before):
            by_kind.setdefault(tuple(part for part in path if isinstance(part, str)), []).append(path)
        path = chance.choice(by_kind[chance.choice(sorted(by_kind))])
        write_entry(journal.path(step), step, mutate(before, path, chance))
        report = audit_run(config.paths.root)
        assert not report.holds, f"batch {step}: {path} was changed"
        write_entry(journal.path(step), step, before)
    assert audit_run(config.paths.root).holds


def test_whatever_is_changed_in_a_version_is_found(config):
    versions, chance = Versions(config.paths.journal), random.Random(1)
    versions.record(2, ["http://127.0.0.1:8000"], digests_of(2), 0.0)
    before = versions.read(2)
    for path in leaves(before):
        if path == ("confirmations", "some entry"):  # once or twice is the same
            continue
        write_entry(versions.path(2), 2, mutate(before, path, chance))
        assert not audit_run(config.paths.root).holds, path
    write_entry(versions.path(2), 2, Version(2, [Confirmation([], digests_of(2), 0.0, 1.7e9)]))
    assert not audit_run(config.paths.root).holds


def test_whatever_number_of_a_batch_is_changed_in_the_metrics_is_found(config):
    names = list(Journal(config.paths.journal).read(2).metrics)
    content = config.paths.metrics.read_bytes()
    for name in names:
        change_lines(lambda rows, name=name: row_of(rows, "orchestrator", 2).update({name: 0.015625}))(config)
        assert f"metrics.jsonl says {name} = 0.015625" in audit_run(config.paths.root).text(everything=True)
        config.paths.metrics.write_bytes(content)

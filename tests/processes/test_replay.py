"""A replay: whoever has the journal can train the run again and find the same bits, or the place where they end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from answering import answering
from tiny import random_samples
from trireme.algo.digest import tensor_digest
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import RunPaths
from trireme.cli.replay import read_config
from trireme.config.run import Model, Ports, RunConfig, WeightBroadcast
from trireme.config.trainer import Checkpoints, Optimizer, Scheduler, TrainerConfig
from trireme.config.written import write_run
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.ledger.shares import Shares
from trireme.ledger.span import find_span
from trireme.ledger.versions import Versions
from trireme.messages import COLUMNS, GetBatch, GetNewest, Go, Live, Newest, Ok, PolicyReady, PolicySent, Reply, Request
from trireme.trainer.loop import train
from trireme.trainer.replay import replay as train_again

STEPS = 4
SAVED_EVERY = 2
LENGTHS = [40, 30, 18, 33, 15, 44, 20]  # five rows of at most 48: one of two ranks is a row short
DEADLINE_S = 240


@dataclass(frozen=True)
class Recorded:
    """A run that was trained by the real trainer, from batches that lay in its journal."""

    config: RunConfig

    @property
    def journal(self) -> Journal:
        return Journal(self.config.paths.journal)

    @property
    def versions(self) -> Versions:
        return Versions(self.config.paths.journal)

    def answer(self, request: Request) -> Reply:
        """An orchestrator's answers, whose engines confirm whatever they are sent."""
        match request:
            case GetNewest():
                return Newest(version=-1, digests={})
            case GetBatch(step=step, rank=rank, world=world):
                return Shares(self.journal, self.config).of(step, rank=rank, world=world)
            case PolicyReady(version=version):
                return Go(version=version, epoch="1", world_size=2)
            case PolicySent(version=version, digests=digests):
                if version > self.versions.newest:
                    self.versions.record(version, ["http://engine"], digests, 0.0)
                return Live(version=version)
        return Ok()


def batch(step: int) -> BatchRecord:
    """Random samples, of which some rollouts have two."""
    samples = random_samples(LENGTHS, seed=step)
    parts = [samples[:2], *([sample] for sample in samples[2:])]
    rollouts = [
        Rollout(
            group=step,
            place=place,
            attempt=0,
            env="say",
            example=0,
            reward=0.5,
            samples=[sample.tokens for sample in part],
            temperature=part[0].temperature,
        )
        for place, part in enumerate(parts)
    ]
    return BatchRecord(step=step, rollouts=rollouts, dropped=[], state=State(next_batch=step + 1))


@contextmanager
def ready_to_train(folder: Path, model: Path, *, num_ranks: int = 1) -> Iterator[Recorded]:
    """Its journal is full, and its orchestrator answers."""
    journal = Journal(folder / "journal")
    for step in range(STEPS):
        journal.append(batch(step))
    config = RunConfig(
        output_dir=folder,
        device="cpu",
        max_steps=STEPS,
        seq_len=48,
        model=Model(name=str(model)),
        weight_broadcast=WeightBroadcast(type="filesystem"),
        trainer=TrainerConfig(
            num_ranks=num_ranks,
            threads=1,
            optim=Optimizer(lr=1e-3, weight_decay=0.1),
            scheduler=Scheduler(type="linear"),
            ckpt=Checkpoints(interval=SAVED_EVERY),
            try_step=True,  # which leaves nothing behind: replays try none
        ),
    )
    with answering(lambda request: Recorded(config).answer(request)) as address:
        config = config.model_copy(update={"ports": Ports(batches=int(address.rpartition(":")[2]), weights=0)})
        write_run(config, config.paths.run_config)
        yield Recorded(config)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Recorded:
    with ready_to_train(tmp_path_factory.mktemp("original") / "run", tiny_model) as run:
        train(run.config)
    assert run.versions.known() == list(range(STEPS + 1))
    return run


@pytest.fixture
def run(original: Recorded, tmp_path: Path) -> Recorded:
    """A copy of it elsewhere, to change."""
    folder = tmp_path / "moved" / "run"
    shutil.copytree(original.config.paths.root, folder)
    return Recorded(read_config(folder, folder / "configs/run.json", Devices()))


def change_batch(run: Recorded, step: int) -> None:
    """One token of one sample, under a checksum that is right."""
    record = run.journal.read(step)
    sample = record.rollouts[2].samples[0]
    columns = {name: getattr(sample, name) for name in COLUMNS}
    ids = np.array(columns.pop("ids"))
    ids[-1] = (ids[-1] + 1) % 128
    record.rollouts[2].samples[0] = type(sample)(ids=ids, **columns)
    run.journal.append(record)


def replay(config: RunConfig, first: int = 0, last: int | None = None, *, keep_going: bool = False) -> int:
    """As the command does it, in this process."""
    return train_again(config, find_span(config.paths, first, last), keep_going=keep_going)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def identical(versions: range, tensors: int) -> list[str]:
    return [f"version {version}: {tensors} tensors, bit-identical" for version in versions]


def num_tensors(run: Recorded) -> int:
    return len(run.versions.read(0).digests)


def test_the_journal_alone_gives_every_version_to_the_bit(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(run.config) == 0
    first, *versions, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run.config.paths.root}: {STEPS} steps from the base model, with torch ")
    assert versions == identical(range(STEPS + 1), num_tensors(run))
    assert last == (
        f"{STEPS} steps trained again from the journal: every version has the digests that the engines confirmed"
    )


def test_a_replay_leaves_the_folder_as_it_was(run: Recorded) -> None:
    before = contents(run.config.paths.root)
    replay(run.config, first=SAVED_EVERY)
    assert contents(run.config.paths.root) == before


def test_one_changed_token_shows_at_the_very_next_version(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    change_batch(run, 2)
    assert replay(run.config) == 1
    told = capsys.readouterr().out
    assert identical(range(3), num_tensors(run)) == told.splitlines()[1:4]
    assert "version 3: " in told
    assert "version 4" not in told
    assert "3 steps trained again from the journal: the first difference is at version 3. On a CPU this is a " in told
    assert f"look at {run.journal.path(2)}" in told


def test_going_on_after_a_difference_shows_that_all_later_versions_differ(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    change_batch(run, 1)
    assert replay(run.config, keep_going=True) == 1
    told = capsys.readouterr().out
    assert identical(range(2), num_tensors(run)) == told.splitlines()[1:3]
    assert all(f"version {version}: {num_tensors(run)} of" in told for version in (2, 3, 4))
    assert f"{STEPS} steps trained again from the journal: the first difference is at version 2." in told


def test_a_changed_digest_is_named_with_its_version_and_tensor(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    name, right = list(run.versions.read(1).digests.items())[3]
    run.versions.record(1, ["http://other"], {**run.versions.read(1).digests, name: "f" * 32}, 0.0)
    assert replay(run.config) == 1
    told = capsys.readouterr().out
    assert (
        f"version 1: 1 of {num_tensors(run)} tensors differ from what http://other confirmed (confirmation 2 of 2), "
        f"the first is {name}: {'f' * 32} then, {right} now\n"
    ) in told


def test_a_tensor_that_nobody_confirmed_is_a_difference(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    name, *others = run.versions.read(0).digests
    lacking = {other: run.versions.read(0).digests[other] for other in others}
    run.versions.path(0).unlink()
    run.versions.record(0, ["http://engine"], lacking, 0.0)
    assert replay(run.config) == 1
    told = capsys.readouterr().out
    assert f"the first is {name}: nothing then, " in told
    assert "Nothing was trained yet: look at the model that it starts from" in told


def test_exported_weights_that_are_not_the_versions_are_named(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    file = run.config.paths.weights / "step_2" / "model.safetensors"
    tensors = load_file(file)
    right = tensor_digest(tensors["model.norm.weight"])
    tensors["model.norm.weight"][5] += 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    assert replay(run.config) == 1
    assert (
        f"version 2: 1 of {num_tensors(run)} tensors differ from what {file.parent} holds, the first is "
        f"model.norm.weight: {tensor_digest(tensors['model.norm.weight'])} then, {right} now\n"
    ) in capsys.readouterr().out


def test_metrics_that_the_steps_do_not_have_are_named(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in run.config.paths.metrics.read_text().splitlines()]
    right = rows[1]["grad_norm"]
    rows[1]["grad_norm"] = 0.5
    run.config.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replay(run.config) == 1
    assert (
        f"version 2: grad_norm of the step that made it was 0.5 then ({run.config.paths.metrics}), is {right} now"
        in (capsys.readouterr().out)
    )


def test_metrics_of_a_way_that_the_run_left_do_not_count(run: Recorded) -> None:
    """A line older than the confirmation: the step was trained again after a rewind and not noted again yet."""
    rows = [json.loads(line) for line in run.config.paths.metrics.read_text().splitlines()]
    confirmed = run.versions.read(STEPS).confirmations[0].time
    rows[-1] |= {"grad_norm": 0.5, "time_s": confirmed - 60}
    run.config.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replay(run.config) == 0


def test_another_learning_rate_is_named_as_the_cause(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule ends at `max_steps`: a run that was lengthened was another one before."""
    longer = Recorded(run.config.model_copy(update={"max_steps": 2 * STEPS}))
    assert replay(longer.config) == 1
    told = capsys.readouterr().out
    assert "version 2: lr of the step that made it was " in told
    assert "the first difference is at version 2." in told


def test_a_missing_batch_is_named_before_anything_is_trained(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    run.journal.path(2).unlink()
    with pytest.raises(JournalCorrupt, match=r"batch_000002\.msgpack is not there.*--until 2"):
        replay(run.config)
    assert capsys.readouterr().out == ""
    assert replay(run.config, last=2) == 0


def test_a_last_batch_that_is_gone_is_missed_by_the_version_that_was_confirmed(run: Recorded) -> None:
    run.journal.path(STEPS - 1).unlink()
    with pytest.raises(JournalCorrupt, match=r"batch_000003\.msgpack is not there"):
        replay(run.config)


def test_a_damaged_batch_is_refused_by_its_checksum(run: Recorded) -> None:
    path = run.journal.path(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalCorrupt, match=r"batch_000001\.msgpack .* do not match its checksum"):
        replay(run.config)


def test_it_stops_where_it_is_told_to(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    change_batch(run, 2)
    assert replay(run.config, last=2) == 0
    assert capsys.readouterr().out.splitlines()[1:-1] == identical(range(3), num_tensors(run))


def test_from_a_checkpoint_come_the_same_bits_without_the_batches_before_it(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    run.journal.path(0).unlink()
    assert replay(run.config, first=SAVED_EVERY) == 0
    first, *versions, _ = capsys.readouterr().out.splitlines()
    assert f"{STEPS - SAVED_EVERY} steps from the checkpoint of step {SAVED_EVERY}" in first
    assert versions == identical(range(SAVED_EVERY, STEPS + 1), num_tensors(run))


def test_versions_that_nobody_confirmed_are_trained_and_said_to_be_unknown(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed: its journal is ahead of what was published."""
    for version in (3, 4):
        run.versions.path(version).unlink()
    shutil.rmtree(run.config.paths.weights / "step_4")
    assert replay(run.config) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:4] == identical(range(3), num_tensors(run))
    assert told[4] == "version 3: no engine confirmed it, so there is nothing to compare it with"
    assert told[-1].endswith("the digests that the engines confirmed (no engine confirmed 3, 4)")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"first": 3}, r"no whole checkpoint of step 3 in .*it has \[2, 4\]"),
        ({"last": 9}, r"Versions 0 to 9 were asked for, .* has 0 to 4\."),
        ({"first": 2, "last": 1}, r"Versions 2 to 1 were asked for"),
        ({"first": -1}, r"Versions -1 to 4 were asked for"),
        ({"last": -1}, r"Versions 0 to -1 were asked for"),
    ],
)
def test_what_cannot_be_replayed_is_refused(run: Recorded, asked: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(run.config, **asked)


def test_a_run_of_which_nothing_is_recorded_is_not_said_to_agree(run: Recorded) -> None:
    for version in run.versions.known():
        run.versions.path(version).unlink()
    shutil.rmtree(run.config.paths.weights)
    with pytest.raises(ConfigError, match=r"Nothing is recorded of versions 0 to 4"):
        replay(run.config)


def test_a_model_that_is_not_found_from_here_says_from_where_to_look(run: Recorded) -> None:
    elsewhere = Recorded(run.config.model_copy(update={"model": Model(name="no/such/model")}))
    with pytest.raises(ConfigError, match=r"in the folder in which the run was started"):
        replay(elsewhere.config)


# the command


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trireme.cli.trireme", "replay", *map(str, words)],
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_the_command_takes_a_folder_that_was_moved(run: Recorded) -> None:
    done = command(run.config.paths.root, "--from", str(SAVED_EVERY), "--until", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:-1] == identical(range(SAVED_EVERY, 4), num_tensors(run))


def test_a_folder_without_a_run_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trireme: {tmp_path} is not a run's folder - expected ")


@pytest.mark.e2e  # two real ranks, twice
def test_two_ranks_replay_what_two_ranks_have_trained_until_a_batch_is_another(
    tmp_path: Path, tiny_model: Path
) -> None:
    with ready_to_train(tmp_path / "run", tiny_model, num_ranks=2) as run:
        words = [sys.executable, "-m", "trireme.cli.trainer", "--run", str(run.config.paths.run_config)]
        trained = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
        assert trained.returncode == 0, trained.stdout + trained.stderr
    change_batch(run, STEPS - 1)
    done = command(run.config.paths.root)
    assert done.returncode == 1, done.stdout + done.stderr
    first, *versions = done.stdout.splitlines()
    assert first.endswith(", 2 ranks of 1 thread")
    assert versions[:STEPS] == identical(range(STEPS), num_tensors(run))
    assert f"the first difference is at version {STEPS}." in versions[-1]


def test_a_run_on_gpus_is_not_replayed_on_fewer(run: Recorded) -> None:
    paths = RunPaths(run.config.paths.root)
    table = json.loads(paths.run_config.read_text()) | {"device": "cuda", "trainer_gpu_ids": [3]}
    paths.run_config.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"trained on 1 GPUs - there are 0 here"):
        read_config(paths.root, paths.run_config, Devices())
    assert read_config(paths.root, paths.run_config, Devices(gpus=("7",))).trainer_gpu_ids == (0,)

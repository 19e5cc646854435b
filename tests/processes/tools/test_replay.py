"""A replay: whoever has the journal can train the run again and find the same bits, or the place where they end."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from support.engines.answering import answering
from support.models.families import IMAGE, MROPE, build_config, save_family
from support.models.tiny import VOCABULARY, random_samples
from support.models.tiny_pictures import picture_file
from support.models.tiny_tokenizer import write_tokenizer
from support.processes import forkserver
from support.runs.planted_faults import change, change_lines
from trireme import messages as wire
from trireme.algo.digest import tensor_digest
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.config.files import write_run
from trireme.config.resolve import resolve, updated
from trireme.config.run import Model, RunConfig
from trireme.journal.journal import Journal
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.rank_shares import Shares
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.journal.versions import Versions
from trireme.launch.origin import begin
from trireme.launch.settings import write_settings
from trireme.monitor.metrics import read_metrics
from trireme.tools.replay import replay as train_again
from trireme.tools.replay_command import as_built, find_span, read_config
from trireme.tools.replay_command import command as replay_command
from trireme.trainer.loop import train

STEPS = 4
SAVED_EVERY = 2
LENGTHS = [40, 30, 18, 33, 15, 44, 20]  # five rows of at most 48: one of two ranks is a row short
DEADLINE_S = 240


@dataclass
class Recorded:
    config: RunConfig

    def __post_init__(self) -> None:
        self.journal = Journal(self.config.paths.journal)
        self.versions = Versions(self.config.paths.journal)
        self._sent: set[tuple[int, int]] = set()

    def answer(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.GetNewest():
                newest = self.versions.newest
                return wire.Newest(version=newest, digests=self.versions.read(newest).digests if newest >= 0 else {})
            case wire.GetBatch(step=step, rank=rank, world=world):
                return Shares(self.journal, self.config).of(step, rank=rank, world=world)
            case wire.PolicyReady(version=version):
                return wire.Go(version=version, epoch="1", world_size=2)
            case wire.PolicySent(version=version, attempt=attempt, digests=digests):
                if (version, attempt) not in self._sent:  # else the same question, asked twice
                    self._sent.add((version, attempt))
                    self.versions.record(version, ["http://engine"], digests, 0.0)
                return wire.Live(version=version)
        return wire.Ok()

    def replay(
        self, first: int | None = 0, last: int | None = None, *, keep_going: bool = False, **changes: Any
    ) -> int:
        config = self.config.model_copy(update=changes)
        return train_again(config, find_span(config.paths, first, last), keep_going=keep_going)

    def change_batch(self, step: int) -> None:
        """One token of one sample, under a checksum that is right."""
        ids = "rollouts.2.samples.0.ids"
        change(step, ids, lambda ids: np.append(ids[:-1], (ids[-1:] + 1) % 128).astype(ids.dtype))(self.config)

    def identical(self, first: int, last: int) -> list[str]:
        tensors = len(self.versions.read(first).digests)
        return [f"version {version}: {tensors} tensors, bit-identical" for version in range(first, last + 1)]


def batch(step: int, shown: str | None = None) -> BatchRecord:
    """Random samples, of which some rollouts have two; with a picture of two tokens in each, where there is one."""
    samples = random_samples(LENGTHS, seed=step)
    for sample in samples if shown else ():
        sample.tokens.ids[1:3] = IMAGE
        sample.tokens = msgspec.structs.replace(sample.tokens, pictures=[wire.Picture(str(shown), 1, 1, 2)])
    parts = [samples[:2], *([sample] for sample in samples[2:])]
    same = {"group": step, "attempt": 0, "env": "say", "example": 0, "reward": 0.5}
    rollouts = [
        Rollout(**same, place=place, samples=[sample.tokens for sample in part], temperature=part[0].temperature)
        for place, part in enumerate(parts)
    ]
    return BatchRecord(step=step, rollouts=rollouts, dropped=[], state=State(next_batch=step + 1))


@contextmanager
def ready_to_train(
    folder: Path,
    model,
    *,
    num_ranks: int = 1,
    picture: bytes | None = None,
    steps: int = STEPS,
    other: Path | None = None,
    **ckpt: Any,
) -> Iterator[Recorded]:
    """
    Args:
        other: a run to begin from, with the same batches as in here.
        ckpt: more keys of `[trainer.ckpt]`.
    """
    files = PictureFiles(pictures_folder(folder / "journal"))
    for step in range(steps):
        Journal(folder / "journal").append(batch(step, files.add(picture) if picture else None))
    trainer = {"num_ranks": num_ranks, "threads": 1, "optim": {"lr": 1e-3, "weight_decay": 0.1}}
    trainer |= {"scheduler": {"type": "linear"}, "ckpt": {"interval": SAVED_EVERY} | ckpt}
    trainer["try_step"] = True  # which leaves nothing behind: replays try none
    run = {"output_dir": folder, "device": "cpu", "max_steps": steps, "seq_len": 48}
    run["model"] = {"name": str(model), "vlm": {"freeze_vision_encoder": False} if picture else None}
    with answering(lambda request: recorded.answer(request)) as address:
        ports = {"batches": int(address.rpartition(":")[2]), "weights": 0}
        sections = {"weight_broadcast": {"type": "filesystem"}, "trainer": trainer, "ports": ports}
        recorded = Recorded(RunConfig.model_validate(run | sections | {"resume_from": other}))
        begin(recorded.config)
        write_run(recorded.config, recorded.config.paths.run_config)
        yield recorded


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_model):
    with ready_to_train(tmp_path_factory.mktemp("original") / "run", tiny_model) as run:
        train(run.config)
    assert run.versions.known() == list(range(STEPS + 1))
    return run


@pytest.fixture
def run(original, tmp_path):
    folder = tmp_path / "moved" / "run"
    shutil.copytree(original.config.paths.root, folder)
    return Recorded(read_config(folder, folder / "configs/run.json", Devices()))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_replay_of_the_journal_reproduces_every_version_to_the_bit(run, capsys):
    """A line of metrics older than the confirmation does not count: after a rewind, the new one is not noted yet."""
    older = {"grad_norm": 0.5, "time_s": run.versions.read(STEPS).confirmations[0].time - 60}
    change_lines(lambda rows: rows[-1].update(older))(run.config)
    before = contents(run.config.paths.root)
    assert run.replay() == 0
    first, *versions, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run.config.paths.root}: {STEPS} steps from the base model, with torch ")
    assert versions == run.identical(0, STEPS)
    assert last.endswith("every version has the digests that the engines confirmed")
    assert contents(run.config.paths.root) == before


def test_run_that_begins_from_another_makes_the_same_versions(original, tiny_model, tmp_path, capsys):
    checkpoint = original.config.paths.checkpoints / f"step_{SAVED_EVERY}"
    with ready_to_train(tmp_path / "run", tiny_model, other=checkpoint) as run:
        train(run.config)
        shutil.rmtree(run.config.paths.checkpoints)  # as after a death before the first one of its own
        train(updated(run.config, {"resume": True}))
    assert run.versions.known() == list(range(SAVED_EVERY, STEPS + 1))
    for version in run.versions.known():
        (confirmation,) = run.versions.read(version).confirmations  # another one would be of other weights
        assert confirmation.digests == original.versions.read(version).digests
    capsys.readouterr()
    assert run.replay(None) == 0
    assert run.identical(SAVED_EVERY, STEPS)[-1] in capsys.readouterr().out


@pytest.mark.parametrize("without", [("optimizer",), ("scheduler",), ("progress",), ("optimizer", "progress")])
def test_replay_begins_with_what_was_taken_of_another_run(original, tiny_model, tmp_path, without):
    begin_from = {"other": original.config.paths.root, "resume_without": without, "steps": STEPS + 2}
    with ready_to_train(tmp_path / "run", tiny_model, **begin_from) as run:
        train(run.config)
    first = 0 if "progress" in without else STEPS
    assert run.versions.read(first).digests == original.versions.read(STEPS).digests, "the same weights"
    assert run.replay(None) == 0


def test_replay_uses_the_settings_of_each_step_after_a_resume(tmp_path, tiny_model, capsys):
    """It had trained a step since its newest checkpoint, which is repeated as it was: to the version that was sent."""
    with ready_to_train(tmp_path / "run", tiny_model) as run:
        paths, first = run.config.paths, updated(run.config, {"max_steps": 3, "trainer.ckpt.interval": 2})
        write_settings(first, paths.run_config)
        train(first)
        for folder in (paths.checkpoints, paths.weights):
            shutil.rmtree(folder / "step_3")
        changes = {"optim.lr": 4e-3, "optim.weight_decay": 0.5, "optim.betas": (0.5, 0.6), "optim.max_norm": 0.01}
        changes |= {"loss.type": "grpo", "loss.beta": 0.1, "num_iterations": 2, "micro_batch_tokens": 96}
        changes = {f"trainer.{key}": value for key, value in changes.items()}
        run.config = updated(run.config, {"resume": True} | changes)
        write_settings(run.config, paths.run_config)
        train(run.config)
    told = capsys.readouterr().out
    assert "max_steps: 3 -> 4, from step 3 on, and with it the learning rate of `linear`" in told
    assert [len(run.versions.read(version).confirmations) for version in range(STEPS + 1)] == [1, 1, 1, 1, 1]
    assert run.replay() == run.replay(first=SAVED_EVERY) == 0
    assert capsys.readouterr().out.count("bit-identical") == STEPS + 1 + 3
    later = updated(run.config, {"max_steps": 5, "trainer.optim.type": "adamw_8bit"})
    write_settings(later, paths.run_config)
    with pytest.raises(ConfigError, match=r'Steps 0 to 3 .*optim.type` = "adamw", .*--until 4'):
        as_built(later, range(5))
    assert as_built(later, range(4)).trainer.optim.type == "adamw"


def test_replay_finds_a_changed_token_at_the_next_version(run, capsys):
    run.change_batch(2)
    assert run.replay(last=2) == 0
    assert capsys.readouterr().out.splitlines()[1:-1] == run.identical(0, 2)
    assert run.replay() == 1
    told = capsys.readouterr().out
    assert told.splitlines()[1:4] == run.identical(0, 2)
    assert "version 4" not in told
    assert "3 steps trained again from the journal: the first difference is at version 3. On a CPU this is a " in told
    assert f"look at {run.journal.path(2)}" in told
    run.journal.path(0).unlink()  # batches before the checkpoint are not needed
    assert run.replay(first=SAVED_EVERY, keep_going=True) == 1
    told = capsys.readouterr().out
    num_tensors = len(run.versions.read(2).digests)
    assert f": 2 steps from the checkpoint of step {SAVED_EVERY}" in told.splitlines()[0]
    assert told.splitlines()[1] == run.identical(2, 2)[0]
    assert all(f"version {version}: {num_tensors} of" in told for version in (3, 4))
    assert "2 steps trained again from the journal: the first difference is at version 3." in told


def test_whatever_was_recorded_and_differs_is_named(run, capsys):
    paths = run.config.paths
    confirmed = run.versions.read(0).digests
    absent, *others = confirmed
    run.versions.path(0).unlink()
    run.versions.record(0, ["http://engine"], {name: confirmed[name] for name in others}, 0.0)
    name, digest = list(run.versions.read(1).digests.items())[3]
    run.versions.record(1, ["http://other"], {**run.versions.read(1).digests, name: "f" * 32}, 0.0)
    exported = paths.weights / "step_2"
    tensors = load_file(exported / "model.safetensors")
    norm = tensor_digest(tensors["model.norm.weight"])
    tensors["model.norm.weight"][5] += 1e-6
    save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
    grad_norm = read_metrics(paths.metrics)[0][1]["grad_norm"]
    same_millisecond = run.versions.read(2).confirmations[0].time - 4e-4
    change_lines(lambda rows: rows[1].update(grad_norm=0.5, time_s=same_millisecond))(run.config)
    assert run.replay(keep_going=True) == 1
    assert capsys.readouterr().out.splitlines()[1:-1] == [
        f"version 0: 1 of {len(confirmed)} tensors differ from what http://engine confirmed, the first is {absent}: "
        f"nothing then, {confirmed[absent]} now",
        f"version 1: 1 of {len(confirmed)} tensors differ from what http://other confirmed (confirmation 2 of 2), the "
        f"first is {name}: {'f' * 32} then, {digest} now",
        f"version 2: 1 of {len(confirmed)} tensors differ from what {exported} holds, the first is model.norm.weight: "
        f"{tensor_digest(tensors['model.norm.weight'])} then, {norm} now",
        f"version 2: grad_norm of the step that made it was 0.5 then ({paths.metrics}), is {grad_norm} now",
        *run.identical(3, 4),
    ]
    assert run.replay() == 1
    assert "Nothing was trained yet: look at the model that it starts from" in capsys.readouterr().out


def test_half_written_export_is_refused_before_anything_is_trained(run, capsys):
    file = run.config.paths.weights / "step_2/model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"step_2/model\.safetensors is damaged: .*trireme export .*--step 2"):
        run.replay()
    assert capsys.readouterr().out == ""
    file.write_bytes(whole)


def test_a_batch_that_is_missing_or_damaged_is_named(run, capsys):
    """A missing one before anything is trained, and the last one too, for its version was confirmed."""
    for step in (STEPS - 1, 2):
        run.journal.path(step).unlink()
        with pytest.raises(JournalCorrupt, match=rf"batch_00000{step}\.msgpack is not there.*--until {step}"):
            run.replay()
    assert capsys.readouterr().out == ""
    run.journal.path(1).write_bytes(run.journal.path(1).read_bytes()[:-1])
    with pytest.raises(JournalCorrupt, match=r"batch_000001\.msgpack .* do not match its checksum"):
        run.replay(last=2)


def test_versions_that_nobody_confirmed_are_trained_and_said_to_be_unknown(run, capsys):
    """A run that was killed: its journal is ahead of what was published."""
    for version in (3, 4):
        run.versions.path(version).unlink()
    shutil.rmtree(run.config.paths.weights / "step_4")
    assert run.replay() == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:4] == run.identical(0, 2)
    assert told[4] == "version 3: no engine confirmed it, so there is nothing to compare it with"
    assert told[-1].endswith("the digests that the engines confirmed (no engine confirmed 3, 4)")


def test_what_cannot_be_replayed_is_refused(run, tmp_path):
    refused: dict[str, dict[str, Any]] = {
        r"no whole checkpoint of step 3 in .*it has \[2, 4\]": {"first": 3},
        r"Versions 0 to 9 were asked for, .* has 0 to 4\.": {"last": 9},
        r"Versions 2 to 1 were asked for": {"first": 2, "last": 1},
        r"Versions -1 to 4 were asked for": {"first": -1},
        r"in the folder in which the run was started": {"model": Model(name="no/such/model")},
    }
    for message, asked in refused.items():
        with pytest.raises(ConfigError, match=message):
            run.replay(**asked)
    for version in run.versions.known():
        run.versions.path(version).unlink()
    shutil.rmtree(run.config.paths.weights)
    with pytest.raises(ConfigError, match=r"Nothing is recorded of versions 0 to 4"):
        run.replay()
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a run's folder - expected "):
        replay_command([str(tmp_path)])


def test_two_ranks_replay_a_run_until_its_changed_batch(tmp_path, tiny_model):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def end_of(*words: str) -> tuple[int, str]:
        with (tmp_path / "log").open("w+") as log:
            process = forkserver.popen([sys.executable, "-m", *words], output=log.fileno(), env=env, cwd=tmp_path)
            code = process.wait(DEADLINE_S)
            log.seek(0)
            return code, log.read()

    with ready_to_train(tmp_path / "run", tiny_model, num_ranks=2) as run:
        code, said = end_of("trireme.cli.trainer", "--run", str(run.config.paths.run_config))
        assert code == 0, said
    run.change_batch(STEPS - 1)
    code, said = end_of("trireme.cli.trireme", "replay", str(run.config.paths.root))
    assert code == 1, said
    first, *versions = said.splitlines()
    assert first.endswith(", 2 ranks of 1 thread")
    assert versions[:STEPS] == run.identical(0, STEPS - 1)
    assert f"the first difference is at version {STEPS}." in said


def test_replay_names_a_missing_picture(tmp_path, capsys):
    shape = build_config("qwen2_5_vl", rope_parameters=MROPE, vocab_size=VOCABULARY)
    model = save_family(write_tokenizer(tmp_path / "model"), shape)
    with ready_to_train(tmp_path / "run", model, picture=picture_file(56, 28)) as run:
        run = Recorded(resolve(run.config, Devices(cores=1)))
        train(run.config)
    assert run.replay() == 0
    assert capsys.readouterr().out.count("bit-identical") == STEPS + 1
    (picture,) = pictures_folder(run.config.paths.journal).iterdir()
    picture.unlink()
    with pytest.raises(JournalCorrupt, match=f"{picture.name} is missing"):
        run.replay()


def test_a_run_on_gpus_is_not_replayed_on_fewer(run):
    paths = run.config.paths
    table = json.loads(paths.run_config.read_text()) | {"device": "cuda", "trainer_gpu_ids": [3]}
    paths.run_config.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"trained on 1 GPUs - there are 0 here"):
        read_config(paths.root, paths.run_config, Devices())
    assert read_config(paths.root, paths.run_config, Devices(gpus=("7",))).trainer_gpu_ids == (0,)

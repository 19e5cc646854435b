"""Supervised fine-tuning: the order of the data, what is measured, that it learns and goes on where it was."""

import json
import math
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models.families import MROPE, save_family
from support.models.families import build_config as family_config
from support.models.tiny import VOCABULARY
from support.models.tiny_pictures import picture_file
from support.models.tiny_tokenizer import write_seeing_tokenizer
from support.processes.rank_processes import run_rank, run_ranks
from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.cli.sft import sft
from trireme.config.files import write_run
from trireme.config.sft import SftConfig
from trireme.config.trainer import Checkpoints, Optimizer, TrainerModel, Vlm
from trireme.journal.manifest import complete_steps
from trireme.journal.pictures import rules_of_model
from trireme.launch.folder import hold_folder
from trireme.launch.origin import begin
from trireme.monitor.metrics import read_metrics
from trireme.monitor.spans import read_spans
from trireme.monitor.timeline import joined
from trireme.trainer.parallel.mesh import World, keep_alive
from trireme.trainer.sft.dataset import SampleFiles
from trireme.trainer.sft.loop import Sft, train_sft
from trireme.trainer.sft.prepare_data import prepare_data
from trireme.trainer.tokenizer import open_tokenizer


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    rng = random.Random(0)
    lines = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter * 4}]}
        for letter in rng.choices("abc", k=200)
    ]
    return write_lines(tmp_path_factory.mktemp("data") / "letters.jsonl", *lines)


def build_config(folder: Path, model: Path, data: Path, **changed: object) -> SftConfig:
    trained = {"model": TrainerModel(name=str(model)), "optim": Optimizer(lr=5e-3), "ckpt": Checkpoints(interval=10)}
    sizes = {"validation_fraction": 0.1, "max_steps": 20, "batch_size": 16, "seq_len": 64, "threads": 1}
    config = SftConfig(output_dir=folder, data=str(data), device="cpu", **trained, **sizes)
    return config.model_copy(update=changed)


@pytest.fixture(scope="module")
def trained(letters, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    train_sft(build_config(folder, tiny_model, letters))
    return folder


def metrics_of(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl")[0]


def test_twenty_steps_learn_a_simple_task(trained):
    rows = metrics_of(trained)
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[0]["loss"] > 4.0  # log 128 = 4.85: it knows nothing
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["validation/loss"] == pytest.approx(rows[-1]["loss"], abs=0.5)
    assert rows[0]["validation/base_loss"] == pytest.approx(rows[0]["loss"], abs=0.1)
    assert [row["step"] for row in rows if "validation/loss" in row] == [19]
    assert rows[4]["perplexity"] == pytest.approx(math.exp(rows[4]["loss"]))
    assert rows[-1]["epoch"] == pytest.approx(20 * 16 / 180)
    spans = joined(read_spans(trained / "spans.jsonl")[0])
    assert [span.step for span in spans if span.what == "train"] == list(range(20))
    assert [span.step for span in spans if span.what == "save"] == [10, 20]
    assert [span.what for span in spans].count("evaluate") == 2  # before the first step and after the last


def test_a_resumed_run_goes_on_to_the_same_weights_to_the_bit(trained, letters, tiny_model, tmp_path):
    train_sft(build_config(tmp_path, tiny_model, letters, max_steps=10))
    assert complete_steps(tmp_path / "checkpoints") == [10]
    train_sft(build_config(tmp_path, tiny_model, letters, resume=True))
    weights = "weights/step_20/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (trained / weights).read_bytes()
    assert [row["loss"] for row in metrics_of(tmp_path)] == [row["loss"] for row in metrics_of(trained)]


def forked(trained: Path, folder: Path, *given: object, **changed: object) -> SftConfig:
    config = build_config(folder, *given, resume_from=trained / "checkpoints" / "step_10", **changed)
    write_run(build_config(trained, *given), trained / "configs" / "run.json")
    begin(config)
    return config


def test_run_that_begins_from_another_ends_with_its_weights(trained, letters, tiny_model, tmp_path):
    train_sft(forked(trained, tmp_path, tiny_model, letters))
    weights = "weights/step_20/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (trained / weights).read_bytes()
    rows = metrics_of(tmp_path)
    assert [row["loss"] for row in rows] == [row["loss"] for row in metrics_of(trained)][10:]
    assert "validation/base_loss" in rows[0]


@pytest.mark.parametrize(
    ("without", "steps", "epochs", "is_first_batch"),
    [
        (("data",), [10, 11], [16 / 180, 32 / 180], True),
        (("progress",), [0, 1], [11 * 16 / 180, 12 * 16 / 180], False),
        (("data", "progress"), [0, 1], [16 / 180, 32 / 180], True),
    ],
)
def test_place_in_the_samples_is_apart_from_the_steps(
    trained, letters, tiny_model, tmp_path, without, steps, epochs, is_first_batch
):
    parts = {"ckpt": Checkpoints(resume_without=without), "max_steps": steps[-1] + 1, "batch_size": 16}
    train_sft(forked(trained, tmp_path, tiny_model, letters, **parts))
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == steps
    assert [row["epoch"] for row in rows] == pytest.approx(epochs)
    first = metrics_of(trained)[0 if is_first_batch else 10]
    assert rows[0]["loss_tokens"] == first["loss_tokens"]
    assert rows[0]["loss"] < 1.0, "the weights are the other run's"


def test_place_in_other_samples_is_refused_when_a_run_begins(trained, letters, tiny_model, tmp_path):
    other = write_lines(tmp_path / "other.jsonl", *map(json.loads, reversed(letters.read_text().splitlines())))
    config = forked(trained, tmp_path / "run", tiny_model, letters)
    with pytest.raises(ConfigError, match=r"other samples so far: .*--ckpt\.resume-without data"):
        train_sft(config.model_copy(update={"data": str(other)}))


def test_resumed_sft_run_refuses_other_samples(letters, tiny_model, tmp_path):
    first = build_config(tmp_path / "run", tiny_model, letters, max_steps=1)
    train_sft(first)
    moved = write_lines(tmp_path / "moved.jsonl", *map(json.loads, letters.read_text().splitlines()))
    resumed = first.model_copy(update={"resume": True, "max_steps": 2, "data": str(moved)})
    other = write_lines(tmp_path / "other.jsonl", *map(json.loads, reversed(letters.read_text().splitlines())))
    for changed in ({"data": str(other)}, {"validation_fraction": 0.5}):
        with pytest.raises(ConfigError, match="other samples so far"):
            train_sft(resumed.model_copy(update=changed))
    train_sft(resumed)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1]


@pytest.mark.parametrize(("data", "shortest"), [("fake", 64), ("fake-of-any-length", 2)])
def test_made_up_data_are_the_same_when_the_run_is_resumed(data, shortest, tiny_model, tmp_path):
    config = build_config(tmp_path, tiny_model, Path(data), max_steps=1)
    train_sft(config)
    samples = SampleFiles(config.paths.data / "train_0")
    lengths = [each.tokens.length for each in samples]
    assert (min(lengths), max(lengths)) == (shortest, 64)
    assert samples[0].tokens.loss_mask.tolist() == [0] + [1] * (lengths[0] - 1)
    train_sft(config.model_copy(update={"resume": True, "max_steps": 2}))
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1]


def test_a_steps_metrics_are_on_disk_before_its_checkpoint(letters, tiny_model, tmp_path, monkeypatch):
    full = tmp_path / "full"
    monkeypatch.setenv("TRIREME_FAULTS", f"disk_full={full}")
    changed = {"ckpt": Checkpoints(interval=1), "disk_timeout_s": 0.0}
    with ExitStack() as stack:
        run = Sft(build_config(tmp_path / "run", tiny_model, letters, **changed), stack)
        metrics = run.step()
        full.touch()
        run.record(metrics)
        with pytest.raises(DeadlineExceeded, match="room for metrics"):
            run.save_if_due()
        full.unlink()


def test_the_validation_loss_is_that_of_transformers(letters, tiny_model, tmp_path):
    """Of all held-out tokens alike, however they are packed, before the first step and at the interval."""
    held_out = [json.loads(line) for line in letters.read_text().splitlines()[:7]]
    validation = write_lines(tmp_path / "validation.jsonl", *held_out)
    given = {"validation": str(validation), "validation_fraction": 0.0, "validation_interval": 2}
    given |= {"num_epochs": 0.06, "batch_size": 3, "ckpt": Checkpoints()}
    train_sft(build_config(tmp_path / "run", tiny_model, letters, **given))
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows if "validation/loss" in row] == [1, 3]
    for row, kind, model in ((rows[0], "base_", tiny_model), (rows[-1], "", tmp_path / "run/weights/step_4")):
        assert row[f"validation/{kind}loss"] == pytest.approx(loss_of(model, held_out), rel=1e-5)
    assert rows[-1]["validation/perplexity"] == pytest.approx(math.exp(rows[-1]["validation/loss"]))


@torch.no_grad()
def loss_of(folder: Path, entries: list[dict]) -> float:
    """Return the loss on what the assistant says and its end-of-turn token, one entry at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for entry in entries:
        prompt = tokenizer.apply_chat_template(entry["messages"][:1], add_generation_prompt=True)["input_ids"]
        answer = [*tokenizer(entry["messages"][1]["content"])["input_ids"], tokenizer.eos_token_id]
        logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        logprobs = logprobs[len(prompt) - 1 : -1]
        total -= sum(float(logprobs[place, token]) for place, token in enumerate(answer))
        count += len(answer)
    return total / count


def test_what_a_picture_shows_is_learned_and_a_resumed_run_reads_it_again(tmp_path):
    """No text says which letter is right. Blind, a letter of three and a sure end cost 0.55 nats each."""
    model, shape = tmp_path / "model", family_config("qwen2_5_vl", rope_parameters=MROPE, vocab_size=VOCABULARY)
    shape.update(write_seeing_tokenizer(model))
    save_family(model, shape)
    rng = random.Random(0)
    lines = []
    for shade, letter in rng.choices([(0, "a"), (128, "b"), (255, "c")], k=100):
        asked = [{"type": "image", "image": f"{letter}.png"}, {"type": "text", "text": "?"}]
        (tmp_path / f"{letter}.png").write_bytes(picture_file(64, 64, shade))
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": letter}]})
    data = write_lines(tmp_path / "data.jsonl", *lines)
    sees = {"model": TrainerModel(name=str(model), vlm=Vlm(freeze_vision_encoder=False))}
    folder, fewer = tmp_path / "run", {"batch_size": 8}
    train_sft(build_config(folder, model, data, **fewer, ckpt=Checkpoints(interval=15)).model_copy(update=sees))
    rows = metrics_of(folder)
    assert rows[-1]["validation/loss"] < 0.4
    train_sft(build_config(folder, model, data, **fewer, ckpt=Checkpoints(resume_step=15)).model_copy(update=sees))
    again = metrics_of(folder)[-5:]
    assert [(row["step"], row["loss"]) for row in again] == [(row["step"], row["loss"]) for row in rows[15:]]
    assert rules_of_model(str(folder / "weights/step_20")) == rules_of_model(str(model))


def test_a_training_that_is_refused_leaves_its_folder_as_it_was(letters, tiny_model, tmp_path):
    typed, paths = ["--data", str(letters), "--model.name", str(tiny_model), "--device", "cpu"], RunPaths(tmp_path)
    typed += ["--output-dir", str(tmp_path)]
    (tmp_path / "notes.txt").touch()
    for flags in ([], ["--resume"], ["--ckpt.resume-step", "7"]):
        with pytest.raises(ConfigError, match=r"holds no run|there is no run"):
            sft([*typed, *flags])
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    paths.metrics.touch()
    with hold_folder(paths), pytest.raises(ConfigError, match="another launcher"):
        sft(typed)
    assert paths.metrics.exists()  # not moved aside
    with pytest.raises(ConfigError, match="tokenizer"):
        open_tokenizer(str(tmp_path / "nowhere"), False)


PATIENCE_S = 6.0
SLOW = f"""import time

def conversations():
    for _ in range(100):
        time.sleep({1.5 * PATIENCE_S / 100})
        yield {{"prompt": "a", "completion": "b"}}
"""


def test_ranks_wait_beyond_their_timeout_for_the_first_to_read_data(tiny_model, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    assert run_ranks(__file__, tiny_model, tmp_path) == [100, 100]


def wait_longer(model: Path, folder: Path, world: World) -> int:
    config = build_config(folder, model, folder / "slow.py", validation_fraction=0.0)
    world.barrier()
    train, _ = prepare_data(config, world, Waits("sft"), keep_alive(world, timeout_s=PATIENCE_S))
    return train.length


if __name__ == "__main__":
    open_tokenizer(sys.argv[1], False)  # its imports take long the first time
    run_rank(wait_longer, timeout_s=PATIENCE_S)

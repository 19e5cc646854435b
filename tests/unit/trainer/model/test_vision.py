"""Pictures in the trainer: a packed row gives what transformers computes of each sample alone, forward and backward."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from support.models.families import IMAGE, MROPE, VOCABULARY, build_config, save_family
from support.models.tiny import batch_reply, largest_difference, one_row, take_gradients, weights_of
from support.processes.rank_processes import run_rank, run_ranks
from trireme.algo.packing import Sample
from trireme.algo.pictures import PictureRules, expand
from trireme.base.errors import ConfigError
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, Loss, Optimizer, TrainerConfig, TrainerModel, Vlm
from trireme.messages import Picture, build_tokens
from trireme.trainer.model.forward import compute_columns, computed_fracs, scorer_of
from trireme.trainer.model.lora import is_adapter
from trireme.trainer.model.model import load_model
from trireme.trainer.model.vision import give_pictures
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import Stepper, base_state

SAME = 92  # a token whose embedding and logits are those of the placeholder
SEEING = ("qwen2_5_vl", "qwen3_5")
TRAINED = Vlm(freeze_vision_encoder=False)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


FILES = (picture(150, 90), picture(60, 130), picture(150, 90, seed=1))
PICTURES = {hashlib.sha256(png).hexdigest(): png for png in FILES}
WIDE, TALL, OTHER = PICTURES


def image(digest: str) -> Image.Image:
    return Image.open(io.BytesIO(PICTURES[digest]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    for kind in SEEING:
        save_family(root / kind, build_config(kind, rope_parameters=MROPE))
        plain = AutoModelForImageTextToText.from_pretrained(root / kind, dtype=torch.float32)
        with torch.no_grad():
            for table in (plain.get_input_embeddings(), plain.get_output_embeddings()):
                table.weight[SAME] = table.weight[IMAGE]
        plain.save_pretrained(root / kind)
    return {kind: root / kind for kind in SEEING}


def load(folder: Path, world: World, **changes: object) -> PreTrainedModel:
    model = load_model(TrainerModel(vlm=Vlm()).model_copy(update=changes), str(folder), world)
    give_pictures(model, PICTURES)
    return model


def sample(folder: Path, pictures: list[str], answer: list[int], prompt: int = 7) -> Sample:
    """A prompt that shows these pictures, with a token after each, and an answer."""
    rules = PictureRules.of({"image_token_id": IMAGE}, AutoImageProcessor.from_pretrained(folder).to_dict())
    grids = [(digest, *rules.grid(*image(digest).size)) for digest in pictures]
    shown = [token for number in range(len(pictures)) for token in (IMAGE, 11 + number)]
    ids, placed = expand([prompt, *shown, 20], IMAGE, grids)
    mask = np.arange(len(ids) + len(answer)) >= len(ids)
    columns = {"loss_mask": mask, "logprobs": -4.0 * mask, "advantages": 1.0 * mask, "versions": np.where(mask, 0, -1)}
    return Sample(build_tokens(ids=ids + answer, pictures=placed, **columns), 1.0)


def samples_of(folder: Path) -> list[Sample]:
    """Longest first. Two begin alike up to their answer, and one ends like another but for its picture."""
    found = [
        *(sample(folder, [digest], [30, 31, 32, 33]) for digest in (WIDE, OTHER)),
        sample(folder, [WIDE], [30, 31, 40, IMAGE, 41, 42]),
        sample(folder, [], [50, 51, 52]),
        sample(folder, [TALL, WIDE], [60, 61, 62]),
        sample(folder, [TALL, OTHER], [60, 61, 62], prompt=8),
    ]
    return sorted(found, key=lambda each: -each.tokens.length)


def alone(plain: PreTrainedModel, folder: Path, sample: Sample) -> torch.Tensor:
    """The logprobs of a sample's answer, by transformers' own forward pass with its pixels."""
    ids = torch.from_numpy(sample.tokens.ids.astype(np.int64))[None]
    sampled = ids[0, -int(sample.tokens.loss_mask.sum()) :]
    sampled[sampled == IMAGE] = SAME
    seen = {}
    if pictures := sample.tokens.pictures:
        images = [image(each.digest) for each in pictures]
        seen = AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")
        seen |= {"mm_token_type_ids": (ids == IMAGE).int()}
    logprobs = plain(input_ids=ids, use_cache=False, **seen).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[-len(sampled) :, 0]


@pytest.mark.parametrize(("kind", "is_packed"), [("qwen2_5_vl", True), ("qwen2_5_vl", False), ("qwen3_5", True)])
def test_samples_of_a_row_see_what_they_see_alone(folders, kind, is_packed, world):
    """A sampled token may be the placeholder."""
    model = load(folders[kind], world, ac=ActivationCheckpointing(), vlm=TRAINED)
    samples = samples_of(folders[kind])
    scorer = scorer_of(model, world.device)
    assert scorer.head is not None
    assert (scorer.is_packed, scorer.shares_prefixes) == (True, True)
    vars(model)["trireme_scorer"] = replace(scorer, is_packed=is_packed)
    found = compute_columns(model, one_row(samples), world.device).logprobs
    weights = torch.linspace(-1, 2, len(found))
    (found * weights).sum().backward()
    plain = AutoModelForImageTextToText.from_pretrained(folders[kind], dtype=torch.float32)
    expected = [alone(plain, folders[kind], each) for each in samples]
    (torch.cat(expected) * weights).sum().backward()
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
    ours, theirs = take_gradients(model), take_gradients(plain)
    for gradients in (ours, theirs):
        for gradient in gradients.values():
            if len(gradient) == VOCABULARY:
                gradient[SAME] += gradient[IMAGE]
                gradient[IMAGE] = 0
    assert largest_difference(ours, theirs) < 1e-4
    texts = [each.tokens.ids.tolist() for each in samples]
    one, other = (number for number, text in enumerate(texts) if text[-4:] == [30, 31, 32, 33])
    assert texts[one] == texts[other]
    assert (expected[one] - expected[other]).abs().max() > 1e-3
    computed, of_existing = computed_fracs(model, [one_row([samples[one], samples[other]])])
    assert 1 > computed > 0.95 > computed_fracs(model, [one_row(samples)])[0]
    assert of_existing == 1


@pytest.mark.parametrize(
    ("kind", "vlm", "lora"),
    [
        *(("qwen2_5_vl", Vlm(), None), ("qwen3_5", TRAINED, None)),
        ("qwen2_5_vl", Vlm(), Lora(rank=2, target_modules=("all-linear",))),
    ],
)
def test_a_step_with_pictures_changes_the_vision_encoder_only_if_asked(folders, kind, vlm, lora, world):
    trainer = TrainerConfig(model=TrainerModel(vlm=vlm, lora=lora), optim=Optimizer(lr=1e-2), loss=Loss(beta=0.1))
    config = RunConfig(model=Model(name=str(folders[kind])), max_steps=2, trainer=trainer)
    state = base_state(config, world)
    before = weights_of(state.model)
    reply = batch_reply(samples_of(folders[kind]), world, capacity=100, step=0)
    metrics = Stepper(config, state, world).step(msgspec.structs.replace(reply, pictures=PICTURES))
    assert metrics["reference_kl"] == 0.0
    after = weights_of(state.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    may_change = {name for name in before if vlm is TRAINED or (is_adapter(name) if lora else ".visual." not in name)}
    assert changed == may_change if vlm is TRAINED else set() < changed <= may_change
    assert not any(".visual." in name for name in before if is_adapter(name))


def test_pictures_that_the_model_reads_otherwise_or_cannot_see_are_refused(folders, world):
    model = load(folders["qwen3_5"], world)
    row = one_row([sample(folders["qwen3_5"], [WIDE], [30])])
    row.tokens.pictures[:] = [Picture(WIDE, 1, 5, 3)]
    with pytest.raises(ConfigError, match=r"5 x 3 tokens in a rollout(.|\n)*3 x 5"):
        compute_columns(model, row, world.device)
    text = load_model(TrainerModel(), str(folders["qwen3_5"]), world)
    give_pictures(text, {})
    with pytest.raises(ConfigError, match=r"model\.vlm"):
        give_pictures(text, PICTURES)
    with pytest.raises(ConfigError, match=r"model\.vlm"):
        compute_columns(text, row, world.device)


def gradients_on(folder: Path, _: Path, world: World) -> dict[str, torch.Tensor]:
    """Of a row with pictures on the first rank, and of one without on the second; of both where there is one rank."""
    model, samples = load(folder, world, vlm=TRAINED), samples_of(folder)
    rows = [one_row(samples[:4]), one_row([sample(folder, [], [50, 51, 52])])]
    for row in rows if world.size == 1 else [rows[world.rank]]:
        (compute_columns(model, row, world.device).logprobs.sum() * world.size).backward()
    return take_gradients(model)


def test_a_rank_without_pictures_keeps_in_step_with_one_that_has_some(folders, tmp_path, world):
    expected = gradients_on(folders["qwen3_5"], tmp_path, world)
    for found in run_ranks(__file__, folders["qwen3_5"], tmp_path):
        assert largest_difference(found, expected) < 1e-4


if __name__ == "__main__":
    run_rank(gradients_on)

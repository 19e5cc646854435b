"""Pictures in the trainer: a packed row gives what transformers computes of each sample alone, forward and backward."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from families import IMAGE, MROPE, build_config, save_family
from tiny import one_row, take_gradients
from trireme.algo.packing import Sample
from trireme.algo.pictures import PictureRules, expand
from trireme.config.trainer import ActivationCheckpointing, TrainerModel, Vlm
from trireme.messages import build_tokens
from trireme.trainer.model.forward import compute_columns, scorer_of, shared_frac
from trireme.trainer.model.model import load_model
from trireme.trainer.model.vision import give_pictures
from trireme.trainer.parallel.mesh import World

SAME = 92  # a token whose embedding and logits are those of the placeholder
ANSWER = 6


def picture(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WIDE, TALL, OTHER = picture(150, 90), picture(60, 130), picture(150, 90, seed=1)
PICTURES = {hashlib.sha256(png).hexdigest(): png for png in (WIDE, TALL, OTHER)}
NAMES = {png: digest for digest, png in PICTURES.items()}


def settings(**changes: object) -> TrainerModel:
    return TrainerModel(vlm=Vlm()).model_copy(update=changes)


def save(kind: str, folder: Path) -> Path:
    save_family(folder, build_config(kind, rope_parameters=MROPE))
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for table in (plain.get_input_embeddings(), plain.get_output_embeddings()):
            table.weight[SAME] = table.weight[IMAGE]
    plain.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {kind: save(kind, root / kind) for kind in ("qwen2_5_vl", "qwen3_5")}


def sample(folder: Path, pngs: list[bytes], answer: list[int], prompt: int = 7) -> Sample:
    """A prompt that shows these pictures, with a token after each, and an answer."""
    processor = AutoImageProcessor.from_pretrained(folder)
    sizes = processor.to_dict()
    rules = PictureRules.of({"image_token_id": IMAGE}, sizes)
    grids = [(NAMES[png], *rules.grid(*Image.open(io.BytesIO(png)).size)) for png in pngs]
    ids, pictures = expand([prompt, *[each for n in range(len(pngs)) for each in (IMAGE, 11 + n)], 20], IMAGE, grids)
    mask = [0] * len(ids) + [1] * len(answer)
    zeros = [0.0] * len(mask)
    tokens = build_tokens(
        ids=ids + answer, loss_mask=mask, logprobs=zeros, advantages=zeros, versions=zeros, pictures=pictures
    )
    return Sample(tokens, 1.0)


def alone(plain: torch.nn.Module, folder: Path, sample: Sample) -> torch.Tensor:
    """The logprobs of a sample's answer, by transformers' own forward pass with its pixels."""
    ids = torch.from_numpy(sample.tokens.ids.astype(np.int64))[None]
    answer = int(sample.tokens.loss_mask.sum())
    seen = {}
    if sample.tokens.pictures:
        images = [Image.open(io.BytesIO(PICTURES[each.digest])) for each in sample.tokens.pictures]
        seen = dict(AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt"))
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for each in sample.tokens.pictures:
            kinds[0, each.place : each.place + each.num_tokens] = 1
        seen["mm_token_type_ids"] = kinds
        ids[0, -answer:][ids[0, -answer:] == IMAGE] = SAME
    logprobs = plain(input_ids=ids, use_cache=False, **seen).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[-answer:, 0]


def packed(folder: Path) -> list[Sample]:
    return [
        sample(folder, [WIDE], [30, 31, 32, 33]),
        sample(folder, [WIDE], [30, 31, 40, IMAGE, 41, 42]),
        sample(folder, [OTHER], [30, 31, 32, 33]),
        sample(folder, [], [50, IMAGE, 51]),
        sample(folder, [TALL, WIDE], [60, 61, 62]),
        sample(folder, [TALL, OTHER], [60, 61, 62], prompt=8),
    ]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_a_packed_row_sees_what_each_sample_sees_alone(
    folders: dict[str, Path], kind: str, is_packed: bool, world: World
) -> None:
    folder = folders[kind]
    model = load_model(settings(ac=ActivationCheckpointing()), str(folder), world)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    scorer = scorer_of(model, world.device)
    assert (scorer.head is not None, scorer.is_packed, scorer.shares_prefixes) == (True, True, True)
    row = one_row(packed(folder))
    if not is_packed:
        vars(model)["trireme_scorer"] = replace(scorer, is_packed=False)
    give_pictures(model, PICTURES)
    found = compute_columns(model, row, world.device).logprobs
    weights = torch.linspace(-1, 2, len(found))
    (found * weights).sum().backward()
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    plain.model.visual.requires_grad_(False)
    samples = sorted(packed(folder), key=lambda each: -each.tokens.length)
    expected = torch.cat([alone(plain, folder, each) for each in samples])
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    theirs = take_gradients(plain)
    assert shared_frac(model, [row]) > 0.1
    ours = take_gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        if gradient.shape[0] == 96:
            gradient[SAME] += gradient[IMAGE]
            theirs[name][SAME] += theirs[name][IMAGE]
            gradient[IMAGE] = theirs[name][IMAGE] = 0
        assert (gradient - theirs[name]).abs().max() <= 1e-4 * max(1.0, float(theirs[name].abs().max())), name

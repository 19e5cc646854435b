"""Pictures: how many tokens stand for one, their positions, and the files that hold them."""

import base64
import hashlib
import io
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from trireme.algo.pictures import PictureRules, collapse, distinct_ids, expand, rotary_positions
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.journal.pictures import PictureFiles, from_data_uri, rules_of_model, size_of, to_png
from trireme.messages import COLUMNS, Picture, build_tokens, concat_tokens

TOKEN = 9
RULES = PictureRules(token=TOKEN, block=28, min_pixels=56 * 56, max_pixels=28 * 28 * 16)
A, B = "a" * 64, "b" * 64


def test_a_picture_has_as_many_tokens_as_the_image_processor_gives_it():
    for width, height in np.random.default_rng(0).integers(10, 900, (300, 2)):
        resized = smart_resize(int(height), int(width), RULES.block, RULES.min_pixels, RULES.max_pixels)
        assert RULES.grid(int(width), int(height)) == tuple(side // RULES.block for side in resized)
    # a strip is refused, as by the image processor
    with pytest.raises(ValueError, match="4000 x 10"):
        RULES.grid(4000, 10)


def test_a_placeholder_becomes_its_pictures_tokens_and_back():
    short = [1, TOKEN, 2, TOKEN, 3]
    whole, pictures = expand(short, TOKEN, [(A, 1, 2), (B, 2, 2)])
    assert whole == [1, 9, 9, 2, 9, 9, 9, 9, 3]
    assert pictures == [Picture(A, 1, 1, 2), Picture(B, 4, 2, 2)]
    assert collapse(whole, pictures) == short


def test_positions_are_those_of_transformers_and_restart_with_each_sample():
    vision = {"spatial_merge_size": 2, "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2_5_vl", vision_config=vision, text_config=text)
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    samples = [
        expand([1, TOKEN, 2, TOKEN, 3], TOKEN, [(A, 1, 2), (B, 3, 2)]),
        ([4, 5, 6], []),
        expand([TOKEN], TOKEN, [(A, 2, 2)]),
    ]
    expected, tokens = [], []
    for ids, pictures in samples:
        grids = torch.tensor([[1, 2 * each.rows, 2 * each.columns] for each in pictures])
        kinds = torch.tensor([ids]).eq(TOKEN).int()
        found, _ = model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=grids)
        expected.append(found[:, 0])
        columns = {name: [0] * len(ids) for name in COLUMNS} | {"ids": ids}
        tokens.append(build_tokens(**columns, pictures=pictures))
    row = concat_tokens(tokens)
    lengths = [each.length for each in tokens]
    assert np.array_equal(rotary_positions(lengths, row.pictures), torch.cat(expected, 1).numpy())


def test_samples_begin_alike_only_where_their_pictures_are_the_same():
    (ids, one), (_, other) = (expand([1, TOKEN], TOKEN, [(digest, 1, 3)]) for digest in (A, B))
    first, second, third = (distinct_ids(np.array(ids), pictures).tolist() for pictures in (one, other, one))
    assert first == third
    assert first[0] == second[0] == 1
    assert len({*first, *second}) == 1 + 3 + 3


def encoded(form: str, mode: str = "RGB", colour: tuple[int, ...] = (200, 0, 0)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (40, 30), colour).save(file, form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture_is_kept_once_whatever_its_form(form, tmp_path):
    url = f"data:image/{form.lower()};base64,{base64.b64encode(encoded(form)).decode()}"
    assert from_data_uri(url) == encoded(form)
    png = to_png(encoded(form))
    assert size_of(png) == (40, 30)
    assert to_png(png) == png
    files = PictureFiles(tmp_path / "pictures")
    digest = files.add(png)
    assert files.add(png) == digest == hashlib.sha256(png).hexdigest()
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == [f"{digest}.png"]
    assert files.read(digest) == png


def test_what_is_transparent_is_white():
    with Image.open(io.BytesIO(to_png(encoded("PNG", "RGBA", (0, 0, 0, 0))))) as image:
        assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_picture_file_that_was_changed_or_is_missing_is_refused(tmp_path):
    files = PictureFiles(tmp_path)
    with pytest.raises(ValueError, match="no digest"):
        files.path("../config")
    digest = files.add(encoded("PNG"))
    files.path(digest).write_bytes(b"other")
    with pytest.raises(JournalCorrupt, match="another picture"):
        files.read(digest)
    files.path(digest).unlink()
    with pytest.raises(JournalCorrupt, match="missing"):
        files.read(digest)


def test_how_a_model_reads_pictures_is_in_its_files(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 9}')
    with pytest.raises(ConfigError, match="preprocessor_config"):
        rules_of_model(str(tmp_path))
    sizes = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": sizes}))
    assert rules_of_model(str(tmp_path)) == RULES
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r"of the kind qwen3 .*Remove `\[model.vlm\]`"):
        rules_of_model(str(tmp_path))


def test_color_squares_evaluates_on_pictures_it_does_not_train_on():
    squares = runpy.run_path(str(Path(__file__).parents[3] / "environments/examples/color_squares.py"))

    def urls(name: str, **args: bool) -> list[str]:
        examples = squares[name](**args)
        assert {each["answer"] for each in examples} == set(squares["COLORS"])
        return [example["prompt"][0]["content"][0]["image_url"]["url"] for example in examples]

    train, held_out = urls("dataset"), urls("eval_dataset")
    assert not set(train) & set(held_out)
    assert all(size_of(to_png(from_data_uri(url))) == (56, 56) for url in held_out)
    assert len({*urls("dataset", blank=True), *urls("eval_dataset", blank=True)}) == 1

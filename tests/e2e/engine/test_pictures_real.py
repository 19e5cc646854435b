"""Pictures on the real engine: it computes what transformers does, also with other weights of its vision encoder."""

import asyncio
import io
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from support.engines.posted_update import sample_through_update, update, updated_by_hand
from support.models.families import SERVED, build_config, save_family
from support.models.tiny_tokenizer import write_seeing_tokenizer
from support.runs.real_run import open_engine
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.model_turn import Turn
from trireme.journal.pictures import PictureFiles, rules_of_model
from trireme.messages import Picture
from trireme.orchestrator.engines.pool import with_placeholders
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.pictures import ConversationPictures
from trireme.orchestrator.rollout.trajectory import Trajectory
from trireme.tools.policies.engine import open_engine_policy

SIZES = {"qwen2_5_vl": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}} | SERVED
_LONG = {"max_position_embeddings": 2048}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
SIZES["qwen2_5_vl"] |= _LONG | {"rope_parameters": _ROPE | {"mrope_section": [4, 6, 6]}}
# without sections, vLLM takes positions in the text alone, and transformers those that it has by default
_INTERLEAVED = _ROPE | {"partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [3, 3, 2]}
for _kind in ("qwen3_5", "qwen3_5_moe"):
    SIZES[_kind] = SIZES[_kind] | _LONG | {"rope_parameters": _INTERLEAVED}
Prompt = tuple[list[int], tuple[Picture, ...]]
Tensors = dict[str, np.ndarray]
CLOSE = {"float32": 1e-3, "bfloat16": 0.04}  # mean difference; two models, or pictures, differ by more than twice that


class Sight:
    """Conversations that show pictures, and what an engine and transformers say of them."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.files = folder, port, PictureFiles(folder / "pictures")
        self.tokenizer = ChatTokenizer(folder)
        self.pictures = ConversationPictures(rules_of_model(str(folder)), self.files)
        self.sampling = {"ignore_eos": True, "logprobs": 0, "logit_bias": {str(self.pictures.rules.token): -100}}

    def show(self, *pixels: np.ndarray, text: str = "what? ") -> Prompt:
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for each in pixels:
            Image.fromarray(each).save(file := io.BytesIO(), "PNG")
            parts.append({"type": "image_url", "image_url": {"url": f"picture:{self.files.add(file.getvalue())}"}})
        asked = Trajectory(self.tokenizer, "branching", self.pictures).ask([{"role": "user", "content": parts}], None)
        return asked.ids, asked.pictures

    def ask(self, prompt: Prompt) -> Turn:
        """As a run asks."""
        ids, pictures = prompt

        async def go() -> Turn:
            config, waits = RunConfig.model_validate({"seq_len": 512}), Waits("test")
            url = f"http://127.0.0.1:{self.port}"
            folder = self.folder / "pictures"
            opening = open_engine_policy(config, self.tokenizer, url, name="", waits=waits, pictures=folder)
            async with opening as policy:
                parts = await self.pictures.content_parts(pictures)
                sampling = self.sampling | {"max_tokens": 40}
                return await policy.runner.pool.generate(ids, sampling, pictures=pictures, content_parts=parts)

        return asyncio.run(go())

    def difference(self, turn: Turn, prompt: Prompt, tensors: Tensors) -> float:
        return float(np.abs(turn.logprobs - self.logprobs(tensors, prompt, turn.ids)).mean())

    def logprobs(
        self, tensors: Tensors, prompt: Prompt, sampled: list[int], *, dtype: torch.dtype = torch.float32
    ) -> np.ndarray:
        """[C] by transformers, with pixels from its own image processor and its own positions."""
        ids = torch.tensor([prompt[0] + sampled])
        with TemporaryDirectory() as folder:
            shutil.copy(self.folder / "config.json", folder)
            save_file(dict(tensors), f"{folder}/model.safetensors", metadata={"format": "pt"})
            model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        files = [Image.open(self.files.path(each.digest)) for each in prompt[1]]
        seen = AutoImageProcessor.from_pretrained(self.folder)(images=files, return_tensors="pt")
        kinds = ids.eq(self.pictures.rules.token).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **seen).logits.float()
        logits[..., self.pictures.rules.token] -= 100
        return logits[0, -len(sampled) - 1 : -1].log_softmax(-1).gather(-1, ids[0, -len(sampled) :, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2_5_vl", "float32"), pytest.param("qwen3_5", "bfloat16", marks=pytest.mark.slow)]
)
def test_an_engine_sees_as_transformers_does_also_with_other_weights(kind, dtype, tmp_path):
    folder, close, rng = tmp_path / "model", CLOSE[dtype], np.random.default_rng(0)
    tokens = write_seeing_tokenizer(folder)
    config = build_config(kind, **SIZES[kind], vocab_size=128)
    config.update(tokens)
    one = load_file(save_family(folder, config) / "model.safetensors")
    spread = {name: 0.3 if "visual." in name else 0.05 for name in one}
    other = {name: tensor + rng.normal(0, spread[name], tensor.shape).astype("float32") for name, tensor in one.items()}
    tower = {name: other[name] if "visual." in name else tensor for name, tensor in one.items()}
    flags = ("--model.name", folder, "--model.vlm.vision-encoder-attr", "model.visual", "--seq-len", "2048")
    flags += ("--inference.model.dtype", dtype, "--max-async-level", "1")  # with a prefix cache
    with open_engine(tmp_path / "engine", *flags) as engine:
        sight = Sight(folder, engine.port)
        shown = [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((70, 100), (120, 60))]
        prompt = sight.show(*shown)
        other_prompt = sight.show(*shown, text="and? ")  # shares features, but no block of the prefix cache
        blank = sight.show(*(np.zeros((*size, 3), np.uint8) for size in ((70, 100), (120, 60))))
        assert prompt[0] == blank[0]
        turn = sight.ask(prompt)
        assert sight.difference(turn, prompt, one) < close < 2 * close < sight.difference(turn, blank, one)
        with updated_by_hand(engine.port) as post:
            post("resume")
            sight.ask(prompt)
            post("pause?mode=keep&clear_cache=false")
            assert update(post, tower, tmp_path) == []
            post("resume")
            stale = sight.ask(other_prompt)
            assert sight.difference(stale, other_prompt, one) < close < 2 * close
            assert sight.difference(stale, other_prompt, tower) > 2 * close  # so caches matter, and pauses empty them
            post("pause?mode=keep")
            for version, (tensors, before) in enumerate([(tower, one), (other, tower), (one, other)]):
                assert update(post, tensors, tmp_path, version=version) == []
                post("resume")
                turn = sight.ask(prompt)  # its features were cached before
                post("pause?mode=keep")
                assert sight.difference(turn, prompt, tensors) < close < 2 * close
                assert sight.difference(turn, prompt, before) > 2 * close
            parts = asyncio.run(sight.pictures.content_parts(prompt[1]))
            body = {"token_ids": with_placeholders(*prompt), "content_parts": parts, "return_token_ids": True}

            def load(is_tower: bool) -> None:
                assert update(post, tower if is_tower else one, tmp_path, version=2 + is_tower) == []

            sampling = sight.sampling | {"max_tokens": 600}
            answer = sample_through_update(post, engine.port, load, **body, sampling_params=sampling)
    (choice,) = answer["choices"]
    ids, told = choice["token_ids"], np.array([each["logprob"] for each in choice["logprobs"]["content"]])
    assert answer["prompt_token_ids"] == prompt[0]
    assert [span["version"] for span in choice["weight_versions"]] == ["2", "3"]
    for span, tensors in zip(choice["weight_versions"], (one, tower), strict=True):
        expected = sight.logprobs(tensors, prompt, ids)
        assert np.abs(told - expected)[span["start"] : span["end"]].mean() < close

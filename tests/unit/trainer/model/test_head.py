"""Logprobs from hidden states in chunks: what the plain form gives, without the tensor that the plain form needs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model

from support.models.live_bytes import LiveBytes
from support.models.tiny import largest_difference, take_gradients
from trireme.algo.loss.logprobs import Choices
from trireme.trainer.model.head import Head, HeadOutput, NoHead, Targets, score_in_chunks

K, V = 45, 97
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def qwen(lora: dict[str, Any] | None = None, **settings: Any) -> transformers.PreTrainedModel:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **settings))
    return inject_adapter_in_model(LoraConfig(r=4, init_lora_weights=False, **lora), model) if lora else model


def with_head(head: torch.nn.Linear) -> transformers.PreTrainedModel:
    model = qwen()
    model.lm_head = head
    return model


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "its own": qwen,
    "tied": lambda: qwen(tie_word_embeddings=True),
    "bias": lambda: with_head(torch.nn.Linear(32, V)),
    "soft cap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5)
    ),
    "scaled up": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=3.0)),
    "scaled down": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=0.1)),
    "adapter": lambda: qwen({"target_modules": ["lm_head"]}),
    "trained beside adapters": lambda: qwen({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "frozen": lambda: with_head(torch.nn.Linear(32, V, bias=False).requires_grad_(False)),
}


def open_model(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    return MODELS[kind]().double().eval()


def random_targets(count: int = K, *, cut: bool = False) -> Targets:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, V, (count,), generator=generator)
    temperatures = torch.rand(count, generator=generator) + 0.5
    temperatures[3] = 0.0
    top = torch.stack([ids, *torch.randint(0, V, (3, count), generator=generator)])
    return Targets(ids, temperatures, random_choices(ids.tolist()) if cut else None, top)


def random_choices(ids: list[int]) -> Choices:
    cut = [k for k in range(len(ids)) if k % 3]
    among = [sorted({ids[k], *((ids[k] + 5 * j) % V for j in range(k % 5))}) for k in cut]
    tokens = [token for each in among for token in each]
    return Choices(torch.tensor(cut), torch.tensor(list(map(len, among))), torch.tensor(tokens))


def hidden_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    return model.base_model(input_ids=torch.arange(K)[None] * 7 % V, use_cache=False)[0][0]


def plain(model: transformers.PreTrainedModel, targets: Targets) -> HeadOutput:
    scale = torch.where(targets.temperatures > 0, targets.temperatures, 1.0)
    logits = model(input_ids=torch.arange(K)[None] * 7 % V, use_cache=False).logits[0] / scale[:, None]
    if choices := targets.choices:
        allowed = torch.ones(K, V, dtype=torch.bool)
        allowed[choices.positions] = False
        allowed[choices.positions.repeat_interleave(choices.counts), choices.ids] = True
        logits = logits.masked_fill(~allowed, -1e30)
    normalised = torch.log_softmax(logits, -1)
    # What a cut sampler could not choose has no logprob that means anything.
    top = torch.where(normalised.T.gather(0, targets.top) < -1e20, 0.0, normalised.T.gather(0, targets.top))
    return HeadOutput(
        normalised.gather(-1, targets.ids[:, None]).squeeze(-1), -(normalised.exp() * normalised).sum(-1), top
    )


def gradients_of(model, output: HeadOutput, is_possible, *, of_entropies: bool) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, K, dtype=torch.float64)
    loss = output.logprobs @ weights + output.logprobs.square().sum() / 9
    loss = loss + (torch.where(is_possible, output.top, 0.0).square() @ weights.flip(0)).sum()
    (loss + output.entropies.square() @ weights.flip(0) if of_entropies else loss).backward()
    return take_gradients(model)


@pytest.mark.parametrize(
    ("chunk", "cut", "of_entropies"), [(1, True, False), (7, False, True), (7, True, True), (1024, True, True)]
)
@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_the_plain_form(kind, chunk, cut, of_entropies):
    model, targets = open_model(kind), random_targets(cut=cut)
    expected = plain(model, targets)
    found = score_in_chunks(Head(model), hidden_of(model), targets, chunk=chunk, entropy_gradient=of_entropies)
    torch.testing.assert_close(found.logprobs, expected.logprobs)
    torch.testing.assert_close(found.entropies, expected.entropies)
    is_possible = expected.top != 0
    torch.testing.assert_close(found.top[is_possible], expected.top[is_possible])
    assert found.entropies.requires_grad == of_entropies
    ours = gradients_of(model, found, is_possible, of_entropies=of_entropies)
    theirs = gradients_of(model, expected, is_possible, of_entropies=of_entropies)
    assert largest_difference(ours, theirs) < 1e-9


@pytest.mark.parametrize("cut", [False, True], ids=["uncut", "cut"])
def test_the_logits_of_all_tokens_never_exist(cut):
    model, count = open_model("tied"), 2000
    hidden = torch.randn(count, 32, dtype=torch.float64, requires_grad=True)
    targets, all_logits = random_targets(count, cut=cut), count * V * 8
    with LiveBytes() as live:
        found = score_in_chunks(Head(model), hidden, targets, chunk=16, entropy_gradient=True)
        (found.logprobs.sum() + found.entropies.sum()).backward()
    assert live.peak < all_logits
    with LiveBytes() as live:
        score_in_chunks(NoHead(), model.lm_head(hidden), targets, chunk=16)
    assert live.peak >= all_logits  # so the measurement sees them where they are


def test_the_gradient_of_a_low_precision_head_does_not_suffer_from_chunks():
    torch.manual_seed(4)
    head, hidden = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)), torch.randn(2000, 32)
    ids = torch.randint(0, V, (2000,))
    targets = Targets(ids, torch.ones(2000), None)

    def gradient(dtype: torch.dtype, chunk: int) -> torch.Tensor:
        model = head.to(dtype)
        score_in_chunks(Head(model), hidden.to(dtype), targets, chunk=chunk).logprobs.sum().backward()
        return take_gradients(model)["lm_head.weight"].double()

    head.bfloat16()
    expected = gradient(torch.float64, 4000)
    errors = [float((gradient(torch.bfloat16, chunk) - expected).norm()) for chunk in (4000, 8)]
    assert errors[1] < 1.5 * errors[0]

"""Reinforcement learning of a language model on one page: the algorithm that Trireme runs, without its system.

    uv run python examples/rl_in_one_file.py                  # two CPU cores, no download
    uv run python examples/rl_in_one_file.py --steps 150      # as long as the quickstart

A tiny model learns to reverse words from reward alone, as in `configs/reverse-text/rl.toml`. Each step

    1. vLLM samples a group of answers to each prompt, with the logprob of every token that it sampled,
    2. each answer is scored, and its advantage is its reward minus the mean of its group,
    3. the trainer computes the logprobs again, with gradient, and takes one optimizer step on the policy-gradient loss,
    4. vLLM loads the new weights.

What is shared with the real system: the messages (`trireme.messages`), the advantage and the loss (`trireme.algo`), the
environment's task, and the vLLM internals that load weights in place (`trireme.inference.vllm_api`).

What the real system adds, and where:

- three processes that run at the same time, each replaceable: `launch/`, `transport/`; generation ahead of training
  with a hard bound on staleness: `orchestrator/scheduler.py`, `algo/staleness.py`
- environments in processes of their own, several turns, tools: `orchestrator/environments/`, `orchestrator/rollout/`
- filters, difficulty pools, curricula, length penalties: `orchestrator/batcher.py`, `orchestrator/buffer.py`
- packed rows, FSDP2, LoRA, mixtures of experts, other optimizers: `trainer/`
- weights that are sent, digested and confirmed: `trainer/publish/`, `orchestrator/weights/`
- a journal that no crash outlives, checkpoints, resume, audit, replay: `journal/`, `trainer/checkpoint/`, `tools/`
- metrics, dashboard, rollout viewer: `monitor/`, `tools/dashboard/`, `tools/viewer/`
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so that it can be handed weights
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",  # a model this small is faster than the compiler
    "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm import LLM, SamplingParams

from trireme.algo.advantage import group_mean
from trireme.algo.columns import Columns, Totals
from trireme.algo.loss.loss import policy_loss
from trireme.config.losses import Loss, resolve_loss
from trireme.inference.vllm_api import begin_reload, finish_reload, incomplete_layers, load_tensors
from trireme.messages import Tokens, build_tokens

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / "models" / "reverse-text-tiny"
sys.path.insert(0, str(REPOSITORY / "environments" / "reverse_text"))
from reverse_text_task import SYSTEM_PROMPT, make_texts, similarity  # noqa: E402

GROUPS, ROLLOUTS = 8, 16  # prompts per batch, answers per prompt
MAX_TOKENS = 16
LOSS = resolve_loss(Loss(), length=MAX_TOKENS)  # "dppo_tv": importance-weighted policy gradient, masked
LEARNING_RATE, BETAS, MAX_NORM = 5e-4, (0.9, 0.95), 1.0


@dataclass
class Rollout:
    """One answer to one prompt."""

    tokens: Tokens  # prompt and answer; the loss mask is 1 on the answer
    reward: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.steps, args.seed)


def train(steps: int, seed: int = 0) -> list[float]:
    """Train for `steps` optimizer steps. Return the mean reward of each batch."""
    torch.manual_seed(seed)
    texts, _ = make_texts(600, 0, min_length=3, max_length=8, seed=0)
    draws = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)

    # The engine keeps a copy of the weights; in the real system it is another process.
    engine = LLM(
        model=str(MODEL),
        dtype="float32",
        max_model_len=128,
        seed=seed,
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
        enforce_eager=True,
    )

    # Sampling and training take turns, so each batch is sampled with the newest weights.
    history = []
    for version in range(steps):
        groups = sample_groups(engine, draws.sample(texts, GROUPS), version)
        batch = with_advantages(groups)
        metrics = optimizer_step(model, optimizer, batch)
        load_weights(engine, model)
        history.append(float(np.mean([rollout.reward for group in groups for rollout in group])))
        print(
            f"step {version + 1}/{steps}  reward {history[-1]:.3f}  "
            + "  ".join(f"{name} {value:.2e}" for name, value in metrics.items()),
            flush=True,
        )
    return history


# 1. sample and score


def sample_groups(engine: LLM, texts: list[str], version: int) -> list[list[Rollout]]:
    """Sample a group of answers to each text with the policy of this version, and score each answer."""
    prompts: Any = [[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}] for text in texts]
    sampling = SamplingParams(n=ROLLOUTS, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0)
    groups = []
    for text, request in zip(texts, engine.chat(prompts, sampling, use_tqdm=False), strict=True):
        group = []
        for answer in request.outputs:
            logprobs = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
            tokens = sample_tokens(list(request.prompt_token_ids), list(answer.token_ids), logprobs, version)
            group.append(Rollout(tokens, reward=score(answer.text, text)))
        groups.append(group)
    return groups


def score(answer: str, text: str) -> float:
    """Return the similarity of the tagged part of an answer and the reversed text, 0 to 1."""
    found = re.search(r"<reversed_text>\s*(.*?)\s*</reversed_text>", answer, re.DOTALL)
    return similarity(found[1] if found else None, text[::-1])


def sample_tokens(prompt: list[int], answer: list[int], logprobs: list[float], version: int) -> Tokens:
    """Return the per-token columns of one rollout. The engine's token ids are kept: text is never tokenized again."""
    before = len(prompt)
    return build_tokens(
        ids=prompt + answer,
        loss_mask=[0] * before + [1] * len(answer),
        logprobs=[0.0] * before + logprobs,
        advantages=[0.0] * (before + len(answer)),
        versions=[-1] * before + [version] * len(answer),
    )


# 2. advantages


def with_advantages(groups: list[list[Rollout]]) -> list[Tokens]:
    """Give every sampled token its rollout's advantage; leave out groups whose rewards are all the same."""
    batch = []
    for group in groups:
        advantages = group_mean(np.array([rollout.reward for rollout in group]))
        for rollout, advantage in zip(group, advantages, strict=True):
            if advantages.any():
                rollout.tokens.advantages[rollout.tokens.loss_mask == 1] = advantage
                batch.append(rollout.tokens)
    return batch


# 3. train


def optimizer_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: list[Tokens]) -> dict[str, float]:
    """Take one step on the loss of `algo.loss`, whose default is a masked importance-weighted policy gradient."""
    if not batch:
        return {}  # no group had a signal
    columns = columns_of(model, batch)
    totals = Totals(tokens=len(columns.logprobs), samples=len(batch))
    terms = policy_loss(columns, totals, LOSS)
    terms.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    mismatch = (columns.logprobs.detach() - columns.behaviour).abs().max()
    return {"loss": float(terms.value), "grad_norm": float(norm), "engine_mismatch": float(mismatch)}


def columns_of(model: PreTrainedModel, batch: list[Tokens]) -> Columns:
    """Compute the logprobs of the sampled tokens of a batch under the current weights, with gradient.

    The K sampled tokens of all rollouts form one column. Here rollouts are padded; the real trainer packs them.
    """

    def padded(name: str) -> torch.Tensor:  # [B, T]
        return pad_sequence([torch.from_numpy(getattr(tokens, name)) for tokens in batch], batch_first=True)

    ids, mask = padded("ids").long(), padded("loss_mask").bool()
    attended = pad_sequence([torch.ones(tokens.length) for tokens in batch], batch_first=True)
    logits = model(ids, attention_mask=attended).logits[:, :-1][mask[:, 1:]]  # [K, V]: each predicts the next token
    every = logits.float().log_softmax(-1)
    behaviour = padded("logprobs")[mask]
    return Columns(
        logprobs=every.gather(-1, ids[mask][:, None])[:, 0],
        entropies=-(every.exp() * every).sum(-1).detach(),
        behaviour=behaviour,
        proximal=behaviour,
        advantages=padded("advantages")[mask],
        versions=padded("versions")[mask].long(),
        samples=mask.nonzero()[:, 0],
        num_samples=len(batch),
        mask=torch.ones(len(behaviour), dtype=torch.bool),
    )


# 4. give the engine the new weights


def load_weights(engine: LLM, model: PreTrainedModel) -> None:
    """Load the trainer's weights into the engine in place.

    On a CPU vLLM packs weights after it has loaded them, so each layer collects its new weights, then unpacks, loads
    and packs again. With tied embeddings the packed head is a copy, which needs the embedding as well.
    """
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def load(worker: Any) -> list[str]:
        inner = worker.model_runner.model
        begin_reload(inner)
        load_tensors(inner, list(tensors.items()), tied=model.config.tie_word_embeddings)
        incomplete = incomplete_layers(inner)
        finish_reload(inner, worker.model_runner.model_config)
        return incomplete

    (incomplete,) = engine.collective_rpc(load)
    assert not incomplete, f"the engine kept old weights in {incomplete}"
    engine.reset_prefix_cache()  # it holds keys and values of the old weights


if __name__ == "__main__":
    main()

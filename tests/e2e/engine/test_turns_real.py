"""A real engine: what a cut sampler chose from, requests in flight at an update, turns read by vLLM's own parsers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from support.runs.real_run import REPOSITORY, SharedEngine, run_apart
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceModel
from trireme.config.sampling import Sampling
from trireme.journal.model_turn import Turn
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.sampling import TurnSampling
from trireme.orchestrator.rollout.turn_reader import TurnReader

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer(REPOSITORY / "models" / "reverse-text-tiny")


def with_pool(engine: SharedEngine, tokenizer: ChatTokenizer, use: Callable[[InferencePool], Awaitable[Any]]) -> Any:
    limits = {"max_model_len": 128, "timeout_s": 60, "max_concurrent": 64, "vocab_size": tokenizer.vocab_size}

    async def main() -> Any:
        opened = open_inference_pool([f"http://127.0.0.1:{engine.port}"], waits=Waits("test"), **limits)
        async with opened as pool, asyncio.timeout(120):
            url = f"{pool.engines[0].url}/update_weight_version"
            async with pool.engines[0].session.post(url, json={"new_version": "0"}) as response:
                response.raise_for_status()
            pool.go_live(pool.engines[0], 0)
            return await use(pool)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=12, min_p=0.1), Sampling(max_tokens=12, top_k=6, top_p=0.9, temperature=0.7)]
)
def test_what_a_cut_sampler_chose_from_is_what_the_whole_distribution_says(engine, tokenizer, sampling):
    words = tokenizer.render([{"role": "user", "content": "Reverse: stone"}], tools=None, generate=True)
    prompt, size = tokenizer.encode(words), tokenizer.vocab_size
    turns = TurnSampling(sampling, run_seed=3, key="k", attempt=0, trained=True, vocab_size=size)

    async def use(pool: InferencePool) -> tuple[Turn, Turn, list[dict]]:
        turn, again = [await pool.generate(prompt, turns.of_turn(1, {})) for _ in range(2)]
        whole = {"max_tokens": 1, "prompt_logprobs": size, "temperature": 1.0}
        body = {"token_ids": prompt + turn.ids, "sampling_params": whole}
        async with pool.engines[0].session.post(f"{pool.engines[0].url}/inference/v1/generate", json=body) as response:
            return turn, again, (await response.json())["prompt_logprobs"][len(prompt) :]

    turn, again, whole = with_pool(engine, tokenizer, use)
    assert turn.kept is not None
    assert (turn.ids, turn.kept) == (again.ids, again.kept)
    assert len(turn.ids) == len(turn.kept) == len(whole) > 1
    for token, logprob, kept, entry in zip(turn.ids, turn.logprobs, turn.kept, whole, strict=True):
        raw = np.array([entry[str(number)]["logprob"] for number in range(size)]) / sampling.temperature
        expected = kept_by(np.exp(raw) / np.exp(raw).sum(), sampling)
        assert kept == sorted(np.flatnonzero(expected).tolist())
        assert logprob == pytest.approx(raw[token] - np.log(np.exp(raw[expected]).sum()), abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=12, temperature=0.7), Sampling(max_tokens=12, top_k=6, top_p=0.9)],
    ids=["whole vocabulary", "cut"],
)
def test_the_likeliest_tokens_have_the_logprobs_that_were_sampled_from(engine, tokenizer, sampling):
    words = tokenizer.render([{"role": "user", "content": "Reverse: stone"}], tools=None, generate=True)
    prompt, size = tokenizer.encode(words), tokenizer.vocab_size
    turns = TurnSampling(sampling, run_seed=3, key="k", attempt=0, trained=True, vocab_size=size, num_top=5)

    async def use(pool: InferencePool) -> tuple[Turn, list[dict]]:
        pool.keeps_top_logprobs = True
        turn = await pool.generate(prompt, turns.of_turn(1, {}))
        whole = {"max_tokens": 1, "prompt_logprobs": size, "temperature": 1.0}
        body = {"token_ids": prompt + turn.ids, "sampling_params": whole}
        async with pool.engines[0].session.post(f"{pool.engines[0].url}/inference/v1/generate", json=body) as response:
            return turn, (await response.json())["prompt_logprobs"][len(prompt) :]

    turn, whole = with_pool(engine, tokenizer, use)
    assert turn.top_logprobs is not None
    assert (turn.kept is None) == (not sampling.cuts)
    for number, (top, entry) in enumerate(zip(turn.top_logprobs, whole, strict=True)):
        raw = np.array([entry[str(token)]["logprob"] for token in range(size)]) / sampling.temperature
        possible = np.isin(np.arange(size), turn.kept[number]) if turn.kept else np.full(size, True)
        expected = np.where(possible, raw - np.log(np.exp(raw[possible]).sum()), -np.inf)
        assert len(top) == (possible.sum() if turn.kept else 5)
        assert [*top] == np.argsort(-expected, kind="stable")[: len(top)].tolist()
        assert [*top.values()] == pytest.approx(expected[[*top]], abs=1e-4)


def kept_by(probabilities: np.ndarray, sampling: Sampling) -> np.ndarray:
    left = np.where(probabilities >= sampling.min_p * probabilities.max(), probabilities, 0.0)
    order = np.argsort(-left, kind="stable")
    left[order[sampling.top_k or 64 :]] = 0.0
    left /= left.sum()
    before = np.cumsum(left[order]) - left[order]
    left[order[before >= sampling.top_p]] = 0.0
    return left > 0


def test_trainer_agrees_with_an_engine_updated_during_cut_sampling(engine, tmp_path):
    """One request at a time, each longer than what comes between two. Weights go through a folder."""
    ahead = ["--max-async-level", "2", "--orchestrator.max-concurrent", "1", "--orchestrator.max-off-policy-steps", "3"]
    small = ["--max-steps", "5", "--orchestrator.batch-size", "8", "--no-orchestrator.eval"]
    long = ["--orchestrator.sampling.max-tokens", "90", "--orchestrator.sampling.extra-body", '{"ignore_eos": true}']
    cut = ["--orchestrator.sampling.top-p", "0.8", "--orchestrator.sampling.temperature", "1.2"]
    run = run_apart(engine, tmp_path / "run", *ahead, *small, *long, *cut, "--weight-broadcast.type", "filesystem")
    assert len(list(run.paths.broadcast.iterdir())) <= 2  # those of the newest versions
    samples = [s for batch in run.batches() for rollout in batch.rollouts for s in rollout.samples]
    versions = [set(sample.versions[sample.loss_mask == 1].tolist()) for sample in samples]
    assert any(len(of_one) > 1 for of_one in versions)
    assert 1 <= max(row["lag/max"] for row in run.rows("orchestrator")) <= 3
    fresh = [row["mismatch_kl"] for row in run.rows("trainer") if "mismatch_kl" in row]
    assert fresh
    assert max(fresh) < 1e-6
    kept = np.concatenate([sample.kept.counts[sample.loss_mask == 1] for sample in samples if sample.kept])
    assert len(kept) == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert kept.min() == 1 < kept.max() < 64


CALLS = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
NOT_JSON = '<tool_call>{"name": add}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("<think>hm</think>ok", "ok", "hm", []),
        ("<think>hm", "", "hm", []),
        ('hm</think>So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "So ", "hm", ["add"]),
        (f"h</think>{CALLS}", "", "h", ["f", "g"]),
        (f"h</think>a {NOT_JSON}", f"a {NOT_JSON}", "h", []),
    ],
)
def test_a_turn_is_read_as_the_openai_route_would(engine, tokenizer, text, content, reasoning, calls):
    ids = [*tokenizer.encode(text), *tokenizer.encode("<|im_end|>")]
    turn = Turn(ids, [-0.1] * len(ids), [0] * len(ids), "stop")

    async def use(pool: InferencePool) -> dict[str, Any]:
        model = InferenceModel(reasoning_parser="qwen3", tool_call_parser="hermes")
        return await TurnReader(model, tokenizer, pool).read(tokenizer.encode("abc"), turn, TOOLS, number=2)

    said = with_pool(engine, tokenizer, use)
    assert (said["content"], said.get("reasoning_content")) == (content, reasoning)
    named = [(f"call0020{place}", name) for place, name in enumerate(calls)]
    assert [(call["id"], call["function"]["name"]) for call in said.get("tool_calls", [])] == named

"""What a cut sampler chose from, as an engine tells it: whole, or not believed."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from trireme.orchestrator.engine_answers import BadAnswer, Choice, choice_of, kept_of, read_message, read_response

VOCABULARY = 10


def entry(token: int, candidates: dict[int, float]) -> dict[str, Any]:
    """Probabilities by token; 0 for those that were left out."""
    listed = [{"token_id": at, "logprob": math.log(p) if p else -9999.0} for at, p in candidates.items()]
    return {"token_id": token, "logprob": math.log(candidates.get(token) or 1), "top_logprobs": listed}


def choice(entries: list[dict[str, Any]], **more: Any) -> Choice:
    ids = [each["token_id"] for each in entries]
    answer = {
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"content": entries},
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    } | more
    return choice_of(read_response(json.dumps({"choices": [answer]}).encode()), max_tokens=8, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (choice([entry(4, {4: 0.25, 9: 0.5, 2: 0.25, 1: 0}), entry(3, {3: 1.0, 4: 0})]), [[2, 4, 9], [3]]),
        (choice([entry(4, {})], sampling_mask=[[9, 4, 0]]), [[0, 4, 9]]),  # the engine's own mask
    ],
)
def test_those_with_a_probability_or_in_the_engines_mask_were_kept(given, kept):
    assert kept_of(given, vocab_size=VOCABULARY) == kept


@pytest.mark.parametrize(
    ("entries", "more", "words"),
    [
        ([entry(4, {9: 0.5, 2: 0.5})], {}, "sampled token 4 from"),
        ([entry(4, {4: 0.5, 2: 0.25})], {}, "of probability 0.750 in all"),
        ([entry(4, {})], {}, "of probability 0.000 in all"),
        ([entry(4, {4: 0.5, 10: 0.5})], {}, "token 10 - ids from 0 to 9"),
        ([entry(4, {4: 1.0})], {"sampling_mask": [[4, 4]]}, "each once"),
        ([entry(4, {4: 1.0})], {"sampling_mask": []}, "1 tokens, and what 0 were chosen from"),
        ([entry(4, {4: 1.0})], {"sampling_mask": [[4, -1]]}, "token -1"),
        ([entry(-1, {})], {}, "token -1 - ids from 0 to 9"),
        ([entry(VOCABULARY, {})], {}, "token 10 - ids from 0 to 9"),
        ([entry(2**31, {})], {}, f"token {2**31} - ids from 0 to 9"),
        ([entry(5, {})], {"token_ids": [4]}, "logprob of token 5 where it sampled 4"),
    ],
)
def test_what_cannot_be_all_that_was_kept_is_not_believed(entries, more, words):
    with pytest.raises(BadAnswer, match=words):
        kept_of(choice(entries, **more), vocab_size=VOCABULARY)


def test_whatever_is_kept_holds_what_was_sampled_or_is_not_believed():
    rng, num_believed = random.Random(0), 0
    for _ in range(1000):
        tokens = [rng.randrange(VOCABULARY) for _ in range(3)]
        most = VOCABULARY + (rng.random() < 0.2)  # now and then one too many
        lists = [rng.sample(range(most), rng.randrange(VOCABULARY - 2, VOCABULARY + 1)) for _ in tokens]
        given = choice([entry(token, {}) for token in tokens], sampling_mask=lists)
        with suppress(BadAnswer):
            kept = kept_of(given, vocab_size=VOCABULARY)
            assert all(token in ids for token, ids in zip(tokens, kept, strict=True))
            assert all(0 <= low < high < VOCABULARY for ids in kept for low, high in pairwise(ids))
            num_believed += 1
    assert 50 < num_believed < 950


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"\xff"])
def test_what_is_no_message_is_bad(data):
    with pytest.raises(BadAnswer, match="no parsed message"):
        read_message(data)

"""What is asked of an engine, and what engines and environments answer: whole, or not believed."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import msgspec
import pytest

from trireme.config.kept import MOST_KEPT, max_logprobs, slots_for
from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig
from trireme.orchestrator.engine_answers import BadAnswer, Choice, choice_of, kept_of, read_message, read_response
from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.wire import Error, Garbage, Held, RunTask
from trireme.orchestrator.sampling import TurnSampling, seed_of

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


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"\xff"])
def test_what_is_no_message_is_bad(data):
    with pytest.raises(BadAnswer, match="no parsed message"):
        read_message(data)


def of_turn(sampling: Sampling, theirs: dict | None = None, *, run_seed: int | None = None, **more) -> dict:
    given = {"key": "3-1", "attempt": 0, "trained": True, "vocab_size": 1000} | more
    return TurnSampling(sampling, run_seed=run_seed, **given).of_turn(2, theirs or {})


def test_everything_that_is_given_reaches_the_engine():
    sampling = Sampling(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, min_tokens=2, stop=("a", "b"), extra_body={"stop_token_ids": [7]},
    )  # fmt: skip
    assert of_turn(sampling, trained=False) == {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [7],
    }  # fmt: skip


def test_the_runs_sampling_wins_over_the_environments():
    theirs = {"temperature": 0.1, "max_tokens": 5, "stop": ["x"], "n": 1, "logprobs": True, "seed": 7, "top_p": None}
    assert of_turn(Sampling(max_tokens=9), theirs) == {"temperature": 1.0, "max_tokens": 9, "stop": ["x"]}
    assert of_turn(Sampling(), {"max_completion_tokens": 5})["max_tokens"] == 5  # OpenAI's newer name


def test_a_seed_depends_on_the_rollout_its_attempt_and_its_turn():
    assert of_turn(Sampling(), run_seed=7)["seed"] == seed_of(7, "3-1", 0, 2)
    assert of_turn(Sampling(seed=8), run_seed=7)["seed"] == seed_of(8, "3-1", 0, 2)
    assert len({seed_of(7, key, attempt, turn) for key in "ab" for attempt in (0, 1) for turn in (1, 2)}) == 8
    assert "seed" not in of_turn(Sampling(temperature=0.0), run_seed=7)


@pytest.mark.parametrize(
    ("sampling", "theirs", "top_k"),
    [
        (Sampling(top_k=5), {}, 5),
        (Sampling(top_k=100), {}, 100),
        (Sampling(top_p=0.9), {}, MOST_KEPT),
        (Sampling(min_p=0.1), {}, MOST_KEPT),
        (Sampling(top_k=5), {"top_k": 20}, 5),
        (Sampling(), {"top_k": 20}, 20),
        (Sampling(), {"top_p": 0.5}, MOST_KEPT),
        (Sampling(), {"top_k": 100_000}, MOST_KEPT),
    ],
)
def test_where_the_sampler_is_cut_all_that_it_may_keep_is_asked_for(sampling, theirs, top_k):
    arguments = of_turn(sampling, theirs)
    config = RunConfig.model_validate({"orchestrator": {"sampling": sampling.model_dump()}})
    assert arguments["top_k"] == top_k
    assert top_k < arguments["logprobs"] == slots_for(top_k) <= max_logprobs(config)


@pytest.mark.parametrize(
    ("sampling", "more", "expected"),
    [
        (Sampling(top_k=90), {"vocab_size": 100}, 100),  # no more than there are
        (Sampling(), {}, None),
        (Sampling(top_k=-1), {}, None),
        (Sampling(temperature=0.0, top_k=5), {}, None),
        (Sampling(top_p=0.5), {"trained": False}, None),
    ],
)
def test_logprobs_are_asked_for_only_where_they_are_needed(sampling, more, expected):
    assert of_turn(sampling, **more).get("logprobs") == expected


DONE = {"type": "done", "task": "r1.0", "reward": 1, "metrics": {}, "prompt": [], "completion": [], "example_id": 3}


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


@pytest.mark.parametrize("turn_rewards", [[], [[]], [[0.5], [], [1, 2, -3.5]], [[1e30], [-1e30]]])
def test_rewards_of_turns_come_as_they_were_sent(turn_rewards):
    assert wire.decode(line(DONE | {"turn_rewards": turn_rewards})).turn_rewards == turn_rewards


@pytest.mark.parametrize(
    "turn_rewards", [None, 0.5, [0.5], [None], [[None]], [["1"]], [[1e31]], [[0.5], [-1e31]], [[[0.5]]], {"0": [1]}]
)
def test_rewards_of_turns_that_break_the_form_cost_their_rollout_and_nothing_else(turn_rewards):
    error = wire.decode(line(DONE | {"turn_rewards": turn_rewards}))
    assert (type(error), error.task, error.stage) == (Error, "r1.0", "rollout")


def test_no_number_that_is_not_finite_gets_through():
    for number in ("NaN", "Infinity", "1e999"):
        data = line(DONE | {"turn_rewards": [["x"]]}).replace(b'"x"', number.encode())
        with contextlib.suppress(Garbage):
            assert isinstance(wire.decode(data), Error)


def test_messages_of_workers_with_and_without_the_newer_fields_are_understood():
    ready = wire.decode(line({"type": "ready", "num_train": 1, "num_eval": 0, "name": "x", "versions": {}}))
    assert (wire.decode(line(DONE)).turn_rewards, ready.group_rewards) == ([], False)
    assert wire.decode(b'{"type":"held","task":"r1.0"}') == Held(task="r1.0")
    sent = msgspec.json.decode(wire.encode(RunTask(task="17-3.0", index=4, group="17", group_size=16)))
    assert (sent["type"], sent["group"], sent["group_size"]) == ("run", "17", 16)

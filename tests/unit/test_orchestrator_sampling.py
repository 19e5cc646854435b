"""What reaches the engine: the run's sampling before the environment's, seeds, and what a cut sampler chose from."""

from __future__ import annotations

import pytest

from trireme.config.kept import MOST_KEPT, max_logprobs, slots_for
from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig
from trireme.orchestrator.sampling import TurnSampling, seed_of


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


@pytest.mark.parametrize(
    ("sampling", "theirs", "names"),
    [
        (Sampling(), {"temperature": 0.5, "top_p": 0.9, "stop": ["x"]}, set()),
        (Sampling(), {"repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}, "min_tokens": 0}, set()),
        (Sampling(), {"repetition_penalty": 1.1, "logit_bias": {"7": 2.0}}, {"repetition_penalty", "logit_bias"}),
        (Sampling(), {"min_tokens": 3, "bad_words": ["x"]}, {"min_tokens", "bad_words"}),
        (Sampling(top_k=9), {"min_tokens": 3}, set()),  # what it forbids is not among what was kept
        (Sampling(presence_penalty=0.5), {"presence_penalty": 0.2}, set()),  # the run's, which a note is given for
    ],
)
def test_what_of_an_environments_sampling_the_trainer_cannot_compute_is_known(sampling, theirs, names):
    turns = TurnSampling(sampling, run_seed=None, key="3-1", attempt=0, trained=True, vocab_size=1000)
    for number in (1, 2):
        turns.of_turn(number, theirs)
    assert turns.distorted == names


def test_openais_newer_name_for_the_longest_answer_is_understood():
    assert of_turn(Sampling(), {"max_completion_tokens": 5})["max_tokens"] == 5


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


def test_no_more_tokens_are_asked_for_than_there_are():
    assert of_turn(Sampling(top_k=90), vocab_size=100)["logprobs"] == 100


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=-1), Sampling(temperature=0.0, top_k=5)])
def test_where_it_is_not_cut_nothing_more_is_asked_for(sampling):
    assert "logprobs" not in of_turn(sampling)


def test_what_is_not_trained_on_is_not_asked_about():
    assert "logprobs" not in of_turn(Sampling(top_p=0.5), trained=False)

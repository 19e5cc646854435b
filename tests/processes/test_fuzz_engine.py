"""An engine that answers nonsense: it costs a rollout or a transfer, never the run."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from fake_engine import digests_of
from mutations import mutations
from trireme.orchestrator.engine_answers import (
    BadAnswer,
    Response,
    choice_of,
    prompt_logprobs_of,
    read_response,
    text_of,
    weight_reports_of,
    world_size_of,
)
from whole_run import Running, build_config, run

CHOICE = {
    "index": 0,
    "token_ids": [7, 8, 2],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": 0.0}]},
    "weight_versions": [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 3}],
}
ANSWER = {"request_id": "1", "choices": [CHOICE], "prompt_logprobs": None}
PROBED = ANSWER | {"prompt_logprobs": [None, {"4": {"logprob": -0.5}}, {"5": {"logprob": -0.25, "rank": 2}}]}
ENCODED = [json.dumps(ANSWER).encode(), json.dumps(PROBED).encode()]
NUMBERS = (-1, 0, 1e300, -(10**18), 10**12, 2**63, None, "x", [], True)


def changed(answer: Any, rng: random.Random) -> Any:
    """Something in it is another value, missing, or there twice."""
    answer = copy.deepcopy(answer)
    place = answer
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.7:
            place = place[key]
            continue
        if rng.random() < 0.3:
            del place[key]
        elif isinstance(place, list) and rng.random() < 0.5:
            place.append(place[key])
        else:
            place[key] = rng.choice(NUMBERS)
        return answer


def is_whole(response: Response, ids: list[int]) -> bool:
    """What is let through: of each token its logprob and its version, in order."""
    choice = choice_of(response, max_tokens=8)
    tokens = len(choice.token_ids)
    covered = [place for span in choice.weight_versions for place in range(span.start, span.end)]
    assert covered == list(range(tokens))
    assert len(choice.logprobs.content) == tokens <= 8
    if response.prompt_logprobs is not None:
        assert len(prompt_logprobs_of(response, ids)) == len(ids) - 1
    return True


def test_a_good_answer_is_read() -> None:
    response = read_response(ENCODED[1])
    assert is_whole(response, [3, 4, 5])
    assert prompt_logprobs_of(response, [3, 4, 5]) == [-0.5, -0.25]


def test_whatever_bytes_an_engine_answers_they_are_whole_or_bad() -> None:
    outcomes = {True: 0, False: 0}
    for data in mutations(ENCODED, 10_000):
        try:
            outcomes[is_whole(read_response(data), [3, 4, 5])] += 1
        except BadAnswer:
            outcomes[False] += 1
    assert outcomes[True] > 100
    assert outcomes[False] > 3_000


def test_whatever_shape_an_answer_has_it_is_whole_or_bad() -> None:
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(10_000):
        data = json.dumps(changed(rng.choice([ANSWER, PROBED]), rng)).encode()
        try:
            outcomes[is_whole(read_response(data), [3, 4, 5])] += 1
        except BadAnswer as error:
            outcomes[False] += 1
            words = str(error)
    assert outcomes[True] > 100
    assert outcomes[False] > 3_000
    assert words.startswith("The engine")


@pytest.mark.parametrize("data", [b"", b"\xff", b"null", b"{}", b"[" * 1_000_000, b'{"choices":[]}'])
def test_what_is_no_completion_is_bad(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        choice_of(read_response(data), max_tokens=8)


def test_a_version_for_ten_to_the_eighteen_tokens_is_not_counted_out() -> None:
    spans = [{"version": "0", "start": 0, "end": 10**18}]
    with pytest.raises(BadAnswer, match="3 tokens but versions for 1000000000000000000"):
        choice_of(read_response(json.dumps({"choices": [CHOICE | {"weight_versions": spans}]}).encode()), max_tokens=8)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"results": []},
        {"results": [None]},
        {"results": [{"digests": {"a": 1}, "incomplete": []}]},
        {"results": 2 * [{"digests": {}, "incomplete": []}]},
    ],
)
def test_a_report_in_which_a_worker_is_missing_is_bad(answer: Any) -> None:
    with pytest.raises(BadAnswer):
        weight_reports_of(answer, num_workers=1)


@pytest.mark.parametrize("answer", [None, [], {}, "n", *({"world_size": size} for size in (None, "1", True, 0, 10**9))])
def test_a_number_of_workers_that_cannot_be_is_bad(answer: Any) -> None:
    with pytest.raises(BadAnswer, match="`world_size` from 1 to 65536 was expected"):
        world_size_of(answer)
    assert world_size_of({"world_size": 8}) == 8


@pytest.mark.parametrize("answer", [None, [], {}, {"n": None}, {"n": []}, "n"])
def test_a_text_that_is_not_there_is_bad(answer: Any) -> None:
    with pytest.raises(BadAnswer, match="`n` was expected"):
        text_of(answer, "n")


# whole runs


def test_a_run_whose_engine_answers_nonsense_now_and_then_ends_well(tmp_path) -> None:
    """One answer in three is changed somewhere; rollouts are tried again, and no batch holds a token that is odd."""
    rng = random.Random(1)
    mangled: list[str] = []

    def mangle(response: dict) -> dict:
        if rng.random() > 1 / 3:
            return response
        answer = changed(response, rng)
        mangled.append(json.dumps(answer))
        return answer

    config = build_config(tmp_path, orchestrator={"max_rollout_attempts": 20})
    outcome = run(config, engine={"mangle": mangle})
    assert outcome.error is None
    assert len(mangled) > 3
    assert [record.step for record in outcome.records] == [0, 1, 2]
    for record in outcome.records:
        assert len(record.rollouts) == 8
        for rollout in record.rollouts:
            for sample in rollout.samples:
                assert (sample.logprobs <= 1e-3).all()
                assert (sample.ids >= 0).all()


def test_a_failed_rollout_says_what_the_engine_answered(tmp_path) -> None:
    bad = {3: [], 4: [{}], 5: None}

    def mangle(response: dict) -> dict:
        number = int(response["request_id"])
        return response | {"choices": bad[number]} if number in bad else response

    outcome = run(
        build_config(tmp_path, max_steps=1, orchestrator={"max_rollout_attempts": 5}), engine={"mangle": mangle}
    )
    assert outcome.error is None
    reasons = [drop.reason for record in outcome.records for drop in record.dropped]
    assert len(reasons) == 3
    assert all("The engine" in reason for reason in reasons)


@pytest.mark.parametrize(
    "garbage",
    [{"results": []}, {"results": None}, {"results": [{"digests": None}]}, {}],
    ids=["nobody", "null", "no digests", "nothing"],
)
def test_a_report_of_weights_that_makes_no_sense_confirms_nothing_and_the_trainer_sends_again(
    tmp_path, garbage: dict
) -> None:
    asked = 0

    async def meanwhile(running: Running) -> None:
        honest = running.engine._collective_rpc

        async def report(body: dict) -> dict:
            nonlocal asked
            asked += 1
            return garbage if asked <= 2 else await honest(body)

        running.engine._collective_rpc = report  # type: ignore[method-assign]

    outcome = run(build_config(tmp_path, max_steps=1), meanwhile=meanwhile)
    assert outcome.error is None
    assert asked > 2
    assert outcome.engine.weights == digests_of(1)

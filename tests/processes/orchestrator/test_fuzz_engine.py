"""An engine that answers nonsense: it costs a rollout or a transfer, never the run."""

import copy
import json
import random
from typing import Any

import pytest

from fake_engine import digests_of
from mutations import mutations
from trireme.orchestrator.engines.responses import BadAnswer, Response, choice_of, prompt_logprobs_of, read_response
from whole_run import WholeRun, build_config, run

CHOICE = {
    "index": 0, "token_ids": [7, 8, 2], "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": 0.0}]},
    "weight_versions": [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 3}],
}  # fmt: skip
ANSWER = {"request_id": "1", "choices": [CHOICE], "prompt_logprobs": None}
PROBED = ANSWER | {"prompt_logprobs": [None, {"4": {"logprob": -0.5}}, {"5": {"logprob": -0.25, "rank": 2}}]}
ENCODED = [json.dumps(ANSWER).encode(), json.dumps(PROBED).encode()]
ENDLESS = CHOICE | {"weight_versions": [{"version": "0", "start": 0, "end": 10**18}]}
BAD = [b"", b"null", b"{}", b'{"x":' + b"[" * 1_000_000, json.dumps({"choices": [ENDLESS]}).encode()]
NUMBERS = (-1, 0, 1e300, -(10**18), 10**12, 2**63, None, "x", [], True)


def changed(answer: Any, rng: random.Random) -> Any:
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
    choice = choice_of(response, max_tokens=8)
    tokens = len(choice.token_ids)
    covered = [place for span in choice.weight_versions for place in range(span.start, span.end)]
    assert covered == list(range(tokens))
    assert len(choice.logprobs.content) == tokens <= 8
    if response.prompt_logprobs is not None:
        assert len(prompt_logprobs_of(response, ids)) == len(ids) - 1
    return True


def test_whatever_bytes_and_shapes_an_engine_answers_they_are_whole_or_bad():
    assert prompt_logprobs_of(read_response(ENCODED[1]), [3, 4, 5]) == [-0.5, -0.25]
    rng = random.Random(0)
    shapes = (json.dumps(changed(rng.choice([ANSWER, PROBED]), rng)).encode() for _ in range(10_000))
    for answer in BAD:
        with pytest.raises(BadAnswer):
            choice_of(read_response(answer), max_tokens=8)
    for answers in (mutations(ENCODED, 10_000), shapes):
        outcomes: list[str | bool] = []
        for data in answers:
            try:
                outcomes.append(is_whole(read_response(data), [3, 4, 5]))
            except BadAnswer as error:
                outcomes.append(str(error))
        assert outcomes.count(True) > 100
        bad = [outcome for outcome in outcomes if outcome is not True]
        assert len(bad) > 3_000
        assert all(str(words).startswith("The engine") for words in bad)


def test_a_run_whose_engine_answers_nonsense_now_and_then_ends_well(tmp_path):
    """Two answers in three are changed somewhere; rollouts are tried again, and no batch holds a token that is odd."""
    rng = random.Random(1)
    outcome = run(
        build_config(tmp_path, orchestrator={"max_rollout_attempts": 20}),
        engine={"mangle": lambda response: response if rng.random() > 2 / 3 else changed(response, rng)},
    )
    assert outcome.error is None
    assert [(record.step, len(record.rollouts)) for record in outcome.records] == [(0, 8), (1, 8), (2, 8)]
    for sample in [sample for record in outcome.records for rollout in record.rollouts for sample in rollout.samples]:
        assert (sample.logprobs <= 1e-3).all()
        assert (sample.ids >= 0).all()
    reasons = [drop.reason for record in outcome.records for drop in record.dropped]
    assert len(reasons) > 2
    assert all("The engine" in reason for reason in reasons)


def test_a_report_of_weights_that_makes_no_sense_confirms_nothing_and_the_trainer_sends_again(tmp_path):
    report = {"digests": {}, "incomplete": []}
    answers: list[Any] = [{}, *({"results": each} for each in ([], None, [{"digests": None}], [report, report]))]
    garbage = {"trireme_receive_ahead": answers[:1], "trireme_weight_report": answers[:]}

    async def meanwhile(running: WholeRun) -> None:
        honest = running.engine._collective_rpc

        async def report(body: dict) -> dict:
            left = garbage[body["method"]]
            return left.pop() if left else await honest(body)

        running.engine._collective_rpc = report  # type: ignore[method-assign]

    outcome = run(build_config(tmp_path, max_steps=1), meanwhile=meanwhile)
    assert outcome.error is None
    assert list(garbage.values()) == [[], []]
    assert outcome.trainer.attempt > 4
    assert outcome.engine.weights == digests_of(1)

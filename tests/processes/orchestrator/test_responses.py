"""An engine that answers nonsense: its answer is read whole or not at all, which costs a rollout, never the run."""

import copy
import json
import random
from typing import Any

import pytest

from support.processes.mutations import mutations
from trireme.orchestrator.engines.responses import BadAnswer, Response, choice_of, prompt_logprobs_of, read_answer

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
    assert prompt_logprobs_of(read_answer(ENCODED[1], Response), [3, 4, 5]) == [-0.5, -0.25]
    rng = random.Random(0)
    shapes = (json.dumps(changed(rng.choice([ANSWER, PROBED]), rng)).encode() for _ in range(4_000))
    for answer in BAD:
        with pytest.raises(BadAnswer):
            choice_of(read_answer(answer, Response), max_tokens=8)
    for answers in (mutations(ENCODED, 4_000), shapes):
        outcomes: list[str | bool] = []
        for data in answers:
            try:
                outcomes.append(is_whole(read_answer(data, Response), [3, 4, 5]))
            except BadAnswer as error:
                outcomes.append(str(error))
        assert outcomes.count(True) > 50
        bad = [outcome for outcome in outcomes if outcome is not True]
        assert len(bad) > 1_000
        assert all(str(words).startswith("The engine") for words in bad)

"""The short way to vLLM's generation gives what its own route gives, and leaves to that one what it does not know."""

import re
from contextlib import suppress
from threading import Thread
from time import sleep
from typing import Any

import httpx
import pytest

from support.runs.real_run import SharedEngine

WAYS = (None, {"X-Request-Id": "by vLLM's own route"})
PROMPTS = [list(range(5, 25)), [7] * 40, [11, 12, 13]]
GREEDY = {"max_tokens": 12, "temperature": 0.0, "logprobs": 0}


def ask(engine: SharedEngine, *, headers: dict[str, str] | None = None, timeout=60, **body: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{engine.port}/inference/v1/generate"
    return httpx.post(url, json=body, headers=headers, timeout=timeout, trust_env=False)


def is_short(answer: httpx.Response) -> bool:
    """vLLM's own answers say which model it was."""
    return "model" not in answer.json()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize(
    "more",
    [{}, {"stop_token_ids": list(range(5, 60))}, {"ignore_eos": True, "max_tokens": 30}, {"repetition_penalty": 1.3}],
    ids=lambda more: "+".join(more) or "plain",
)
def test_both_ways_give_the_same_tokens_logprobs_versions_and_reasons(engine, prompt, more):
    short, own = (ask(engine, headers=way, token_ids=prompt, sampling_params=GREEDY | more) for way in WAYS)
    assert is_short(short)
    assert not is_short(own)
    (choice,), (other,) = short.json()["choices"], own.json()["choices"]
    for name in ("index", "token_ids", "finish_reason", "stop_reason", "weight_versions", "sampling_mask"):
        assert choice[name] == other[name], name
    ours, theirs = choice["logprobs"]["content"], other["logprobs"]["content"]
    assert [each["token_id"] for each in ours] == [each["token_id"] for each in theirs] == choice["token_ids"]
    assert [each["logprob"] for each in ours] == pytest.approx([each["logprob"] for each in theirs], abs=1e-5)


@pytest.mark.parametrize(
    "sampling", [{"logprobs": 3}, {"stop": ["a"]}, {"prompt_logprobs": 0}, {"n": 2, "temperature": 1.0}], ids=str
)
def test_what_the_short_way_does_not_know_is_left_to_vllm(engine, sampling):
    answer = ask(engine, token_ids=PROMPTS[0], sampling_params=GREEDY | sampling)
    assert answer.status_code == 200
    assert not is_short(answer)


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [], "sampling_params": GREEDY},
        {"token_ids": [-1], "sampling_params": GREEDY},
        {"token_ids": [10**9], "sampling_params": GREEDY},
        {"token_ids": [5] * 100_000, "sampling_params": GREEDY},
        {"token_ids": [5], "sampling_params": GREEDY | {"temperature": -1.0}},
        {"token_ids": [5], "sampling_params": GREEDY | {"max_tokens": "many"}},
        {"token_ids": [5], "sampling_params": []},
        {"token_ids": [5], "sampling_params": GREEDY, "model": "nobody"},
        {"token_ids": "five", "sampling_params": GREEDY},
        {},
    ],
    ids=lambda body: str(body)[:60],
)
def test_a_bad_request_is_refused_as_vllm_refuses_it(engine, body):
    short, own = (ask(engine, headers=way, **body) for way in WAYS)
    assert 400 <= short.status_code < 500
    assert (short.status_code, short.json()) == (own.status_code, own.json())
    assert ask(engine, token_ids=[5], sampling_params=GREEDY).status_code == 200  # it is as well as before


def test_a_client_that_hangs_up_ends_its_request_in_the_engine(engine):
    before, errors = num_finished(engine), engine.process.output.count("Exception in ASGI application")
    body = {"token_ids": [5], "sampling_params": GREEDY | {"max_tokens": 120, "ignore_eos": True}}
    for asked in range(2, 200, 2):  # one may be answered before it is given up
        with suppress(httpx.ReadTimeout):
            ask(engine, timeout=0.05, **body)
        assert is_short(ask(engine, **body))
        if (finished := num_finished(engine) - before) < asked:
            break
    assert asked // 2 <= finished < asked
    assert engine.process.output.count("Exception in ASGI application") == errors


def num_finished(engine: SharedEngine) -> float:
    text = httpx.get(f"http://127.0.0.1:{engine.port}/metrics", timeout=60, trust_env=False).text
    return sum(map(float, re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", text, re.MULTILINE)))


def post(engine: SharedEngine, route: str, **body: Any) -> None:
    httpx.post(f"http://127.0.0.1:{engine.port}/{route}", json=body, timeout=60, trust_env=False).raise_for_status()


def metric(engine: SharedEngine, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{engine.port}/metrics/?name[]=vllm:{name}", trust_env=False).text
    return float(re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize(("route", "again"), [("pause?mode=keep&clear_cache=false", 0), ("pause?mode=keep", 1)])
def test_a_request_under_way_computes_nothing_again_if_caches_are_kept(engine, route, again):
    sampling = GREEDY | {"ignore_eos": True, "max_tokens": 80}
    for attempt in range(20):  # an answer that was complete before the pause shows nothing
        before, sampled = metric(engine, "num_preemptions_total"), metric(engine, "generation_tokens_total")
        found: list[httpx.Response] = []
        long = Thread(
            target=lambda found=found: found.append(ask(engine, token_ids=[9] * 40, sampling_params=sampling))
        )
        long.start()
        while long.is_alive() and metric(engine, "generation_tokens_total") == sampled:
            sleep(0.01)
        post(engine, route)
        post(engine, "update_weight_version", new_version=f"after {attempt}")
        post(engine, "resume")
        long.join()
        spans = found[0].json()["choices"][0]["weight_versions"]
        assert spans[-1]["end"] == 80
        if len(spans) > 1:
            break
    assert [span["version"] for span in spans][1:] == [f"after {attempt}"]
    assert metric(engine, "num_preemptions_total") - before == again

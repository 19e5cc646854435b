"""What is asked of engines, a teacher and environments, and what they answer: whole, or not believed."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.waiting import Waits
from trireme.config.orchestrator import MOST_KEPT, Sampling, slots_for
from trireme.config.orchestrator import Teacher as TeacherConfig
from trireme.config.run import RunConfig
from trireme.journal.records import Rollout
from trireme.messages import build_tokens
from trireme.orchestrator import teacher as module
from trireme.orchestrator.engines.responses import BadAnswer, Choice, choice_of, kept_of, read_message, read_response
from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.wire import Held, RunTask
from trireme.orchestrator.rollout.chat import open_chat_tokenizer
from trireme.orchestrator.rollout.sampling import TurnSampling, seed_of
from trireme.orchestrator.teacher import open_teacher

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


def test_those_with_a_probability_or_in_the_engines_mask_were_kept():
    given = choice([entry(4, {4: 0.25, 9: 0.5, 2: 0.25, 1: 0}), entry(3, {3: 1.0, 4: 0})])
    assert kept_of(given, vocab_size=VOCABULARY) == [[2, 4, 9], [3]]
    assert kept_of(choice([entry(4, {})], sampling_mask=[[9, 4, 0]]), vocab_size=VOCABULARY) == [[0, 4, 9]]


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
    assert top_k < arguments["logprobs"] == slots_for(top_k) <= config.max_logprobs


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


def test_messages_of_workers_with_and_without_the_newer_fields_are_understood():
    ready = wire.decode(line({"type": "ready", "num_train": 1, "num_eval": 0, "name": "x", "versions": {}}))
    assert (wire.decode(line(DONE)).turn_rewards, ready.group_rewards) == ([], False)
    assert wire.decode(b'{"type":"held","task":"r1.0"}') == Held(task="r1.0")
    sent = msgspec.json.decode(wire.encode(RunTask(task="17-3.0", index=4, group="17", group_size=16)))
    assert (sent["type"], sent["group"], sent["group_size"]) == ("run", "17", 16)


TOKENIZER = open_chat_tokenizer("models/reverse-text-tiny")


def fake_teacher(
    asked: list[dict[str, Any]], *, failures: int = 0, status: int = 503, shift: int = 0, longest: int = 5
) -> web.Application:
    """vLLM's three routes; the logprob of token t is -t / 100, and the first so many questions about tokens fail.

    Args:
        longest: its context.
        shift: of token ids, as of another tokenizer.
    """

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big"}]})

    async def tokenize(request: web.Request) -> web.Response:
        ids = TOKENIZER.encode((await request.json())["prompt"])
        return web.json_response({"tokens": [token + shift for token in ids], "max_model_len": longest})

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if len(asked) <= failures:
            return web.json_response({"error": "busy"}, status=status)
        entries = [None, *({str(token): {"logprob": -token / 100}} for token in body["prompt"][1:])]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": entries}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/tokenize", tokenize)])
    app.add_routes([web.post("/v1/completions", completions)])
    return app


def rollout() -> Rollout:
    samples = [
        build_tokens(ids=ids, loss_mask=mask, logprobs=mask, advantages=mask, versions=mask)
        for ids, mask in (([5, 9, 7, 3], [0, 1, 0, 1]), ([8, 2], [0, 1]))
    ]
    return Rollout(env="env", example=0, reward=1.0, samples=samples, temperature=1.0)


def score(tmp_path: Path, one: Rollout, **how: int) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    async def go() -> None:
        async with TestServer(fake_teacher(asked, **how)) as server:
            config = TeacherConfig(base_url=str(server.make_url("/v1")))
            async with open_teacher(config, TOKENIZER, Waits("orchestrator", tmp_path), max_model_len=4) as teacher:
                await teacher.score([one])

    with patch.object(module, "PAUSE_S", 0.0):
        asyncio.run(go())
    return asked


def test_each_sampled_token_gets_the_teachers_logprob_and_no_other_token_any(tmp_path: Path) -> None:
    one = rollout()
    asked = score(tmp_path, one)
    np.testing.assert_allclose(one.teacher[0], [np.nan, -0.09, np.nan, -0.03], rtol=1e-6)
    np.testing.assert_allclose(one.teacher[1], [np.nan, -0.02], rtol=1e-6)
    assert {tuple(body["prompt"]) for body in asked} == {(5, 9, 7, 3), (8, 2)}
    assert {body["model"] for body in asked} == {"big"}


def test_a_teacher_that_fails_is_asked_again_and_ends_the_run_by_name_if_it_fails_throughout(tmp_path: Path) -> None:
    one = rollout()
    assert len(score(tmp_path, one, failures=2)) == 4
    assert len(one.teacher) == 2
    with pytest.raises(PeerDied, match=r"teacher at http.* in 3 attempts .*503.*busy"):
        score(tmp_path, rollout(), failures=99)
    with pytest.raises(PeerDied, match=r"refused .*400.*busy"):
        score(tmp_path, rollout(), failures=2, status=400)  # one per sample
    assert len(score(tmp_path, rollout(), failures=2, status=429)) == 4


def test_a_teacher_that_is_not_there_or_has_another_tokenizer_or_no_room_is_refused(tmp_path: Path) -> None:
    async def open_one(config: TeacherConfig | None) -> None:
        async with open_teacher(config, TOKENIZER, Waits("orchestrator", tmp_path), max_model_len=4) as teacher:
            assert teacher is None  # a run without a teacher

    with pytest.raises(ConfigError, match="same tokenizer was expected"):
        score(tmp_path, rollout(), shift=1)
    with pytest.raises(ConfigError, match="--max-model-len 5"):  # vLLM refuses a prompt that fills its context
        score(tmp_path, rollout(), longest=4)
    with pytest.raises(ConfigError, match="does not answer as vLLM does"):
        asyncio.run(open_one(TeacherConfig(base_url="http://127.0.0.1:9/v1")))
    asyncio.run(open_one(None))

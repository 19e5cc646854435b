"""What is asked of engines, a teacher and environments, and what they answer: whole, or not believed."""

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from trireme.base.errors import ConfigError, DeadlineExceeded, PeerDied
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Teacher as TeacherConfig
from trireme.config.run import RunConfig
from trireme.config.sampling import MOST_KEPT, Sampling, slots_for
from trireme.journal.model_turn import Turn
from trireme.journal.records import Rollout
from trireme.messages import build_tokens
from trireme.orchestrator import teacher as module
from trireme.orchestrator.engines.pool import RequestRefused
from trireme.orchestrator.engines.responses import (
    BadAnswer,
    Choice,
    Parsed,
    Response,
    choice_of,
    kept_of,
    read_answer,
    read_choice,
    top_logprobs_of,
)
from trireme.orchestrator.rollout.chat import open_chat_tokenizer
from trireme.orchestrator.rollout.sampling import (
    TurnSampling,
    ignored_arguments,
    merge_template_kwargs,
    replaced_arguments,
    sampling_arguments,
    seed_of,
)
from trireme.orchestrator.self_distillation import SelfTeacher
from trireme.orchestrator.teacher import open_teacher

VOCABULARY = 10


def entry(token: int, candidates: dict[int, float]) -> dict[str, Any]:
    """Probabilities by token; 0 for those that were left out."""
    listed = [{"token_id": at, "logprob": math.log(p) if p else -9999.0} for at, p in candidates.items()]
    return {"token_id": token, "logprob": math.log(candidates.get(token) or 1), "top_logprobs": listed}


def choice(entries: list[dict[str, Any]], **more: Any) -> Choice:
    ids = [each["token_id"] for each in entries]
    versions = [{"version": "0", "start": 0, "end": len(ids)}]
    answer = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": entries}, "weight_versions": versions}
    data = json.dumps({"choices": [answer | more]}).encode()
    return choice_of(read_answer(data, Response), max_tokens=8, vocab_size=VOCABULARY)


def test_those_with_a_probability_or_in_the_engines_mask_were_kept():
    given = choice([entry(4, {4: 0.25, 9: 0.5, 2: 0.25, 1: 0}), entry(3, {3: 1.0, 4: 0})])
    assert kept_of(given, vocab_size=VOCABULARY) == [[2, 4, 9], [3]]
    assert kept_of(choice([entry(4, {})], sampling_mask=[[9, 4, 0]]), vocab_size=VOCABULARY) == [[0, 4, 9]]


@pytest.mark.parametrize(
    ("entries", "more", "words"),
    [
        ([entry(4, {9: 0.5, 2: 0.5})], {}, "sampled token 4 from"),
        ([entry(4, {4: 0.5, 2: 0.25})], {}, "of probability 0.750 in all"),
        ([entry(4, {4: 1.0})], {"sampling_mask": [[4, 4]]}, "each once"),
        ([entry(4, {4: 1.0})], {"sampling_mask": []}, "1 tokens, and what 0 were chosen from"),
        ([entry(4, {4: 1.0})], {"sampling_mask": [[4, -1]]}, "token -1"),
        ([entry(-1, {})], {}, "token -1 - ids from 0 to 9"),
        ([entry(VOCABULARY, {})], {}, "token 10 - ids from 0 to 9"),
        ([entry(5, {})], {"token_ids": [4]}, "logprob of token 5 where it sampled 4"),
    ],
)
def test_what_cannot_be_all_that_was_kept_is_not_believed(entries, more, words):
    with pytest.raises(BadAnswer, match=words):
        kept_of(choice(entries, **more), vocab_size=VOCABULARY)


def test_the_likeliest_tokens_come_with_their_logprobs():
    given = choice([entry(4, {4: 0.1, 9: 0.5, 2: 0.25, 7: 0.15}), entry(3, {3: 1.0, 4: 0})])
    found = top_logprobs_of(given, 3, vocab_size=VOCABULARY)
    assert found == [
        {9: pytest.approx(math.log(0.5)), 2: pytest.approx(math.log(0.25)), 7: pytest.approx(math.log(0.15))},
        {3: 0.0},
    ]


@pytest.mark.parametrize(
    ("candidates", "words"),
    [({}, "0 likeliest tokens"), ({4: 0.9, 2: 0.4}, "of probability 1.300"), ({VOCABULARY: 0.5}, "token 10")],
)
def test_what_cannot_be_the_likeliest_tokens_is_not_believed(candidates, words):
    with pytest.raises(BadAnswer, match=words):
        top_logprobs_of(choice([entry(4, candidates)]), 3, vocab_size=VOCABULARY)


@pytest.mark.parametrize("data", [b"\xff", b'{"choices": []}', b'{"choices": [{"message": null}]}'])
def test_what_is_no_message_is_bad(data):
    with pytest.raises(BadAnswer, match="The engine"):
        read_choice(data, Parsed)


def of_turn(sampling: Sampling, theirs: dict | None = None, *, run_seed: int | None = None, **more) -> dict:
    given = {"key": "3-1", "attempt": 0, "trained": True, "vocab_size": 1000} | more
    return TurnSampling(sampling, run_seed=run_seed, **given).of_turn(2, theirs or {})


def test_everything_that_is_given_reaches_the_engine():
    named = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 2}
    named |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    sampling = Sampling(**named, stop=("a", "b"), extra_body={"stop_token_ids": [7]})
    assert of_turn(sampling, trained=False) == named | {"stop": ["a", "b"], "stop_token_ids": [7]}


def test_the_runs_sampling_wins_over_the_environments():
    theirs = {"temperature": 0.1, "max_tokens": 5, "stop": ["x"], "n": 1, "logprobs": True, "seed": 7, "top_p": None}
    assert of_turn(Sampling(max_tokens=9), theirs) == {"temperature": 1.0, "max_tokens": 9, "stop": ["x"]}
    assert of_turn(Sampling(), {"max_completion_tokens": 5})["max_tokens"] == 5  # OpenAI's newer name


@pytest.mark.parametrize(
    ("sampling", "theirs", "names"),
    [
        (Sampling(), {"stop": ["x"], "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0}, set()),
        (Sampling(), {"repetition_penalty": 1.1, "min_tokens": 3}, {"repetition_penalty", "min_tokens"}),
        (Sampling(), {"logit_bias": {"7": 2.0}, "bad_words": ["x"]}, {"logit_bias", "bad_words"}),
        (Sampling(top_k=9), {"min_tokens": 3}, set()),  # what it forbids is not among what was kept
        (Sampling(presence_penalty=0.5), {"presence_penalty": 0.2}, set()),  # the run's, which a note is given for
    ],
)
def test_sampling_that_the_trainer_cannot_compute_is_reported(sampling, theirs, names):
    turns = TurnSampling(sampling, run_seed=None, key="3-1", attempt=0, trained=True, vocab_size=1000)
    turns.of_turn(1, theirs)
    turns.of_turn(2, {})
    assert turns.distorted == names


def test_a_loss_that_centers_scores_asks_for_the_likeliest_tokens():
    assert of_turn(Sampling(), num_top=20)["logprobs"] == 20
    assert of_turn(Sampling(), num_top=20, vocab_size=7)["logprobs"] == 7
    assert of_turn(Sampling(top_k=5), num_top=20) == of_turn(Sampling(top_k=5))  # all that was kept
    assert "logprobs" not in of_turn(Sampling(), num_top=20, trained=False)
    assert of_turn(Sampling(temperature=0.0, top_k=5), num_top=20)["logprobs"] == 20


TEMPLATE = frozenset({"messages", "enable_thinking", "tools"})


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"temperature": 1.0, "max_completion_tokens": 5, "n": 1, "logprobs": True, "seed": None}, []),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, []),
        ({"temperature": 0.7}, ["temperature = 0.7 is replaced by the run's, 1.0"]),
        ({"max_token": 5}, ["max_token = 5 is ignored (did you mean `max_tokens`?)"]),
        ({"seed": 7}, ["seed = 7 is ignored"]),
        ({"chat_template_kwargs": {"thinking": 1}}, ["thinking is no variable of the model's chat template"]),
    ],
)
def test_what_an_environment_asks_for_in_vain_is_put_into_words(theirs, words):
    own = sampling_arguments(Sampling())
    assert [*(ignored_arguments(theirs, TEMPLATE) | replaced_arguments(theirs, own)).values()] == words


def test_the_template_gets_what_asks_most_specifically():
    run = Sampling(chat_template_kwargs={"enable_thinking": True, "a": 1}, extra_body={"reasoning_effort": "high"})
    table, asked = {"chat_template_kwargs": {"a": 2, "b": 2}}, {"reasoning_effort": "none", "temperature": 0.5}
    merged = merge_template_kwargs(run.template_request, table, asked)
    assert merged == {"enable_thinking": False, "a": 2, "b": 2, "reasoning_effort": "none"}
    assert sampling_arguments(run) == {"temperature": 1.0}
    with pytest.raises(ValueError, match="messages"):
        merge_template_kwargs({"chat_template_kwargs": {"messages": []}})


def test_a_seed_depends_on_the_rollout_its_attempt_and_its_turn():
    assert of_turn(Sampling(), run_seed=7)["seed"] == seed_of(7, "3-1", 0, 2)
    assert of_turn(Sampling(seed=8), run_seed=7)["seed"] == seed_of(8, "3-1", 0, 2)
    assert len({seed_of(7, key, attempt, turn) for key in "ab" for attempt in (0, 1) for turn in (1, 2)}) == 8
    assert "seed" not in of_turn(Sampling(temperature=0.0), run_seed=7)


@pytest.mark.parametrize(
    ("sampling", "theirs", "top_k"),
    [
        (Sampling(top_k=5), {"top_k": 20}, 5),
        (Sampling(), {"top_k": 20}, 20),
        (Sampling(), {"top_k": 100_000}, MOST_KEPT),
        (Sampling(top_p=0.9), {}, MOST_KEPT),
        (Sampling(), {"min_p": 0.1}, MOST_KEPT),
    ],
)
def test_where_the_sampler_is_cut_all_that_it_may_keep_is_asked_for(sampling, theirs, top_k):
    arguments = of_turn(sampling, theirs)
    config = RunConfig.model_validate({"orchestrator": {"sampling": sampling.model_dump()}})
    assert arguments["top_k"] == top_k
    assert top_k < arguments["logprobs"] == slots_for(top_k) <= config.max_logprobs


def test_logprobs_are_asked_for_only_where_they_are_needed():
    assert of_turn(Sampling(top_k=90), vocab_size=100)["logprobs"] == 100  # no more than there are
    for sampling in (Sampling(), Sampling(top_k=-1), Sampling(temperature=0.0, top_k=5)):
        assert "logprobs" not in of_turn(sampling)
    assert "logprobs" not in of_turn(Sampling(top_p=0.5), trained=False)


TOKENIZER = open_chat_tokenizer("models/reverse-text-tiny")


def fake_teacher(
    asked: list[dict[str, Any]],
    *,
    failures: int = 0,
    status: int = 503,
    shift: int = 0,
    longest: int = 5,
    worst: float = -1.0,
) -> web.Application:
    """vLLM's three routes; the logprob of token t is -t / 100, and the first so many questions about tokens fail."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "big"}]})
        body = await request.json()
        if request.path == "/tokenize":
            ids = [token + shift for token in TOKENIZER.encode(body["prompt"])]
            return web.json_response({"tokens": ids, "max_model_len": longest})
        assert request.path == "/v1/completions"
        asked.append(body)
        if len(asked) <= failures:
            return web.json_response({"error": "busy"}, status=status)
        entries = [None, *({str(token): {"logprob": -token / 100}} for token in body["prompt"][1:])]
        ids, logprobs = [7, 2][: body["max_tokens"]], [-0.5, worst][: body["max_tokens"]]
        sampled = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "prompt_logprobs": entries}
        return web.json_response({"choices": [sampled | {"finish_reason": "stop" if len(ids) > 1 else "length"}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app


def score(*, base_url: str | None = None, **how: int) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Return the teacher's logprobs of a rollout with two samples, and what it was asked."""
    samples = [
        build_tokens(ids=ids, loss_mask=mask, logprobs=mask, advantages=mask, versions=mask)
        for ids, mask in (([5, 9, 7, 3], [0, 1, 0, 1]), ([8, 2], [0, 1]))
    ]
    rollout = Rollout(env="env", example=0, reward=1.0, samples=samples, temperature=1.0)
    asked: list[dict[str, Any]] = []

    async def go() -> None:
        async with TestServer(fake_teacher(asked, **how)) as server:
            config = TeacherConfig(base_url=base_url or str(server.make_url("/v1")))
            async with open_teacher(config, TOKENIZER, Waits("orchestrator"), max_model_len=4) as teacher:
                await teacher.score([rollout])

    with patch.object(module, "PAUSE_S", 0.0):
        asyncio.run(go())
    return rollout.teacher, asked


def sample(ids: list[int], **how: Any) -> tuple[Turn, dict[str, Any]]:
    """Return a turn that the teacher sampled after these tokens, and the request."""
    asked: list[dict[str, Any]] = []

    async def go() -> Turn:
        async with TestServer(fake_teacher(asked, **how)) as server:
            config = TeacherConfig(base_url=str(server.make_url("/v1")), samples=True)
            async with open_teacher(config, TOKENIZER, Waits("orchestrator"), max_model_len=4) as teacher:
                return await teacher.generate(ids, {"temperature": 0.5, "max_tokens": 3, "top_p": 0.9})

    with patch.object(module, "PAUSE_S", 0.0):
        return asyncio.run(go()), asked[-1]


def test_a_turn_of_the_teacher_is_by_no_version_of_the_policy() -> None:
    turn, asked = sample([5], failures=2)
    assert (turn.ids, turn.logprobs, turn.versions) == ([7, 2], [-0.5, -1.0], [-1, -1])
    assert (turn.finish_reason, turn.cut) == ("stop", None)
    # What the run leaves out means what it means to the policy, not what the teacher's folder says.
    sent = {name: asked[name] for name in ("prompt", "max_tokens", "temperature", "top_p", "top_k")}
    assert sent == {"prompt": [5], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 0}
    cut, asked = sample([5, 9, 7])
    assert (cut.ids, cut.cut, asked["max_tokens"]) == ([7], "context_full", 1)


def test_an_answer_of_the_teacher_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(RequestRefused):  # costs the rollout
        sample([5], failures=1, status=400)
    with pytest.raises(PeerDied):  # no logprob, however often it is asked
        sample([5], worst=0.5)


def judged(
    answer: str | None, longest: int, *, timeout_s: float = 9.0, is_away: bool = False
) -> tuple[list[float], list[list[int]]]:
    """Return what the policy says of its tokens once it was shown an answer, and the prompts that engines got."""
    asked: list[list[int]] = []

    async def score(ids: list[int]) -> list[float]:
        asked.append(ids)
        if is_away:  # as a request waits while no engine is live
            await asyncio.Event().wait()
        return [-place / 10 for place in range(1, len(ids))]

    pool: Any = SimpleNamespace(score=score, timeout_s=timeout_s, max_model_len=longest)
    tokens = build_tokens(
        ids=[5, 9, 7], loss_mask=[0, 1, 1], logprobs=[0, -8, -9], advantages=[0] * 3, versions=[0] * 3
    )
    rollout = Rollout(env="env", example=0, reward=1.0, samples=[tokens], temperature=1.0, answer=answer)
    config = TeacherConfig(demonstration="answer", template="as {demonstration}")
    asyncio.run(SelfTeacher(config, TOKENIZER, pool, Waits("orchestrator")).score([rollout]))
    return rollout.teacher[0].tolist(), asked


def test_the_policy_judges_its_tokens_after_it_was_shown_the_answer(caplog) -> None:
    hint = TOKENIZER.encode(TOKENIZER.render([{"role": "system", "content": "as cba"}], tools=None, generate=False))
    found, asked = judged("cba", 100)
    assert asked == [[*hint, 5, 9, 7]]
    np.testing.assert_allclose(found, [np.nan, -(len(hint) + 1) / 10, -(len(hint) + 2) / 10], rtol=1e-6)
    # An engine needs room for one more token. Without it, nothing is learned, and that is said.
    found, asked = judged("cba", len(hint) + 3)
    assert (found[1:], asked) == ([-8.0, -9.0], [])
    assert "raise `seq_len`" in caplog.text
    with pytest.raises(ConfigError, match="example 0 of environment 'env' has None there"):
        judged(None, 100)


def test_the_judgement_of_a_policy_without_engines_ends_at_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="logprobs of 1 rollouts from inference, longer than the 0 s allowed"):
        judged("cba", 100, timeout_s=0.05, is_away=True)


@pytest.mark.parametrize("how", [{}, {"failures": 2}, {"failures": 2, "status": 429}])
def test_each_sampled_token_gets_the_logprob_of_the_teacher(how: dict) -> None:
    (first, second), asked = score(**how)
    np.testing.assert_allclose(first, [np.nan, -0.09, np.nan, -0.03], rtol=1e-6)
    np.testing.assert_allclose(second, [np.nan, -0.02], rtol=1e-6)
    assert {tuple(body["prompt"]) for body in asked} == {(5, 9, 7, 3), (8, 2)}
    assert {body["model"] for body in asked} == {"big"}
    assert len(asked) == 2 + how.get("failures", 0)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"failures": 99}, PeerDied, r"teacher at http.* in 3 attempts .*503.*busy"),
        ({"failures": 2, "status": 400}, PeerDied, r"refused .*400.*busy"),  # one per sample
        ({"shift": 1}, ConfigError, "same tokenizer was expected"),
        ({"longest": 4}, ConfigError, "--max-model-len 5"),  # vLLM refuses a prompt that fills its context
        ({"base_url": "http://127.0.0.1:9/v1"}, ConfigError, "does not answer as vLLM does"),
    ],
)
def test_unusable_teacher_ends_the_run(how, error, words) -> None:
    with pytest.raises(error, match=words):
        score(**how)

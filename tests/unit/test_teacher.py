"""A teacher is asked about the very tokens that the policy sampled, and a wrong one is refused at the start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Teacher as TeacherConfig
from trireme.ledger.records import Rollout
from trireme.messages import build_tokens
from trireme.orchestrator import teacher as module
from trireme.orchestrator.chat import open_chat_tokenizer
from trireme.orchestrator.teacher import open_teacher

TOKENIZER = open_chat_tokenizer("models/reverse-text-tiny")


def fake_teacher(asked: list[dict[str, Any]], *, failures: int, shift: int) -> web.Application:
    """vLLM's three routes; the logprob of token t is -t / 100, and the first so many questions about tokens fail.

    Args:
        shift: of token ids, as of another tokenizer.
    """

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big"}]})

    async def tokenize(request: web.Request) -> web.Response:
        ids = TOKENIZER.encode((await request.json())["prompt"])
        return web.json_response({"tokens": [token + shift for token in ids]})

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if len(asked) <= failures:
            return web.json_response({"error": "busy"}, status=503)
        entries = [None, *({str(token): {"logprob": -token / 100}} for token in body["prompt"][1:])]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": entries}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/tokenize", tokenize)])
    app.add_routes([web.post("/v1/completions", completions)])
    return app


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def rollout() -> Rollout:
    samples = [
        build_tokens(ids=ids, loss_mask=mask, logprobs=mask, advantages=mask, versions=mask)
        for ids, mask in (([5, 9, 7, 3], [0, 1, 0, 1]), ([8, 2], [0, 1]))
    ]
    return Rollout(0, 0, 0, "env", 0, 1.0, samples, 1.0)


def score(tmp_path: Path, one: Rollout, *, failures: int = 0, shift: int = 0) -> list[dict[str, Any]]:
    """Have a teacher judge a rollout; returns what it was asked."""

    asked: list[dict[str, Any]] = []

    async def go() -> None:
        async with TestServer(fake_teacher(asked, failures=failures, shift=shift)) as server:
            config = TeacherConfig(base_url=str(server.make_url("/v1")))
            async with open_teacher(config, TOKENIZER, Waits("orchestrator", tmp_path)) as teacher:
                await teacher.score([one])

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


def test_a_teacher_that_is_not_there_or_has_another_tokenizer_is_refused(tmp_path: Path) -> None:
    async def open_one(config: TeacherConfig | None) -> None:
        async with open_teacher(config, TOKENIZER, Waits("orchestrator", tmp_path)) as teacher:
            assert teacher is None  # a run without a teacher

    with pytest.raises(ConfigError, match="same tokenizer was expected"):
        score(tmp_path, rollout(), shift=1)
    with pytest.raises(ConfigError, match="does not answer as vLLM does"):
        asyncio.run(open_one(TeacherConfig(base_url="http://127.0.0.1:9/v1")))
    asyncio.run(open_one(None))

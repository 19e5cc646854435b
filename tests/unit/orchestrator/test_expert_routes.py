"""Which experts the engine used: believed where it makes sense, and with every token through to the trainer's row."""

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from support.engines.fake_engine import Asked, open_fake_engine
from support.models.tiny_tokenizer import CHATML, END, write_tokenizer
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.model_turn import Turn, assistant_message
from trireme.messages import COLUMNS, Routed, Tokens, build_tokens, concat_tokens, decode_as, encode
from trireme.orchestrator.engines import expert_routes
from trireme.orchestrator.engines.pool import open_inference_pool
from trireme.orchestrator.engines.responses import BadAnswer, Choice, Response, read_answer
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.trajectory import Prompt, Trajectory

SHAPE = expert_routes.ExpertShape(layers=3, top_k=2, num_experts=8)
ASK = {"role": "user", "content": "2 + 2?"}
LONGER = [ASK, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
HEAD = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 3, 2), }\n"


def routes(ids: list[int]) -> np.ndarray:
    found = [[[(token + layer) % 8, (token + layer + 3) % 8] for layer in range(3)] for token in ids]
    return np.array(found, dtype=np.uint8).reshape(-1, 3, 2)


def written(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def choice(num_tokens: int, routed_experts: str | None) -> Choice:
    answer = {"token_ids": [1] * num_tokens, "finish_reason": "stop", "routed_experts": routed_experts}
    answer |= {"logprobs": {"content": [{"logprob": -1.0}] * num_tokens}}
    answer |= {"weight_versions": [{"version": "0", "start": 0, "end": num_tokens}]}
    return read_answer(json.dumps({"choices": [answer]}).encode(), Response).choices[0]


def test_expert_routes_are_read_in_one_byte_or_two() -> None:
    few, many = routes([4, 5, 6, 7]), np.array([[[511, 3]]], dtype=np.uint16)
    for num_tokens, num_prompt, given, shape in (
        (3, 2, few, SHAPE),
        (1, 1, many, expert_routes.ExpertShape(1, 2, 512)),
    ):
        found = expert_routes.routes_of(choice(num_tokens, written(given)), num_prompt=num_prompt, shape=shape)
        assert (found.dtype, found.tolist()) == (given.dtype, given.tolist())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "did not say which experts"),
        ("%%%", "cannot be read"),
        (written(np.zeros((3, 3, 2), np.uint8))[:-4], "cannot be read"),
        (written(np.array([{}] * 3, dtype=object)), "cannot be read"),
        # a header that promises more than there is costs no memory
        (base64.b64encode(b"\x93NUMPY\x01\x00" + len(HEAD).to_bytes(2, "little") + HEAD).decode(), "cannot be read"),
        (written(np.zeros((3, 3, 2), np.uint8)), r"\(3, 3, 2\), as uint8 - \(4, 3, 2\) were expected"),
        (written(np.zeros((4, 2, 2), np.uint8)), r"\(4, 2, 2\)"),
        (written(np.zeros((4, 3, 2), np.float32)), "as float32"),
        (written(np.full((4, 3, 2), 8, np.uint8)), "expert 8 - the model has 8, from 0 on"),
    ],
)
def test_what_cannot_be_the_experts_of_these_tokens_is_not_believed(given: str | None, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        expert_routes.routes_of(choice(3, given), num_prompt=2, shape=SHAPE)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}, SHAPE),
        ({"text_config": {"num_hidden_layers": 3, "n_routed_experts": 8, "top_k_experts": 2}}, SHAPE),
        ({"num_hidden_layers": 3}, None),
        ({"num_hidden_layers": 3, "num_experts": 0, "num_experts_per_tok": 2}, None),
    ],
)
def test_the_experts_to_replay_are_read_from_the_models_configuration(config, expected) -> None:
    moe = {"moe": {"router_replay": True}}
    replaying = RunConfig.model_validate({"model": {"name": "dense"}, "trainer": {"model": moe}})
    assert expert_routes.experts_to_replay(RunConfig(), config) is None
    if expected:
        assert expert_routes.experts_to_replay(replaying, config) == expected
    else:
        with pytest.raises(ConfigError, match="with dense - a model with a mixture of experts was expected"):
            expert_routes.experts_to_replay(replaying, config)


def test_request_asks_only_for_expert_routes_not_yet_known() -> None:
    def of_request(asked: Asked, ids: list[int]) -> str:
        return written(routes([*asked.ids, *ids][asked.sampling["routed_experts_prompt_start"] : -1]))

    async def ask(**more: Any) -> tuple[Turn, Asked]:
        async with open_fake_engine(routes=of_request, version=0, answer=lambda asked: [20, 21, 2]) as engine:
            options = {"max_model_len": 64, "timeout_s": 5, "max_concurrent": 1, "experts": SHAPE}
            async with open_inference_pool([engine.url], waits=Waits("test"), **options) as pool:
                pool.go_live(pool.engines[0], 0)
                turn = await pool.generate([5, 6, 7, 8], {}, **more)
            return turn, engine.requests[0]

    turn, _ = asyncio.run(ask(routes_from=3))
    assert turn.routes.tolist() == routes([8, 20, 21]).tolist()
    turn, asked = asyncio.run(ask())  # an evaluation: nothing is wanted, so nothing is read and little is sent
    assert turn.routes is None
    assert asked.sampling["routed_experts_prompt_start"] == 4


def record(trajectory: Trajectory, tokenizer: ChatTokenizer, question: Prompt, text: str) -> None:
    ids = [*tokenizer.encode(text), END]
    new = routes([*question.ids, *ids][question.routes_from : -1])
    said = assistant_message(text)
    trajectory.record(question, Turn(ids, [-1] * len(ids), [0] * len(ids), "", routes=new, message=said))


def check_routed(sample: Tokens) -> None:
    assert sample.routed.known.tolist() == [1] * (sample.length - 1) + [0]
    assert (sample.routed.layers, sample.routed.top_k) == (3, 2)
    assert sample.routed.experts.tolist() == routes(sample.ids[:-1]).ravel().tolist()


@pytest.mark.parametrize(
    ("mode", "texts", "num_samples"),
    [("interleaved", ["yes"], 1), ("interleaved", ["yes", "no"], 2), ("branching", ["yes"], 2)],
)
def test_a_later_turn_tells_of_what_the_earlier_ones_could_not(tmp_path, mode, texts, num_samples) -> None:
    """Of two answers to the same messages, the second begins a sample of its own."""
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, CHATML))
    trajectory = Trajectory(tokenizer, mode)
    first = trajectory.ask([ASK], None)
    assert first.routes_from == 0
    record(trajectory, tokenizer, first, "4")
    check_routed(*trajectory.samples())
    questions = [trajectory.ask(LONGER, None) for _ in texts]
    for question, text in zip(questions, texts, strict=True):
        assert question.routes_from == (len(first.ids) + 1 if mode == "interleaved" else 0)
        record(trajectory, tokenizer, question, text)
    assert len(trajectory.samples()) == num_samples
    for sample in trajectory.samples():
        check_routed(sample)


def routed_sample(ids: list[int]) -> Tokens:
    columns = {name: [0] * len(ids) for name in COLUMNS} | {"ids": ids}
    return build_tokens(**columns, routed=expert_routes.to_routed([routes(ids[:-1])], len(ids)))


def test_expert_routes_stay_with_their_tokens_in_a_packed_row() -> None:
    plain = build_tokens(**{name: [0] for name in COLUMNS})
    row = concat_tokens([routed_sample([4, 5, 6]), plain, routed_sample([7, 8])])
    assert row.routed.known.tolist() == [1, 1, 0, 0, 1, 0]
    assert row.routed.experts.tolist() == routes([4, 5, 7]).ravel().tolist()
    assert concat_tokens([plain, plain]).routed is None
    assert expert_routes.to_routed([], 5) is None
    other = build_tokens(**{name: [0] for name in COLUMNS}, routed=Routed(*np.zeros((2, 1), np.uint8), 4, 2))
    with pytest.raises(AssertionError, match="of different models"):
        concat_tokens([routed_sample([4, 5]), other])
    before = {name: getattr(plain, name) for name in COLUMNS} | {"kept": None}
    assert decode_as(Tokens, encode(before)).routed is None  # written before there were routes

"""Which experts the engine used: believed where it makes sense, and with every token through to the trainer's row."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_engine import Asked, open_fake_engine
from tiny_tokenizer import CHATML, END, write_tokenizer
from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Experts, TrainerConfig, TrainerModel
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.messages import COLUMNS, Routed, Tokens, build_tokens, concat_tokens, decode_as, encode
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.engine_answers import BadAnswer, Choice, read_response
from trireme.orchestrator.generation import Generation
from trireme.orchestrator.inference_pool import open_inference_pool
from trireme.orchestrator.routes import ExpertShape, expert_shape, experts_to_replay, routes_of, to_routed
from trireme.orchestrator.trajectory import Trajectory
from trireme.orchestrator.turns import Said

SHAPE = ExpertShape(layers=3, top_k=2, num_experts=8)
ASK = {"role": "user", "content": "2 + 2?"}
MORE = {"role": "user", "content": "sure?"}


def route_of(token: int) -> list[list[int]]:
    """Where a scripted engine sends a token: [layers, top_k]."""
    return [[(token + layer) % 8, (token + layer + 3) % 8] for layer in range(3)]


def routes(ids: list[int]) -> np.ndarray:
    return np.array([route_of(token) for token in ids], dtype=np.uint8).reshape(-1, 3, 2)


def written(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def choice(num_tokens: int, routed_experts: str | None) -> Choice:
    content = [{"logprob": -1.0}] * num_tokens
    answer = {"token_ids": [1] * num_tokens, "finish_reason": "stop", "routed_experts": routed_experts}
    answer |= {"logprobs": {"content": content}, "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}]}
    return read_response(json.dumps({"choices": [answer]}).encode()).choices[0]


def answer(trajectory: Trajectory, messages: list[dict[str, Any]], ids: list[int], said: str) -> tuple[list[int], int]:
    """One turn of an engine that says what was not known before; returns the prompt and how much of it was known."""
    question = trajectory.ask(messages, None)
    new = routes([*question.ids, *ids][question.routes_from : -1])
    turn = Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop", routes=new)
    trajectory.record(question, turn, Said(said))
    return question.ids, question.routes_from


def says(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path, CHATML))


# what an engine says


def test_experts_of_prompt_and_answer_are_read_but_for_the_last_token() -> None:
    found = routes_of(choice(3, written(routes([4, 5, 6, 7]))), num_prompt=2, shape=SHAPE)
    assert found.dtype == np.uint8
    assert found.tolist() == [route_of(token) for token in (4, 5, 6, 7)]


def test_more_experts_than_a_byte_can_name_take_two() -> None:
    many = np.array([[[511, 3]]], dtype=np.uint16)
    found = routes_of(choice(1, written(many)), num_prompt=1, shape=ExpertShape(1, 2, 512))
    assert (found.dtype, found.tolist()) == (np.uint16, many.tolist())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "did not say which experts"),
        ("%%%", "cannot be read"),
        (base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "cannot be read"),
        (written(np.zeros((3, 3, 2), np.uint8))[:-4], "cannot be read"),
        (written(np.array([{}] * 3, dtype=object)), "cannot be read"),
        (written(np.zeros((3, 3, 2), np.uint8)), r"\(3, 3, 2\), as uint8 - \(4, 3, 2\) were expected"),
        (written(np.zeros((4, 2, 2), np.uint8)), r"\(4, 2, 2\)"),
        (written(np.zeros((4, 3, 2), np.float32)), "as float32"),
        (written(np.full((4, 3, 2), 8, np.uint8)), "expert 8 - the model has 8, from 0 on"),
    ],
)
def test_what_cannot_be_the_experts_of_these_tokens_is_not_believed(given: str | None, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        routes_of(choice(3, given), num_prompt=2, shape=SHAPE)


def test_a_header_that_promises_more_than_there_is_costs_no_memory() -> None:
    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 3, 2), }\n"
    text = base64.b64encode(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head).decode()
    with pytest.raises(BadAnswer, match="cannot be read"):
        routes_of(choice(3, text), num_prompt=2, shape=SHAPE)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}, SHAPE),
        ({"text_config": {"num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2}}, SHAPE),
        ({"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2}, SHAPE),
        ({"num_hidden_layers": 3}, None),
        ({"num_hidden_layers": 3, "num_experts": 0, "num_experts_per_tok": 2}, None),
    ],
)
def test_the_experts_of_a_model_are_read_from_its_configuration(config: dict, expected: ExpertShape | None) -> None:
    assert expert_shape(config) == expected


def test_a_model_without_experts_has_no_routes_to_replay() -> None:
    def config(replay: bool) -> RunConfig:
        model = TrainerModel(moe=Experts(router_replay=replay))
        return RunConfig(model=Model(name="dense"), trainer=TrainerConfig(model=model))

    assert experts_to_replay(config(False), {"num_hidden_layers": 3}) is None
    with pytest.raises(ConfigError, match="with dense - a model with a mixture of experts was expected"):
        experts_to_replay(config(True), {"num_hidden_layers": 3})


# through the rollout


def test_a_request_asks_for_the_experts_from_the_token_on_from_which_they_are_not_known() -> None:
    def of_request(asked: Asked, ids: list[int]) -> str:
        start = asked.sampling["routed_experts_prompt_start"]
        return written(routes([*asked.ids, *ids][start:-1]))

    async def ask(**more: Any) -> tuple[Generation, Asked]:
        async with open_fake_engine(routes=of_request, version=0, answer=lambda asked: [20, 21, 2]) as engine:
            opened = open_inference_pool(
                [engine.url], waits=Waits("test"), max_model_len=64, timeout_s=5, max_concurrent=1, experts=SHAPE
            )
            async with opened as pool:
                pool.go_live(pool.engines[0], 0)
                turn = await pool.generate([5, 6, 7, 8], {}, **more)
            return turn, engine.requests[0]

    turn, _ = asyncio.run(ask(routes_from=3))
    assert turn.routes is not None
    assert turn.routes.tolist() == [route_of(token) for token in (8, 20, 21)]
    turn, asked = asyncio.run(ask())  # an evaluation: nothing is wanted, so nothing is read and little is sent
    assert turn.routes is None
    assert asked.sampling["routed_experts_prompt_start"] == 4


def test_a_sample_has_the_experts_of_every_token_but_its_last(tokenizer: ChatTokenizer) -> None:
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, [ASK], [*tokenizer.encode("4"), END], "4")
    (sample,) = trajectory.samples()
    assert_routed(sample, sample.length - 1)


def test_a_later_turn_tells_of_what_the_earlier_ones_could_not(tokenizer: ChatTokenizer) -> None:
    """The last token of the first turn was computed only in the second one, with the text in between."""
    trajectory = Trajectory(tokenizer, "interleaved")
    prompt, known = answer(trajectory, [ASK], [*tokenizer.encode("4"), END], "4")
    assert known == 0
    _, known = answer(trajectory, [ASK, says("4"), MORE], [*tokenizer.encode("yes"), END], "yes")
    assert known == len(prompt) + 1
    (sample,) = trajectory.samples()
    assert_routed(sample, sample.length - 1)


def test_where_a_turn_begins_a_sample_of_its_own_what_is_known_goes_along(tokenizer: ChatTokenizer) -> None:
    """Two answers to one question: the second begins a sample, whose beginning the engine had told of before."""
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, [ASK], [*tokenizer.encode("4"), END], "4")
    one, other = (trajectory.ask([ASK, says("4"), MORE], None) for _ in range(2))
    for question, text in ((one, "yes"), (other, "no")):
        ids = [*tokenizer.encode(text), END]
        new = routes([*question.ids, *ids][question.routes_from : -1])
        trajectory.record(question, Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop", routes=new), Said(text))
    samples = trajectory.samples()
    assert len(samples) == 2
    for sample in samples:
        assert_routed(sample, sample.length - 1)


def test_each_turn_of_a_branching_rollout_is_told_of_from_its_beginning(tokenizer: ChatTokenizer) -> None:
    trajectory = Trajectory(tokenizer, "branching")
    answer(trajectory, [ASK], [*tokenizer.encode("4"), END], "4")
    _, known = answer(trajectory, [ASK, says("4"), MORE], [END], "")
    assert known == 0
    for sample in trajectory.samples():
        assert_routed(sample, sample.length - 1)


def assert_routed(sample: Tokens, num_known: int) -> None:
    """That the first `num_known` tokens, and only they, have the experts of the scripted engine."""
    assert sample.routed is not None
    assert sample.routed.known.tolist() == [1] * num_known + [0] * (sample.length - num_known)
    assert (sample.routed.layers, sample.routed.top_k) == (3, 2)
    found = sample.routed.experts.reshape(-1, 3, 2)
    assert found.tolist() == [route_of(token) for token in sample.ids[:num_known].tolist()]


# to the trainer


def routed_sample(ids: list[int]) -> Tokens:
    count = len(ids)
    return build_tokens(
        ids=ids,
        loss_mask=[0] + [1] * (count - 1),
        logprobs=[0.0] * count,
        advantages=[0.0] * count,
        versions=[-1] + [0] * (count - 1),
        routed=to_routed([routes(ids[:-1])], count),
    )


def test_the_experts_stay_with_their_tokens_when_samples_are_packed() -> None:
    plain = build_tokens(ids=[9], loss_mask=[0], logprobs=[0], advantages=[0], versions=[-1])
    row = concat_tokens([routed_sample([4, 5, 6]), plain, routed_sample([7, 8])])
    assert row.routed is not None
    assert row.routed.known.tolist() == [1, 1, 0, 0, 1, 0]
    assert row.routed.experts.reshape(-1, 3, 2).tolist() == [route_of(token) for token in (4, 5, 7)]
    assert concat_tokens([plain, plain]).routed is None


def test_samples_of_different_models_are_never_packed_together() -> None:
    nothing = np.zeros(0, np.uint8)
    other = build_tokens(**{name: [0] for name in COLUMNS}, routed=Routed(np.zeros(1, np.uint8), nothing, 4, 2))
    with pytest.raises(AssertionError, match="of different models"):
        concat_tokens([routed_sample([4, 5]), other])


def test_the_journal_keeps_them_and_rows_made_of_it_are_the_same(tmp_path: Path) -> None:
    samples = [routed_sample([4, 5, 6]), routed_sample([7, 8, 1, 2])]
    rollout = Rollout(group=0, place=0, attempt=0, env="e", example=0, reward=1.0, samples=samples, temperature=1.0)
    Journal(tmp_path).append(BatchRecord(step=0, rollouts=[rollout], dropped=[], state=State()))
    read = Journal(tmp_path).read(0).rollouts[0].samples
    rows = [
        micro_batches_of_rank([Sample(tokens, 1.0) for tokens in each], capacity=16, rank=0, world=1)
        for each in (samples, read)
    ]
    assert encode(rows[0]) == encode(rows[1])


def test_journals_that_were_written_before_there_were_routes_can_be_read() -> None:
    tokens = routed_sample([4, 5])
    before = {name: getattr(tokens, name) for name in COLUMNS} | {"kept": None}
    assert decode_as(Tokens, encode(before)).routed is None


def test_nothing_is_known_of_a_sample_that_no_engine_told_of() -> None:
    assert to_routed([], 5) is None

"""The trainer's whole loop, against an orchestrator that has every batch ready."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from support.engines.answering import DEADLINE_S, answering
from support.models.tiny import batch_reply, random_samples
from trireme import messages
from trireme.algo.digest import tensor_digest
from trireme.base.errors import PeerRefused
from trireme.base.waiting import Waits
from trireme.config.losses import Loss
from trireme.config.run import Model, Ports, RunConfig, WeightBroadcast
from trireme.config.trainer import Checkpoints, Optimizer, TrainerConfig
from trireme.monitor.metrics import read_metrics
from trireme.monitor.spans import read_spans
from trireme.monitor.timeline import joined, shares, steady
from trireme.trainer import heartbeat as heartbeat_module
from trireme.trainer.checkpoint.checkpoint import complete_steps
from trireme.trainer.heartbeat import Activity, heartbeat
from trireme.trainer.loop import train

STEPS = 4
CLOCKS_S = 1e-4  # between two clocks that are read one after the other


@dataclass
class FakeOrchestrator:
    refuses: int | None = None
    newest: messages.Newest = field(default_factory=lambda: messages.Newest(version=-1, digests={}))
    engine_lost_at: set[int] = field(default_factory=set)  # steps before which an engine needs weights
    lost_at: set[int] = field(default_factory=set)  # versions that engines lose when they are first sent
    says_so: bool = False  # that one was lost, when it is asked for a batch
    asked: list[messages.Request] = field(default_factory=list)

    def __call__(self, request: messages.Request) -> messages.Reply:
        if isinstance(request, messages.Heartbeat):
            return messages.Ok()
        self.asked.append(request)
        match request:
            case messages.GetNewest():
                return self.newest
            case messages.GetBatch(step=step) if step in self.engine_lost_at and not self._was_sent_to_some(step):
                return messages.Publish(reason="an engine came up without weights")
            case messages.GetBatch(step=step) if step == self.refuses:
                return messages.Refusal(error="the end of this trainer")
            case messages.GetBatch(step=step) if self.says_so and step in self.lost_at and self._attempts(step) == 1:
                return messages.Publish(reason=f"version {step} was not confirmed")
            case messages.GetBatch(step=step):
                ranks: Any = SimpleNamespace(dp_rank=request.rank, dp_size=request.world)
                return batch_reply(random_samples([30, 20, 12, 40], seed=step), ranks, capacity=64, step=step)
            case messages.PolicyReady(version=version):
                return messages.Go(version=version, epoch="1", world_size=2)
            case messages.PolicySent(version=version) if version < STEPS and ("GetBatch", version) not in self.story():
                return messages.NotYet(note="engines load")
            case messages.PolicySent(version=version) if version in self.lost_at and self._attempts(version) == 1:
                return messages.Again(reason="an engine died")
            case messages.PolicySent(version=version):
                return messages.Live(version=version)
        return messages.Ok()

    def ready(self) -> list[messages.PolicyReady]:
        return [request for request in self.asked if isinstance(request, messages.PolicyReady)]

    def _was_sent_to_some(self, version: int) -> bool:
        return any(request.version == version and not request.everywhere for request in self.ready())

    def _attempts(self, version: int) -> int:
        sent = (request for request in self.asked if isinstance(request, messages.PolicySent))
        return len({request.attempt for request in sent if request.version == version})

    def story(self) -> list[tuple[str, int]]:
        return [(type(it).__name__, getattr(it, "version", None) or getattr(it, "step", 0)) for it in self.asked]

    def digests(self) -> dict[int, dict[str, str]]:
        return {request.version: request.digests for request in self.asked if isinstance(request, messages.PolicySent)}


def run(
    folder: Path, model: Path, *, resume: bool = False, loss: Loss | None = None, **behaviour: Any
) -> FakeOrchestrator:
    """Train the whole run. A step is tried before the first if a loss is given."""
    orchestrator = FakeOrchestrator(**behaviour)
    settings = {"optim": Optimizer(lr=1e-3), "ckpt": Checkpoints(interval=2), "try_step": loss is not None}
    trainer = TrainerConfig(threads=1, loss=loss or Loss(), **settings)
    with answering(orchestrator) as address, suppress(PeerRefused):
        config = RunConfig(
            output_dir=folder, resume=resume, device="cpu", max_steps=STEPS, max_async_level=2, seq_len=200,
            model=Model(name=str(model)), ports=Ports(batches=int(address.rpartition(":")[2])),
            weight_broadcast=WeightBroadcast(type="filesystem"), trainer=trainer,
        )  # fmt: skip
        train(config)
    return orchestrator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def straight(folder, tiny_model):
    return run(folder, tiny_model)


def test_every_version_is_confirmed_before_the_next_is_made(straight):
    """This orchestrator does not confirm a version before it is asked for a batch: the trainer goes on meanwhile."""
    expected = [("GetNewest", 0)]
    for step in range(STEPS):
        expected += [("PolicyReady", step), ("PolicySent", step), ("GetBatch", step), ("PolicySent", step)]
    last = [("PolicyReady", STEPS), ("PolicySent", STEPS), ("PolicySent", STEPS), ("Done", STEPS)]
    assert straight.story() == [*expected, *last]
    sent = [request for request in straight.asked if isinstance(request, messages.PolicySent)]
    assert sent[::2] == sent[1::2]  # the same question, so it has the same answer
    assert isinstance(straight.asked[-1], messages.Done)
    assert len({str(digests) for digests in straight.digests().values()}) == STEPS + 1  # each step changes the weights


@pytest.mark.parametrize("says_so", [False, True])
def test_a_version_lost_meanwhile_is_sent_again_and_trained_on_as_it_was(straight, tiny_model, tmp_path, says_so):
    disturbed = run(tmp_path, tiny_model, lost_at={0, 2, STEPS}, says_so=says_so)
    story = disturbed.story()
    assert [story.count(("PolicyReady", version)) for version in range(STEPS + 1)] == [2, 1, 2, 1, 2]
    assert all(request.everywhere for request in disturbed.ready())
    assert [story.count(("GetBatch", step)) for step in range(STEPS)] == [1 + says_so, 1, 1 + says_so, 1]
    assert disturbed.digests() == straight.digests()
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]


def test_trainer_notices_too_little_memory_before_any_request(tiny_model, tmp_path):
    """Rows of these batches have 64 tokens; `seq_len` is 200, and a row as long comes some day."""
    (tmp_path / "large.py").write_text(
        "def loss(columns):\n    if len(columns.mask) > 100:\n        raise MemoryError\n    return columns.logprobs\n"
    )
    asked: list[messages.Request] = []
    with pytest.raises(MemoryError):
        run(tmp_path / "run", tiny_model, asked=asked, loss=Loss(type="custom", path=f"{tmp_path}/large.py:loss"))
    assert asked == []


def test_a_run_leaves_what_was_served_and_a_row_of_metrics_per_step(straight, folder):
    assert complete_steps(folder / "checkpoints") == [2, 4]
    for step in (2, 4):
        exported = load_file(folder / f"weights/step_{step}/model.safetensors")
        assert {name: tensor_digest(tensor) for name, tensor in exported.items()} == straight.digests()[step]
    rows, _ = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    promised = {"loss", "grad_norm", "lr", "importance_ratio", "policy/entropy", "policy/kl", "perf/tokens_per_s"}
    assert all(promised | {"time/step", "time/publish", "time/confirm"} <= row.keys() for row in rows)


def spans_of(folder: Path) -> list[Any]:
    return joined(read_spans(folder / "spans.jsonl")[0])


def test_the_lane_of_a_trainer_shows_what_each_step_was_spent_on(straight, folder):
    spans = spans_of(folder)
    assert {span.lane for span in spans} == {"trainer"}
    assert (spans[0].what, spans[-1].what) == ("start", "idle")
    of_steps = shares(spans, "trainer", *steady(spans))
    assert sum(of_steps.values()) == pytest.approx(1.0)
    assert {"train", "transfer", "save", "wait"} <= of_steps.keys()
    for row in read_metrics(folder / "metrics.jsonl")[0]:
        trained_s = sum(span.seconds for span in spans if (span.what, span.step) == ("train", row["step"]))
        assert trained_s >= row["time/forward_backward"] + row["time/optimizer"] - CLOCKS_S
        assert 0 < row["time/idle"] <= row["time/wait_for_batch"] + row["time/publish"] + CLOCKS_S


def test_a_trainer_that_died_goes_on_to_the_same_weights_to_the_bit(straight, tiny_model, tmp_path):
    died = run(tmp_path, tiny_model, refuses=3)
    assert died.story()[-1] == ("GetBatch", 3)
    again = run(tmp_path, tiny_model, resume=True, newest=messages.Newest(version=3, digests=died.digests()[3]))
    assert again.story()[:4] == [("GetNewest", 0), ("GetBatch", 2), ("GetBatch", 3), ("PolicyReady", 4)]
    assert again.digests() == {4: straight.digests()[4]}
    spans = spans_of(tmp_path)
    _, second = (index for index, span in enumerate(spans) if span.what == "start")
    trained = [{span.step for span in part if span.what == "train"} for part in (spans[:second], spans[second:])]
    assert trained == [{0, 1, 2}, {2, 3}]


def test_trainer_sends_its_weights_to_an_engine_that_came_up_without(straight, tiny_model, tmp_path):
    disturbed = run(tmp_path, tiny_model, engine_lost_at={0, 2})
    story = disturbed.story()
    confirmed = [("GetBatch", 2), ("PolicySent", 2)]
    extra = [("GetBatch", 2), ("PolicyReady", 2), ("PolicySent", 2), ("GetBatch", 2)]
    assert story[story.index(("GetBatch", 2)) :][:6] == [*confirmed, *extra]
    assert [request.everywhere for request in disturbed.ready()] == [True, False, True, True, False, True, True]
    assert disturbed.digests() == straight.digests()


def test_a_heart_beats_what_the_trainer_does_and_waits_for(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "INTERVAL_S", 0.01)
    beats: Queue[Any] = Queue()

    def listen(request: messages.Request) -> messages.Reply:
        beats.put(request)
        return messages.Ok()

    waits = Waits("trainer")
    with answering(listen) as address, waits.waiting("batch 3", peer="orchestrator", deadline_s=DEADLINE_S):
        with heartbeat(address, "run", waits, Activity(state="running", version=3)):
            first = beats.get(timeout=DEADLINE_S)
    assert isinstance(first, messages.Heartbeat)
    assert (first.run_id, first.process, first.state, first.version) == ("run", "trainer", "running", 3)
    assert [wait.endswith("s for batch 3 from orchestrator") for wait in first.waits] == [True]

"""A small run on disk, written file by file in the order in which a real one writes, with no process behind it.

Two environments, rollouts that fail, groups that are dropped for each reason, groups that stay open. Fast enough to be
written hundreds of times.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from support.engines.fake_engine import digests_of
from trireme.algo.data.difficulty import Outcome
from trireme.algo.filters import flaw_with
from trireme.algo.rules import Rules, rules_of
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal import targets
from trireme.journal.entry import write_entry
from trireme.journal.journal import Journal
from trireme.journal.manifest import MANIFEST, Manifest, describe_file
from trireme.journal.records import BatchRecord, Dropped, OpenGroup, Rollout, State
from trireme.journal.versions import Versions
from trireme.messages import Tokens, build_tokens
from trireme.monitor.metrics import MetricsFile
from trireme.orchestrator.batch_metrics import batch_metrics, state_metrics
from trireme.orchestrator.buffer import Buffer

SIZES = {"a": 7, "b": 5}
GROUP = 3
BATCH = 6
ATTEMPTS = 2
INTERVAL = 2  # of checkpoints


def build_config(folder: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "max_steps": 5,
        "max_async_level": 1,
        "seed": 2,  # in its first five batches happens all that can happen to a group
        "orchestrator": {
            "batch_size": BATCH, "rollouts_per_example": GROUP, "max_rollout_attempts": ATTEMPTS,
            "max_off_policy_steps": 2, "env": [{"id": "a", "weight": 2.0}, {"id": "b", "weight": 1.0}],
        },
    }  # fmt: skip
    return RunConfig.model_validate(values | sections)


RICH: dict[str, Any] = {
    "curriculum": [
        {"weights": {"a": 1.0}}, {"weights": {"a": 1.0, "b": 1.0}, "from_step": 2},
        {"weights": {"b": 1.0}, "from_reward": 1.4, "smoothing": 2},
    ],
    "buffer": {"pools": {"easy_threshold": 1.5, "hard_threshold": 1.2, "easy_weight": 0.0}},
    "filters": {"truncated": "mask", "gibberish": "mask", "gibberish_logprob": -0.8, "gibberish_window": 2},
    "length_penalty": {"type": "linear", "max_length": 12, "weight": 0.5},
    "advantage": {"type": "ema", "clip": 1.25, "reward_clip": [0.0, 2.25]},
    "teacher": {"base_url": "http://127.0.0.1:9/v1", "weight": 0.25},
    "echo": {"user": 0.5},
}  # fmt: skip
"""Of `[orchestrator]`: everything that a batch can go by, all at once."""


def build_rich_config(folder: Path, **sections: Any) -> RunConfig:
    plain = build_config(folder, **sections)
    values = plain.model_dump(exclude_unset=True)
    return RunConfig.model_validate(values | {"orchestrator": values["orchestrator"] | RICH})


def write_whole_run(folder: Path, *, batches: int = 5, rich: bool = False, **sections: Any) -> RunConfig:
    config = (build_rich_config if rich else build_config)(folder, **sections)
    for _ in WrittenRun(config).write(batches):
        pass
    return config


class WrittenRun:
    """Its processes are functions here: each writes the next file, and the next one follows."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.paths = config.paths
        self.journal = Journal(self.paths.journal)
        self.versions = Versions(self.paths.journal)
        self._random = random.Random(config.seed)

    def write(self, batches: int) -> Iterator[str]:
        write_run(self.config, self.paths.run_config)
        yield "configuration"
        self._confirm(0)
        yield "version 0"
        yield from self.go_on(0, batches)

    def go_on(self, first: int, last: int) -> Iterator[str]:
        """From batch `first` to before `last`. Batches are written as early as allowed."""
        ahead = 1 if self.config.max_async_level else 0
        for step in range(first, last + ahead):
            if step < last:
                record = self._fill(step)
                self.journal.append(record)
                yield f"batch {step}"
                metrics = record.metrics | {"time/fill_batch": 0.5}
                MetricsFile(self.paths.metrics, "orchestrator").append(step, metrics)
                yield f"line of batch {step}"
            if step - ahead >= first:
                yield from self._train(step - ahead)

    def _train(self, step: int) -> Iterator[str]:
        self._confirm(step + 1)
        yield f"version {step + 1}"
        MetricsFile(self.paths.metrics, "trainer").append(step, {"loss": 0.1, "grad_norm": 1.0})
        yield f"line of step {step}"
        if (step + 1) % INTERVAL == 0:
            weights = self.paths.weights / f"step_{step + 1}"
            weights.mkdir(parents=True)
            (weights / "model.safetensors").write_bytes(b"weights")
            yield f"export {step + 1}"
            write_checkpoint(self.paths.checkpoints / f"step_{step + 1}", step + 1)
            yield f"checkpoint {step + 1}"

    def _confirm(self, version: int) -> None:
        self.versions.record(version, ["http://127.0.0.1:8000"], digests_of(version), 1e-7)

    def _fill(self, step: int) -> BatchRecord:
        before, rules = self.journal.head_state(), rules_of(self.config)
        buffer = Buffer(SIZES, rules, before)
        trained: list[list[Rollout]] = []
        dropped: list[Dropped] = []
        outcomes: list[Outcome] = []
        while len(trained) < BATCH // GROUP:
            self._decide(buffer.take(), step, trained, dropped, outcomes)
        open_groups = buffer.reopened + [fresh for _ in range(2) if (fresh := take_fresh(buffer))]
        trained.sort(key=lambda group: group[0].group)
        rollouts = [rollout for group in trained for rollout in group]
        baselines = give_advantages(rollouts, rules, before)
        outcomes = sorted([*outcomes, *map(targets.outcome_of, trained)], key=lambda outcome: outcome.group)
        buffer.close_batch(outcomes, next_step=step + 1)
        decided = {"trained": rollouts, "dropped": dropped}
        state = State(
            next_batch=step + 1, open_groups=open_groups,
            counters={name: before.counters.get(name, 0) + len(some) for name, some in decided.items()},
            baselines=baselines, **buffer.state(),
        )  # fmt: skip
        metrics = batch_metrics(step, rollouts, dropped, config=self.config, outcomes=outcomes)
        metrics |= state_metrics(state, config=self.config)
        return BatchRecord(step, rollouts, dropped, state, metrics, rules, outcomes)

    def _decide(self, task: OpenGroup, step: int, trained: list, dropped: list, outcomes: list[Outcome]) -> None:
        def drop(place: int, attempt: int, reason: str) -> None:
            dropped.append(Dropped(task.id, place, attempt, task.env, task.example, reason))

        match self._random.randrange(8):
            case 0:
                outcomes.append(Outcome(task.id, task.env, task.example, task.id % 2 * 2.0))
                for place in range(GROUP):
                    drop(place, 0, "no signal: all rewards of the group are equal")
            case 1:
                drop(1, 0, "score: ValueError: no number")
                drop(1, 1, "timeout: not finished after 600 s (`rollout_timeout_s`)")
                drop(0, 0, "group given up: rollout 1 failed 2 times, last timeout: not finished")
                drop(2, 0, "group given up: rollout 1 failed 2 times, last timeout: not finished")
            case 2:
                drop(2, 0, "score: ValueError: no number")
                for place, attempt in enumerate([0, 0, 1]):
                    drop(place, attempt, "stale: begun under version 0")
            case fate:
                attempts = [0, 1, 0] if fate == 3 else [0, 0, 0]
                if fate == 3:
                    drop(1, 0, "score: KeyError: 'answer'")
                trained.append([self._roll_out(task, step, place, attempts[place]) for place in range(GROUP)])

    def _roll_out(self, task: OpenGroup, step: int, place: int, attempt: int) -> Rollout:
        oldest = max(0, step - 2) if self.config.max_async_level else step
        samples = [self._sample(oldest, step) for _ in range(self._random.randrange(1, 3))]
        return Rollout(
            group=task.id, place=place, attempt=attempt, env=task.env, example=task.example,
            reward=self._random.randrange(10) / 10 + place, samples=samples,
            temperature=self.config.orchestrator.sampling.temperature,
            metrics={"num_turns": float(self._random.randrange(1, 4))}, prompt=[{"role": "user", "content": "say it"}],
            completion=[{"role": "assistant", "content": "it"}], answer="it", truncated=place == 2,
            stop="length" if place == 2 else None, num_turns=len(samples),
            num_computed=sum(each.length for each in samples), **self._per_token(samples),
        )  # fmt: skip

    def _per_token(self, samples: list[Tokens]) -> dict[str, list[np.ndarray]]:
        if self.config.orchestrator.teacher is None:
            return {}
        given = [np.where(sample.loss_mask == 1, -self._random.random(), np.nan) for sample in samples]
        steps = [np.full(sample.length, np.nan) for sample in samples]
        for step in steps:
            step[-1] = self._random.randrange(3) / 2
        return {
            "teacher": [each.astype(np.float32) for each in given],
            "token_rewards": [each.astype(np.float32) for each in steps],
        }

    def _sample(self, oldest: int, newest: int) -> Tokens:
        given, sampled = self._random.randrange(2, 4), self._random.randrange(2, 5)
        versions = sorted(self._random.randrange(oldest, newest + 1) for _ in range(sampled))
        if newest:  # a version that batches are trained by exists by now
            versions = [min(version, newest - bool(self.config.max_async_level)) for version in versions]
        if self.config.inference.keep_prefix_cache != "never":
            return _with_cache(versions[0], versions[-1])
        return build_tokens(
            ids=[self._random.randrange(50) for _ in range(given + sampled)], loss_mask=[0] * given + [1] * sampled,
            logprobs=[0.0] * given + [-self._random.random() for _ in range(sampled)],
            advantages=[0.0] * (given + sampled), versions=[-1] * given + versions,
            ce_weights=np.float32([0.5] * given + [0.0] * sampled) if self.config.orchestrator.echo else None,
        )  # fmt: skip


def _with_cache(first: int, second: int) -> Tokens:
    """Two turns, of which the later one read what the earlier one had computed."""
    return build_tokens(
        ids=range(7), loss_mask=[0, 0, 1, 1, 0, 1, 1], logprobs=[0.0, 0.0, -0.1, -0.2, 0.0, -0.3, -0.4],
        advantages=[0.0] * 7, versions=[-1, -1, first, first, -1, second, second],
        oldest=np.int32([-1, -1, first, first, -1, first, first]),
    )  # fmt: skip


def take_fresh(buffer: Buffer) -> OpenGroup | None:
    return None if buffer.reopened else buffer.take()


def give_advantages(rollouts: list[Rollout], rules: Rules, before: State) -> dict[str, float]:
    """As a batcher does; returns the running means after the batch."""
    per_rollout, baselines = targets.advantages_of(
        rollouts, rules, before.baselines, custom=targets.estimators_of(rules)
    )
    for rollout, parts in zip(rollouts, per_rollout, strict=True):
        rollout.samples = [targets.with_advantages(*both) for both in zip(rollout.samples, parts, strict=True)]
        rollout.flaws = targets.flaws_of(rollout, rules) + (["zero_advantage"] if targets.is_zero(parts) else [])
        rollout.masked = flaw_with("mask", rollout.flaws, targets.filters_of(rules))
    return baselines


def write_checkpoint(folder: Path, version: int) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    for name in ("rank_0.safetensors", "random_0.safetensors"):
        (partial / name).write_bytes(f"{name} of version {version}".encode() * 10)
    files = {path.name: describe_file(path) for path in partial.iterdir()}
    manifest = Manifest(version=version, world_size=1, time=1.7e9, files=files)
    (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    partial.rename(folder)


def rewrite_batch(config: RunConfig, step: int, change: Callable[[BatchRecord], Any]) -> None:
    journal = Journal(config.paths.journal)
    record = journal.read(step)
    change(record)
    write_entry(journal.path(step), step, record)


def rewrite_version(config: RunConfig, version: int, change: Callable[[Any], Any]) -> None:
    versions = Versions(config.paths.journal)
    entry = versions.read(version)
    change(entry)
    write_entry(versions.path(version), version, entry)

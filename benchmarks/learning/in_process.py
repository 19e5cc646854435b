"""A task learned in one process: the run's own trainer, with a sampler beside it instead of engines.

Everything that decides what is learned is the run's own: prompts, advantages, packing, losses, optimizer. Only the
tokens come from `transformers` in this process, sampled by the weights of exactly `lag` versions ago: what a benchmark
of losses needs, and no real run can hold still. One run takes seconds, where the quickstart takes minutes.

The sampler computes in the precision of an engine (`ENGINES`). With `fp8` its linear layers are rounded to
float8_e4m3fn with a scale per output channel, embedding and head excepted, and their products are computed in bfloat16.
A real engine may round activations too.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import ROOT
from benchmarks.learning import fields
from benchmarks.trl.task import dataset, score
from trireme.algo.rules import rules_of
from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.journal.model_turn import Message, Turn, assistant_message
from trireme.journal.rank_shares import DealtBatch, row_capacity
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.journal.targets import advantages_of, flaws_of, with_advantages
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.trajectory import Prompt, Trajectory
from trireme.trainer.parallel.mesh import open_world
from trireme.trainer.publish.served_weights import served_tensors
from trireme.trainer.step import Stepper, base_state

sys.path.insert(0, str(ROOT / "environments" / "alphabet_sort"))
from alphabet_sort_episodes import FIRST_TAG, LATER_TAG, Episode, items_in, make_episodes, similarity

logging.disable_progress_bar()

ENGINES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}
"""Precisions of an engine, and what it computes in."""
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Trial:
    """One run: flags of `rl` on top of the task's configuration, a lag, a seed.

    Example:
        Trial("grpo", ("--trainer.loss.type", "grpo"), lag=1, seed=0)
    """

    name: str
    flags: tuple[str, ...] = ()
    lag: int = 1
    seed: int = 0
    max_steps: int = 150
    task: str = "reverse-text"  # of TASKS
    engine: str = "float32"  # of ENGINES
    teacher: Trial | None = None  # learned first; what came of it is the teacher


@dataclass
class Course:
    """The figures of a trial, by step."""

    trial: Trial
    rewards: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    ess: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)  # KL of engine and trainer on tokens of lag 0; else NaN
    masked: list[float] = field(default_factory=list)  # share of tokens without a gradient because of a mask or clip
    weights: dict[str, torch.Tensor] | None = None  # at the end; None if not asked for


def learn(trial: Trial, *, keep_weights: bool = False, course: Course | None = None) -> Course:
    """Run a trial to its end.

    Args:
        course: filled in step by step, for those who want what there was if it fails.
    """
    config = configure(trial)
    course = course or Course(trial)
    teacher = Teacher(config, learn(trial.teacher, keep_weights=True)) if trial.teacher else None
    torch.manual_seed(trial.seed)
    with open_world("cpu", threads=1, timeout_s=600) as world:
        state = base_state(config, world)
        stepper = Stepper(config, state, world)
        sampler = Sampler(config, trial.lag, task=trial.task, engine=trial.engine)
        targets = Targets(config)
        for step in range(trial.max_steps):
            sampler.take_weights(state.version, served_tensors(state.model, torch.float32))
            rollouts = sampler.rollouts(step)
            if teacher is not None:
                teacher.score(rollouts)
            targets.assign(rollouts)
            metrics = train_on(stepper, config, step, rollouts)
            course.rewards.append(float(np.mean([rollout.reward for rollout in rollouts])))
            course.entropies.append(metrics.get("policy/entropy", float("nan")))
            course.ess.append(metrics.get("ess", float("nan")))
            course.mismatches.append(metrics.get("mismatch_kl", float("nan")))
            course.masked.append(sum(metrics[name] for name in ("masked_frac", "clip_frac/low", "clip_frac/high")))
        if keep_weights:
            course.weights = {name: tensor.clone() for name, tensor in served_tensors(state.model, torch.float32)}
    return course


def configure(trial: Trial) -> RunConfig:
    task = TASKS[trial.task]
    flags = ["--device", "cpu", "--seed", str(trial.seed), "--max-steps", str(trial.max_steps)]
    file = ROOT / "configs" / task.config / "rl.toml"
    config, _ = load_run_config(["@", str(file), *flags, *task.flags, *trial.flags], program="rl")
    return resolve(config, Devices(cores=2))


def train_on(stepper: Stepper, config: RunConfig, step: int, rollouts: list[Rollout]) -> dict[str, float]:
    record = BatchRecord(step=step, rollouts=rollouts, dropped=[], state=State())
    batch = DealtBatch(record, world=1, capacity=row_capacity(config), losses=config.recipes)
    return stepper.step(batch.share(0))


class Targets:
    """Advantages and masks, by the functions that fill a run's batches."""

    def __init__(self, config: RunConfig) -> None:
        self._rules = rules_of(config)
        self._mask_truncated = config.orchestrator.filters.truncated == "mask"
        self._baselines: dict[str, float] = {}

    def assign(self, rollouts: list[Rollout]) -> None:
        advantages, self._baselines = advantages_of(rollouts, self._rules, self._baselines)
        for rollout, values in zip(rollouts, advantages, strict=True):
            rollout.samples = [with_advantages(*pair) for pair in zip(rollout.samples, values, strict=True)]
            if self._mask_truncated and "truncated" in flaws_of(rollout, self._rules):
                rollout.masked = "truncated"


@dataclass(frozen=True)
class Example:
    """A conversation: what the model is asked before each of its turns, and how good its answers are."""

    asked: list[list[Message]]
    score: Callable[[list[str]], float]


def reverse_text() -> list[Example]:
    """The quickstart's examples, one turn each."""
    return [Example([row["prompt"]], partial(_score_text, row["answer"])) for row in dataset(num_train=600)]


def _score_text(wanted: str, answers: list[str]) -> float:
    return score(answers[0], wanted)


def alphabet_sort() -> list[Example]:
    """The examples of configs/alphabet-sort with exactly two turns, and its reward."""
    episodes, _ = make_episodes(600, 0, num_turns=(2, 2), names_per_turn=(1, 4), items="letters", sort_by="any", seed=0)
    return [
        Example([[{"role": "user", "content": text}] for text in episode.prompts()], partial(_score_lists, episode))
        for episode in episodes
    ]


def _score_lists(episode: Episode, answers: list[str]) -> float:
    found = []
    for tag, answer, lines in zip((FIRST_TAG, LATER_TAG), answers, episode.expected(), strict=True):
        said = re.findall(rf"<{tag}>\s*(.*?)\s*</{tag}>", answer, re.DOTALL)
        found.append(similarity(items_in(said[-1]) if said else None, items_in("\n".join(lines))) ** 4)
    return float(np.mean(found))


def long_fields() -> list[Example]:
    """A digit each, with answers of 183 tokens (`fields.py`)."""
    return [Example([[{"role": "user", "content": digit}]], partial(_score_fields, digit)) for digit in "0123456789"]


def _score_fields(digit: str, answers: list[str]) -> float:
    return fields.score(digit, answers[0])


@dataclass(frozen=True)
class Task:
    """What is learned, and by which settings."""

    examples: Callable[[], list[Example]]
    config: str  # folder of configs/
    flags: tuple[str, ...] = ()


_LONG = ("--model.name", str(fields.START), "--seq-len", "256", "--orchestrator.sampling.max-tokens", "200")
TASKS = {
    "reverse-text": Task(reverse_text, "reverse-text"),
    "alphabet-sort": Task(alphabet_sort, "alphabet-sort"),
    "fields": Task(long_fields, "alphabet-sort", _LONG),
}


class Sampler:
    """The policy of `lag` versions ago as an engine of some precision has it, on the examples of a task."""

    def __init__(self, config: RunConfig, lag: int, *, task: str = "reverse-text", engine: str = "float32") -> None:
        folder = ROOT / config.model.name
        self._config = config
        self._engine = engine
        self._task = task
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._chat = ChatTokenizer(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=ENGINES[engine]).eval()
        self._kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)
        self._examples = TASKS[task].examples()

    def take_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        rounded = _in_fp8 if self._engine == "fp8" else _as_it_is
        self._kept.append((version, {name: rounded(name, tensor).clone() for name, tensor in tensors}))

    def rollouts(self, step: int) -> list[Rollout]:
        version, weights = self._kept[0]
        self._model.load_state_dict(weights, strict=False)  # a tied head comes once
        group_size = self._config.orchestrator.rollouts_per_example
        order = np.random.default_rng([self._config.seed, step]).permutation(len(self._examples))
        chosen = [int(example) for example in order[: self._config.num_groups] for _ in range(group_size)]
        conversations = [_Conversation(self._examples[example], self._chat) for example in chosen]

        # All conversations take their next turn together, so that they are one batch.
        for _ in range(len(self._examples[0].asked)):
            asked = [each.ask() for each in conversations]
            turns = self._generate([prompt.ids for prompt in asked], version)
            for conversation, prompt, turn in zip(conversations, asked, turns, strict=True):
                turn.message = assistant_message(self._tokenizer.decode(turn.ids, skip_special_tokens=True))
                conversation.answer(prompt, turn)

        return [
            Rollout(
                group=step * self._config.num_groups + place // group_size,
                place=place % group_size,
                attempt=0,
                env=self._task,
                example=chosen[place],
                reward=each.example.score(each.answers),
                samples=each.trajectory.samples(),
                temperature=1.0,
                truncated=each.is_truncated,
            )
            for place, each in enumerate(conversations)
        ]

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], version: int) -> list[Turn]:
        """Return one answer to each prompt, end token included."""
        batch = self._tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        out = self._model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._config.orchestrator.sampling.max_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        ids_NC = out.sequences[:, batch["input_ids"].shape[1] :]
        logprobs_NCV = torch.log_softmax(torch.stack(out.logits, dim=1).float(), dim=-1)
        logprobs_NC = logprobs_NCV.gather(-1, ids_NC[..., None]).squeeze(-1)
        tops = self._top_logprobs(logprobs_NCV)
        ended_NC = (ids_NC == self._model.generation_config.eos_token_id).int()
        lengths = (ids_NC.shape[1] - (ended_NC.cumsum(1) - ended_NC).sum(1)).tolist()
        return [
            Turn(
                ids=ids[:length].tolist(),
                logprobs=logprobs[:length].tolist(),
                versions=[version] * length,
                finish_reason="stop" if ended.any() else "length",
                top_logprobs=top and top[:length],
            )
            for ids, logprobs, top, ended, length in zip(ids_NC, logprobs_NC, tops, ended_NC, lengths, strict=True)
        ]

    def _top_logprobs(self, logprobs_NCV: torch.Tensor) -> list[list[dict[int, float]] | None]:
        """Return the likeliest tokens at each place of each answer, if the loss needs them."""
        if not (count := self._config.num_top_logprobs):
            return [None] * len(logprobs_NCV)
        values, tokens = (each.tolist() for each in logprobs_NCV.topk(min(count, logprobs_NCV.shape[-1])))
        pairs = zip(tokens, values, strict=True)
        return [[dict(zip(*each, strict=True)) for each in zip(*pair, strict=True)] for pair in pairs]


class _Conversation:
    """One rollout under way: its messages, and its tokens as the orchestrator puts them together."""

    def __init__(self, example: Example, chat: ChatTokenizer) -> None:
        self.example = example
        self.trajectory = Trajectory(chat, "interleaved")
        self.answers: list[str] = []
        self.is_truncated = False
        self._messages: list[Message] = []

    def ask(self) -> Prompt:
        self._messages = [*self._messages, *self.example.asked[len(self.answers)]]
        return self.trajectory.ask(self._messages, None)

    def answer(self, prompt: Prompt, turn: Turn) -> None:
        self.trajectory.record(prompt, turn)
        self.answers.append(turn.message["content"])
        self.is_truncated = turn.finish_reason == "length"
        self._messages = [*self._messages, turn.message]


def _as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _in_fp8(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Round the weights of a linear layer of the decoder as vLLM's `fp8_per_channel` does."""
    if tensor.ndim != 2 or ".layers." not in name:
        return tensor
    scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST_FP8
    return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale


class Teacher:
    """Weights that have learned the task, asked about the policy's tokens as a served teacher would be."""

    def __init__(self, config: RunConfig, course: Course) -> None:
        assert course.weights is not None
        self._model = AutoModelForCausalLM.from_pretrained(ROOT / config.model.name, dtype=torch.float32).eval()
        self._model.load_state_dict(course.weights, strict=False)

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> None:
        """Fill `teacher`, as `orchestrator/teacher.py` does."""
        samples = [rollout.samples[0] for rollout in rollouts]
        longest = max(sample.length for sample in samples)
        ids_NT = torch.zeros(len(samples), longest, dtype=torch.int64)
        for row, sample in zip(ids_NT, samples, strict=True):
            row[: sample.length] = torch.from_numpy(sample.ids.astype(np.int64))
        logprobs_NTV = torch.log_softmax(self._model(ids_NT).logits[:, :-1], dim=-1)
        said_NT = logprobs_NTV.gather(-1, ids_NT[:, 1:, None]).squeeze(-1).numpy()
        for rollout, sample, said in zip(rollouts, samples, said_NT, strict=True):
            of_tokens = np.concatenate([[np.nan], said[: sample.length - 1]])
            rollout.teacher = [np.where(sample.loss_mask == 1, of_tokens, np.nan).astype(np.float32)]

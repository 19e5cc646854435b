"""The quickstart task learned in one process: the run's own trainer, with a sampler beside it instead of engines.

Everything that decides what is learned is the run's own: advantages, packing, losses, optimizer. Only the tokens come
from `transformers` in this process, sampled by the weights of exactly `lag` versions ago: what a benchmark of losses
needs, and no real run can hold still. One run takes seconds, where the quickstart takes minutes.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import ROOT
from benchmarks.trl.task import dataset, score
from trireme.algo.rules import rules_of
from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.journal.rank_shares import DealtBatch, row_capacity
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.journal.targets import advantages_of, flaws_of, with_advantages
from trireme.messages import Tokens, build_tokens
from trireme.trainer.parallel.mesh import open_world
from trireme.trainer.publish.served_weights import served_tensors
from trireme.trainer.step import Stepper, base_state

QUICKSTART = "configs/reverse-text/rl.toml"


@dataclass(frozen=True)
class Trial:
    """One run: flags of `rl` on top of the quickstart, a lag, a seed.

    Example:
        Trial("grpo", ("--trainer.loss.type", "grpo"), lag=1, seed=0)
    """

    name: str
    flags: tuple[str, ...] = ()
    lag: int = 1
    seed: int = 0
    max_steps: int = 150
    teacher: Trial | None = None  # learned first; what came of it is the teacher


@dataclass
class Course:
    """The figures of a trial, by step."""

    trial: Trial
    rewards: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    ess: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] | None = None  # at the end; None if not asked for


def learn(trial: Trial, *, keep_weights: bool = False) -> Course:
    """Run a trial to its end."""
    config = configure(trial)
    course = Course(trial)
    teacher = Teacher(config, learn(trial.teacher, keep_weights=True)) if trial.teacher else None
    torch.manual_seed(trial.seed)
    with open_world("cpu", threads=1, timeout_s=600) as world:
        state = base_state(config, world)
        stepper = Stepper(config, state, world)
        sampler = Sampler(config, trial.lag)
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
        if keep_weights:
            course.weights = {name: tensor.clone() for name, tensor in served_tensors(state.model, torch.float32)}
    return course


def configure(trial: Trial) -> RunConfig:
    flags = ["--device", "cpu", "--seed", str(trial.seed), "--max-steps", str(trial.max_steps), *trial.flags]
    config, _ = load_run_config(["@", str(ROOT / QUICKSTART), *flags], program="rl")
    return resolve(config, Devices(cores=2))


def train_on(stepper: Stepper, config: RunConfig, step: int, rollouts: list[Rollout]) -> dict[str, float]:
    record = BatchRecord(step=step, rollouts=rollouts, dropped=[], state=State())
    return stepper.step(DealtBatch(record, world=1, capacity=row_capacity(config)).share(0))


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


class Sampler:
    """The policy of `lag` versions ago, on the environment's texts."""

    def __init__(self, config: RunConfig, lag: int) -> None:
        self._config = config
        self._lag = lag
        self._tokenizer = AutoTokenizer.from_pretrained(ROOT / config.model.name, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(ROOT / config.model.name, dtype=torch.float32).eval()
        self._kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)
        self._tasks = dataset(num_train=config.orchestrator.env[0].args["num_train"])

    def take_weights(self, version: int, tensors) -> None:
        self._kept.append((version, {name: tensor.clone() for name, tensor in tensors}))

    def rollouts(self, step: int) -> list[Rollout]:
        version, weights = self._kept[0]
        self._model.load_state_dict(weights, strict=False)  # a tied head comes once
        group_size = self._config.orchestrator.rollouts_per_example
        order = np.random.default_rng([self._config.seed, step]).permutation(len(self._tasks))
        chosen = [int(example) for example in order[: self._config.num_groups] for _ in range(group_size)]
        prompts = [self._prompt(self._tasks[example]["prompt"]) for example in chosen]
        answers = self._generate(prompts)
        return [
            Rollout(
                group=step * self._config.num_groups + place // group_size,
                place=place % group_size,
                attempt=0,
                env="reverse-text",
                example=example,
                reward=score(self._tokenizer.decode(ids, skip_special_tokens=True), self._tasks[example]["answer"]),
                samples=[_sample(prompt, ids, logprobs, version)],
                temperature=1.0,
                truncated=ids[-1] != self._model.generation_config.eos_token_id,
            )
            for place, (example, prompt, (ids, logprobs)) in enumerate(zip(chosen, prompts, answers, strict=True))
        ]

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(rendered, add_special_tokens=False)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Return the ids and logprobs of one answer to each prompt, end token included."""
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
        logprobs_NCV = torch.log_softmax(torch.stack(out.logits, dim=1), dim=-1)
        logprobs_NC = logprobs_NCV.gather(-1, ids_NC[..., None]).squeeze(-1)
        ended_NC = (ids_NC == self._model.generation_config.eos_token_id).int()
        lengths = (ids_NC.shape[1] - (ended_NC.cumsum(1) - ended_NC).sum(1)).tolist()
        return [
            (ids[:length].tolist(), logprobs[:length].tolist())
            for ids, logprobs, length in zip(ids_NC, logprobs_NC, lengths, strict=True)
        ]


def _sample(prompt: list[int], ids: list[int], logprobs: list[float], version: int) -> Tokens:
    given, sampled = len(prompt), len(ids)
    return build_tokens(
        ids=prompt + ids,
        loss_mask=[0] * given + [1] * sampled,
        logprobs=[0.0] * given + logprobs,
        advantages=[0.0] * (given + sampled),
        versions=[-1] * given + [version] * sampled,
    )


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

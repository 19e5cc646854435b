"""The policy as its own teacher: it is shown a demonstration, and then judges what it sampled without one.

Self-distillation fine-tuning (arXiv 2601.19897). The demonstration is a system message before the sample's own tokens,
which stay as they are, so no template renders them again. `algo.advantage` turns the difference of the logprobs into a
token's advantage, as with any other teacher.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Teacher as TeacherConfig
from trireme.journal.records import Rollout
from trireme.messages import Tokens
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.rollout.chat import ChatTokenizer

log = get_logger("teacher")


@dataclass(eq=False)
class SelfTeacher:
    """Asks the run's engines for logprobs, under the version that they serve when a batch is full."""

    config: TeacherConfig
    tokenizer: ChatTokenizer
    pool: InferencePool
    waits: Waits

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.config.max_concurrent)
        self._has_warned = False

    async def score(self, rollouts: list[Rollout]) -> None:
        """Fill `teacher` of each rollout: per sample [T] float32, NaN where the policy sampled nothing.

        Raises:
            ConfigError: a rollout has no demonstration.
            DeadlineExceeded: the engines took longer than all of these requests may, one after the other.
        """
        deadline_s = self.pool.timeout_s * max(1, len(rollouts))
        what = f"logprobs of {len(rollouts)} rollouts"
        with self.waits.waiting(what, peer="inference", deadline_s=deadline_s) as wait:

            async def score(rollout: Rollout) -> None:
                hint = self._hint(rollout)
                rollout.teacher = [await self._logprobs(hint, sample) for sample in rollout.samples]

            # A request without a live engine waits for one, however long that takes.
            try:
                async with asyncio.timeout(deadline_s):
                    await asyncio.gather(*map(score, rollouts))
            except TimeoutError:
                words = f"{wait}, longer than the {deadline_s:.0f} s allowed. Look at {wait.log}"
                raise DeadlineExceeded(words) from None

    def _hint(self, rollout: Rollout) -> list[int]:
        key = self.config.demonstration or ""
        shown = rollout.columns.get(key, rollout.answer if key == "answer" else None)
        if not isinstance(shown, str):
            raise ConfigError(
                f'orchestrator.teacher.demonstration = "{key}": example {rollout.example} of environment '
                f"{rollout.env!r} has {shown!r:.80} there - expected a text. It has: "
                f"{', '.join(rollout.state_keys) or 'an answer'}. Name another field, or add one to the examples."
            )
        content = self.config.template.replace("{demonstration}", shown)
        message = {"role": "system", "content": content}
        return self.tokenizer.encode(self.tokenizer.render([message], tools=None, generate=False))

    async def _logprobs(self, hint: list[int], sample: Tokens) -> np.ndarray:
        ids = hint + sample.ids.tolist()

        # vLLM samples a token after the prompt. Without room for it, the teacher says what the policy said.
        if len(ids) >= self.pool.max_model_len:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "a demonstration of %d tokens and a sample of %d do not fit into the %d of the engines: nothing is "
                    "learned from such samples - raise `seq_len`. This is logged once.",
                    len(hint),
                    sample.length,
                    self.pool.max_model_len,
                )
            found = sample.logprobs[1:]
        else:
            async with self._places:
                found = np.array((await self.pool.score(ids))[len(hint) :])
        # [T]: nothing precedes the first token that the policy was given, so it is none of its own.
        return np.where(sample.loss_mask > 0, np.array([np.nan, *found]), np.nan).astype(np.float32)

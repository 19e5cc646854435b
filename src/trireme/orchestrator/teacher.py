"""A teacher for distillation: any vLLM server with the same tokenizer.

It gets each sample of the policy as token ids and returns the logprob of each token, and `algo.advantage` turns the
difference into a token's advantage. Or it samples the turns of rollouts in place of the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
import numpy as np

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Teacher as TeacherConfig
from trireme.journal.model_turn import Turn
from trireme.journal.records import Rollout
from trireme.messages import Tokens
from trireme.orchestrator.engines.engine import words_of
from trireme.orchestrator.engines.generation import read_foreign_turn
from trireme.orchestrator.engines.pool import PromptTooLong, RequestRefused
from trireme.orchestrator.engines.responses import BadAnswer, Prompted, prompt_logprobs_of, read_choice
from trireme.orchestrator.rollout.chat import ChatTokenizer

log = get_logger("teacher")

T = TypeVar("T")

ATTEMPTS = 3
LATER = (408, 429)  # statuses with which a server asks for a retry
PAUSE_S = 1.0  # before a retry
UNCUT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Defaults of the run's sampling, sent because the server would take its model's own."""
PROBE = "Trireme: 3 banks of oars, 170 rowers.\n\tnaïve café"
"""Text that two different tokenizers are likely to split differently."""


@dataclass(eq=False)
class Teacher:
    """A client of the teacher's server."""

    config: TeacherConfig
    session: aiohttp.ClientSession
    waits: Waits
    model: str
    max_model_len: int  # longest context of the policy; the teacher's is longer
    vocab_size: int | None = None  # size of the policy's vocabulary

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.config.max_concurrent)

    async def score(self, rollouts: list[Rollout]) -> None:
        """Fill `teacher` of each rollout: per sample [T] float32, NaN where the policy sampled nothing.

        Raises: PeerDied if it does not answer, after several attempts, or refuses a sample.
        """
        deadline_s = ATTEMPTS * (self.config.timeout_s + PAUSE_S) * max(1, len(rollouts))
        with self.waits.waiting(f"logprobs of {len(rollouts)} rollouts", peer="teacher", deadline_s=deadline_s):

            async def score(rollout: Rollout) -> None:
                rollout.teacher = [await self._logprobs(sample) for sample in rollout.samples]

            await asyncio.gather(*map(score, rollouts))

    async def generate(self, ids: list[int], sampling: dict[str, Any]) -> Turn:
        """Sample one turn. Its tokens have the version -1, as no version of the policy sampled them.

        Raises:
            PromptTooLong: `ids` fills the policy's context.
            RequestRefused: the server takes the request for invalid.
            PeerDied: it does not answer, after several attempts.
        """
        room = self.max_model_len - len(ids)
        if room <= 0:
            raise PromptTooLong(f"The prompt has {len(ids)} tokens, the model takes {self.max_model_len}.")
        max_tokens = min(room, sampling.get("max_tokens") or room)
        asked = {"prompt": ids, "max_tokens": max_tokens, "logprobs": 0, "return_token_ids": True}
        read = partial(read_foreign_turn, max_tokens=max_tokens, vocab_size=self.vocab_size)

        turn = await self._ask("a prompt", UNCUT | sampling | asked, read)
        if turn.finish_reason == "length":
            turn.cut = "context_full" if max_tokens == room else "max_tokens"
        return turn

    async def _logprobs(self, sample: Tokens) -> np.ndarray:
        ids = sample.ids.tolist()
        # vLLM samples at least one token; only the logprobs of the prompt are used.
        body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        try:
            found = await self._ask("a sample", body, lambda data: prompt_logprobs_of(read_choice(data, Prompted), ids))
        except RequestRefused as error:
            raise PeerDied(
                f"The teacher at {self.config.base_url} refused a sample of {len(ids)} tokens: {error} - logprobs were "
                "expected. Serve it as it was when the run began; the run continues where it was with --resume."
            ) from error
        # [T]: nothing precedes the first token, so it has no logprob.
        return np.where(sample.loss_mask > 0, np.array([np.nan, *found]), np.nan).astype(np.float32)

    async def _ask(self, what: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        """Post a request until there is an answer that makes sense. Raises: RequestRefused, PeerDied."""
        body, last = {"model": self.model} | body, ""

        for attempt in range(ATTEMPTS):
            try:
                async with self._places, self.session.post(f"{_base(self.config)}/completions", json=body) as response:
                    data = await response.read()

                    # The server would refuse the same request again, so this is not retried.
                    if 400 <= response.status < 500 and response.status not in LATER:
                        raise RequestRefused(response.status, words_of(data))
                    if response.status >= 400:
                        raise BadAnswer(f"status {response.status}: {words_of(data)}")
                    return read(data)
            except (aiohttp.ClientError, TimeoutError, BadAnswer) as error:
                last = f"{type(error).__name__}: {error}"
                log.warning("teacher at %s, attempt %d: %s", self.config.base_url, attempt + 1, last)
                await asyncio.sleep(PAUSE_S)

        raise PeerDied(
            f"The teacher at {self.config.base_url} did not answer {what} of {len(body['prompt'])} tokens in "
            f"{ATTEMPTS} attempts ({last}) - an answer within {self.config.timeout_s:.0f} s was expected. See its log; "
            "the run continues where it was with --resume."
        )


@asynccontextmanager
async def open_teacher(
    config: TeacherConfig, tokenizer: ChatTokenizer, waits: Waits, *, max_model_len: int
) -> AsyncIterator[Teacher]:
    """Connect to a teacher of the run.

    Raises: ConfigError if it does not answer, has another tokenizer than the policy, or no longer context than
        the policy (`max_model_len`).
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=config.timeout_s)) as session:

        async def ask(method: str, url: str, **how: Any) -> Any:
            async with session.request(method, url, raise_for_status=True, **how) as response:
                return await response.json()

        try:
            model = config.model or (await ask("GET", f"{_base(config)}/models"))["data"][0]["id"]
            body = {"model": model, "prompt": PROBE, "add_special_tokens": False}
            answer = await ask("POST", f"{_base(config).removesuffix('/v1')}/tokenize", json=body)
            theirs, longest = answer["tokens"], int(answer["max_model_len"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"The teacher at {config.base_url} does not answer as vLLM does: {type(error).__name__}: {error} "
                "- a running vLLM server was expected, its address with /v1 at the end. Start it, or correct "
                "`orchestrator.teacher.base_url`."
            ) from error

        # Under another tokenizer the same ids are another text, and the logprobs would be wrong without an error.
        ours = tokenizer.encode(PROBE)
        if theirs != ours:
            raise ConfigError(
                f"The teacher at {config.base_url} ({model}) reads {PROBE!r} as the tokens "
                f"{str(theirs)[:80]}, the policy as {str(ours)[:80]} - the same tokenizer was expected, because it is "
                "asked about the policy's own tokens. Serve a teacher of the same family, or leave out "
                "`[orchestrator.teacher]`."
            )

        if longest <= max_model_len:  # it refuses a prompt that fills its context
            raise ConfigError(
                f"The teacher at {config.base_url} ({model}) has a context of {longest} tokens, the policy one of "
                f"{max_model_len} - a longer one was expected, because vLLM needs room for a token after each sample. "
                f"Serve the teacher with `--max-model-len {max_model_len + 1}`, or lower "
                "`inference.model.max_model_len`."
            )
        log.info("teacher %s at %s", model, config.base_url)
        yield Teacher(config, session, waits, model, max_model_len, tokenizer.vocab_size)


def _base(config: TeacherConfig) -> str:
    assert config.base_url, "refused by the rules"
    return config.base_url.rstrip("/")

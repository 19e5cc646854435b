"""Limit the conversations under way by what the engines' KV caches hold, with congestion control as TCP has it.

With too many conversations, engines preempt requests and evict what is about to continue, and compute both again. With
too few they are idle. The right number depends on lengths and pauses that no configuration knows. A window finds it:

- The oldest conversations, as many as it holds, have their turns. Younger ones wait, with their first turn or the next.
- It begins with those that fit if each fills the model's context. While some wait and engines are calm, it grows by 1
  for each that ends, so it doubles while as many end as it holds (slow start); by 0.4 once requests have taken half of
  a cache or there was congestion.
- Congestion shrinks it to 0.8 of those that fit. Signs are preemptions, requests that wait for a full cache, and tokens
  of conversations that were evicted, by the share of the engines' time in which they are computed again: slow tools
  leave them time. It shrinks again once that shows: no more are under way than it holds, and each has had a turn.

If no engine reports its KV cache, the window is infinite. `max_concurrent` limits requests, with a window or without.
Admitting agents by additive increase and multiplicative decrease is from CONCUR (arXiv 2601.22705). We deviate in the
pace, that of conversations that end, as one more shows its size only then; and in weighing evictions by time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from trireme.base.waiting import Wait, Waits
from trireme.journal.model_turn import Turn
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import Load

SHRINK, GROW, GROW_AT_FIRST = 0.8, 0.4, 1.0
AGAIN = (0.05, 0.2)  # share of the engines' time for evicted tokens: calm below the first, congested above the second
FULL, HALF = 0.9, 0.5  # shares of a KV cache
PARTIAL = 256  # tokens that a cache may lack of a conversation without an eviction: incomplete blocks


@dataclass(eq=False)
class Window:
    """Waits for: the end of conversations. Woken by: that, and changes of engines."""

    live_engines: Callable[[], list[Engine]]
    waits: Waits
    max_model_len: int
    token_s: Callable[[], float]  # returns the seconds in which an engine computes a token of a prompt
    width: float = math.inf  # conversations per engine core
    conversations: dict[int, int] = field(default_factory=dict)  # epochs of their last turns, the oldest number first
    waiting: dict[int, asyncio.Event] = field(default_factory=dict)  # those that wait for a turn, or to begin
    num_preemptions: int = 0  # since the batch before
    _newest: float = math.inf  # number of the youngest conversation that has its turns
    _num_joined: int = 0
    _epoch: int = 0  # counts changes of engines, which may empty caches; -1: may have been evicted while it waited
    _is_calm: bool = True
    _grow: float = GROW_AT_FIRST
    _num_unsettled: int = 0  # turns until the last change shows
    _round: tuple[int, float, float] = (0, 0.0, -math.inf)  # turns, seconds for evicted tokens, begin
    _line: ExitStack = field(default_factory=ExitStack)  # holds the one wait of all that wait
    _wait: Wait | None = None

    @property
    def size(self) -> float:
        return max(1.0, self.width * self._num_cores())

    def join(self) -> int:
        """Return the number of a new conversation."""
        self._num_joined += 1
        self.conversations[self._num_joined] = -1
        self._admit()
        return self._num_joined

    def leave(self, number: int) -> None:
        del self.conversations[number]
        is_pressed = any(each.waiting or each.kv_usage > FULL for each in self._loads())

        # One that is cancelled while it waits leaves no more room than before.
        if self.waiting and number not in self.waiting and self._is_calm and not is_pressed:
            self.width += self._grow / self._num_cores()
        self._admit()

    def may_go(self, number: int) -> bool:
        return number <= self._newest or number not in self.conversations

    async def wait_for_turn(self, number: int) -> None:
        """Wait for older conversations. Each of them has a timeout, so this needs none."""
        while not self.may_go(number):
            self.conversations[number] = -1
            if not self.waiting:
                self._wait = self._line.enter_context(self.waits.waiting("a place", peer="inference", deadline_s=0.0))
            await self.waiting.setdefault(number, asyncio.Event()).wait()

    def learn(self, number: int, num_prompt: int, num_known: int, turn: Turn) -> None:
        """Take the answer to a turn into account.

        Args:
            num_known: tokens of the prompt that the conversation had up to its last turn.
        """
        num_turns, again_s, began = self._round
        num_evicted = 0 if turn.num_computed is None else num_known + turn.num_computed - num_prompt - len(turn.ids)
        if num_evicted > PARTIAL and self.conversations.get(number) == self._epoch:
            again_s += num_evicted * self.token_s()
        if number in self.conversations:
            self.conversations[number] = self._epoch
        self._num_unsettled -= 1
        self._round = num_turns + 1, again_s, began

        # A round is as long as all that are under way take for a turn.
        if num_turns >= max(8, self._num_active()):
            now = asyncio.get_running_loop().time()
            share = again_s / max(1.0, now - began) / self._num_cores()
            self._is_calm, self._round = share < AGAIN[0], (0, 0.0, now)
            if share > AGAIN[1]:
                self._shrink()

    def observe(self, engine: Engine, load: Load | None) -> None:
        """Take an engine's load into account; None if it does not tell."""
        before, engine.load = engine.load, load
        if load is None:
            return
        load.epoch = self._epoch
        if self.width == math.inf:
            self.width = load.kv_tokens / self.max_model_len / engine.num_cores

        # An update of the weights makes an engine preempt what it runs, which is no congestion.
        num_new = load.preemptions - before.preemptions if before and before.epoch == self._epoch else 0
        self.num_preemptions += num_new
        if load.kv_usage > HALF:
            self._grow = GROW
        if num_new or (load.waiting and load.kv_usage > FULL):
            self._shrink()
        self._admit()

    def engines_changed(self) -> None:
        """Count the engines again: one has gone live, or is not live any more."""
        self._epoch += 1
        self._admit()

    def _loads(self) -> list[Load]:
        return [engine.load for engine in self.live_engines() if engine.load]

    def _num_cores(self) -> int:
        return max(1, sum(engine.num_cores for engine in self.live_engines()))

    def _num_active(self) -> int:
        return len(self.conversations) - len(self.waiting)

    def _shrink(self) -> None:
        num_active = self._num_active()
        if self._num_unsettled > 0 or num_active > self.size + 1:
            return
        num_fitting = min(num_active, self.size) - sum(load.waiting for load in self._loads())
        self.width = SHRINK * max(1, num_fitting) / self._num_cores()
        self._grow, self._is_calm, self._num_unsettled = GROW, False, num_active
        self._round = 0, 0.0, asyncio.get_running_loop().time()

    def _admit(self) -> None:
        """Let the oldest conversations have their turns, as many as the window holds."""
        self._newest = math.inf
        if len(self.conversations) > (size := self.size):
            self._newest = next(islice(self.conversations, int(size) - 1, None))
        if not self.waiting:
            return

        # The wait of all begins again whenever one goes on.
        assert self._wait is not None, f"{len(self.waiting)} conversations wait without a wait"
        for each in [each for each in self.waiting if self.may_go(each)]:
            self.waiting.pop(each).set()
            self._wait.since = time.monotonic()
        used = max((load.kv_usage for load in self._loads()), default=0.0)
        self._wait.note = (
            f"{len(self.waiting)} rollouts wait for a place: window {int(self.size)} of {len(self.conversations)}, "
            f"growing as they end, KV cache {used:.0%} full, {self.num_preemptions} preemptions since the last batch"
        )
        if not self.waiting:
            self._line.close()

    def take_metrics(self) -> dict[str, float]:
        """Return what is now, and counts since the last call; nothing without an engine that reports its load."""
        if not (loads := self._loads()):
            return {}
        num_preemptions, self.num_preemptions = self.num_preemptions, 0
        return {
            "window/size": self.size,
            "window/waiting": len(self.waiting),
            "window/kv_used_frac": sum(load.kv_usage for load in loads) / len(loads),
            "window/requests_waiting": sum(load.waiting for load in loads),
            "window/preemptions": num_preemptions,
        }

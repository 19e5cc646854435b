"""Choose the engine that will answer a request soonest, by what its prefix cache holds and by its load.

An engine keeps what it has computed of a conversation until its caches are emptied. A prompt that begins in the same
way is computed only from there on, if it goes to the same engine (and the same core: each data-parallel replica has a
cache of its own). A request goes to the core with the least

    requests in flight * seconds per request + tokens of the prompt that it has not computed * seconds per token

so a conversation stays where it is known until waiting there would take longer than computing it elsewhere, and the
members of a group share a long prompt but are spread if it is short. Both factors are measured over all engines:

- seconds per request: by how much one request more on a core delays an answer, which is the slope of the seconds per
  sampled token over the requests that shared the core, times the tokens of an answer. It lies between nothing (a GPU
  samples for many as fast as for one) and an equal part of the answer's time (a full queue, or a CPU);
- seconds per token: the slope of the time until the first token over the tokens computed for it, as engines report it.

What a core holds is recorded at the end of each prompt and each turn, in whole blocks of 32 tokens. The record names
the engine's process and the salt of the cache, a version of the weights: a restart invalidates it, and an update too
unless caches are kept (`inference.keep_prefix_cache`). What an engine evicts is not known. So a record counts as much
as records of late were confirmed by the cached tokens that engines reported: an engine that caches nothing is chosen by
its load alone. One that is not live is not among those to choose from, so that its conversations move.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trireme.journal.model_turn import Turn
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import Response

BLOCK = 32
MOST_PREFIXES = 1 << 16  # the ends of prompts and turns that are remembered, the newest ones
NEWEST = 0.01  # weight of a new measurement in the running means
LEAST = 0.1  # part of an equal share that one request more costs at least, so that requests never pile up

Cache = tuple[str, int, int, int]
"""Contents of a prefix cache: address and core, process and salt.

A request of salt v reads only what others of salt v have left. It is sent when the engine has version v or a later one,
so nothing that it reads is older than v.
"""


class Place(NamedTuple):
    """One core of an engine."""

    engine: Engine
    core: int
    num_held: int = 0  # tokens of the prompt that its cache is taken to hold
    salt: int = 0  # name of that cache: a version that the engine has, or has had

    @property
    def load(self) -> int:
        return self.engine.in_flight_by_core[self.core]


def oldest_readable(engine: Engine, since: int | None) -> int:
    """Return the oldest salt under which an engine may look for the beginning of a prompt, see `Affinity.choose`."""
    version = engine.version or 0
    return version if since is None else max(engine.cached_since, min(since, version))


def prefix_hashes(ids: list[int], earlier: list[int] | None = None) -> list[int]:
    """Return a hash of all tokens up to the end of each whole block.

    Args:
        earlier: hashes of the first blocks, which are known.
    """
    hashes = list(earlier or ())
    last = hashes[-1] if hashes else 0
    for end in range((len(hashes) + 1) * BLOCK, len(ids) + 1, BLOCK):
        last = hash((last, *ids[end - BLOCK : end]))
        hashes.append(last)
    return hashes


@dataclass
class Affinity:
    """Keeps what the engines' caches hold and how fast engines are, and chooses by it."""

    request_s: float = 1.0  # before the first answer: long, so that the load decides
    token_s: float = 1e-4  # before the first report
    hit_frac: float = 1.0  # share of the tokens taken to be held that were
    # caches that hold a prefix, by its hash
    _caches: OrderedDict[int, tuple[Cache, ...]] = field(default_factory=OrderedDict)
    _num_answers: int = 0
    # running means: load, seconds per sampled token, load squared, the product of both, sampled tokens
    _sampling: tuple[float, ...] = (0.0,) * 5
    _prefill: tuple[float, float] = (0.0, 0.0)  # running means: seconds times tokens, tokens squared

    def choose(self, engines: list[Engine], hashes: Sequence[int], num_tokens: int, since: int | None = None) -> Place:
        """Return the core that will answer a prompt first. Equal ones are taken in their order.

        Args:
            hashes: `prefix_hashes` of the prompt; empty if engines may not use their caches for it.
            num_tokens: tokens of the prompt.
            since: the oldest version whose caches the prompt may read; None: only those of the engine's own version.
        """
        if since is None and len(engines) == 1 and engines[0].num_cores == 1:
            return Place(engines[0], 0, salt=engines[0].version or 0)

        # The longest prefix that each core holds, of those that may be read, with its salt.
        readable = {each.url: (each.life, oldest_readable(each, since), each.version or 0) for each in engines}
        held: dict[tuple[str, int], tuple[int, int]] = {}
        for number in range(len(hashes), 0, -1):
            for url, core, life, salt in self._caches.get(hashes[number - 1], ()):
                now, oldest, newest = readable.get(url, (-1, 0, 0))
                if life == now and oldest <= salt <= newest:
                    held.setdefault((url, core), (number * BLOCK, salt))

        # The wait at each of them, less what it has computed already.
        best, least_s = None, math.inf
        for engine in engines:
            for core in range(engine.num_cores):
                num_held, salt = held.get((engine.url, core), (0, engine.version or 0))
                to_compute = num_tokens - self.hit_frac * num_held
                seconds = engine.in_flight_by_core[core] * self.request_s + to_compute * self.token_s
                if best is None or seconds < least_s:
                    best, least_s = Place(engine, core, num_held, salt), seconds
        assert best is not None, "no engine to choose from"
        return best

    def send(self, place: Place, hashes: list[int]) -> int:
        """Note that a prompt is sent to a core. Returns how many requests share the core then."""
        self.record(place, hashes)
        return place.load + 1

    def record(self, place: Place, hashes: list[int]) -> None:
        """Note that a core holds a prefix, or will once it has computed what is under way."""
        if not hashes:
            return
        cache = (place.engine.url, place.core, place.engine.life, place.salt)
        others = (each for each in self._caches.pop(hashes[-1], ()) if each[:2] != cache[:2])
        self._caches[hashes[-1]] = (*others, cache)
        if len(self._caches) > MOST_PREFIXES:
            self._caches.popitem(last=False)

    def learn(
        self,
        place: Place,
        hashes: list[int],
        ids: list[int],
        turn: Turn,
        response: Response,
        *,
        seconds: float,
        load: int,
    ) -> None:
        """Take the answer to a prompt into account.

        Args:
            place: as it was chosen.
            hashes: of the prompt.
            ids: the prompt.
            seconds: until the whole answer.
            load: requests that shared the core when the prompt was sent.
        """
        # An update in the middle that empties the caches makes the engine compute everything again.
        version = place.engine.version or 0
        is_kept = place.salt >= place.engine.cached_since
        if hashes and turn.versions and (is_kept or turn.versions[-1] == version):
            holding = place if is_kept else place._replace(salt=version)
            self.record(holding, hashes)
            self.record(holding, prefix_hashes(ids + turn.ids, hashes))
        if turn.versions and turn.versions[0] == turn.versions[-1]:
            load = max(load, place.load + 1)
            self.measure(place, len(ids), len(turn.ids), response, seconds=seconds, load=load)

    def measure(
        self, place: Place, num_prompt: int, num_sampled: int, response: Response, *, seconds: float, load: int
    ) -> None:
        """Measure how fast engines are, and how far records can be trusted, by an answer that no update met.

        Args:
            load: requests that shared the core, this one included.
        """
        self._num_answers += 1
        weight = max(NEWEST, 1 / self._num_answers)
        prefill_s, num_cached = response.prefill_s, response.num_cached
        rate = (seconds - (prefill_s or 0.0)) / num_sampled
        now = (load, rate, load**2, load * rate, num_sampled)
        self._sampling = tuple(mean + weight * (new - mean) for mean, new in zip(self._sampling, now, strict=True))

        mean_load, mean_rate, squared, product, mean_sampled = self._sampling
        equal_part, variance = mean_rate / mean_load, squared - mean_load**2
        slope = (product - mean_load * mean_rate) / variance if variance > 1e-6 * squared else equal_part
        self.request_s = mean_sampled * min(max(slope, LEAST * equal_part), equal_part)

        if num_cached is not None and place.num_held:
            self.hit_frac += weight * (min(1.0, num_cached / place.num_held) - self.hit_frac)

        # The square makes long prompts count: the time of short ones is that of an iteration, however many tokens.
        num_computed = num_prompt - (num_cached or 0)
        if prefill_s is not None and num_computed > 0:
            before, new = self._prefill, (prefill_s * num_computed, num_computed**2)
            self._prefill = before[0] + weight * (new[0] - before[0]), before[1] + weight * (new[1] - before[1])
            self.token_s = self._prefill[0] / self._prefill[1]

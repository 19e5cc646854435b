"""One rollout token by token: what engine and trainer said of each, and the text as HTML, coloured by one quantity.

Pure but for reading the batch. Whatever a model wrote is text: nothing of it is taken for HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from trireme.base.paths import RunPaths
from trireme.journal.logprobs import logprobs_of, read_logprobs
from trireme.journal.records import BatchRecord, Rollout
from trireme.messages import Tokens
from trireme.tools.dashboard.rollout_table import list_batches, name_of
from trireme.tools.rollouts import Record, clean, read_batch, record_of_rollout, row_of
from trireme.tools.tokenizer import find_decoder, pieces, visible

RARE = 0.007
"""A probability that has the strongest colour, as everything below."""
WIDE = math.log(2.0)
"""The logarithm of a ratio that has the strongest colour, as everything beyond."""
RED, GREEN, BLUE, VIOLET = (212, 51, 74), (15, 157, 107), (34, 139, 230), (124, 92, 255)
VERSIONS = ((34, 139, 230), (124, 92, 255), (15, 157, 107), (240, 140, 0), (228, 73, 128), (14, 165, 160))

Colour = tuple[tuple[int, int, int], float]  # and how strong, from 0 to 1
NO_COLOUR: Colour = (RED, 0.0)


@dataclass(frozen=True)
class TokenColumns:
    """All that is known of the tokens of one sample."""

    ids: np.ndarray  # [T] int32
    texts: list[str]  # [T]
    sampled: np.ndarray  # [T] bool: by the policy
    trained: np.ndarray  # [T] bool: in the loss
    engine: np.ndarray  # [T] float32, log p when it was sampled; NaN where it was not
    trainer: np.ndarray  # [T] float32, log p of the weights that were trained on it; NaN where it is not known
    advantages: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, -1 where it was not sampled
    rewards: np.ndarray  # [T] float32, NaN where the token was given none
    teacher: np.ndarray  # [T] float32, NaN where there is none
    kept: np.ndarray  # [T] int32: tokens that a cut sampler chose among, 0 where it was not cut

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def ratios(self) -> np.ndarray:
        """[T] probability under the weights being trained over that under the engine's."""
        return np.exp(self.trainer.astype(np.float64) - self.engine)

    @property
    def has_trainer(self) -> bool:
        return bool(np.isfinite(self.trainer).any())


@dataclass(frozen=True)
class LoadedRollout:
    """One rollout of a batch, beside those of its group."""

    step: int
    rollout: Rollout
    record: Record
    samples: list[TokenColumns]
    group: list[tuple[int, Rollout]]  # number in the batch, itself among them
    has_texts: bool  # the run's tokenizer is on this machine


@lru_cache(maxsize=4)
def _batch(journal: Path, step: int, file: str) -> tuple[BatchRecord | None, str]:
    return read_batch(journal / name_of(step))


def batch_of(run: Path, step: int) -> tuple[BatchRecord | None, str]:
    """And what is wrong with it. The newest that were looked at are kept."""
    journal = RunPaths(run).journal
    file = list_batches(journal, step).get(step, "")
    return _batch(journal, step, file) if file else (None, f"There is no batch {step} in {journal}.")


def load_rollout(run: Path, step: int, number: int) -> LoadedRollout | str:
    """What is wrong where it cannot be had."""
    record, trouble = batch_of(run, step)
    if record is None:
        return trouble
    if not 0 <= number < len(record.rollouts):
        return f"Batch {step} has rollouts 0 to {len(record.rollouts) - 1}, not {number}: those dropped have no tokens."
    rollout = record.rollouts[number]
    decode = find_decoder(run)
    said = read_logprobs(RunPaths(run).logprobs, step)
    samples = [
        columns_of(rollout, place, pieces(sample.ids.tolist(), decode), said)
        for place, sample in enumerate(rollout.samples)
    ]
    group = [(place, one) for place, one in enumerate(record.rollouts) if one.group == rollout.group]
    found = record_of_rollout(row_of(number, rollout), rollout)
    return LoadedRollout(step, rollout, found, samples, group, has_texts=decode is not None)


def columns_of(rollout: Rollout, place: int, texts: list[str], said: dict[bytes, np.ndarray]) -> TokenColumns:
    """Of sample `place` of the rollout."""
    sample = rollout.samples[place]
    sampled = sample.loss_mask.astype(bool)
    nothing = np.full(sample.length, np.nan, np.float32)
    trainer = None if rollout.masked else logprobs_of(sample, said)
    return TokenColumns(
        ids=sample.ids,
        texts=texts,
        sampled=sampled,
        trained=sampled & (rollout.masked is None),
        engine=np.where(sampled, sample.logprobs, np.nan),
        trainer=nothing if trainer is None else trainer,
        advantages=sample.advantages,
        versions=sample.versions,
        rewards=_column(rollout.token_rewards, place, nothing),
        teacher=_column(rollout.teacher, place, nothing),
        kept=_kept(sample),
    )


def _column(columns: Sequence[np.ndarray], place: int, nothing: np.ndarray) -> np.ndarray:
    found = columns[place] if place < len(columns) else nothing
    return found if len(found) == len(nothing) else nothing


def _kept(sample: Tokens) -> np.ndarray:
    return sample.kept.counts if sample.kept is not None else np.zeros(sample.length, np.int32)


# colours


def _by_rarity(logprob: float) -> Colour:
    return (RED, _visible(logprob / math.log(RARE))) if math.isfinite(logprob) else NO_COLOUR


def _visible(share: float) -> float:
    """The root: most tokens are likely, and what little they differ should be seen."""
    return math.sqrt(max(0.0, min(1.0, share)))


def _by_sign(value: float, scale: float) -> Colour:
    return (GREEN if value > 0 else RED, min(1.0, abs(value) / scale)) if math.isfinite(value) else NO_COLOUR


def _by_ratio(columns: TokenColumns, place: int) -> Colour:
    difference = float(columns.trainer[place] - columns.engine[place])
    if not math.isfinite(difference):
        return NO_COLOUR
    return (BLUE if difference > 0 else RED), _visible(abs(difference) / WIDE)


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(np.abs(values), initial=0.0)) or 1.0


def _by_version(columns: TokenColumns, place: int) -> Colour:
    version = int(columns.versions[place])
    return (VERSIONS[version % len(VERSIONS)], 0.7) if version >= 0 else NO_COLOUR


COLOURS: dict[str, tuple[str, Callable[[TokenColumns, int], Colour]]] = {
    "engine": (
        "redder: the engine thought it less likely when it was sampled (strongest at p = 0.007 or less)",
        lambda columns, place: _by_rarity(float(columns.engine[place])),
    ),
    "trainer": (
        "redder: the trainer's weights thought it less likely before the step (strongest at p = 0.007 or less)",
        lambda columns, place: _by_rarity(float(columns.trainer[place])),
    ),
    "ratio": (
        "blue: likelier under the trainer than under the engine; red: less (strongest at twice or half)",
        _by_ratio,
    ),
    "advantage": (
        "green: made more likely by this batch; red: less",
        lambda columns, place: _by_sign(float(columns.advantages[place]), _largest(columns.advantages)),
    ),
    "version": ("a colour for each version of the policy that sampled", _by_version),
    "mask": (
        "violet: sampled and trained on; faint: given to the model, or masked",
        lambda columns, place: (VIOLET, 0.5 if columns.trained[place] else 0.0),
    ),
    "reward": (
        "green and red: rewards of single tokens, where the environment gives them",
        lambda columns, place: _by_sign(float(columns.rewards[place]), _largest(columns.rewards)),
    ),
}
"""What tokens are coloured by: what the colours mean, and the colour of a token."""


def colours_of(samples: Sequence[TokenColumns]) -> list[str]:
    """Those that would show something."""
    missing = set()
    if not any(sample.has_trainer for sample in samples):
        missing |= {"trainer", "ratio"}
    if not any(np.isfinite(sample.rewards).any() for sample in samples):
        missing |= {"reward"}
    return [name for name in COLOURS if name not in missing]


# HTML


def token_html(columns: TokenColumns, colour: str, window: range, *, step: int) -> str:
    """A `span` of each token; what is known of it stands in `data-t`, which the style sheet shows under the pointer."""
    colour_of = COLOURS[colour][1]
    return "".join(_span(columns, place, colour_of(columns, place), step) for place in window)


def _span(columns: TokenColumns, place: int, colour: Colour, step: int) -> str:
    (red, green, blue), strength = colour
    style = f' style="background:rgba({red},{green},{blue},{0.75 * strength:.2f})"' if strength > 0.03 else ""
    given = "" if columns.sampled[place] else " given"
    told = html.escape("\n".join(lines_of(columns, place, step=step)), quote=True).replace("\n", "&#10;")
    text = html.escape(visible(columns.texts[place])).replace("\n", "<br>")
    return f'<span class="tr-token{given}"{style} data-t="{told}">{text}</span>'


def lines_of(columns: TokenColumns, place: int, *, step: int) -> Iterator[str]:
    """All that is known of one token."""
    yield f"token {place + 1} of {columns.length}: {clean(columns.texts[place])!r}, id {int(columns.ids[place])}"
    if not columns.sampled[place]:
        yield "given to the model, not sampled"
        return
    version = int(columns.versions[place])
    yield f"engine   {_probability(columns.engine[place])}"
    yield f"trainer  {_probability(columns.trainer[place])}"
    ratio = float(columns.ratios[place]) if math.isfinite(columns.trainer[place]) else math.nan
    yield f"ratio    {'not known' if math.isnan(ratio) else f'{ratio:.4f}'}"
    yield f"advantage {float(columns.advantages[place]):+.4f}"
    yield f"version  {version}, lag {step - version}"
    yield "trained on" if columns.trained[place] else "masked: not trained on"
    if math.isfinite(columns.rewards[place]):
        yield f"reward   {float(columns.rewards[place]):+.4f}"
    if math.isfinite(columns.teacher[place]):
        yield f"teacher  {_probability(columns.teacher[place])}"
    if columns.kept[place]:
        yield f"chosen among {int(columns.kept[place])}"


def _probability(logprob: float) -> str:
    if not math.isfinite(logprob):
        return "not known"
    return f"p {math.exp(min(0.0, logprob)):.4f} (logprob {float(logprob):.4f})"


@dataclass(frozen=True)
class TokenFigures:
    """Of a sample's tokens that were sampled, in numbers. None where nothing is known."""

    sampled: int
    mean_p: float | None  # geometric, under the engine
    mean_ratio: float | None
    farthest: float | None  # ratio, from 1 in either direction
    versions: list[int]


def figures_of(columns: TokenColumns) -> TokenFigures:
    engine = columns.engine[np.isfinite(columns.engine)]
    ratios = columns.ratios[np.isfinite(columns.ratios)]
    return TokenFigures(
        sampled=int(columns.sampled.sum()),
        mean_p=math.exp(float(engine.mean())) if len(engine) else None,
        mean_ratio=float(ratios.mean()) if len(ratios) else None,
        farthest=float(ratios[np.argmax(np.abs(np.log(ratios)))]) if len(ratios) else None,
        versions=sorted({int(version) for version in columns.versions[columns.sampled]}),
    )

"""All that is known of each token of a rollout, for the dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trireme.base.paths import RunPaths
from trireme.base.safe_text import clean
from trireme.journal.logprobs import logprobs_of, read_logprobs
from trireme.journal.records import Rollout
from trireme.tools.tokenizer import find_decoder, sample_pieces

RARE = 0.007  # a probability that has the strongest colour, as all below it
WIDE = math.log(2.0)  # the logarithm of a ratio that has the strongest colour, as all beyond it
FAINTEST = 0.03  # share of the strongest colour that can be seen
RED, GREEN, BLUE, VIOLET = (212, 51, 74), (15, 157, 107), (34, 139, 230), (124, 92, 255)
VERSIONS = (BLUE, VIOLET, GREEN, (240, 140, 0), (228, 73, 128), (14, 165, 160))


@dataclass(frozen=True)
class TokenColumns:
    """All that is known of the T tokens of one sample."""

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
        """[T] float64: probability under the weights being trained over that under the engine's."""
        return np.exp(self.trainer.astype(np.float64) - self.engine)

    @property
    def has_trainer(self) -> bool:
        return bool(np.isfinite(self.trainer).any())


def load_columns(run: Path, step: int, rollout: Rollout) -> tuple[list[TokenColumns], bool]:
    """Return the columns of each sample of a rollout, and whether the run's tokenizer is on this machine. Blocks."""
    decode, known = find_decoder(run), read_logprobs(RunPaths(run).logprobs, step)
    columns = [
        columns_of(rollout, place, sample_pieces(sample, decode), known) for place, sample in enumerate(rollout.samples)
    ]
    return columns, decode is not None


def columns_of(rollout: Rollout, place: int, texts: list[str], known: dict[bytes, np.ndarray]) -> TokenColumns:
    """Return the columns of sample `place`.

    Args:
        known: the trainer's logprobs, by sample.
    """
    sample = rollout.samples[place]
    sampled = sample.loss_mask.astype(bool)
    unknown = np.full(sample.length, np.nan, np.float32)
    trainer = None if rollout.masked else logprobs_of(sample, known)

    def column(columns: Sequence[np.ndarray]) -> np.ndarray:
        found = columns[place] if place < len(columns) else unknown
        return found if len(found) == sample.length else unknown

    return TokenColumns(
        ids=sample.ids,
        texts=texts,
        sampled=sampled,
        trained=sampled & (rollout.masked is None),
        engine=np.where(sampled, sample.logprobs, np.nan),
        trainer=unknown if trainer is None else trainer,
        advantages=sample.advantages,
        versions=sample.versions,
        rewards=column(rollout.token_rewards),
        teacher=column(rollout.teacher),
        kept=np.zeros(sample.length, np.int32) if sample.kept is None else sample.kept.counts,
    )


def summary(columns: TokenColumns) -> str:
    """Return the figures of a sample's sampled tokens. The mean of p is geometric, under the engine.

    Example:
        97 tokens, 57 sampled by version 11 · mean p 0.812 · ratio 1.0010 on average, 1.1040 farthest from 1
    """
    versions = sorted({int(version) for version in columns.versions[columns.sampled]})
    engine = columns.engine[np.isfinite(columns.engine)]
    ratios = columns.ratios[np.isfinite(columns.ratios)]
    text = f"{columns.length} tokens, {int(columns.sampled.sum())} sampled"
    if versions:
        text += f" by version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"
    if len(engine):
        text += f" · mean p {math.exp(float(engine.mean())):.3f}"
    if len(ratios):
        farthest = ratios[np.argmax(np.abs(np.log(ratios)))]
        text += f" · ratio {ratios.mean():.4f} on average, {farthest:.4f} farthest from 1"
    return text


# colours

COLOURS = {
    "engine": "redder: the engine thought it less likely when it was sampled (strongest at p = 0.007 or less)",
    "trainer": (
        "redder: the trainer's weights thought it less likely before the step (strongest at p = 0.007 or less)"
    ),
    "ratio": "blue: likelier under the trainer than under the engine; red: less (strongest at twice or half)",
    "advantage": "green: made more likely by this batch; red: less",
    "version": "a colour for each version of the policy that sampled",
    "mask": "violet: sampled and trained on; faint: given to the model, or masked",
    "reward": "green and red: rewards of single tokens, where the environment gives them",
}
"""Quantities to colour tokens by, with the meaning of the colours."""

RGB = tuple[int, int, int]


def shades_of(columns: TokenColumns, colour: str) -> list[tuple[RGB, float]]:
    """Return a colour for each token, and its strength from 0 to 1.

    Probabilities and ratios are shown by the root of their logarithm: most tokens are likely, and most ratios near 1.
    """
    if colour == "version":
        return [(VERSIONS[version % len(VERSIONS)], 0.7 * (version >= 0)) for version in columns.versions.tolist()]
    above, signed = GREEN, np.zeros(columns.length)
    if colour in ("engine", "trainer"):
        logprobs = columns.engine if colour == "engine" else columns.trainer
        signed = -np.sqrt(np.clip(logprobs / math.log(RARE), 0.0, 1.0))
    elif colour == "ratio":
        above, difference = BLUE, columns.trainer - columns.engine
        signed = np.sign(difference) * np.sqrt(np.clip(np.abs(difference) / WIDE, 0.0, 1.0))
    elif colour == "mask":
        above, signed = VIOLET, 0.5 * columns.trained
    else:
        values = columns.advantages if colour == "advantage" else columns.rewards
        signed = values / (np.nanmax(np.abs(values), initial=0.0) or 1.0)
    return [(above if value > 0 else RED, abs(value)) for value in np.nan_to_num(signed).tolist()]


def colours_of(samples: Sequence[TokenColumns]) -> list[str]:
    """Return the names of the colours that would show something."""
    missing = set()
    if not any(sample.has_trainer for sample in samples):
        missing |= {"trainer", "ratio"}
    if not any(np.isfinite(sample.rewards).any() for sample in samples):
        missing |= {"reward"}
    return [name for name in COLOURS if name not in missing]


def facts_of(columns: TokenColumns, place: int, *, step: int) -> Iterator[tuple[str, str]]:
    """Yield all that is known of one token, by name."""
    yield "token", f"{place + 1} of {columns.length}: {clean(columns.texts[place])!r}, id {int(columns.ids[place])}"
    if not columns.sampled[place]:
        yield "given", "to the model, not sampled"
        return
    version, ratio = int(columns.versions[place]), float(columns.ratios[place])
    yield "engine", _probability(columns.engine[place])
    yield "trainer", _probability(columns.trainer[place])
    yield "ratio", f"{ratio:.4f}" if math.isfinite(ratio) else "not known"
    yield "advantage", f"{float(columns.advantages[place]):+.4f}"
    yield "version", f"{version}, lag {step - version}"
    yield "loss", "trained on" if columns.trained[place] else "masked: not trained on"
    if math.isfinite(columns.rewards[place]):
        yield "reward", f"{float(columns.rewards[place]):+.4f}"
    if math.isfinite(columns.teacher[place]):
        yield "teacher", _probability(columns.teacher[place])
    if columns.kept[place]:
        yield "chosen", f"among {int(columns.kept[place])}"


def _probability(logprob: float) -> str:
    known = math.isfinite(logprob)
    return f"p {math.exp(min(0.0, logprob)):.4f} (logprob {float(logprob):.4f})" if known else "not known"

"""One rollout token by token: the probabilities of engine and trainer, ratio, advantage and version of each token."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from nicegui import run, ui

from trireme.base.safe_text import clean, decimal
from trireme.journal.logprobs import logprobs_of, read_logprobs
from trireme.journal.records import Rollout
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.rollouts import DROPPED, BatchFile, Record, Row
from trireme.tools.run_reader import RunReader
from trireme.tools.tokenizer import WINDOW, sample_pieces, visible, window_of

NO_TRAINER = (
    "The trainer's side is not known: the step is not trained yet, or the run does not keep it "
    "(`trainer.save_logprobs`)."
)
RARE = 0.007  # a probability that has the strongest colour, as all below it
WIDE = math.log(2.0)  # the logarithm of a ratio that has the strongest colour, as all beyond it
FAINTEST = 0.03  # share of the strongest colour that can be seen
RED, GREEN, BLUE, VIOLET = (212, 51, 74), (15, 157, 107), (34, 139, 230), (124, 92, 255)
VERSIONS = (BLUE, VIOLET, GREEN, (240, 140, 0), (228, 73, 128), (14, 165, 160))


class LoadedRollout(NamedTuple):
    """One rollout of a batch, with the rows of its group, itself among them."""

    record: Record
    samples: list[TokenColumns]
    group: list[Row]
    has_texts: bool  # the run's tokenizer is on this machine


def load_rollout(run: RunReader, step: int, number: int) -> LoadedRollout | str:
    """Return a rollout, or why it cannot be loaded. Blocks."""
    # the batches read last stay in memory, as users open several rollouts of one
    file = _batch_file(run.journal.path(step))
    file.read_more()
    if file.trouble:
        return file.trouble
    rows = [row for row in file.rows if row.fate != DROPPED]
    if not 0 <= number < len(rows):
        return f"Batch {step} has rollouts 0 to {len(rows) - 1}, not {number}: those dropped have no tokens."
    record = file.record(rows[number])
    assert record.rollout is not None, f"rollout {number} of batch {step} was not dropped"
    # the tokenizer and the trainer's logprobs may both be missing
    decode, known = run.decoder(), read_logprobs(run.paths.logprobs, step)
    texts = [sample_pieces(sample, decode) for sample in record.rollout.samples]
    columns = [columns_of(record.rollout, place, of_sample, known) for place, of_sample in enumerate(texts)]
    return LoadedRollout(record, columns, [row for row in rows if row.group == record.row.group], decode is not None)


_batch_file = lru_cache(maxsize=4)(BatchFile)


# the page


async def build(runs: RunSet) -> None:
    await TokensPage(runs).load()


class TokensPage:
    """The rollout that is shown, and the quantity that its tokens are coloured by."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._steps = runs.main.journal.steps()
        self._colour = runs.query.get("colour", "engine")
        self._first = 0  # token of the window
        self._loaded: LoadedRollout | None = None
        # the address may name step, rollout and colour, so that a page can be shared
        with theme.card(), theme.row():
            fields = []
            for label, newest in (("Step", self._steps[-1]), ("Rollout", 0)):
                wanted = runs.query.get(label.lower(), "")
                value = int(wanted) if wanted.isdigit() else newest
                fields.append(ui.number(label, value=value, min=0, precision=0, on_change=self.load))
                fields[-1].props("dense outlined debounce=300").style("width: 110px")
            self._step, self._number = fields
            self._toggle = ui.toggle([], on_change=self._choose_colour)
            self._toggle.props("no-caps unelevated dense padding='4px 12px'")
            self._legend = theme.soft()
        self._body = theme.column()

    async def load(self) -> None:
        if self._step.value is None or self._number.value is None:
            return
        wanted = int(self._step.value), int(self._number.value)
        # a thread reads the batch, and the user may have typed another number meanwhile
        loaded = await run.io_bound(load_rollout, self._runs.main, *wanted)
        if loaded is None or wanted != (self._step.value, self._number.value) or self._body.is_deleted:
            return
        self._first = 0

        if isinstance(loaded, LoadedRollout):
            self._loaded = loaded
            colours = colours_of(loaded.samples)
            self._colour = self._colour if self._colour in colours else colours[0]
            labels = {name: f"{name} p" if name in ("engine", "trainer") else name for name in colours}
            self._toggle.set_options(labels, value=self._colour)
            self._show()
            return

        self._loaded = None
        self._body.clear()
        with self._body:
            known = f"The run has batches {self._steps[0]} to {self._steps[-1]} so far."
            theme.nothing("This rollout cannot be shown.", f"{loaded} {known}", icon="error_outline")

    def _choose_colour(self) -> None:
        if self._toggle.value and self._toggle.value != self._colour:
            self._colour = self._toggle.value
            self._show()

    def _show(self) -> None:
        loaded = self._loaded
        if loaded is None:
            return

        row = loaded.record.row
        here = {"step": row.step, "rollout": row.number}
        # the address follows what is shown, so that it can be shared
        self._legend.set_text(COLOURS[self._colour])
        ui.navigate.history.replace(self._runs.link("/tokens", **here, colour=self._colour))
        self._body.clear()
        # about the rollout as a whole: what it is, its group, and what is missing here
        with self._body:
            with theme.card():
                with theme.row():
                    theme.heading(f"{row.env} · example {row.example} · rollout {row.rollout}")
                    theme.soft(f"step {row.step} · group {row.group} · reward {decimal(row.reward)}")
                    ui.space()
                    where = {"q": f"step={row.step}", "rollout": f"{row.step}/{row.number}"}
                    ui.link("What was said", self._runs.link("/rollouts", **where)).classes("tr-go")
                show_group(loaded, self._number.set_value)
                masked = loaded.record.more.get("masked")
                if masked:
                    ui.label(f"Masked: {masked}.").classes("tr-warn")
                if not loaded.has_texts:
                    ui.label("The run's tokenizer is not on this machine: numbers instead of text.").classes("tr-warn")
                if not masked and not any(columns.has_trainer for columns in loaded.samples):
                    theme.soft(NO_TRAINER)
            # then its samples, token by token
            for place, columns in enumerate(loaded.samples):
                with theme.card(f"Sample {place + 1} of {len(loaded.samples)}", summary(columns)):
                    self._show_sample(columns, step=int(row.step or 0))

    def _show_sample(self, columns: TokenColumns, *, step: int) -> None:
        def turn(first: int) -> None:
            self._first = first
            self._show()

        window = window_of(min(self._first, max(0, columns.length - 1)), columns.length)
        if columns.length > WINDOW:
            with theme.row():
                for start in range(0, columns.length, WINDOW):
                    label = f"{start + 1} – {min(columns.length, start + WINDOW)}"
                    button = ui.button(label, on_click=lambda start=start: turn(start)).props("dense size=sm")
                    button.props("outline" if start == window.start else "flat")
        text = ui.html(token_html(columns, self._colour, window, step=step), sanitize=False).classes("tr-tokens")
        text.props('tabindex=0 aria-label="Tokens"')


def show_group(loaded: LoadedRollout, open: Callable[[int], Any]) -> None:
    """Show the rewards of a rollout's group as buttons.

    Args:
        open: called with the number of the rollout that was clicked.
    """
    with ui.element("div").classes("tr-mates"):
        for row in loaded.group:
            with ui.element("button").classes("tr-mate") as mate:
                ui.label(decimal(row.reward, 2))
            mate.props["aria-label"] = f"rollout {row.rollout} of the group"
            mate.props["aria-current"] = str(row is loaded.record.row).lower()
            mate.on("click", lambda number=row.number: open(number))


def token_html(columns: TokenColumns, colour: str, window: range, *, step: int) -> str:
    """Return a `span` for each token, with what is known of it in `data-t`, which the style sheet shows on hovering.

    Text of a model is escaped, and never becomes markup.
    """
    spans, shades = [], shades_of(columns, colour)
    # what the user sees on hovering is an attribute, so line ends and quotes are escaped as well
    for place in window:
        (red, green, blue), strength = shades[place]
        alpha = f"{0.75 * strength:.2f}"
        style = f' style="background:rgba({red},{green},{blue},{alpha})"' if strength > FAINTEST else ""
        given = "" if columns.sampled[place] else " given"
        facts = "\n".join(f"{name:10}{fact}" for name, fact in facts_of(columns, place, step=step))
        known = html.escape(facts, quote=True).replace("\n", "&#10;")
        text = html.escape(visible(columns.texts[place])).replace("\n", "<br>")
        spans.append(f'<span class="tr-token{given}"{style} data-t="{known}">{text}</span>')
    return "".join(spans)


# what is known of each token


@dataclass(frozen=True)
class TokenColumns:
    """All that is known of the T tokens of one sample."""

    ids: np.ndarray  # [T] int32
    texts: list[str]  # [T]
    sampled: np.ndarray  # [T] bool: by a model
    trained: np.ndarray  # [T] bool: in the loss
    engine: np.ndarray  # [T] float32, log p when it was sampled; NaN where it was not
    trainer: np.ndarray  # [T] float32, log p of the weights that were trained on it; NaN where it is not known
    advantages: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, -1 where the policy did not sample it
    oldest: np.ndarray  # [T] int32, the oldest version that it attended to; else as `versions`
    weights: np.ndarray  # [T] float32, in the cross-entropy
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


def columns_of(rollout: Rollout, place: int, texts: list[str], known: dict[bytes, np.ndarray]) -> TokenColumns:
    """Return the columns of sample `place`.

    Args:
        known: the trainer's logprobs, by sample.
    """
    sample = rollout.samples[place]
    sampled = sample.loss_mask.astype(bool)
    unknown = np.full(sample.length, np.nan, np.float32)
    trainer = None if rollout.masked else logprobs_of(sample, known)

    # the journal may lack a column, or have one of another length if it is damaged
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
        oldest=sample.attended if len(sample.attended) == sample.length else sample.versions,
        weights=np.zeros(sample.length, np.float32) if sample.ce_weights is None else sample.ce_weights,
        rewards=column(rollout.token_rewards),
        teacher=column(rollout.teacher),
        kept=np.zeros(sample.length, np.int32) if sample.kept is None else sample.kept.counts,
    )


def summary(columns: TokenColumns) -> str:
    """Return the figures of a sample's sampled tokens. The mean of p is geometric, under the engine.

    Example:
        97 tokens, 57 sampled by version 11 · mean p 0.812 · ratio 1.0010 on average, 1.1040 farthest from 1
    """
    versions = sorted({int(version) for version in columns.versions if version >= 0})
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
    # the sign decides between two colours, the size is the strength
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
    if columns.weights[place] and not columns.sampled[place]:
        yield "loss", f"cross-entropy, weight {columns.weights[place]:g}"
    if not columns.sampled[place]:
        yield "given", "to the model, not sampled"
        return

    # Only what an engine sampled has logprobs, a version and an advantage.
    version, ratio = int(columns.versions[place]), float(columns.ratios[place])
    yield "engine", _probability(columns.engine[place])
    yield "trainer", _probability(columns.trainer[place])
    yield "ratio", f"{ratio:.4f}" if math.isfinite(ratio) else "not known"
    yield "advantage", f"{float(columns.advantages[place]):+.4f}"
    yield "version", f"{version}, lag {step - version}" if version >= 0 else "none: another model sampled it"
    if (oldest := int(columns.oldest[place])) != version:
        yield "cache", f"of version {oldest}, {version - oldest} versions older"

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

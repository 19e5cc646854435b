"""The report of a run, section by section, read once from the run's folder. The run may be live or killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import RunPaths
from trireme.base.safe_text import shortened
from trireme.config.files import find_run_file, read_run, read_table, to_table, to_toml, without_secrets
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.journal import Journal
from trireme.journal.manifest import complete_steps
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.provenance import read_provenance
from trireme.monitor.metrics import read_metrics
from trireme.monitor.progress import Progress
from trireme.monitor.run_text import held_out_lines, short_time
from trireme.monitor.samples import choose
from trireme.monitor.timeline import WORTH_TELLING, in_words
from trireme.tools.audit.audit import audit_run
from trireme.tools.conversation import blocks
from trireme.tools.dashboard.history import Metrics, Spans, summarize
from trireme.tools.diff.configuration import flatten
from trireme.tools.report.plots import Line, line_plot, picture
from trireme.tools.report.writing import Report, block, folded, paragraphs, prose, table
from trireme.tools.rollouts import BatchFile, Record, record_of_rollout

OWN = (
    *("name", "output_dir", "resume", "ports", "hosts", "wandb", "dashboard"),
    *("inference.server", "orchestrator.server", "trainer.ckpt.resume_step", "ckpt.resume_step"),
)
"""Keys of this run alone: where it is, and where its processes meet."""
MOST_CHARACTERS = 1500  # of a block of a conversation
MOST_BLOCKS = 12
MOST_PICTURES = 4  # of a conversation
MOST_REASONS = 3
MOST_ENVIRONMENTS = 6  # in a plot


class Chart(NamedTuple):
    """A plot, drawn where there is any of its metrics."""

    title: str
    metrics: dict[str, str]  # name -> label
    log: bool = False
    shows_constants: bool = True  # also where no metric ever changes


CHARTS = (
    Chart("Loss", {"loss": "loss"}),
    Chart("Loss on held-out data", {"validation/loss": "held-out loss"}),
    Chart("Norm of the gradient, before it is clipped", {"grad_norm": "norm"}, log=True),
    Chart("Entropy of the policy (nats)", {"policy/entropy": "entropy"}),
    Chart("KL to the policy that sampled; engine to trainer", {"policy/kl": "policy", "mismatch_kl": "engine"}),
    Chart("Importance ratio", {"importance_ratio": "mean ratio", "ess": "effective share of samples"}),
    Chart("KL to the reference model", {"reference_kl": "KL"}),
    Chart(
        "Shares of groups and rollouts",
        {"groups/signal_frac": "groups with signal", "truncated_frac": "truncated", "rollouts/error_rate": "failed"},
    ),
    Chart("Tokens of a rollout", {"tokens/completion_mean": "mean", "tokens/completion_max": "longest"}),
    Chart("Turns of a rollout", {"turns/mean": "mean"}, shows_constants=False),
    Chart("Age of tokens (versions)", {"lag/mean": "mean", "lag/max": "oldest"}),
    Chart("Tokens trained on per second", {"perf/tokens_per_s": "tokens/s"}),
    Chart("Seconds of a step", {"time/step": "step", "time/wait_for_batch": "of it, waiting"}, log=True),
    Chart("Memory of a step (GiB)", {"perf/peak_memory_gib": "peak"}, shows_constants=False),
    Chart("Learning rate", {"lr": "lr"}, shows_constants=False),
)


def build_report(folder: Path, *, num_rollouts: int = 2, audits: bool = True) -> Report:
    """
    Args:
        num_rollouts: shown of each of three batches.
        audits: audit the run, which reads the whole journal.

    Raises: ConfigError where the folder is not a run's.
    """
    run = Run(folder)
    sections = {
        "Overview": run.overview(),
        "Curves": run.curves(),
        "Where the time went": run.time(),
        "Warnings": run.warnings(),
        "Rollouts": run.rollouts(num_rollouts),
        "Audit": run.audit() if audits else iter(()),
        "Configuration": run.configuration(),
        "Versions and machine": run.surroundings(),
    }
    written = {title: text for title, parts in sections.items() if (text := paragraphs(parts))}
    return Report(run.name, run.lead(), written)


class Run:
    """One run, of reinforcement learning or of supervised training. Each section yields texts and parts in HTML."""

    def __init__(self, folder: Path) -> None:
        file = find_run_file(folder, "trainer")
        self.folder = folder
        self.paths = RunPaths(folder)
        self.rl: RunConfig | None = read_run(RunConfig, file) if "orchestrator" in read_table(file) else None
        self.config: RunConfig | SftConfig = self.rl or read_run(SftConfig, file)
        self.name = self.config.name or folder.resolve().name
        self.metrics, self._progress = Metrics(keeps_all=True), Progress(self.config.max_steps)
        rows = read_metrics(self.paths.metrics)[0]
        self.metrics.add(rows)
        self._progress.add(rows)
        self._times_s = [row["time_s"] for row in rows if isinstance(row.get("time_s"), int | float)]
        self._batches = Journal(self.paths.journal).steps()

    def lead(self) -> str:
        """Return what came of the run."""
        done = f"{self.metrics.num_done} of {self.config.max_steps} steps"
        if len(self._times_s) > 1:
            done += f" in {short_time(max(self._times_s) - min(self._times_s))}, from the first batch on"
        parts = [done]
        if ends := self._progress.reward_ends():
            parts.append(f"mean reward {ends.first:.3f} → {ends.last:.3f} (of {ends})")
        parts += [line.replace("->", "→") for line in held_out_lines(self._progress.evaluations())]
        if held_out := self.metrics.finite("validation/loss"):
            parts.append(f"held-out loss {held_out[0]:.4g} → {held_out[-1]:.4g}")
        return "; ".join(parts) + "."

    def overview(self) -> Iterator[str]:
        config, rl = self.config, self.rl
        facts = {"model": f"`{config.model.name}`"}
        if rl:
            ahead = f"up to {rl.max_async_level} batches" if rl.max_async_level else "none"
            batch = f"{rl.orchestrator.batch_size} rollouts, {rl.orchestrator.rollouts_per_example} of each example"
            facts |= {
                "environments": ", ".join(f"`{entry.resolved_name}`" for entry in rl.orchestrator.env),
                "batch": batch,
                "loss and advantage": f"loss `{rl.trainer.loss.type}`, advantage `{rl.orchestrator.advantage.type}`",
                "generation ahead of training": ahead,
                "optimizer": f"`{rl.trainer.optim.type}`, learning rate {rl.trainer.optim.lr:g}",
            }
        else:
            facts["training"] = "supervised"
        rollouts, tokens, dropped = (
            sum(self.metrics.finite(name)) for name in ("rollouts/trained", "tokens/total", "rollouts/dropped")
        )
        if rollouts:
            facts["trained on"] = f"{rollouts:,.0f} rollouts, {tokens:,.0f} tokens with their prompts; "
            facts["trained on"] += f"{dropped:,.0f} rollouts dropped"
        if self._times_s:
            begin, end = (datetime.fromtimestamp(at, UTC) for at in (min(self._times_s), max(self._times_s)))
            facts["written"] = f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
        if steps := complete_steps(self.paths.checkpoints):
            facts["checkpoints"] = ", ".join(map(str, steps))
        yield table(facts.items())

    # curves and time

    def _line(self, metric: str, label: str) -> Line:
        """Return a metric over steps counted from 1, as the terminal counts them."""
        series = self.metrics.series(metric)
        return Line(label, series.steps.astype(np.float64) + 1, series.values)

    def curves(self) -> Iterator[str]:
        rewards = [self._line("reward/mean", "in training")]
        for env, name in self.metrics.held_out().items():
            versions, values = self.metrics.series(name)
            rewards.append(Line(f"held out: {env}", versions.astype(np.float64), values, has_dots=True))
        rewards = [line for line in rewards if len(line.x)][:MOST_ENVIRONMENTS]
        if rewards:
            yield line_plot("Mean reward", rewards, is_wide=True)
        names = [name for name in self.metrics.names() if name.startswith("reward/") and name.count("/") == 2]
        environments = sorted({name.split("/")[1] for name in names})[:MOST_ENVIRONMENTS]
        if len(environments) > 1:
            lines = [self._line(f"reward/{env}/mean", env) for env in environments]
            yield line_plot("Mean reward in training, by environment", lines, is_wide=True)
        plots = []
        for chart in CHARTS:
            lines = [line for name, label in chart.metrics.items() if len((line := self._line(name, label)).x)]
            if lines and (chart.shows_constants or any(len(np.unique(line.y)) > 1 for line in lines)):
                plots.append(line_plot(chart.title, lines, log=chart.log))
        yield from plots
        if not plots:
            yield "No step has been measured yet."

    def time(self) -> Iterator[str]:
        spans = Spans(self.paths.spans)
        while spans.refresh():
            pass
        if spans:
            begin_s, end_s = spans.steady()
            shown = summarize(spans, begin_s, end_s)
            yield f"Over {end_s - begin_s:,.0f} s, from the first step to the last: {shown.advice}."
            yield table([(process, in_words(shares)) for process, shares in shown.shares.items()])
            rows = [
                (process, f"{share:.0%}", why)
                for process, waits in shown.waits.items()
                for why, share in waits[:MOST_REASONS]
                if share >= WORTH_TELLING
            ]
            if rows:
                yield table(rows, ["process that waited", "of the time", "for what"])

    def warnings(self) -> Iterator[str]:
        counts = Counter(warned.name for warned in self._progress.warnings)
        newest = {warned.name: warned for warned in self._progress.warnings}
        if not newest:
            yield "None: no sign of a collapse was seen."
            return
        rows = [
            (warned.step + 1, name + (f" ({counts[name]} times)" if counts[name] > 1 else ""), warned.text)
            for name, warned in newest.items()
        ]
        yield table(rows, ["step", "sign", "what was seen, what it means, and what to try"])

    # rollouts

    def rollouts(self, count: int) -> Iterator[str]:
        """Show rollouts of the first, the middle and the last batch."""
        steps = self._batches
        if not (steps and count):
            return
        yield "Not chosen by their rewards: of the first groups of each of these batches, one rollout each."
        named = {steps[0]: "at the start", steps[len(steps) // 2]: "in the middle", steps[-1]: "at the end"}
        for step in sorted(named):
            file = BatchFile(Journal(self.paths.journal).path(step))
            file.read_more()
            if file.batch is None:
                yield f"Batch {step} cannot be read: {file.trouble}"
                continue
            for rollout in choose(file.batch.rollouts, count):
                record = record_of_rollout(step, 0, rollout)
                title = f"{named[step]}, step {step + 1}: example {rollout.example} of {rollout.env}"
                yield from self._conversation(f"{title}, reward {rollout.reward:.4g}", record)

    def _conversation(self, title: str, record: Record) -> Iterator[str]:
        found = blocks([*record.prompt, *record.completion])
        texts = [f"[{each.heading}]\n{shortened(each.text, MOST_CHARACTERS)}" for each in found]
        if len(texts) > MOST_BLOCKS:
            texts[MOST_BLOCKS:] = [f"… and {len(texts) - MOST_BLOCKS} more messages"]
        facts = [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        facts += [f"answer {record.answer}"] if record.answer else []
        yield Markup("<h3>{}</h3>").format(prose(title))
        yield block("\n\n".join(texts))
        digests = dict.fromkeys(digest for each in found for digest in each.pictures)
        for digest in list(digests)[:MOST_PICTURES]:
            with suppress(OSError, ValueError, JournalCorrupt):  # it is not there, or damaged
                yield picture(digest, PictureFiles(pictures_folder(self.paths.journal)).read(digest))
        yield shortened(" · ".join([*facts, *record.facts]), MOST_CHARACTERS)

    # audit, configuration, machine

    def audit(self) -> Iterator[str]:
        if self.rl is None or not self._batches:  # supervised training has no journal
            return
        yield block(audit_run(self.folder).text())

    def configuration(self) -> Iterator[str]:
        program = "rl" if self.rl else "sft"
        yield f"Keys that are not at their defaults, without ports and paths, for `uv run {program} @ FILE`:"
        yield block(choices_of(self.config))
        yield folded("All keys", block(to_toml(without_secrets(to_table(self.config)))))

    def surroundings(self) -> Iterator[str]:
        known = flatten(read_provenance(self.paths) or {})
        rows = [(name, " ".join(map(str, value)) if isinstance(value, list) else value) for name, value in known]
        yield table(rows) if rows else "The run did not write down what it ran with."


def choices_of(config: RunConfig | SftConfig) -> str:
    """Return TOML from which `rl`, or `sft`, makes the same configuration again, without the keys of this run alone."""
    return to_toml(without_secrets(_changed(to_table(config), to_table(type(config)()))))


def _changed(table: dict[str, Any], defaults: dict[str, Any], above: str = "") -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in table.items():
        default = defaults.get(name)
        if f"{above}{name}" in OWN or value == default:
            continue
        if isinstance(value, dict) and isinstance(default, dict):
            if below := _changed(value, default, f"{above}{name}."):
                changed[name] = below
        else:
            changed[name] = value
    return changed

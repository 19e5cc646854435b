"""Train a run again from its journal alone, and compare every version with its records to the last bit.

The records are digests that engines confirmed, exported weights and metrics. Nothing is written. On a CPU every version
must have the same bits. On a GPU it may not; then the result is how far they agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from trireme.algo.digest import tensor_digest
from trireme.base.errors import ConfigError
from trireme.base.paths import step_folder
from trireme.base.safe_text import clean
from trireme.config.run import RunConfig
from trireme.journal.origin import read_origin
from trireme.journal.rank_shares import Shares
from trireme.journal.settings import Settings, is_rounded
from trireme.tools.record_differences import counted, differences
from trireme.tools.run_reader import RunReader
from trireme.trainer.checkpoint.checkpoint import load_version
from trireme.trainer.model.loading import untrained_of
from trireme.trainer.model.lora import adapters_of
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.publish.served_weights import exported_tensors, served_tensors
from trireme.trainer.step import Stepper, base_state
from trireme.transport.weights.published_files import PublishedFiles

Digests = Mapping[str, str]

CAUSES_FIRST = ("lr", "loss", "grad_norm")
"""Metrics that are compared before the others."""


def replay(config: RunConfig, span: range, *, keep_going: bool = False) -> int:
    """Replay and print one line per version. A collective of all ranks; each returns the same exit code.

    Args:
        span: steps to repeat, from the checkpoint before the first one, or what the run began from. See `find_span`.
        keep_going: continue after a difference.

    Returns: 1 if something differs that must not, else 0.

    Raises: JournalCorrupt if a batch, or the record of a version, is damaged; ConfigError if an export is.
    """
    run = RunReader(config.paths.root)
    require_whole_exports(run, span)
    rows, trainer, earlier = run.rows(), config.trainer, Settings(config).earlier
    with open_world(config.device, trainer.model, threads=trainer.threads, timeout_s=trainer.batch_timeout_s) as world:
        if world.is_main:
            start = f"the checkpoint of step {span.start}" if span.start else "the base model"
            if (origin := read_origin(config.paths.root)) and span.start == origin.begins_at:
                start = f"version {origin.version} of {origin.folder}"
            print(
                f"{config.paths.root}: {counted(len(span), 'step')} from {start}, with {_surroundings(config)}",
                flush=True,
            )

        compared: list[ComparedVersion] = []  # on rank 0 only
        for retraced in retrace(config, world, span):
            if world.is_main:
                row = rows.get(("trainer", retraced.version - 1), {})
                may_round = is_rounded(earlier, retraced.version)
                compared.append(compare(retraced, run, row, may_round=may_round))
                print(clean(str(compared[-1])), flush=True)

            # Rank 0 alone compares, and all ranks must leave the loop at the same version.
            if world.agree(bool(compared and compared[-1].differences)) and not keep_going:
                break

        if world.is_main:
            print(_verdict(config, compared), flush=True)

        # On a GPU a difference is no failure, as kernels may add in another order each time.
        return world.agree(config.device == "cpu" and any(each.differences for each in compared))


def require_whole_exports(run: RunReader, span: range) -> None:
    """Raises: ConfigError if exported weights that would be compared are damaged, as a copy that was cut short is."""
    for version in range(span.start, span.stop + 1):
        for path in exported_files(run, version):
            try:
                PublishedFiles([path])
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{path} is damaged: {error} - expected a whole safetensors file, to compare it. Copy it again, or "
                    f"move its folder away: then `trireme export {run.paths.root} --step {version}` makes it again."
                ) from None


def exported_files(run: RunReader, version: int) -> list[Path]:
    return sorted(step_folder(run.paths.weights, version).glob("*.safetensors"))


# training again


@dataclass(frozen=True)
class Retraced:
    """A version that was trained again."""

    version: int
    digests: Digests  # keyed by tensor, in the precision in which weights are served; empty but on rank 0
    metrics: Mapping[str, float]  # trainer's metrics of the step that made it
    exported: Digests  # digests of all that an export holds, keyed by tensor


def retrace(config: RunConfig, world: World, span: range) -> Iterator[Retraced]:
    """Yield the version that the steps start from, then what each makes. A collective; digests are on rank 0 only."""
    try:
        state = base_state(config, world)
    except ConfigError as error:
        # A relative path holds only in the folder in which the run was started.
        name = config.trainer.model.name or config.model.name or ""
        if Path(name).is_absolute():
            raise
        raise ConfigError(
            f"{error}\nThe run called it {name!r}: where that is a folder, start the replay in the folder in which the "
            "run was started."
        ) from error

    load_version(state, config.paths.checkpoints, span.start, rank=world.rank)

    def retraced(metrics: Mapping[str, float]) -> Retraced:
        served = served_tensors(state.model, getattr(torch, config.served_dtype))

        # An export of adapters holds nothing else; any other one holds what is served and what is not trained.
        has_adapters = adapters_of(state.model) is not None
        others = exported_tensors(state.model) if has_adapters else untrained_of(state.model).tensors()

        # All ranks must walk through the tensors, as gathering one is a collective.
        digests, exported = (
            {name: tensor_digest(tensor) for name, tensor in tensors if world.is_main} for tensors in (served, others)
        )
        return Retraced(state.version, digests, metrics, exported if has_adapters else digests | exported)

    stepper = Stepper(config, state, world)
    shares = Shares(RunReader(config.paths.root).journal, config)
    yield retraced({})
    for step in span:
        yield retraced(stepper.step(shares.of(step, rank=world.dp_rank, world=world.dp_size)))


# comparison with the run's records


@dataclass(frozen=True)
class ComparedVersion:
    """One version and all that is recorded of it."""

    version: int
    num_tensors: int
    is_confirmed: bool  # engines had confirmed it, or its weights were exported
    differences: tuple[str, ...]  # in words; the first is the most telling one

    def __str__(self) -> str:
        if self.differences:
            return "\n".join(f"version {self.version}: {difference}" for difference in self.differences)
        if not self.is_confirmed:
            return f"version {self.version}: no engine confirmed it, so there is nothing to compare it with"
        return f"version {self.version}: {self.num_tensors} tensors, bit-identical"


def compare(retraced: Retraced, run: RunReader, row: Mapping[str, Any], *, may_round: bool = False) -> ComparedVersion:
    """Compare a version with all that is recorded of it: confirmations, of which there are several after restarts, its
    exported weights, and the trainer's metrics.

    Args:
        row: the trainer's metrics of the step that made it.
        may_round: it was made twice, with other rounding: one of its records must agree.

    Raises: JournalCorrupt if its record is damaged.
    """
    # A version has several confirmations if engines or the run restarted.
    recorded: list[tuple[str, Digests, Digests]] = []  # source, our digests, recorded digests
    known = run.versions.has(retraced.version)
    confirmations = run.versions.read(retraced.version).confirmations if known else []
    for number, confirmation in enumerate(confirmations, 1):
        which = f" (confirmation {number} of {len(confirmations)})" if len(confirmations) > 1 else ""
        source = f"{' and '.join(confirmation.engines)} confirmed{which}"
        recorded.append((source, retraced.digests, confirmation.digests))

    # An export is compared even if no engine confirmed the version.
    export = step_folder(run.paths.weights, retraced.version)
    if export.is_dir():
        files = PublishedFiles(exported_files(run, retraced.version))
        recorded.append((f"{export} holds", retraced.exported, files.digests()))

    # A record of the other making may round differently, so it is enough if one record agrees.
    if may_round:
        recorded, row = [each for each in recorded if not differences(each[1], each[2])] or recorded, {}

    # The number of tensors shows how far a difference spread; the first one is where to look.
    differing = []
    for source, ours, theirs in recorded:
        if found := differences(ours, theirs):
            name, (_, now, then) = next(iter(found.items()))
            differing.append(
                f"{len(found)} of {len(ours)} tensors differ from what {source}, the first is {name}: "
                f"{then or 'nothing'} then, {now or 'nothing'} now"
            )

    # Metrics that are older than the confirmation are of steps that the run abandoned when it was rewound.
    confirmed = min((one.time for one in confirmations), default=-math.inf)
    # Lines have milliseconds, confirmations more: a line of the same millisecond is not older.
    confirmed -= 1e-3
    if row.get("time_s", confirmed) >= confirmed:
        # One metric is enough: those that cause the others come first.
        others = sorted(retraced.metrics.keys() - CAUSES_FIRST)
        for name in (*CAUSES_FIRST, *others):
            value = retraced.metrics.get(name, math.nan)
            now = value if math.isfinite(value) else None
            if name in retraced.metrics and name in row and row[name] != now:
                differing.append(
                    f"{name} of the step that made it was {row[name]} then ({run.paths.metrics}), is {now} now"
                )
                break
    return ComparedVersion(retraced.version, len(retraced.digests), bool(recorded), tuple(differing))


# the verdict


def _verdict(config: RunConfig, compared: list[ComparedVersion]) -> str:
    # The first version is the one that the replay starts from: no step made it.
    steps = f"{counted(len(compared) - 1, 'step')} trained again from the journal"
    first = next((each for each in compared if each.differences), None)
    if first is None:
        unknown = ", ".join(str(each.version) for each in compared if not each.is_confirmed)
        but = f" (no engine confirmed {unknown})" if unknown else ""
        return f"{steps}: every version has the digests that the engines confirmed{but}"

    text = f"{steps}: the first difference is at version {first.version}. "
    if config.device != "cpu":
        return text + (
            "On a GPU this is no contradiction: kernels may add in another order each time, and all that follows "
            "differs then. --keep-going continues."
        )

    # Where to look depends on whether the replay trained anything before the difference.
    suspects = "Nothing was trained yet: look at the model that it starts from, and at what was recorded."
    if first is not compared[0]:
        batch = RunReader(config.paths.root).journal.path(first.version - 1)
        suspects = (
            f"Up to there all agreed: look at {batch}, at what was recorded, and at what has changed since the run, or "
            "within it where it was resumed: another number of ranks rounds differently."
        )
    return text + (
        "On a CPU this is a contradiction: the same journal, configuration, code and libraries give the same bits. "
        f"{suspects} Here were {_surroundings(config)}."
    )


def _surroundings(config: RunConfig) -> str:
    """Describe what results depend on besides the journal and the code."""
    processor = torch.backends.cpu.get_cpu_capability() if config.device == "cpu" else torch.cuda.get_device_name()
    ranks = f"{counted(config.trainer.num_ranks or 1, 'rank')} of {counted(torch.get_num_threads(), 'thread')}"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {processor}, {ranks}"

"""Train a run again from its journal alone, and compare every version with its records.

On a CPU every version must have the same bits. On a GPU it may not; then the result is how far they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from trireme.algo.digest import tensor_digest
from trireme.base.errors import ConfigError
from trireme.base.paths import step_folder
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.manifest import complete_steps, read_manifest
from trireme.journal.rank_shares import Shares
from trireme.tools.replay.evidence import Comparison, Evidence, Retraced
from trireme.trainer.checkpoint.checkpoint import TrainerState, load_checkpoint
from trireme.trainer.model.lora import adapters_of
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.publish.served_weights import exported_tensors, served_dtype, served_tensors
from trireme.trainer.step import Stepper, base_state


def replay(config: RunConfig, span: range, *, keep_going: bool = False) -> int:
    """Replay and print one line per version. A collective of all ranks; each returns the same exit code.

    Args:
        span: steps to repeat, from the checkpoint before the first one (0: the base model). See `journal.replay_range`.
        keep_going: continue after a difference.

    Returns: 1 where something differs that must not, else 0.

    Raises: JournalCorrupt where a batch, or the record of a version, is damaged.
    """
    evidence = Evidence(config.paths)
    trainer = config.trainer
    with open_world(
        config.device,
        threads=trainer.threads,
        timeout_s=trainer.batch_timeout_s,
        replicas=trainer.model.dp_replicate,
        cp=trainer.model.cp,
    ) as world:
        report = Report(config)
        if world.is_main:
            report.begin(span)
        for retraced in retrace(config, world, span):
            differs = world.is_main and report.take(evidence.compare(retraced))
            if world.agree(differs) and not keep_going:
                break
        if world.is_main:
            report.end()
        return world.agree(report.is_contradiction)


def retrace(config: RunConfig, world: World, span: range) -> Iterator[Retraced]:
    """Yield the version that the steps start from, then what each makes. A collective; digests are on rank 0 only."""
    state = _state_at(config, world, span.start)
    stepper = Stepper(config, state, world)
    shares = Shares(Journal(config.paths.journal), config)
    yield Retraced(state.version, served_digests(config, state, world), adapters=_adapter_digests(state, world))
    for step in span:
        metrics = stepper.step(shares.of(step, rank=world.dp_rank, world=world.dp_size))
        digests, adapters = served_digests(config, state, world), _adapter_digests(state, world)
        yield Retraced(state.version, digests, metrics, adapters)


def served_digests(config: RunConfig, state: TrainerState, world: World) -> dict[str, str]:
    """Return digests of the weights as engines would get them. A collective; empty on other ranks than 0."""
    tensors = served_tensors(state.model, getattr(torch, served_dtype(config)))
    return {name: tensor_digest(tensor) for name, tensor in tensors if world.is_main}


def _adapter_digests(state: TrainerState, world: World) -> dict[str, str]:
    """Return digests of exported adapters. A collective; empty without adapters, and on other ranks than 0."""
    if adapters_of(state.model) is None:
        return {}
    tensors = exported_tensors(state.model)
    return {name: tensor_digest(tensor) for name, tensor in tensors if world.is_main}


def _state_at(config: RunConfig, world: World, version: int) -> TrainerState:
    try:
        state = base_state(config, world)
    except ConfigError as error:
        name = config.trainer.model.name or config.model.name or ""
        if Path(name).is_absolute():
            raise
        raise ConfigError(
            f"{error}\nThe run called it {name!r}: where that is a folder, start the replay in the folder in which the "
            "run was started."
        ) from error
    if version:
        load_checkpoint(state, step_folder(config.paths.checkpoints, version), rank=world.rank)
    return state


@dataclass
class Report:
    """The printed report, on rank 0."""

    config: RunConfig
    compared: list[Comparison] = field(default_factory=list)

    @property
    def first_difference(self) -> Comparison | None:
        return next((comparison for comparison in self.compared if comparison.differences), None)

    @property
    def is_contradiction(self) -> bool:
        return self.config.device == "cpu" and self.first_difference is not None

    def begin(self, span: range) -> None:
        start = f"the checkpoint of step {span.start}" if span.start else "the base model"
        _say(f"{self.config.paths.root}: {_count(len(span), 'step')} from {start}, with {_surroundings(self.config)}")

    def take(self, comparison: Comparison) -> bool:
        """Print a version. Return whether it differs."""
        self.compared.append(comparison)
        _say(str(comparison))
        return bool(comparison.differences)

    def end(self) -> None:
        steps = f"{_count(len(self.compared) - 1, 'step')} trained again from the journal"
        if self.first_difference is None:
            _say(f"{steps}: every version has the digests that the engines confirmed{self._but()}")
        else:
            _say(f"{steps}: the first difference is at version {self.first_difference.version}. {self._why()}")

    def _but(self) -> str:
        unknown = [str(comparison.version) for comparison in self.compared if not comparison.is_confirmed]
        return f" (no engine confirmed {', '.join(unknown)})" if unknown else ""

    def _why(self) -> str:
        assert self.first_difference is not None
        if not self.is_contradiction:
            return (
                "On a GPU this is no contradiction: kernels may add in another order each time, and all that follows "
                "differs then. --keep-going goes on."
            )
        return (
            "On a CPU this is a contradiction: the same journal, configuration, code and libraries give the same bits. "
            f"{self._suspects(self.first_difference)} Here were {_surroundings(self.config)}."
        )

    def _suspects(self, comparison: Comparison) -> str:
        if comparison is self.compared[0]:
            return "Nothing was trained yet: look at the model that it starts from, and at what was recorded."
        batch = Journal(self.config.paths.journal).path(comparison.version - 1)
        return (
            f"Up to there all agreed: look at {batch}, at what was recorded, and at what has changed since the run, or "
            f"within it where it went on after a stop.{self._other_ranks()}"
        )

    def _other_ranks(self) -> str:
        """Note that a resumed run may have had another number of ranks, which the journal does not record."""
        folder = self.config.paths.checkpoints
        sizes = {read_manifest(step_folder(folder, step)).world_size for step in complete_steps(folder)}
        others = " and ".join(map(str, sorted(sizes - {self.config.trainer.num_ranks or 1})))
        return f" There are checkpoints of {others} ranks: those round differently." if others else ""


def _surroundings(config: RunConfig) -> str:
    """Describe what results depend on besides the journal and the code."""
    processor = torch.backends.cpu.get_cpu_capability() if config.device == "cpu" else torch.cuda.get_device_name()
    ranks = f"{_count(config.trainer.num_ranks or 1, 'rank')} of {_count(torch.get_num_threads(), 'thread')}"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {processor}, {ranks}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _say(text: str) -> None:
    print(text, flush=True)

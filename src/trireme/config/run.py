"""The whole run: one frozen root that every process loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.base.paths import RunPaths
from trireme.config.inference import InferenceConfig
from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.section import Section
from trireme.config.supervisor import Supervisor
from trireme.config.trainer import TrainerConfig

Broadcast = Literal["auto", "gloo", "nccl", "ipc", "filesystem"]


class Model(Section):
    """`[model]`: the base model that all processes start from."""

    name: str = "models/reverse-text-tiny"
    """Folder or hub name."""


class Wandb(Section):
    """`[wandb]`: metrics to Weights & Biases as well."""

    project: str = "trireme"
    """Project."""
    name: str | None = None
    """Name of the run there; the run's `name` where not given."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to disk only; `wandb sync` sends it later."""


class WeightBroadcast(Section):
    """`[weight_broadcast]`: how new weights travel from the trainer to the engines."""

    type: Broadcast = "auto"
    """`auto` is gloo on CPU, nccl on GPUs. `ipc` needs trainer and engine on one GPU; `filesystem` works anywhere."""
    timeout_s: PositiveFloat = 300.0
    """How long one update may take, all in all."""
    bucket_mib: PositiveInt = 64
    """Tensors travel in buckets of this size, in MiB: the only extra memory that an update takes."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference between the trainer's and an engine's logprobs on a fixed prompt after each update; by
    precision where not given (float32 1e-3, else 0.5)."""


class Ports(Section):
    """`[ports]`: where the orchestrator and the trainer meet."""

    host: str = "127.0.0.1"
    """The orchestrator's address, as the trainer reaches it."""
    batches: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Batches and control; `rl` finds a free port where not given, separate commands take 5555."""
    weights: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Rendezvous of trainer and engines; `rl` finds a free port where not given, separate commands take 5556."""


class RunConfig(Section):
    """Everything about a run. `rl @ file.toml` resolves it once and writes it to `configs/run.json`."""

    name: str | None = None
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: Path = Path("outputs")
    """Where runs are written."""
    resume: bool = False
    """Go on with the run that lies in the output folder, from its newest complete checkpoint."""
    max_steps: PositiveInt = 100
    """Optimizer steps."""
    seq_len: PositiveInt = 2048
    """Longest sample that is trained on, in tokens."""
    seed: int = 0
    """Seed of everything random."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs where there are some. `cpu` ignores GPU ids."""
    max_async_level: Annotated[int, Field(ge=0)] = 1
    """How many steps generation may run ahead of training; 0 is synchronous and, on CPU, reproducible to the bit."""
    inference_gpu_ids: tuple[int, ...] | None = None
    """GPUs of the engines."""
    trainer_gpu_ids: tuple[int, ...] | None = None
    """GPUs of the trainer."""
    inference_gpus: PositiveInt | None = None
    """Number of GPUs for engines, counted from the first; instead of `inference_gpu_ids`."""
    trainer_gpus: PositiveInt | None = None
    """Number of GPUs for the trainer, after the engines'; instead of `trainer_gpu_ids`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the logs tell."""
    disk_timeout_s: PositiveFloat = 86400.0
    """How long the run waits for room on a full disk before it gives up."""
    model: Model = Model()
    wandb: Wandb | None = None
    weight_broadcast: WeightBroadcast = WeightBroadcast()
    ports: Ports = Ports()
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    supervisor: Supervisor = Supervisor()

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.output_dir / self.name if self.name else self.output_dir)

    @property
    def run_id(self) -> str:
        """Trainer and orchestrator refuse to work together unless it is the same."""
        return str(self.paths.root.resolve())

    @property
    def num_groups(self) -> int:
        """Groups per batch = batch_size / rollouts_per_example."""
        return self.orchestrator.batch_size // self.orchestrator.rollouts_per_example

    @property
    def synchronous(self) -> bool:
        return self.max_async_level == 0

"""The configuration of a whole run, which every process loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.base.errors import ConfigError
from trireme.base.network import is_here, is_loopback
from trireme.base.paths import RunPaths
from trireme.config.inference import InferenceConfig
from trireme.config.losses import Loss, centers_scores, resolve_loss
from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.sampling import slots_for
from trireme.config.section import EnvVars, Section, Seed, merged
from trireme.config.trainer import TrainerConfig, Vlm

PositiveOrInfinite = Annotated[float, Field(gt=0, allow_inf_nan=True)]
Broadcast = Literal["auto", "gloo", "nccl", "ipc", "filesystem"]


class Model(Section):
    """`[model]`: the base model that all processes start from."""

    name: str = "models/reverse-text-tiny"
    """Folder or hub name."""
    vlm: Vlm | None = None
    """Train a model that also sees with pictures; a table."""


class Wandb(Section):
    """`[wandb]`: metrics to Weights & Biases as well."""

    project: str = "trireme"
    """Project."""
    entity: str | None = None
    """User or team that the project belongs to; the account's own if not set."""
    name: str | None = None
    """Name of the run there; the run's `name` if not set."""
    group: str | None = None
    """Group that the run is shown in, together with others."""
    tags: tuple[str, ...] = ()
    """Tags of the run, to filter by."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to disk only; `wandb sync` sends it later."""


class WeightBroadcast(Section):
    """`[weight_broadcast]`: how new weights travel from the trainer to the engines."""

    type: Broadcast = "auto"
    """`auto` is gloo on CPU, ipc where trainer and engine share one GPU, else nccl. `filesystem` works anywhere."""
    timeout_s: PositiveFloat = 300.0
    """Longest time of one whole update."""
    bucket_mib: PositiveInt = 64
    """Tensors travel in buckets of this size. An update takes the memory of two, and of one tensor."""
    delta: bool = False
    """Send only what changed since the version before, for bf16 and small learning rates. It takes a copy of the served
    model in host memory of all trainer ranks together, and one per engine worker."""
    probe_tolerance: PositiveOrInfinite | None = None
    """Largest difference between the trainer's and an engine's logprobs on a fixed prompt; `inf` takes any. If not set,
    1e-3 in float32, else the mean may be four times what rounding makes."""


class Ports(Section):
    """`[ports]`: where the orchestrator and the trainer meet."""

    batches: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Batches and control; `rl` finds a free port if not set, separate commands take 5555."""
    weights: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Rendezvous of trainer and engines; `rl` finds a free port if not set, separate commands take 5556."""
    ranks: Annotated[int, Field(gt=0, le=65535)] | None = None
    """Rendezvous of the trainer's ranks where they are on several machines; 5557 if not set."""
    dashboard: Annotated[int, Field(gt=0, le=65535)] | None = None
    """Port of the dashboard that `--dashboard` opens; a free port if not set."""


class Hosts(Section):
    """`[hosts]`: a run on several machines: the address of each process, as the others reach it.

    All processes load the same file; each listens at its own address. Anything but loopback needs a shared token, in
    `TRIREME_TOKEN` or in `token_file`.
    """

    inference: tuple[str, ...] = ("127.0.0.1",)
    """One vLLM server on each; `host:port` where it listens on another port than `inference.server.port`. With none
    the run waits for engines that join it."""
    orchestrator: str = "127.0.0.1"
    """Machine of the orchestrator."""
    trainer: tuple[str, ...] = ("127.0.0.1",)
    """Machines that share the trainer's ranks, equally many each; rank 0 is on the first."""
    join_timeout_s: PositiveFloat = 3600.0
    """Longest time that a run without engines in `inference` waits for one to join."""
    token_file: Path | None = None
    """File with the shared token, on every machine."""

    @property
    def by_process(self) -> dict[str, tuple[str, ...]]:
        """The addresses of each kind of process."""
        return {"inference": self.inference, "orchestrator": (self.orchestrator,), "trainer": self.trainer}

    @property
    def all(self) -> tuple[str, ...]:
        """Each address once, without its port. One of IPv6 stays whole, for the rule that refuses it."""
        addresses = (address for each in self.by_process.values() for address in each)
        return tuple(dict.fromkeys(a if a.count(":") > 1 else a.partition(":")[0] for a in addresses))

    @property
    def are_loopback(self) -> bool:
        """Return whether nothing of the run can be reached from another machine, nor has to be."""
        return all(map(is_loopback, self.all))

    @property
    def are_one_machine(self) -> bool:
        """Return whether all processes are on one machine, and so share its GPUs."""
        return self.are_loopback or len(self.all) == 1


class Supervisor(Section):
    """`[supervisor]`: when a process is started again, and when the run is given up."""

    restart: bool = True
    """Start a process that died again, alone. `rl --no-restart` ends the run at the first death instead, and
    then kills no process for being stopped or unhealthy."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one process in a row, without a newly trained step, before the run ends."""
    backoff_s: PositiveFloat = 1.0
    """The second restart in a row comes after this long; each further one waits twice as long."""
    longest_backoff_s: PositiveFloat = 30.0
    """No restart waits longer than this."""
    frozen_after_s: PositiveOrInfinite = 20.0
    """A process that has been stopped (SIGSTOP) for this long is killed, and so started again; `inf` kills none."""
    unhealthy_after_s: PositiveOrInfinite = 60.0
    """A server that has not answered `/health` for this long is killed, and so started again; one whose port is closed
    after 10 s."""

    def delay_s(self, number: int) -> float:
        """The wait before the restart of this number in a row, counted from the first that waits."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(number - 1, 60))


class Console(Section):
    """`[console]`: what the terminal shows. Nothing of it changes what is trained."""

    style: Literal["trireme", "vf-rl"] = "trireme"
    """`vf-rl`: plain lines as that command has them, and its folders `checkpoint-N` and `runs` in addition to ours."""
    every: PositiveInt = 1
    """Steps from one line to the next, where lines are written."""
    samples_every: PositiveInt | None = None
    """Steps from one look at what the model writes to the next; none if not set."""
    num_samples: PositiveInt = 1
    """Rollouts shown at each look."""


class AnyRun(Section):
    """Keys that runs of `rl` and of `sft` share."""

    name: str | None = None
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: Path = Path("outputs")
    """Folder that runs are written to."""
    resume: bool = False
    """Resume the run in the output folder from its newest complete checkpoint."""
    resume_from: Path | None = None
    """Folder of another run, or of one of its checkpoints (`.../checkpoints/step_N`), from which a new run begins: from
    the checkpoint of `ckpt.resume_step`, or the newest complete one. Nothing of that folder is changed."""
    seq_len: PositiveInt = 2048
    """Longest sample that is trained on, in tokens."""
    seed: Seed = 0
    """Seed of everything random."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs where there are some. `cpu` ignores GPU ids."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that the logs keep."""
    disk_timeout_s: PositiveFloat = 86400.0
    """Longest time that the run waits for space on a full disk."""
    env_vars: EnvVars = {}
    """Environment variables of the command and of all processes that it starts, over those of the shell. Not what
    Trireme sets itself, nor what is read before this file is: `PYTHON…`, `LD_…`."""
    wandb: Wandb | None = None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.output_dir / self.name if self.name else self.output_dir)


class RunConfig(AnyRun):
    """Everything about a run. `rl @ file.toml` resolves it once and writes it to `configs/run.json`."""

    max_steps: PositiveInt = 100
    """Training steps: batches, each of which makes one version."""
    max_async_level: Annotated[int, Field(ge=0)] = 1
    """Steps that generation may run ahead of training; 0 is synchronous and, on CPU, reproducible to the bit."""
    inference_gpu_ids: tuple[int, ...] | None = None
    """GPUs of the engines."""
    trainer_gpu_ids: tuple[int, ...] | None = None
    """GPUs of the trainer."""
    inference_gpus: PositiveInt | None = None
    """Number of GPUs for engines, counted from the first; instead of `inference_gpu_ids`."""
    trainer_gpus: PositiveInt | None = None
    """Number of GPUs for the trainer, after the engines'; instead of `trainer_gpu_ids`."""
    dashboard: bool = False
    """Open the dashboard of the run, for this machine only; it ends with the run."""
    model: Model = Model()
    weight_broadcast: WeightBroadcast = WeightBroadcast()
    ports: Ports = Ports()
    hosts: Hosts = Hosts()
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    supervisor: Supervisor = Supervisor()
    console: Console = Console()

    @property
    def run_id(self) -> str:
        """The identity of the run: trainer and orchestrator refuse to work together unless theirs is the same.

        On one machine the folder itself; on several its name as it was given, which may be another folder on each.
        """
        return str(self.paths.root.resolve() if self.hosts.are_loopback else self.paths.root)

    @property
    def engine_urls(self) -> list[str]:
        """The addresses at which the orchestrator finds the inference servers."""
        return list(map(self.engine_url, self.hosts.inference))

    def engine_url(self, address: str) -> str:
        host, port = place_of(address)
        return f"http://{host}:{port or self.inference.server.port}"

    def of(self, environment: str) -> RunConfig:
        """Return the run as one of its sources has it: with the tables of that source over the run's, key by key.

        Example:
            config.of("reverse-text").orchestrator.sampling.max_tokens, config.of("math").trainer.loss.type
        """
        source = next((each for each in self.orchestrator.env if each.resolved_name == environment), None)
        loss = merged(self.trainer.loss, getattr(source, "loss", None))
        trainer = self.trainer.model_copy(update={"loss": loss})
        return self.model_copy(update={"trainer": trainer, "orchestrator": self.orchestrator.of(environment)})

    @property
    def losses(self) -> dict[str, RunConfig]:
        """The run as each source with a loss of its own has it; `""` is the run itself, for all others."""
        own = [each.resolved_name for each in self.orchestrator.env if getattr(each, "loss", None) is not None]
        return {"": self} | {name: self.of(name) for name in own}

    @property
    def recipes(self) -> dict[str, Loss]:
        """Each of `losses` with every key filled in that it reads."""
        return {name: resolve_loss(own.trainer.loss, length=own.loss_length) for name, own in self.losses.items()}

    @property
    def num_groups(self) -> int:
        """Groups per batch; where sources have groups of different sizes, how many there are on average, and where
        tokens fill it, how many of the longest rollouts do."""
        orchestrator, sources = self.orchestrator, self.orchestrator.sources
        weights = {each.resolved_name: each.weight for each in orchestrator.env} or {"": 1.0}
        sizes = {name: sources.get(name, orchestrator).rollouts_per_example for name in weights}
        mean = sum(weights[name] * size for name, size in sizes.items()) / sum(weights.values())
        return max(1, round(orchestrator.num_rollouts(self.seq_len) / mean))

    @property
    def loss_length(self) -> int:
        """Sampled tokens of a sample, at most or nearly: what the normalisation by a constant divides by."""
        return self.orchestrator.sampling.max_tokens or self.seq_len

    @property
    def synchronous(self) -> bool:
        return self.max_async_level == 0

    @property
    def served_dtype(self) -> str:
        """The precision in which weights are sent, exported and served; `auto`, before it is resolved, is bfloat16 on
        GPUs, else float32."""
        dtype = self.inference.model.dtype
        return dtype if dtype != "auto" else "float32" if self.device == "cpu" else "bfloat16"

    @property
    def shares_gpus(self) -> bool:
        """Return whether trainer and engine take memory of the same GPU. A process that starts alone
        knows it by the transport only."""
        both = {*(self.trainer_gpu_ids or ())} & {*(self.inference_gpu_ids or ())}
        return self.weight_broadcast.type == "ipc" or bool(both)

    @property
    def serves_adapters(self) -> bool:
        """Return whether engines hold the adapters separately from the base model."""
        lora = self.trainer.model.lora
        return lora is not None and lora.sync == "adapter"

    @property
    def replays_routes(self) -> bool:
        return self.trainer.model.moe.router_replay

    @property
    def shares_prefixes(self) -> bool:
        """Return whether an engine may reuse the beginning of a prompt from an earlier request.

        In a synchronous run on CPU it may not, or a request's arithmetic would depend on what ran before it. There is
        no prefix cache then; but router replay needs one, so no two requests are given the same prefix.
        """
        return not (self.replays_routes and self.synchronous and self.device == "cpu")

    @property
    def num_top_logprobs(self) -> int:
        """Likeliest tokens at each place whose logprobs a loss needs; 0 if none needs any."""
        wanted = [loss.score_centering_top_k for loss in self.recipes.values() if centers_scores(loss)]
        return max((number or 0 for number in wanted), default=0)

    @property
    def max_logprobs(self) -> int:
        """Logprobs per token that the engine must be able to return: enough for all tokens that a turn may keep or that
        the loss needs, and vLLM's own default of 20 at least."""
        samplings = [self.orchestrator.sampling, *(own.sampling for own in self.orchestrator.sources.values())]
        return max(20, self.num_top_logprobs, *(slots_for(sampling.most_kept) for sampling in samplings))


NODE = "TRIREME_NODE"


def place_of(address: str) -> tuple[str, int | None]:
    """Return the host of an address, and its port if it has one.

    Raises: ValueError if the address is neither `host` nor `host:port`.
    """
    host, colon, port = address.partition(":")
    if not host or "/" in address or (colon and not (port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(address)
    return host, int(port) if colon else None


def find_node(table: str, addresses: tuple[str, ...], flag: int | None) -> int:
    """Return the number of this machine among these addresses, counted from 0: the flag, `TRIREME_NODE`, or found by
    the machine's own addresses.

    Raises: ConfigError if none of them decides it.
    """
    if not addresses:
        raise ConfigError(
            f"`{table}` names no machine, so engines join this run - expected the address of its orchestrator. Add "
            "`--join ADDRESS`."
        )
    given = os.environ.get(NODE, "") if flag is None else str(flag)
    if given and not (given.isdigit() and int(given) < len(addresses)):
        raise ConfigError(
            f"this is node {given}, and `{table}` has {len(addresses)} addresses ({', '.join(addresses)}) - expected a "
            f"number from 0 to {len(addresses) - 1}. Correct `--node` (or {NODE})."
        )
    if given:
        return int(given)
    if len(addresses) == 1:
        return 0

    # The machine's own addresses decide, unless it has several of these, or others reach it by an address not its own.
    ours = [number for number, address in enumerate(addresses) if is_here(address.partition(":")[0])]
    if len(ours) != 1:
        found = f"{len(ours)} of them are this machine" if ours else "none of them is this machine"
        raise ConfigError(
            f"`{table}` is {', '.join(addresses)}, and {found} - expected to find out which one is to start here. "
            f"Add `--node N`, counted from 0 (or set {NODE}), or correct the addresses."
        )
    return ours[0]

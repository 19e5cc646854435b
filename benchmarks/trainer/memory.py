"""How far `trireme plan` is off: its memory of a trainer's step beside what the step really takes, on CPU.

    uv run python -m benchmarks.trainer.memory               # all cases, each in a process of its own
    uv run python -m benchmarks.trainer.memory --cases 3 4   # some of them

Two things are measured in a step that is not the first. `tensors` is exact: what torch's allocator had handed out at
the highest, as its profiler saw every request. `process` is what the kernel says the process grew by since before the
model was built, at the highest: with what malloc does not give back, and the buffers of matrix libraries. `tried` is
what `trainer.try_step` has torch hand out, before the first step: it is to be no less than the step itself.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.update({"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"})  # before torch is imported

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.made_models import qwen3
from benchmarks.measuring import command, print_table
from trireme.algo.model.architecture import architecture_of
from trireme.algo.packing import Sample, rows_of
from trireme.base.devices import Devices
from trireme.config.model.folder import read_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.messages import BatchReply, build_tokens
from trireme.tools.plan.estimate import CPU_SCATTERED, PROCESS_BYTES, scattered_bytes
from trireme.tools.plan.trainer_memory import training_of
from trireme.trainer.parallel.mesh import open_world
from trireme.trainer.step import Stepper, base_state
from trireme.trainer.try_step import try_step

COLUMNS = ["layers x hidden, rows x tokens", "tensors: plan", "measured", "error"]
COLUMNS += ["process: plan", "measured", "error", "tensors of the tried step"]
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A model of Qwen3's kind, and rows for it."""

    hidden: int
    layers: int
    tokens: int  # in a row
    rows: int = 2
    samples: int = 2  # in each row; several need a mask
    vocabulary: int = 8192
    dtype: str = "float32"
    ac: str | None = None  # "full", "selective", or every other layer: "half"
    rank: int | None = None  # the adapters'; None without them
    optimizer: str = "adamw"
    head_chunk: int = 1024

    def __str__(self) -> str:
        extras = [self.dtype.replace("float", "f")] * (self.dtype != "float32")
        extras += [f"ac {self.ac}"] * bool(self.ac) + [f"LoRA {self.rank}"] * bool(self.rank)
        extras += [self.optimizer] * (self.optimizer != "adamw")
        extras += [f"chunk {self.head_chunk}"] * (self.head_chunk != 1024)
        shape = f"{self.layers} x {self.hidden}, {self.rows} x {self.tokens}"
        return ", ".join([shape, f"V {self.vocabulary}", f"{self.samples} sample(s)", *extras])


CASES = (
    Case(256, 2, 512),
    Case(256, 4, 1024, samples=1),
    Case(256, 4, 1024),
    Case(256, 2, 4096, samples=1),
    Case(256, 8, 512, ac="full"),
    Case(256, 8, 512, ac="half"),
    Case(256, 8, 512, ac="selective"),
    Case(256, 8, 1024, dtype="bfloat16"),
    Case(256, 8, 1024, dtype="bfloat16", ac="full"),
    Case(512, 4, 512, rows=1, vocabulary=1024),
    Case(512, 4, 512, rank=16),
    Case(512, 4, 512, rank=16, dtype="bfloat16", ac="full"),
    Case(512, 4, 128, optimizer="sgd", vocabulary=1024),
    Case(512, 4, 128, optimizer="muon", vocabulary=1024),
    Case(256, 2, 1024, vocabulary=32768, samples=1),
    Case(256, 2, 1024, vocabulary=32768, samples=1, head_chunk=256),
    Case(1024, 2, 256, vocabulary=1024, samples=1),
    Case(1024, 4, 512, vocabulary=1024),
    Case(1024, 4, 512, vocabulary=1024, ac="full"),
)


def main(cases: Annotated[tuple[int, ...] | None, "only these, by number"] = None) -> None:
    torch.set_num_threads(1)
    largest = {"tensors": 0.0, "process": 0.0}
    chosen = CASES if cases is None else [CASES[number] for number in cases]
    print_table(COLUMNS, measured_rows(chosen, largest))
    print(f"\nlargest error: tensors {largest['tensors']:.1%}, process {largest['process']:.1%}")


def measured_rows(cases: Sequence[Case], largest: dict[str, float]) -> Iterator[list[str]]:
    """Yield the row of each case, and keep the largest errors."""
    for case in cases:
        # It runs in a process forked off this one, which has imported everything and computed nothing.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(measure, (case,))
        cells = [str(case)]
        for name in largest:
            planned, measured = found[f"planned_{name}"], found[f"measured_{name}"]
            error = planned / measured - 1
            largest[name] = max(largest[name], abs(error))
            cells += [f"{planned / MIB:,.0f} MiB", f"{measured / MIB:,.0f} MiB", f"{error:+.1%}"]
        yield [*cells, f"{found['tried_tensors'] / found['measured_tensors'] - 1:+.1%}"]


def settings(case: Case) -> dict[str, Any]:
    """Return the table `[trainer]`."""
    model: dict[str, Any] = {"from_scratch": True, "optimization_dtype": case.dtype, "head_chunk": case.head_chunk}
    if case.ac:
        model["ac"] = {"freq": 2 if case.ac == "half" else 1, "mode": case.ac if case.ac == "selective" else "full"}
    if case.rank:
        model["lora"] = {"rank": case.rank}
    return {"model": model, "optim": {"type": case.optimizer}, "num_ranks": 1}


def run_config(case: Case, folder: Path) -> Any:
    sizes = {"vocab_size": case.vocabulary, "max_position_embeddings": 65536}
    qwen3(case.hidden, case.layers, **sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    trainer = settings(case)
    trainer["model"]["name"] = str(folder)
    values = {"device": "cpu", "seq_len": case.tokens, "max_steps": 10, "trainer": trainer}
    return resolve(RunConfig.model_validate(values), Devices(cores=1))


def planned_bytes(case: Case, config: Any) -> tuple[float, float]:
    """Return the bytes of tensors, and of the process beyond what it is before a model is there."""
    model, packed = architecture_of(read_config(config.model.name)), case.samples > 1
    training = training_of(config, model, rows=case.rows, packed=packed)
    moments = {name: parts for name, parts in training.moments.items() if name != "publish"}
    parts = max(moments.values(), key=lambda parts: sum(parts.values()))
    tensors = sum(parts.values())
    return tensors, tensors + scattered_bytes(parts, CPU_SCATTERED) + PROCESS_BYTES


def measured_bytes(case: Case, config: Any, world: Any) -> tuple[float, float]:
    """Return the same as `planned_bytes`, measured in the first three steps."""
    before = resident_bytes("VmRSS")
    state = base_state(config, world)
    stepper, batch = Stepper(config, state, world), batch_of(case)
    stepper.step(batch(0))
    settled = _held(state)
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted from here
    stepper.step(batch(1))
    process = resident_bytes("VmHWM") - before
    return settled + highest_of(lambda: stepper.step(batch(2))), process


def tried_bytes(config: Any, world: Any) -> float:
    """Return the bytes of tensors in the step that changes nothing."""
    state = base_state(config, world)
    return _held(state) + highest_of(lambda: try_step(Stepper(config, state, world)))


def batch_of(case: Case) -> Any:
    rng, length = np.random.default_rng(0), case.tokens // case.samples
    mask, zeros = np.ones(length), np.zeros(length)
    ids = rng.integers(0, case.vocabulary, (case.rows * case.samples, length))
    columns: dict[str, Any] = {"loss_mask": mask, "logprobs": zeros - 5, "advantages": mask, "versions": zeros}
    samples = [Sample(build_tokens(ids=each, **columns), 1.0) for each in ids]
    rows = [list(range(row * case.samples, (row + 1) * case.samples)) for row in range(case.rows)]
    packed, count = rows_of(samples, rows), len(samples)
    return lambda step: BatchReply(
        step=step,
        micro_batches=packed,
        loss_tokens=count * (length - 1),
        num_rollouts=count,
        loss_samples=count,
    )


def _held(state: Any) -> float:
    """Return the bytes held by parameters and the optimizer's state."""
    tensors = [*state.model.parameters(), *state.model.buffers()]
    tensors += [value for each in state.optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return float(sum(storages.values()))


def highest_of(work: Any) -> float:
    """Return the bytes that torch handed out beyond those it had handed out before, at the highest."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    requests = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return float(np.cumsum([number for _, number in requests]).max())


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measure(case: Case) -> dict[str, float]:
    """Return the planned, measured and tried bytes of a case, measured in this process."""
    with tempfile.TemporaryDirectory() as name, open_world("cpu", threads=1, timeout_s=60) as world:
        config = run_config(case, Path(name))
        planned = dict(zip(("planned_tensors", "planned_process"), planned_bytes(case, config), strict=True))
        measured = dict(zip(("measured_tensors", "measured_process"), measured_bytes(case, config, world), strict=True))
        return planned | measured | {"tried_tensors": tried_bytes(config, world)}


if __name__ == "__main__":
    command(main)

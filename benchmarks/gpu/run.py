"""Checks and times on one GPU what CPU tests cannot show, in under nine minutes.

    uv run python benchmarks/gpu/run.py [--device cpu] [--only NAME ...] [--json FILE]

Each section runs in a process of its own with a deadline, so one that fails or hangs costs no other. Sections that lack
something (a second GPU, vLLM) say so and count as skipped. `--device cpu` runs what can be run, at toy sizes: it checks
this program, and times nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
BUDGET_S = 520


class Skipped(Exception):
    """Something that the section needs is not here."""


def device_and_versions(device: str) -> dict[str, Any]:
    import torch

    from trireme.base.devices import detect_devices

    found = {"torch": torch.__version__, "devices": str(detect_devices())}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        assert len(detect_devices().gpus) == torch.cuda.device_count(), "device files and torch disagree"
    return found


def digest_is_the_same_on_both(device: str) -> dict[str, Any]:
    """A fingerprint that depends on the device would refuse every update."""
    import torch

    from trireme.algo.digest import tensor_digest

    torch.manual_seed(0)
    size = 1 << (28 if device == "cuda" else 20)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(size // 16, dtype=torch.float32).to(dtype)
        assert tensor_digest(tensor) == tensor_digest(tensor.to(device)), dtype
    large = torch.randn(size, device=device, dtype=torch.bfloat16)
    seconds = timed(lambda: tensor_digest(large), device)
    return {"digest_gb_per_s": large.nbytes / seconds / 1e9}


def timed(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Seconds of the fastest of a few runs, after one that does not count."""
    import torch

    work()
    best = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def weights_by_cuda_ipc(device: str) -> dict[str, Any]:
    """Another process on the same GPU reads exactly what was sent."""
    if device != "cuda":
        raise Skipped("CUDA memory handles need a GPU")
    import torch

    from trireme.algo.digest import tensor_digest
    from trireme.transport.weights.buckets import spec_of
    from trireme.transport.weights.ipc import IpcSender

    tensors = {f"w{i}": torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for i in range(64)}
    sender = IpcSender()
    began = time.perf_counter()
    specs = [spec_of(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    payload = json.loads(json.dumps(sender.send(specs, tensors.values())))  # as it travels
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_receive_by_ipc, args=(specs, payload, answers))
    child.start()
    digests = answers.get(timeout=120)
    child.join(30)
    assert digests == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    return {"gib": 64 * 4096 * 4096 * 2 / 2**30, "seconds_with_process_start": time.perf_counter() - began}


def _receive_by_ipc(specs: list, payload: dict, answers: Any) -> None:
    from trireme.algo.digest import tensor_digest
    from trireme.transport.weights.ipc import IpcReceiver

    answers.put({name: tensor_digest(tensor) for name, tensor in IpcReceiver().tensors(specs, payload)})


def weights_by_nccl(device: str) -> dict[str, Any]:
    """Two ranks on two GPUs; NCCL refuses two ranks on one."""
    import torch

    if device != "cuda" or torch.cuda.device_count() < 2:
        raise Skipped(f"needs two GPUs, here {torch.cuda.device_count() if device == 'cuda' else 0}")
    from trireme.base.processes import free_port

    port, context = free_port(), multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_nccl_rank, args=(rank, port, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = [answers.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(30)
    assert results[0]["digests"] == results[1]["digests"]
    seconds = max(result["seconds"] for result in results)
    return {"gb_per_s": 64 * 4096 * 4096 * 2 / seconds / 1e9}


def _nccl_rank(rank: int, port: int, answers: Any) -> None:
    import torch

    from trireme.algo.digest import tensor_digest
    from trireme.messages import InitInfo, TensorSpec
    from trireme.transport.weights.collective import CollectiveReceiver, CollectiveSender

    torch.cuda.set_device(rank)
    specs = [TensorSpec(name=f"w{i}", dtype="bfloat16", shape=[4096, 4096]) for i in range(64)]
    options: dict[str, Any] = {"bucket_bytes": 64 << 20, "timeout_s": 60.0}
    for epoch in ("first", "second"):  # the first opens the connection
        if rank == 0:
            torch.manual_seed(1)
            tensors = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in specs]
            if epoch == "first":
                sender = CollectiveSender("nccl", "127.0.0.1", port, **options)
            sender.join(epoch, 2)
            began = time.perf_counter()
            sender.send(specs, tensors)
            digests = {spec.name: tensor_digest(tensor) for spec, tensor in zip(specs, tensors, strict=True)}
        else:
            if epoch == "first":
                info = InitInfo("nccl", "127.0.0.1", port, epoch, rank_offset=1, world_size=2, **options)
                receiver = CollectiveReceiver(info)
            receiver.join(epoch, 1, 2)
            began = time.perf_counter()
            digests = {name: tensor_digest(tensor) for name, tensor in receiver.tensors(specs, {})}
        seconds = time.perf_counter() - began
    answers.put({"digests": digests, "seconds": seconds})


def trainer_step_agrees_with_cpu(device: str) -> dict[str, Any]:
    """The same batch, in float32: loss and gradient norm of a tiny model on this device and on the CPU."""
    here, cpu = _step(device), _step("cpu")
    worst = max(abs(here[name] - cpu[name]) / max(abs(cpu[name]), 1e-6) for name in ("loss", "grad_norm"))
    assert worst < 1e-3, (here, cpu)
    return {"relative_difference": worst}


def _step(device: str) -> dict[str, float]:
    code = (
        "import json, sys; sys.path.insert(0, 'benchmarks/gpu'); import run; "
        f"print('RESULT' + json.dumps(run.tiny_step({device!r})))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, output.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def tiny_step(device: str) -> dict[str, float]:
    import numpy as np

    from trireme.algo.packing import Sample, micro_batches_of_rank
    from trireme.config.trainer import Loss, Optimizer, TrainerModel
    from trireme.messages import build_tokens
    from trireme.trainer.model.model import load_model
    from trireme.trainer.optim.optimizer import build_optimizer
    from trireme.trainer.parallel.mesh import open_world
    from trireme.trainer.step import forward_backward, policy_gradient, update

    rng = np.random.default_rng(0)
    samples = []
    for length in rng.integers(16, 60, 32):
        mask = np.arange(length) >= 8
        samples.append(
            Sample(
                build_tokens(
                    ids=rng.integers(10, 100, length),
                    loss_mask=mask,
                    logprobs=np.where(mask, -2.0, 0.0),
                    advantages=rng.normal(size=length) * mask,
                    versions=np.where(mask, 0, -1),
                ),
                1.0,
            )
        )
    with open_world(device, threads=2, timeout_s=60) as world:
        model = load_model(TrainerModel(), "models/reverse-text-tiny", world)
        optimizer = build_optimizer(model, Optimizer(lr=1e-3))
        metrics = forward_backward(
            model,
            micro_batches_of_rank(samples, capacity=256, rank=0, world=1),
            loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
            step=0,
            loss_function=policy_gradient(Loss(ratio_low=0, ratio_high=1e9)),
            world=world,
        )
        return {"loss": metrics["loss"], **update(model, optimizer, 1.0)}


def trainer_throughput(device: str) -> dict[str, Any]:
    """Forward and backward of a 0.6B-parameter Qwen3 in bfloat16 on packed rows, by attention and compilation."""
    results: dict[str, Any] = {}
    for attention in ("sdpa", "flash_attention_2", "flex_attention"):
        for compiled in (False, True):
            name = f"{attention}{'+compile' if compiled else ''}"
            code = (
                "import json, sys; sys.path.insert(0, 'benchmarks/gpu'); import run; "
                f"print('RESULT' + json.dumps(run.throughput({device!r}, {attention!r}, {compiled})))"
            )
            try:
                output = subprocess.run(
                    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=90
                )
                lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT")]
                results[name] = json.loads(lines[0][6:]) if lines else f"failed: {output.stderr.strip()[-300:]}"
            except subprocess.TimeoutExpired:
                results[name] = "took longer than 90 s"
            if device == "cpu":
                return results
    return results


def throughput(device: str, attention: str, compiled: bool) -> dict[str, float]:
    import tempfile

    import torch

    from trireme.algo.packing import micro_batches_of_rank
    from trireme.config.trainer import Loss
    from trireme.trainer.model.model import load_model
    from trireme.trainer.parallel.mesh import open_world
    from trireme.trainer.perf import flops_per_token, throughput
    from trireme.trainer.step import forward_backward, policy_gradient

    samples = long_samples(device)
    length, count = samples[0].tokens.length, len(samples)
    with tempfile.TemporaryDirectory() as folder, open_world(device, threads=2, timeout_s=60) as world:
        write_model_config(folder, device)
        model = load_model(random_weights(attn=attention, compile=compiled), folder, world)
        rows = micro_batches_of_rank(samples, capacity=length * count // 2, rank=0, world=1)

        def work() -> None:
            forward_backward(
                model,
                rows,
                loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
                step=0,
                loss_function=policy_gradient(Loss(ratio_low=0, ratio_high=1e9)),
                world=world,
            )
            model.zero_grad(set_to_none=True)

        seconds = timed(work, device, repeats=2)
        flops = flops_per_token(model, length)
        result = throughput(tokens=length * count, seconds=seconds, flops=flops, world_size=1)
        if device == "cuda":
            result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return result


def write_model_config(folder: str, device: str) -> None:
    """Of a Qwen3 with 0.6B parameters; on a CPU, of a tiny one."""
    from transformers import Qwen3Config

    large = device == "cuda"
    Qwen3Config(
        vocab_size=151936 if large else 512,
        hidden_size=1024 if large else 64,
        intermediate_size=3072 if large else 128,
        num_hidden_layers=28 if large else 2,
        num_attention_heads=16 if large else 2,
        num_key_value_heads=8 if large else 1,
        head_dim=128 if large else 32,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)


def random_weights(**choices: Any) -> Any:
    """`[trainer.model]`: bfloat16, every layer computed again in the backward pass."""
    from trireme.config.trainer import ActivationCheckpointing, TrainerModel

    return TrainerModel(from_scratch=True, optimization_dtype="bfloat16", ac=ActivationCheckpointing(), **choices)


def long_samples(device: str) -> list[Any]:
    """Alike, but for their tokens."""
    import numpy as np

    from trireme.algo.packing import Sample
    from trireme.messages import build_tokens

    length, count = (2048, 16) if device == "cuda" else (64, 4)
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 4
    columns: dict[str, Any] = {
        "loss_mask": mask,
        "logprobs": -2.0 * mask,
        "advantages": mask,
        "versions": np.where(mask, 0, -1),
    }
    return [Sample(build_tokens(ids=rng.integers(0, 500, length), **columns), 1.0) for _ in range(count)]


def a_tried_step(device: str) -> dict[str, Any]:
    """The step before the first changes nothing, and its peak of memory is that of a real one."""
    import tempfile

    import torch

    from trireme.algo.packing import micro_batches_of_rank
    from trireme.config.run import Model, RunConfig
    from trireme.config.trainer import TrainerConfig
    from trireme.messages import BatchReply
    from trireme.trainer.parallel.mesh import open_world
    from trireme.trainer.step import Stepper, base_state
    from trireme.trainer.try_step import try_step

    samples = long_samples(device)
    length, count = samples[0].tokens.length, len(samples)
    capacity = length * count // 2
    with tempfile.TemporaryDirectory() as folder, open_world(device, threads=2, timeout_s=60) as world:
        write_model_config(folder, device)
        trainer = TrainerConfig(model=random_weights(), micro_batch_tokens=capacity)
        kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
        config = RunConfig(device=kind, seq_len=length, model=Model(name=folder), trainer=trainer)
        state = base_state(config, world)
        before = [parameter.detach().clone() for parameter in state.model.parameters()]
        peaks = {"tried_gib": peak_gib(lambda: try_step(Stepper(config, state, world)), device)}
        after = list(state.model.parameters())
        assert all(torch.equal(one.to_local(), other.to_local()) for one, other in zip(before, after, strict=True))
        assert not state.optimizer.state
        stepper = Stepper(config, state, world)
        for step in range(2):
            batch = BatchReply(
                step=step,
                micro_batches=micro_batches_of_rank(samples, capacity=capacity, rank=0, world=1),
                loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
                num_rollouts=count,
                loss_samples=count,
            )
            peaks[f"step_{step}_gib"] = peak_gib(partial(stepper.step, batch), device)
    return peaks


def peak_gib(work: Callable[[], object], device: str) -> float:
    """Of tensors; 0 on a CPU, whose allocator does not count."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def head_in_chunks(device: str) -> dict[str, Any]:
    """Logprobs, entropies and gradients of a vocabulary of 150,000: peak memory and time, all at once and in chunks."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from head import in_own_process

    large = {"tokens": 16384, "vocabulary": 151936, "hidden": 4096}
    sizes: dict[str, Any] = large if device == "cuda" else {"tokens": 64, "vocabulary": 512, "hidden": 32}
    dtype = "torch.bfloat16" if device == "cuda" else "torch.float32"
    sizes |= {"device": repr(device), "dtype": dtype}
    found = {
        f"chunks of {chunk}" if chunk else "plain": in_own_process(chunk=chunk, **sizes)
        for chunk in (None, 512, 1024, 4096)
    }
    plain, chunked = found["plain"], found["chunks of 1024"]
    for name, tolerance in (("logprobs", 1e-3), ("entropies", 1e-3), ("gradient", 2e-2)):
        assert abs(chunked[name] - plain[name]) <= tolerance * abs(plain[name]), (name, chunked[name], plain[name])
    return found


def experts_of_a_mixture(device: str) -> dict[str, Any]:
    """One layer of Qwen3-30B-A3B's shape, forward and backward: experts all together and one after the other, and with
    the routes of an engine, which must cost next to nothing and change nothing where they are the router's own."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from trireme.config.trainer import Experts, TrainerModel
    from trireme.messages import Routed
    from trireme.trainer.model.moe import prepare_experts, routes_argument

    large = device == "cuda"
    tokens, hidden, expert, experts, top_k = (8192, 2048, 768, 128, 8) if large else (64, 64, 32, 8, 2)
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=expert, num_experts=experts, num_experts_per_tok=top_k,
        num_hidden_layers=1, num_attention_heads=hidden // 64, num_key_value_heads=1, head_dim=64, vocab_size=1024,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (1, tokens), device=device)
    chosen: list[Any] = []
    found: dict[str, Any] = {}
    logits: dict[str, Any] = {}
    for name in ("grouped_mm", "eager", "replay"):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if large else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
        settings = Experts(implementation="eager" if name == "eager" else "grouped_mm", router_replay=name == "replay")
        prepare_experts(model, TrainerModel(moe=settings), list(model.model.layers))
        model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].detach()))
        routes: dict[str, Any] = {}
        if name == "replay":
            table = chosen[0].to("cpu", torch.uint8).numpy()
            known = torch.ones(tokens, dtype=torch.uint8).numpy()
            routes = routes_argument(model, Routed(known, table.reshape(-1), 1, top_k), torch.device(device))

        def step(model: Any = model, routes: dict[str, Any] = routes) -> Any:
            output = model(input_ids=ids, **routes).logits
            output.float().logsumexp(-1).sum().backward()
            return output

        logits[name] = step().detach().float()
        found[f"{name}_tokens_per_s"] = tokens / timed(step, device)
    for name in ("eager", "replay"):
        found[f"{name}_differs_by"] = float((logits[name] - logits["grouped_mm"]).abs().max())
        assert found[f"{name}_differs_by"] < (0.1 if large else 1e-4), found
    return found


def quickstart_on_this_device(device: str) -> dict[str, Any]:
    """`rl` as a user types it, a few steps: on a single GPU, trainer and engine share it and weights go by CUDA IPC."""
    found, run = run_rl(device, "configs/reverse-text/rl.toml", "--max-steps", "30")
    return found | {"audit": _last_line("audit", run), "replay": _last_line("replay", run, "--until", "10")}


def pictures_on_this_device(device: str) -> dict[str, Any]:
    """A few steps of the task that cannot be solved without looking."""
    found, run = run_rl(device, "configs/color-squares/rl.toml", "--max-steps", "6")
    return found | {"replay": _last_line("replay", run)}


def an_engine_in_8_bits(device: str) -> dict[str, Any]:
    """The engine rounds each version of the weights again."""
    flags = ("--inference.model.dtype", "bfloat16", "--inference.args.quantization", "fp8_per_channel")
    return run_rl(device, "configs/reverse-text/rl.toml", "--max-steps", "6", *flags)[0]


def run_rl(device: str, config: str, *flags: str) -> tuple[dict[str, Any], Path]:
    """Return what a run measured, and its folder."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise Skipped(f"vLLM cannot be imported: {error}") from error
    folder, name = ROOT / "outputs" / "gpu-benchmark", f"{Path(config).parent.name}-{int(time.time())}"
    placed = ["--device", device, "--output-dir", str(folder), "--name", name]
    command = [str(Path(sys.executable).parent / "rl"), "@", config, *placed, *flags]
    began = time.perf_counter()
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert output.returncode == 0, output.stdout[-3000:] + output.stderr[-1000:]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["process"] == "trainer"]
    mismatches = [row["mismatch_kl"] for row in steps if row.get("mismatch_kl") is not None]
    found = {
        "seconds": time.perf_counter() - began,
        "step_s": sorted(row["time/step"] for row in steps)[len(steps) // 2],
        "publish_s": sorted(row["time/publish"] for row in steps)[len(steps) // 2],
        "max_mismatch_kl": max(mismatches, default=None),
    }
    return found, folder / name


def checkpoints_into_an_engine(device: str) -> dict[str, Any]:
    """`eval` as a user types it: what the quickstart wrote goes into a running engine, confirmed by its digest."""
    from trireme.base.processes import free_port

    runs = sorted((ROOT / "outputs" / "gpu-benchmark").glob("reverse-text-*/weights"))
    if not runs:
        raise Skipped("no weights of quickstart_on_this_device")
    programs = Path(sys.executable).parent
    port = free_port()
    flags = ["--device", device, "--inference.server.port", str(port)]
    engine = [str(programs / "inference"), "@", "configs/reverse-text/rl.toml", *flags]
    with subprocess.Popen(engine, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _until_healthy(f"http://127.0.0.1:{port}/health", server, deadline_s=120)
            flags = ["--weights-dir", str(runs[-1]), "--env.id", "reverse-text", "--num-examples", "50"]
            command = [str(programs / "eval"), "--client.base-url", f"http://127.0.0.1:{port}/v1", *flags]
            began = time.perf_counter()
            output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
            assert output.returncode == 0, output.stdout[-2000:] + output.stderr[-1000:]
            return {"eval_s": time.perf_counter() - began, "said": output.stdout.strip().splitlines()[-6:]}
        finally:
            server.terminate()


def _until_healthy(url: str, server: subprocess.Popen, *, deadline_s: float) -> None:
    import httpx

    for _ in range(int(deadline_s)):
        assert server.poll() is None, f"the engine ended with exit code {server.returncode}"
        try:
            if httpx.get(url, timeout=1, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise TimeoutError(f"the engine was not up within {deadline_s:.0f} s")


def _last_line(verb: str, *arguments: Any) -> str:
    """What `trireme audit` or `trireme replay` concludes; on a GPU, the replay tells where bits first differ."""
    command = [sys.executable, "-m", "trireme.cli.trireme", verb, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return f"exit code {done.returncode}: {lines[0 if verb == 'audit' else -1] if lines else ''}"


def weights_as_a_delta(device: str) -> dict[str, Any]:
    """What has changed is found where the tensor is, and a copy on the host that is patched has its digest."""
    import torch

    from trireme.algo.digest import tensor_digest
    from trireme.algo.patch import Patch, apply_patch, build_patch, changed

    torch.manual_seed(0)
    before = torch.randn(1 << (28 if device == "cuda" else 20), device=device, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for share in (0.01, 0.1, 1.0):
        after = torch.where(torch.rand(before.shape, device=device) < share, -before, before)
        patch = build_patch(after, changed(after, before))
        copy = before.cpu()
        apply_patch(Patch(patch.form, patch.num_changed, patch.where.cpu(), patch.values.cpu()), copy)
        assert tensor_digest(copy) == tensor_digest(after), share
        seconds = timed(lambda after=after: build_patch(after, changed(after, before)), device)  # type: ignore[misc]
        found[f"bytes_at_{share:g}"] = patch.num_bytes / after.nbytes
        found[f"gb_per_s_at_{share:g}"] = after.nbytes / seconds / 1e9
    return found


def optimizers(device: str) -> dict[str, Any]:
    """Bytes per parameter and seconds per step of each; the one in 8 bits is compiled here, and on CPUs is not."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from optimizers import build_model, bytes_held, measure
    from optimizers import optimizers as all_optimizers

    hidden, layers = (2048, 8) if device == "cuda" else (128, 1)
    model = build_model(hidden, layers, device)
    count = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": count}
    for name, optimizer in all_optimizers(model).items():
        key = name.replace(", ", "_")
        found[f"{key}_ms"] = measure(optimizer, device) * 1e3
        found[f"{key}_bytes_per_parameter"] = bytes_held(optimizer) / count
        optimizer.state.clear()
    return found


SECTIONS: dict[str, tuple[Callable[[str], dict[str, Any]], int]] = {
    "device_and_versions": (device_and_versions, 60),
    "digest_is_the_same_on_both": (digest_is_the_same_on_both, 60),
    "weights_by_cuda_ipc": (weights_by_cuda_ipc, 90),
    "weights_by_nccl": (weights_by_nccl, 90),
    "weights_as_a_delta": (weights_as_a_delta, 60),
    "trainer_step_agrees_with_cpu": (trainer_step_agrees_with_cpu, 120),
    "a_tried_step": (a_tried_step, 60),
    "quickstart_on_this_device": (quickstart_on_this_device, 250),
    "checkpoints_into_an_engine": (checkpoints_into_an_engine, 150),
    "pictures_on_this_device": (pictures_on_this_device, 120),
    "an_engine_in_8_bits": (an_engine_in_8_bits, 120),
    "head_in_chunks": (head_in_chunks, 120),
    "experts_of_a_mixture": (experts_of_a_mixture, 90),
    "optimizers": (optimizers, 120),
    "trainer_throughput": (trainer_throughput, 400),
}
"""What runs, in this order, and how many seconds each may take."""


def run_section(name: str, device: str) -> None:
    """In a child process: prints the result as the last line."""
    try:
        result: dict[str, Any] = {"verdict": "ok", **SECTIONS[name][0](device)}
    except Skipped as reason:
        result = {"verdict": "skipped", "reason": str(reason)}
    except Exception as error:
        result = {"verdict": "FAILED", "error": f"{type(error).__name__}: {str(error)[-1500:]}"}
    print("RESULT" + json.dumps(result))


def run_in_child(name: str, device: str, deadline_s: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--section", name, "--device", device]
    began = time.perf_counter()
    try:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s)
        lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT")]
        result = json.loads(lines[-1][6:]) if lines else {"verdict": "FAILED", "error": output.stderr[-1500:]}
    except subprocess.TimeoutExpired:
        result = {"verdict": "FAILED", "error": f"took longer than {deadline_s:.0f} s"}
    return result | {"took_s": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--json", type=Path, help="write all results here as well")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    if args.section:
        run_section(args.section, args.device)
        return 0
    began, results = time.perf_counter(), {}
    for name in args.only:
        left = BUDGET_S - (time.perf_counter() - began)
        results[name] = run_in_child(name, args.device, max(5.0, min(SECTIONS[name][1], left)))
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    return 1 if any(result["verdict"] == "FAILED" for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

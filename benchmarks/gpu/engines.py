"""Sections with vLLM: one engine that several of them share, and runs of `rl` as a user types them."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks import ROOT
from benchmarks.gpu.section import Figures, Skipped, folder, part
from benchmarks.gpu.trainer import write_qwen3
from trireme.algo.loss.divergence import kl_estimate
from trireme.base.devices import detect_devices
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.cli.rl import launch
from trireme.config.files import read_run
from trireme.config.resolve import resolve, updated
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.logprobs import logprobs_of, read_logprobs
from trireme.launch.standalone_engine import open_engine
from trireme.monitor.metrics import Row, is_of_step, read_metrics
from trireme.orchestrator.engines.engine import Engine, open_engine_session
from trireme.tools.doctor.rehearsal import run_program

QUICKSTART = "configs/reverse-text/rl.toml"
ENVIRONMENT = ROOT / "tests" / "e2e" / "say.py"  # rewards differ nearly always, whatever a random model writes
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
RUN_S = 110.0  # a command's limit on a GPU, so that a section can still say how it ended; on a CPU twice that
DEPTHS = (0, 16, 64, 256, 1024, 4096)  # bounds of ranges of positions in a sample
SIZES = {
    "cuda": {"max_tokens": 2048, "batch_size": 64, "max_steps": 6, "requests": 256, "micro_batch_tokens": 16384},
    "cpu": {"max_tokens": 40, "batch_size": 16, "max_steps": 3, "requests": 16, "micro_batch_tokens": 1024},
}


# one engine


def engine(device: str) -> None:
    """Start an engine with a Qwen3-0.6B of random weights as a run has it, and stay until this process is asked to
    end."""
    model = folder() / "model"
    write_model(model, device)
    config = resolve(RunConfig.model_validate(shared_settings(device, model)), detect_devices())

    async def serve() -> None:
        is_over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
        began = time.perf_counter()
        async with open_engine(config, detect_devices(), Waits("benchmark")) as url:
            with part("start") as found:
                found |= {"seconds": time.perf_counter() - began, "weights_go_over": config.weight_broadcast.type}
                found["url"] = url
            await is_over.wait()

    asyncio.run(serve())


def write_model(target: Path, device: str) -> None:
    """Write random weights, and a tokenizer that has a word for each token of the vocabulary."""
    write_qwen3(target, device, initializer_range=0.05, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target), dtype=torch.bfloat16)
    model.save_pretrained(target)
    words = ["<pad>", "<end>", "<other>", "say", *map(str, range(model.config.vocab_size - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(target)


def shared_settings(device: str, model: Path) -> dict[str, Any]:
    """Return the settings of a run whose trainer has a GPU of its own if there are two, so that weights go by NCCL."""
    size = SIZES[device]
    settings: dict[str, Any] = {
        "device": device,
        "output_dir": folder(),
        "name": "engine",
        "max_steps": size["max_steps"],
        "seq_len": size["max_tokens"] + 64,
        "model": {"name": str(model)},
        "supervisor": {"restart": False},
        "inference": {"model": {"dtype": "bfloat16"}, "start_timeout_s": RUN_S},
        "trainer": {
            "micro_batch_tokens": size["micro_batch_tokens"],
            "model": {"optimization_dtype": "bfloat16", "ac": {}},
        },
        "orchestrator": {
            "batch_size": size["batch_size"],
            "rollouts_per_example": 8,
            "sampling": {"max_tokens": size["max_tokens"]},
            "env": [{"id": str(ENVIRONMENT)}],
        },
    }
    if device == "cuda" and detect_devices().num_gpus > 1:
        settings |= {"inference_gpu_ids": [0], "trainer_gpu_ids": [1]}
    return settings


def shared_config() -> RunConfig:
    return read_run(RunConfig, RunPaths(folder() / "engine").run_config)


def generation(device: str) -> None:
    """Tokens per second of one request, and of many at once."""
    size = SIZES[device]
    num_tokens = size["max_tokens"] // 4
    for name, count in (("one request", 1), (f"{size['requests']} requests", size["requests"])):
        with part(name) as found:
            asyncio.run(generate(min(count, 16), num_tokens))  # warms up
            found["tokens_per_s"] = count * num_tokens / asyncio.run(generate(count, num_tokens))


async def generate(count: int, num_tokens: int) -> float:
    """Return the seconds in which the shared engine answers so many requests of so many tokens at once."""
    sampling = {"max_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    bodies = [
        msgspec.json.encode({"token_ids": [*range(5, 25), 30 + i], "sampling_params": sampling}) for i in range(count)
    ]
    (url,) = shared_config().engine_urls
    async with open_engine_session(timeout_s=RUN_S) as session:
        asked, began = Engine(url, session), time.perf_counter()
        answers = await asyncio.gather(*(asked.request("inference/v1/generate", body) for body in bodies))
        seconds = time.perf_counter() - began
    for status, answer in answers:
        assert status == 200, answer[:500]
        assert len(json.loads(answer)["choices"][0]["token_ids"]) == num_tokens, "an answer is too short"
    return seconds


def training_run(device: str) -> None:
    """An orchestrator and a trainer beside the shared engine: every update is confirmed; how long generation stands
    still; how far trainer and engine are apart, by the depth of the context."""
    config = updated(shared_config(), {"name": "training_run"})
    with part("run") as found:
        code = launch(config, detect_devices(), ("orchestrator", "trainer"))
        assert code == 0, f"exit code {code}; see {config.paths.logs}"
        found |= figures_of(config.paths)
    with part("mismatch KL by depth") as found:
        found |= mismatch_by_depth(config.paths)
    with part("audit") as found:
        found["said"] = command("trireme.cli.trireme", "audit", config.paths.root)[0]


def figures_of(paths: RunPaths) -> Figures:
    """Return a run's medians over its steps, without the first, which warms up."""
    rows = [row for row in read_metrics(paths.metrics)[0] if is_of_step(row)]
    trainer, orchestrator = ([row for row in rows if row["process"] == name] for name in ("trainer", "orchestrator"))
    mismatches = [row["mismatch_kl"] for row in trainer if row.get("mismatch_kl") is not None]
    assert mismatches, "no token was trained on by the weights that sampled it"

    def middle(of: list[Row], name: str) -> float | None:
        values = [row[name] for row in of[1:] if row.get(name) is not None]
        return median(values) if values else None

    return {
        "steps": len(trainer),
        "step_s": middle(trainer, "time/step"),
        "trainer_tokens_per_s": middle(trainer, "perf/tokens_per_s"),
        "mfu": middle(trainer, "perf/mfu"),
        "publish_s": middle(trainer, "time/publish"),
        "update_s": middle(orchestrator, "time/update_weights"),
        "generation_stopped_s": middle(orchestrator, "time/engines_paused"),
        "of_which_loading_s": middle(orchestrator, "time/engines_load"),
        "max_mismatch_kl": max(mismatches),
        "reward": f"{orchestrator[0]['reward/mean']:.3f} -> {orchestrator[-1]['reward/mean']:.3f}",
    }


def mismatch_by_depth(paths: RunPaths) -> dict[str, float]:
    """Return the mean `mismatch_kl` of tokens by the number of tokens before them, from the journal and the trainer's
    logprobs."""
    found: dict[int, list[np.ndarray]] = {}
    journal = Journal(paths.journal)
    for step in journal.steps():
        known = read_logprobs(paths.logprobs, step)
        for sample in (sample for rollout in journal.read(step).rollouts for sample in rollout.samples):
            if (logprobs := logprobs_of(sample, known)) is None:
                continue
            is_fresh = ~np.isnan(logprobs) & (sample.versions == step)
            mismatch = kl_estimate(torch.from_numpy(logprobs - sample.logprobs)).numpy()
            ranges = np.searchsorted(DEPTHS, np.arange(len(logprobs)), side="right") - 1
            for number in np.unique(ranges[is_fresh]):
                found.setdefault(int(number), []).append(mismatch[is_fresh & (ranges == number)])
    assert found, f"{paths.logprobs} has no logprobs of tokens by the weights that sampled them"
    return {f"from {DEPTHS[number]}": float(np.concatenate(found[number]).mean()) for number in sorted(found)}


def checkpoints(device: str) -> None:
    """`eval` as a user types it: the weights that the run has exported go into the running engine, confirmed."""
    weights = RunPaths(folder() / "training_run").weights
    with part("eval") as found:
        if not weights.exists():
            raise Skipped("needs the section `training_run`, whose weights it takes")
        found |= evaluate(shared_config().engine_urls[0], weights, "--take-over")


# runs with engines of their own


def synchronous(device: str) -> None:
    """A synchronous run of the quickstart. On GPUs its engine has batch-invariant kernels, which fix settings of NCCL
    in the engine alone."""
    with part("run") as found:
        paths = run_rl(device, "synchronous", QUICKSTART, "--max-steps", 6, "--max-async-level", 0)
        found |= figures_of(paths)
    with part("audit") as found:
        found["said"] = command("trireme.cli.trireme", "audit", paths.root)[0]
    with part("replay") as found:
        found["said"] = command("trireme.cli.trireme", "replay", paths.root, "--until", 2)[-1]


def data_parallel_2(device: str) -> None:
    """Two engine cores, each of which takes and confirms every version."""
    with part("run") as found:
        found |= run_parallel(device, "data", {"dp": 2})


def tensor_parallel_2(device: str) -> None:
    """One engine core on two workers, each of which takes its part of every tensor."""
    with part("run") as found:
        found |= run_parallel(device, "tensor", {"tp": 2})


def run_parallel(device: str, kind: str, parallel: dict[str, int]) -> Figures:
    """Return the figures of a run with such an engine. If there are only two GPUs, none is left for a trainer: then the
    engine takes the checkpoints of the section `synchronous`, in the same way."""
    name, count = f"{kind}_parallel_2", detect_devices().num_gpus
    flags = ["--max-steps", 3, "--inference.model.enforce-eager"]
    if device == "cpu":
        return figures_of(run_rl(device, name, QUICKSTART, *flags, f"--inference.args.{kind}-parallel-size", 2))
    if count > 2:
        flags += [word for key, size in parallel.items() for word in (f"--inference.parallel.{key}", size)]
        trainer = json.dumps(list(range(2, min(4, count))))  # several ranks, if there are four GPUs
        flags += ["--inference-gpu-ids", "[0, 1]", "--trainer-gpu-ids", trainer]
        return figures_of(run_rl(device, name, QUICKSTART, *flags))
    weights = RunPaths(folder() / "synchronous").weights
    if not weights.exists():
        raise Skipped("needs the section `synchronous`, whose weights it takes if there is no third GPU")
    settings = shared_settings(device, ROOT / "models" / "reverse-text-tiny")
    settings |= {"name": name, "inference_gpu_ids": [0, 1], "trainer_gpu_ids": [1]}
    settings["inference"] |= {"parallel": parallel, "model": {"enforce_eager": True}}
    config = resolve(RunConfig.model_validate(settings), detect_devices())

    async def serve() -> Figures:
        async with open_engine(config, detect_devices(), Waits("benchmark")) as url:
            return await asyncio.to_thread(evaluate, url, weights)

    return asyncio.run(serve())


def evaluate(url: str, weights: Path, *flags: str) -> Figures:
    """Have an engine take checkpoints by `eval`, which compares the digests of all of its workers."""
    began = time.perf_counter()
    words = ["--client.base-url", f"{url}/v1", "--weights-dir", weights, "--env.id", ENVIRONMENT, "--num-examples", 8]
    said = command("trireme.cli.eval", *words, "--no-eval-base", *flags)
    return {"said": " ".join(said[-1].split()), "seconds": time.perf_counter() - began}


def pictures(device: str) -> None:
    """A few steps of the task that cannot be solved without looking."""
    with part("run") as found:
        found |= figures_of(run_rl(device, "pictures", "configs/color-squares/rl.toml", "--max-steps", 3))


def engine_in_8_bits(device: str) -> None:
    """The engine rounds each version of the weights again."""
    flags = ("--inference.model.dtype", "bfloat16", "--inference.args.quantization", "fp8_per_channel")
    with part("run") as found:
        found |= figures_of(run_rl(device, "engine_in_8_bits", QUICKSTART, "--max-steps", 3, *flags))
        assert 0 < found["max_mismatch_kl"] < 0.1, found


def memory_pressure(device: str) -> None:
    """Trainer and engine on one GPU of which others leave them little; the engine is killed once, and starts again
    beside the trainer."""
    with part("run") as found:
        free, total = torch.cuda.mem_get_info(0)
        left = int(0.3 * total) + (4 << 30)  # for the engine, and for the trainer and the contexts of both
        taken = torch.empty(max(0, free - left), dtype=torch.uint8, device="cuda:0")
        name, flags = "memory_pressure", ("--inference.gpu-memory-utilization", 0.3, "--inference.model.enforce-eager")
        gpu = ("--inference-gpu-ids", "[0]", "--trainer-gpu-ids", "[0]", "--supervisor.restart")
        killed: list[int] = []
        Thread(target=kill_engine, args=(RunPaths(folder() / name), 3, killed), daemon=True).start()
        paths = run_rl(device, name, QUICKSTART, "--max-steps", 40, *flags, *gpu)
        found |= figures_of(paths) | {"taken_gib": taken.nbytes / 2**30}
        assert killed, "the run was over before its engine was killed"


def kill_engine(paths: RunPaths, step: int, killed: list[int]) -> None:
    """Kill the engine of a run that this process has started, once the run has trained so many steps."""
    while not any(row["step"] >= step for row in read_metrics(paths.metrics)[0] if is_of_step(row)):
        time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "trireme.cli.inference" in process.cmdline():
                process.kill()
                killed.append(process.pid)


def run_rl(device: str, name: str, config: str, *flags: Any) -> RunPaths:
    """Run `rl` to its good end; return the paths of the run."""
    placed = ("--device", device, "--output-dir", folder(), "--name", name, "--no-orchestrator.eval")
    restart = () if "--supervisor.restart" in flags else ("--no-restart",)
    ended = run_program(
        RUN_S * (1 + (device == "cpu")),
        "trireme.cli.rl",
        "@",
        str(ROOT / config),
        *map(str, (*placed, *restart, *flags)),
    )
    assert ended.code == 0, f"`rl` {ended.how}. {ended.last_lines}"
    shutil.rmtree(folder() / name / "checkpoints", ignore_errors=True)
    return RunPaths(folder() / name)


def command(module: str, *arguments: Any) -> list[str]:
    """Run one of our commands to its good end; return the lines that it printed."""
    ended = run_program(RUN_S, module, *map(str, arguments))
    assert ended.code == 0, f"it {ended.how}. {ended.last_lines}"
    return [line for line in ended.output.splitlines() if line.strip()] or [""]

"""Has something become much slower? Small forms of the benchmarks, as ratios of what is measured side by side.

    uv run python -m benchmarks.small            # prints the ratios beside the stored ones
    uv run python -m benchmarks.small --check    # and ends with 1 if one is far off
    uv run python -m benchmarks.small --store    # writes benchmarks/small.json

No figure is a time: each is our way against a plain one of the same work, in processor seconds if one process does
it all, on whatever machine this is. A ratio may be `SLACK` times the stored one, in the best of so many `TRIES`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import ROOT
from benchmarks.made_models import qwen3
from benchmarks.measuring import Work, by_turns, command, command_s, cpu_s

STORED = Path(__file__).with_name("small.json")
SLACK = 1.25
TRIES = 3
ROUNDS = 5
PLAIN_ROLLOUTS = 4000
STEPS = (6, 26)  # the quickstart is measured between these
NEEDED = ("vllm.entrypoints.launchers.api_server.entry", "torch.distributed.fsdp, transformers.models.qwen3")


def median_ratio(ours: Work, plain: Work) -> float:
    """Return the median ratio of processor seconds, by turns."""
    found = by_turns({"ours": ours, "plain": plain}, ROUNDS, cpu_s)
    return median(ours_s / max(1e-6, plain_s) for ours_s, plain_s in zip(*found.values(), strict=True))


def command_cpu_s(*words: str) -> float:
    """Return the median processor seconds of a command."""
    return median(command_s(*words)[1] for _ in range(ROUNDS))


def weight_transfer() -> dict[str, float]:
    """A transfer of 50 million parameters, digests and all, against gloo's broadcast of the same bytes."""
    from benchmarks.weights.transfer import measure

    return {"weight_transfer": median(measure(50_000_000, ROUNDS)["ratios"])}


def packed_rows() -> dict[str, float]:
    """Forward and backward over a packed row whose samples attend apart, against the mask that transformers makes."""
    import torch
    from transformers import AutoModelForCausalLM

    from trireme.trainer.model.packing.attention import ARGUMENT, PackedRow, row_given, use_packed_attention

    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256}
    config = qwen3(128, 3, **shape, vocab_size=128, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    lengths = [24] * 64
    row, ids = PackedRow(lengths, torch.device("cpu")), torch.zeros(1, sum(lengths), dtype=torch.int64)
    places = torch.cat([torch.arange(length) for length in lengths])[None]

    def apart() -> None:
        use_packed_attention(model)
        with row_given():
            model(input_ids=ids, position_ids=places, use_cache=False, **{ARGUMENT: row}).logits.sum().backward()

    def masked() -> None:
        model.set_attn_implementation("sdpa")
        model(input_ids=ids, position_ids=places, use_cache=False).logits.sum().backward()

    return {"packed_rows": median_ratio(apart, masked)}


def rollouts() -> dict[str, float]:
    """Processor time of a rollout in the orchestrator and in the environment's worker.

    Against plain asyncio: as many tasks as a rollout's, which encode and decode a message of its size.
    """
    message = {"ids": list(range(200)), "logprobs": [-0.1] * 200, "text": "x" * 400}

    async def encode_and_decode() -> None:
        await asyncio.sleep(0)
        json.loads(json.dumps(message))

    async def in_turns() -> None:
        for _ in range(PLAIN_ROLLOUTS // 100):
            await asyncio.gather(*(encode_and_decode() for _ in range(100)))

    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = ["--rollouts", "6144", "--in-flight", "1024", "--json", str(out)]
        command_s(sys.executable, "-m", "benchmarks.orchestrator.rollout_cost", *words)
        (found,) = json.loads(out.read_text())["this"]
    plain_us = cpu_s(lambda: asyncio.run(in_turns())) / PLAIN_ROLLOUTS * 1e6
    return {"rollout": found["orchestrator_us"] / plain_us, "worker": found["workers_us"] / plain_us}


def update() -> dict[str, float]:
    """Processor time in which the trainer publishes 16 versions of 4 million parameters in bfloat16 as files.

    Against a forward pass over the probe's prompt, and saving the same tensors with safetensors.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from support.engines.answering import answering
    from trireme.base.waiting import Waits
    from trireme.config.run import RunConfig
    from trireme.messages import Go, Live, PolicyReady, PolicySent, Reply, Request
    from trireme.monitor.spans import Lane
    from trireme.trainer.parallel.mesh import open_world
    from trireme.trainer.publish.publisher import Publisher
    from trireme.trainer.step import base_state
    from trireme.transport.control import ControlClient

    config = qwen3(256, 4, vocab_size=1024, tie_word_embeddings=False)
    ids = torch.arange(32)[None]

    def answer(request: Request) -> Reply:
        if isinstance(request, PolicyReady):
            return Go(version=request.version, epoch="only", world_size=2)
        assert isinstance(request, PolicySent), request
        return Live(version=request.version)

    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        plain = AutoModelForCausalLM.from_config(config)
        plain.save_pretrained(folder / "model")
        run = RunConfig.model_validate(
            {
                "output_dir": folder,
                "device": "cpu",
                "model": {"name": str(folder / "model")},
                "weight_broadcast": {"type": "filesystem"},
                "inference": {"model": {"dtype": "bfloat16"}},
            }
        )
        world = stack.enter_context(open_world("cpu", threads=1, timeout_s=60))
        control = ControlClient(stack.enter_context(answering(answer)), Waits("trainer"))
        stack.callback(control.close)
        publisher = Publisher(run, base_state(run, world).model, world, control, Waits("trainer"), Lane("trainer"))
        versions = itertools.count()

        def publish() -> None:
            for version in itertools.islice(versions, 16):
                publisher.publish(version)

        @torch.no_grad()
        def compute_and_save() -> None:
            for _ in range(16):
                plain(ids, use_cache=False)
                tensors = {name: tensor.bfloat16() for name, tensor in plain.state_dict().items()}
                save_file(tensors, folder / "plain.safetensors")

        return {"update": median_ratio(publish, compute_and_save)}


def quickstart() -> dict[str, float]:
    """Processor time of the whole quickstart: until its first rollout, and of a step.

    The start is compared with importing what its engine and its trainer cannot do without, a step with transformers'
    own generation, backward pass and optimizer for a batch of the same size.
    """
    from benchmarks.tools.startup import started

    spent: dict[int, float] = {}
    with TemporaryDirectory() as folder, started(Path(folder), ["--max-steps", str(STEPS[-1] + 4)]) as start:
        start.watch()
        startup_s = sum(start.processor_seconds().values())
        metrics = start.root / "metrics.jsonl"
        while len(spent) < len(STEPS):
            assert start.process.poll() is None, f"the run ended: see {start.root / 'logs'}"
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            num_steps = sum('"grad_norm"' in line for line in lines)
            if num_steps >= STEPS[len(spent)]:
                spent[num_steps] = sum(start.processor_seconds().values())
            time.sleep(0.02)
    (first, first_s), (last, last_s) = spent.items()
    step_s = (last_s - first_s) / (last - first)
    plain_start_s = sum(command_cpu_s(sys.executable, "-c", f"import {needed}") for needed in NEEDED)
    return {"start_up": startup_s / plain_start_s, "step": step_s / median(_plain_steps())}


def _plain_steps() -> Iterator[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "reverse-text-tiny")
    optimizer = torch.optim.AdamW(model.parameters())
    prompts = torch.arange(3, 28).repeat(128, 1)

    def step() -> None:
        ids = model.generate(prompts, do_sample=True, min_new_tokens=10, max_new_tokens=10)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for _ in range(ROUNDS):
        yield cpu_s(step)


def help_text() -> dict[str, float]:
    """`rl --help` against importing pydantic alone."""
    rl = str(Path(sys.executable).with_name("rl"))
    plain_s = command_cpu_s(sys.executable, "-c", "import pydantic_settings")
    return {"help_text": command_cpu_s(rl, "--help") / plain_s}


MEASURES = (weight_transfer, packed_rows, rollouts, update, quickstart, help_text)


def main(check: bool = False, store: bool = False) -> int:
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # without byte code, compiling is most of a start
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    found: dict[str, float] = {}
    for measure in MEASURES:
        for name, ratio in _least(measure, stored if check else {}).items():
            found[name] = ratio
            verdict = f"   more than {SLACK:g} times as much" if ratio > _most(stored, name) else ""
            print(f"{name:16} {ratio:8.3f}   stored {stored.get(name)}{verdict}", flush=True)
    if store:
        STORED.write_text(json.dumps({name: round(ratio, 3) for name, ratio in found.items()}, indent=1) + "\n")
    is_well = all(ratio <= _most(stored, name) for name, ratio in found.items())
    return 0 if is_well or not check else 1


def _least(measure: Callable[[], dict[str, float]], stored: dict[str, float]) -> dict[str, float]:
    """Return the least of several tries, as many as it takes to come under the bounds: disturbances only add."""
    least = measure()
    for _ in range(TRIES - 1):
        if all(ratio <= _most(stored, name) for name, ratio in least.items()):
            break
        least = {name: min(ratio, least[name]) for name, ratio in measure().items()}
    return least


def _most(stored: dict[str, float], name: str) -> float:
    return SLACK * stored.get(name, math.inf)


if __name__ == "__main__":
    command(main)

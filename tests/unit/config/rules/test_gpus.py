"""Launch rules for pretended GPUs: which process gets which GPUs, ports, ranks and transfer, or why it is refused."""

from pathlib import Path

import pytest

from support.runs.resolved_runs import ENV, gpus, resolved
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import PROCESSES, ProcessName
from trireme.config.inference import InferenceConfig
from trireme.config.rules.check import problems
from trireme.config.run import RunConfig
from trireme.launch.plan import plan
from trireme.tools.policies.engine import engine_config

NAMED = Devices(gpus=("GPU-a", "6", "4"), cores=8)  # CUDA_VISIBLE_DEVICES=GPU-a,6,4
HALF = "--inference-gpu-ids 0,1 --trainer-gpu-ids"
APART = "--device cuda --hosts.inference 10.0.0.1 --hosts.orchestrator 10.0.0.1 --hosts.trainer 10.0.0.2"
TWO_ENGINES = "--hosts.inference 127.0.0.1:8000 127.0.0.1:8010"

RL = [
    ("", gpus(1), "0 dp1 tp1 | 0 x1 | ipc"),
    ("", gpus(2), "0 dp1 tp1 | 1 x1 | nccl"),
    ("", gpus(3), "0,1 dp2 tp1 | 2 x1 | nccl"),
    ("", gpus(4), "0,1 dp2 tp1 | 2,3 x2 | nccl"),
    ("", NAMED, "GPU-a,6 dp2 tp1 | 4 x1 | nccl"),
    # a side without a setting takes what the other leaves
    ("--inference-gpus 6 --trainer-gpus 2", gpus(8), "0,1,2,3,4,5 dp6 tp1 | 6,7 x2 | nccl"),
    ("--inference-gpus 1", gpus(4), "0 dp1 tp1 | 1,2,3 x3 | nccl"),
    ("--trainer-gpu-ids 0", gpus(4), "1,2,3 dp3 tp1 | 0 x1 | nccl"),
    ("--inference-gpu-ids 3 --trainer-gpus 2", gpus(4), "3 dp1 tp1 | 0,1 x2 | nccl"),
    ("--inference-gpu-ids 2,0 --trainer-gpu-ids 3,1", gpus(4), "2,0 dp2 tp1 | 3,1 x2 | nccl"),
    ("--inference-gpu-ids 1,0 --trainer-gpu-ids 2", NAMED, "6,GPU-a dp2 tp1 | 4 x1 | nccl"),
    ("--inference-gpu-ids 1 --trainer-gpu-ids 1", gpus(2), "1 dp1 tp1 | 1 x1 | ipc"),
    ("--weight-broadcast.type filesystem", gpus(2), "0 dp1 tp1 | 1 x1 | filesystem"),
    (f"{HALF} 1,0 --weight-broadcast.type filesystem", gpus(2), "0,1 dp2 tp1 | 1,0 x2 | filesystem"),
    # parallelism
    ("--inference.parallel.tp 2", gpus(8), "0,1,2,3 dp2 tp2 | 4,5,6,7 x4 | nccl"),
    ("--inference.parallel.tp 2 --inference-gpus 3", gpus(4), "no: ... takes 2 GPUs ... has 3 ... `tp = 3`"),
    ("--inference.parallel.tp 2", gpus(2), "no: ... takes 2 GPUs ... has 1"),
    ("--inference.parallel.dp 1", gpus(4), "no: ... dp = 1 takes 1 GPUs ... has 2 ... `dp = 2`"),
    ("--trainer.num-ranks 3", gpus(4), "no: ... num_ranks = 3, and the trainer has 2 GPUs"),
    # what cannot be had
    ("--inference-gpus 6 --trainer-gpus 2", gpus(4), "no: ... [4, 5] do not exist - 4 GPUs are visible"),
    ("--inference-gpus 4", gpus(4), "no: ... no GPU is left for trainer"),
    ("--inference-gpu-ids 0 --inference-gpus 2", gpus(4), "no: ... inference_gpus = 2 and inference_gpu_ids = [0]"),
    ("--trainer-gpu-ids 3,3", gpus(4), "no: ... names a GPU twice"),
    (f"{HALF} 1,2", gpus(4), "no: ... of their own ... `inference_gpu_ids = [0, 1]`, `trainer_gpu_ids = [2]`"),
    (f"{HALF} 0,1", gpus(2), "no: ... of their own ... `inference_gpu_ids = [0]`, `trainer_gpu_ids = [1]`"),
    (f"{HALF} 1,0 --weight-broadcast.type ipc", gpus(2), "no: ... [0, 1] and ... [1, 0] - expected one GPU for both"),
    ("--weight-broadcast.type ipc", gpus(2), "no: ... [0] and trainer_gpu_ids = [1] - expected one GPU for both"),
    ("--weight-broadcast.type nccl", gpus(1), "no: ... [0] and trainer_gpu_ids = [0] ... Leave the type out, for ipc"),
]  # fmt: skip

# The three commands, each in a shell of its own; the transfer is that which all of them choose.
ALONE = [
    # on one machine as `rl` splits it
    ("", gpus(1), "0 dp1 tp1 :8000 | :8001,5555 | 0 x1 :5556 | ipc"),
    ("", gpus(2), "0 dp1 tp1 :8000 | :8001,5555 | 1 x1 :5556 | nccl"),
    ("--inference-gpus 3 --trainer-gpus 1", gpus(4), "0,1,2 dp3 tp1 :8000 | :8001,5555 | 3 x1 :5556 | nccl"),
    ("--inference-gpu-ids 1,0 --trainer-gpu-ids 3,2", gpus(4), "1,0 dp2 tp1 :8000 | :8001,5555 | 3,2 x2 :5556 | nccl"),
    ("--ports.batches 1 --ports.weights 2", gpus(2), "0 dp1 tp1 :8000 | :8001,1 | 1 x1 :2 | nccl"),
    # CUDA_VISIBLE_DEVICES differs from command to command
    ("", Devices(gpus=("3",), cores=8, hides_some=True), "3 dp1 tp1 :8000 | :8001,5555 | 3 x1 :5556 | nccl"),
    # on several machines each takes all, or so many, of its own
    (APART, gpus(4), "0,1,2,3 dp4 tp1 :8000 | :8001,5555 | 0,1,2,3 x4 :5556 | nccl"),
    (APART, gpus(1), "0 dp1 tp1 :8000 | :8001,5555 | 0 x1 :5556 | nccl"),
    (f"{APART} 10.0.0.3", gpus(2), "0,1 dp2 tp1 :8000 | :8001,5555 | 0,1 x4 :5556 | nccl"),
    (f"{APART} --inference-gpus 3 --trainer-gpus 2", gpus(4), "0,1,2 dp3 tp1 :8000 | :8001,5555 | 0,1 x2 :5556 | nccl"),
    # refused by the process that it is about
    (f"{APART} --trainer-gpus 5", gpus(4), "0,1,2,3 dp4 tp1 :8000 | :8001,5555 | no: ... [4] do not exist | nccl"),
    (TWO_ENGINES, gpus(4), "no: ... Add `--inference-gpu-ids 0` to the first | :8001,5555 | 2,3 x2 :5556 | nccl"),
    (f"{TWO_ENGINES} --inference-gpu-ids 1", gpus(4), "1 dp1 tp1 :8000 | :8001,5555 | 0,2,3 x3 :5556 | nccl"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "on", "expected"), RL)
def test_rl_gives_each_process_its_gpus_or_says_why_not(flags, on, expected):
    engine, _, trainer, transfer = started(flags, on)
    found = [engine] if engine.startswith("no: ") else [engine, trainer, transfer]
    assert matches(expected, found), found


@pytest.mark.parametrize(("flags", "on", "expected"), ALONE)
def test_commands_in_shells_of_their_own_choose_alike(flags, on, expected):
    each = {name: started(flags, on, name) for name in PROCESSES}
    transfers = {transfer for *_, transfer in each.values() if transfer}
    found = [each[name][number] for number, name in enumerate(("inference", "orchestrator", "trainer"))]
    assert matches(expected, [*found, *transfers]), found


@pytest.mark.parametrize("count", [1, 4])
def test_an_engine_without_a_trainer_takes_all_of_the_gpus(count):
    config = engine_config(RunConfig(), str(Path(__file__).parents[4] / "models" / "reverse-text-tiny"), gpus(count))
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (tuple(range(count)), ())
    assert config.inference.gpu_memory_utilization == InferenceConfig().gpu_memory_utilization


def started(flags: str, on: Devices, section: ProcessName | None = None) -> tuple[str, str, str, str]:
    """Return what the engine, the orchestrator and the trainer start with, or why they do not, and the transfer.

    Example:
        ("2,0 dp2 tp1 :8000", ":8001,5555", "3,1 x2 :5556", "nccl")  # GPUs, parallelism or ranks, and ports
    """
    try:
        config = resolved(ENV + flags, on=on, section=section)
    except ConfigError as error:
        return (f"no: {error}",) * 3 + ("",)
    transfer, parallel = config.weight_broadcast.type, config.inference.parallel
    if found := problems(config, on, section=section):
        return (f"no: {' '.join(found)}",) * 3 + (transfer,)
    specs = plan(config, Path("run.json"), on)
    ports = {name: f" :{','.join(map(str, spec.ports.values()))}" for name, spec in specs.items()}
    at = ports if section else dict.fromkeys(ports, "")  # `rl` takes free ones
    gpus_of = {name: spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in specs.items()}
    assert gpus_of["orchestrator"] == ""
    engine = f"{gpus_of['inference']} dp{parallel.dp} tp{parallel.tp}{at['inference']}"
    trainer = f"{gpus_of['trainer']} x{specs['trainer'].num_ranks}{at['trainer']}"
    return engine, at["orchestrator"].strip(), trainer, transfer


def matches(expected: str, found: list[str]) -> bool:
    """Compare cells; of a refusal only the words around "..."."""
    cells = expected.split(" | ")
    return len(cells) == len(found) and all(
        all(part in text for part in cell.split(" ... ")) if cell.startswith("no: ") else cell == text
        for cell, text in zip(cells, found, strict=True)
    )

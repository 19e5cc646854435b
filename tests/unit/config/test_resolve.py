"""A resolved run leaves nothing open, and its defaults follow from the machine."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from support.runs.resolved_runs import CPU, ENV, gpus, resolved, value_at
from trireme.base.devices import Devices, detect_devices
from trireme.config.files import PROCESSES, read_run, to_toml, write_process_files, write_run
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve, resolve_sft
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig

EIGHT_CORES = Devices(cores=8)
DATA = Path(__file__).parents[2] / "data"
TOLERANCE = "weight_broadcast.probe_tolerance"
DTYPE, PASSES = "inference.model.dtype", "trainer.model.optimization_dtype"
LIBCUDA = """
#include <stdlib.h>
static int given(const char *name) { return atoi(getenv(name)); }
int cuDriverGetVersion(int *version) { *version = given("OFFERS"); return 0; }
int cuInit(unsigned flags) { return given("ERROR"); }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = 8 + number; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? device : 0; return 0; }
"""


def test_a_machine_without_gpus_runs_on_cpu_in_full_precision():
    expected = {"device": "cpu", "inference_gpu_ids": [], "trainer_gpu_ids": [], TOLERANCE: 1e-3}
    expected |= {"weight_broadcast.type": "gloo", "inference.model.dtype": "float32", "trainer.num_ranks": 1}
    expected |= {"trainer.threads": 4, "inference.cpu.threads": 4}
    config = resolved(on=EIGHT_CORES)
    assert {key: value_at(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "on", "key", "value"),
    [
        # with half precision anywhere, the trainer measures it
        ("--trainer.model.optimization-dtype bfloat16", CPU, TOLERANCE, None),
        ("--inference.model.dtype bfloat16", CPU, TOLERANCE, None),
        ("--weight-broadcast.probe-tolerance 0.1", gpus(2), TOLERANCE, 0.1),
        # one GPU is shared and leaves room for the trainer
        ("", gpus(1), "inference.gpu_memory_utilization", 0.4),
        ("--inference.gpu-memory-utilization 0.7", gpus(1), "inference.gpu_memory_utilization", 0.7),
        # both sides compute and send in bfloat16 where the GPUs that they take have it
        ("", gpus(2), DTYPE, "bfloat16"),
        ("", gpus(2), PASSES, "bfloat16"),
        (f"--{PASSES.replace('_', '-')} float32", gpus(2), PASSES, "float32"),
        ("", gpus(2, capabilities=((9, 0), (7, 5))), DTYPE, "float16"),
        ("", gpus(2, capabilities=((9, 0), (7, 5))), PASSES, "float32"),
        ("--inference-gpus 1 --trainer-gpus 1", gpus(3, capabilities=((9, 0), (8, 0), (7, 5))), DTYPE, "bfloat16"),
        # GPUs that are asked for are never replaced by the CPU without a word
        ("--trainer-gpus 1", CPU, "device", "cuda"),
        # one model's name is every process's
        ("--model.name a/b", CPU, "trainer.tokenizer.name", "a/b"),
        ("--model.name a/b", CPU, "inference.model.name", "a/b"),
        ("--trainer.model.name a/b", CPU, "inference.model.name", "a/b"),
        ("--model.name a/b --trainer.tokenizer.name c/d", CPU, "trainer.tokenizer.name", "c/d"),
        # engine and trainer share the cores unless they take turns, and ranks share the trainer's
        ("--max-async-level 0", EIGHT_CORES, "trainer.threads", 8),
        ("--max-async-level 0", EIGHT_CORES, "inference.cpu.threads", 8),
        ("--trainer.num-ranks 2", EIGHT_CORES, "trainer.threads", 2),
        ("--trainer.num-ranks 3 --max-async-level 0", EIGHT_CORES, "trainer.threads", 2),
        ("--trainer.num-ranks 99", EIGHT_CORES, "trainer.threads", 1),
        # a step is tried where it delays no engine
        ("", CPU, "trainer.try_step", False),
        ("", gpus(1), "trainer.try_step", True),
        ("--trainer.try-step true", CPU, "trainer.try_step", True),
        ("--trainer.try-step false", gpus(2), "trainer.try_step", False),
        ("--orchestrator.env.0.id tasks/shell/", CPU, "orchestrator.env.0.name", "shell"),
        ("--orchestrator.eval.env.0.id ../mine/x.py", CPU, "orchestrator.eval.env.0.name", "x"),
        ("--orchestrator.eval.env.0.id x --orchestrator.eval.env.0.name y", CPU, "orchestrator.eval.env.0.name", "y"),
        # lengths follow from the run's, and an evaluation is greedy unless its temperature is given
        ("--seq-len 64", CPU, "inference.model.max_model_len", 64),
        ("--seq-len 64", CPU, "trainer.micro_batch_tokens", 64),
        ("--orchestrator.eval.interval 5 --orchestrator.sampling.max-tokens 8", CPU, "orchestrator.eval.sampling", 8),
        ("--orchestrator.eval.sampling.max-tokens 16", CPU, "orchestrator.eval.sampling.temperature", 0),
        ("--orchestrator.eval.sampling.temperature 0.5", CPU, "orchestrator.eval.sampling.temperature", 0.5),
    ],
)
def test_a_value_that_is_left_open_follows_from_the_machine_and_the_rest(flags, on, key, value):
    found = value_at(resolved(flags, on=on), key)
    assert (found["max_tokens"] if isinstance(found, dict) else found) == value


def test_rl_finds_free_ports_outside_those_of_connections():
    config = resolved("--ports.batches 7777 --ports.weights 0")
    ports = {config.inference.server.port, config.orchestrator.server.port, config.ports.weights}
    assert (len(ports - {None, 0}), config.ports.batches) == (3, 7777)
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ports if first <= port <= last], "a connection could get it before the run listens"


def test_supervised_runs_resolve_too():
    on_gpus = resolve_sft(SftConfig(), gpus(4))
    assert (on_gpus.device, on_gpus.num_ranks, on_gpus.threads) == ("cuda", 4, 4)
    assert on_gpus.model.optimization_dtype == "bfloat16"
    on_cpu = resolve_sft(SftConfig(seq_len=64), CPU)
    assert (on_cpu.device, on_cpu.num_ranks, on_cpu.micro_batch_tokens) == ("cpu", 1, 64)
    assert on_cpu.model.name == on_cpu.tokenizer.name == RunConfig().model.name


@pytest.mark.parametrize("on", [CPU, gpus(1), gpus(4)])
def test_a_written_run_reads_back_the_same_and_resolves_to_itself(on, tmp_path):
    infinite = "--trainer.loss.ratio-high inf --orchestrator.buffer.pools.hard-threshold -inf"
    write_run(config := resolved(ENV + infinite, on=on), tmp_path / "run.json")
    assert read_run(RunConfig, tmp_path / "run.json") == config
    assert load_run_config(["--run", str(tmp_path / "run.json")], program="rl")[0] == resolve(config, on) == config


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_can_be_started_alone_from_what_a_run_wrote(process, tmp_path):
    config = resolved(f"@ {DATA / 'guide_example.toml'} --orchestrator.eval.num-examples none", on=gpus(4))
    write_process_files(config, tmp_path)
    alone = resolved(f"@ {tmp_path / process}.toml", on=gpus(4), section=process)
    for key in (process, "max_steps", "weight_broadcast", "ports"):
        assert getattr(alone, key) == getattr(config, key)


def test_toml_is_written_as_it_is_read():
    table = {"a": 1, "b c": 'quote " and \\ and ü', "small": 1e-06, "on": True, "list": [1, 2], "empty": []}
    table |= {"t": {"x": {"y": "z"}, "none": {}}, "many": [{"id": "a", "args": {"k": [{"deep": 1}]}}, {"id": "b"}]}
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("0", "1")),
        ("", ()),
        ("-1", ()),
        ("1", ("1",)),
        ("1,0", ("1", "0")),
        ("0,7,1", ("0",)),  # CUDA stops at the first entry that names no GPU
        ("GPU-1234", ("GPU-1234",)),
    ],
)
def test_visible_gpus_are_what_cuda_would_see(tmp_path, visible, found):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert detect_devices(environ, tmp_path).gpus == (), "a variable does not make GPUs"
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    devices = detect_devices(environ, tmp_path, library="none.so")
    assert devices.gpus == found
    assert devices.cores >= 1


@pytest.mark.parametrize(
    ("told", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@h)", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build", "540.4.0"),
        ("", None),  # no such file, as in WSL2
    ],
)
def test_the_drivers_version_is_read_in_each_of_its_forms(tmp_path, told, driver):
    (tmp_path / "nvidia0").touch()
    if told:
        (tmp_path / "version").write_text(f"{told}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert detect_devices({}, tmp_path, tmp_path / "version", "none.so").driver == driver


@pytest.mark.parametrize(
    ("visible", "offers", "error", "capabilities"),
    [
        (None, 13000, 0, ((8, 0), (9, 0))),
        (None, 12020, 803, ()),
        ("1", 13000, 0, ()),  # this library shows two all the same: nothing is claimed of the one
    ],
)
def test_the_drivers_own_library_tells_what_it_offers(tmp_path, visible, offers, error, capabilities):
    (tmp_path / "cuda.c").write_text(LIBCUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    environ = {"OFFERS": str(offers), "ERROR": str(error)} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    devices = detect_devices(environ, tmp_path, library=str(library))
    assert (devices.cuda, devices.cuda_error, devices.capabilities) == (offers, error, capabilities)
    assert devices.hides_some == (visible is not None)

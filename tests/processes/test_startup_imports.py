"""What starts quickly loads little. Modules are listed, seconds are not: those are benchmarks/startup.py's."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.processes import quick_imports
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.inference.server import FORKED, environment, server_arguments

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 120

SERVERS = {"aiohttp", "fastapi", "httpx", "prometheus_client", "requests", "starlette", "uvicorn"}
SCREENS = {"IPython", "matplotlib", "nicegui", "plotly", "rich", "textual"}
DATA = {"datasets", "numpy", "pandas", "pyarrow", "scipy", "sympy"}
MODELS = {"accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers", "vllm"}
REST = {"gepa", "playwright", "psutil", "wandb", "zmq"}
"""Each takes tens of milliseconds to seconds to import."""

DOOR: set[str] = set()
ORCHESTRATOR = {*SERVERS, "numpy", "psutil", "tokenizers", "zmq"} - {"httpx", "requests"}

LOADS = {
    "trireme.cli.rl": DOOR,
    "trireme.cli.trireme": DOOR,
    "trireme.cli.sft": DOOR,
    "trireme.cli.trainer": DOOR,
    "trireme.cli.orchestrator": DOOR,
    "trireme.cli.inference trireme.inference.server": DOOR,
    "trireme.cli.rl trireme.launch.supervise": {"httpx", "rich"},  # asks for health, shows the run
    "trireme.orchestrator.loop": ORCHESTRATOR,
    "trireme.trainer.loop": MODELS - {"vllm"} | {"numpy", "psutil", "sympy", "zmq"},
}
"""Of the libraries above, those that each of these may load."""


def loaded_by(code: str, folder: Path) -> set[str]:
    """Of the libraries above, what has been imported when `code` has run, or left, in an interpreter of its own."""
    watched = SERVERS | SCREENS | DATA | MODELS | REST
    tell = "import atexit, sys\n"
    tell += f"atexit.register(lambda: print('LOADED', *({watched!r} & sys.modules.keys())))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", tell],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize("modules", LOADS, ids=[modules.split()[-1] for modules in LOADS])
def test_a_process_loads_what_it_needs_and_no_more(modules, tmp_path):
    found = loaded_by("\n".join(f"import {module}" for module in modules.split()), tmp_path)
    assert found <= LOADS[modules]


@pytest.mark.parametrize(
    "call",
    [
        *(f'from trireme.cli.{name} import {name}; {name}(["--help"])' for name in ("rl", "trireme")),
        f'from trireme.cli.rl import rl; rl(["@", "{REPOSITORY}/configs/reverse-text/rl.toml", "--dry-run"])',
    ],
    ids=["rl --help", "trireme --help", "rl --dry-run"],
)
def test_a_command_that_starts_nothing_loads_none_of_them(call, tmp_path):
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    assert loaded_by(call, tmp_path) == set()


# what vLLM is told, so that it comes up quickly

CPU, GPUS = Devices(), Devices(gpus=("0", "1"))
EXECUTOR, BLOCK = "--distributed-executor-backend", "--block-size"


@pytest.mark.parametrize(
    ("given", "on", "flag", "values"),
    [
        ("{}", CPU, EXECUTOR, [FORKED]),
        ("{}", GPUS, EXECUTOR, [None]),
        ("{tensor_parallel_size = 2}", CPU, EXECUTOR, [None]),
        ('{distributed_executor_backend = "mp"}', CPU, EXECUTOR, ["mp"]),
        ('{kv_cache_dtype = "fp8"}', CPU, BLOCK, ["32"]),
        ("{block_size = 64}", CPU, BLOCK, ["64"]),
        ("{}", CPU, BLOCK, ["16", "32"]),  # by the processor
        ("{}", GPUS, BLOCK, [None]),
    ],
)
def test_on_a_cpu_vllm_forks_its_engine_compiles_nothing_and_keeps_blocks_of_its_caches_size(given, on, flag, values):
    """GPUs, several workers and what the user asks for are left to vLLM."""
    argv = ["--inference.args", given, "--model.name", "some/model"]
    config = resolve(load_run_config(argv, program="rl")[0], on)
    found = dict(pairwise(server_arguments(config)))  # of several of one name, vLLM takes the last
    assert found.get(flag) in values
    assert environment(config).get("TORCHDYNAMO_DISABLE") == ("1" if on == CPU else None)


def test_after_quick_imports_garbage_is_collected_again_also_where_one_failed():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import_module("no_such_module")
    assert gc.isenabled()

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
from trireme.config.run import RunConfig
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
def test_a_process_loads_what_it_needs_and_no_more(modules: str, tmp_path: Path) -> None:
    found = loaded_by("\n".join(f"import {module}" for module in modules.split()), tmp_path)
    assert found <= LOADS[modules]


@pytest.mark.parametrize(
    "call",
    [
        'from trireme.cli.rl import rl; rl(["--help"])',
        'from trireme.cli.trireme import trireme; trireme(["--help"])',
        f'from trireme.cli.rl import rl; rl(["@", "{REPOSITORY}/configs/reverse-text/rl.toml", "--dry-run"])',
    ],
    ids=["rl --help", "trireme --help", "rl --dry-run"],
)
def test_a_command_that_starts_nothing_loads_none_of_them(call: str, tmp_path: Path) -> None:
    shipped = tmp_path / "models"
    shipped.symlink_to(REPOSITORY / "models")
    assert loaded_by(call, tmp_path) == set()


# what vLLM is told, so that it comes up quickly


def resolved(*flags: str, on: Devices) -> RunConfig:
    config, _ = load_run_config([*flags, "--model.name", "some/model"], program="rl")
    return resolve(config, on)


def executor_of(config: RunConfig) -> str | None:
    """Of several of one name, vLLM takes the last."""
    words = server_arguments(config)
    flag = "--distributed-executor-backend"
    return dict(pairwise(words)).get(flag)


CPU, GPUS = Devices(), Devices(gpus=("0", "1"))


def block_size_of(config: RunConfig) -> str | None:
    return dict(pairwise(server_arguments(config))).get("--block-size")


def test_a_cache_in_eight_bits_keeps_larger_blocks_and_a_users_own_size_stands() -> None:
    assert block_size_of(resolved("--inference.args", '{kv_cache_dtype = "fp8"}', on=CPU)) == "32"
    assert block_size_of(resolved("--inference.args", "{block_size = 64}", on=CPU)) == "64"
    assert block_size_of(resolved(on=CPU)) in ("16", "32")  # by the processor
    assert block_size_of(resolved(on=GPUS)) is None


def test_on_a_cpu_vllm_forks_its_engine_and_compiles_nothing() -> None:
    config = resolved(on=CPU)
    assert executor_of(config) == FORKED
    assert environment(config)["TORCHDYNAMO_DISABLE"] == "1"


def test_gpus_several_workers_and_what_the_user_asks_for_are_left_to_vllm() -> None:
    on_gpus = resolved(on=GPUS)
    assert executor_of(on_gpus) is None
    assert "TORCHDYNAMO_DISABLE" not in environment(on_gpus)
    assert executor_of(resolved("--inference.args", "{tensor_parallel_size = 2}", on=CPU)) is None
    asked = resolved("--inference.args", '{distributed_executor_backend = "mp"}', on=CPU)
    assert executor_of(asked) == "mp"


def test_after_quick_imports_garbage_is_collected_again_also_where_one_failed() -> None:
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import_module("no_such_module")
    assert gc.isenabled()

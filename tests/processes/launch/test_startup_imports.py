"""What starts quickly loads little. Modules are listed, seconds are not: those are benchmarks/tools/startup.py's."""

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from trireme.base.processes import quick_imports

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 120

SERVERS = {"aiohttp", "fastapi", "httpx", "prometheus_client", "requests", "starlette", "uvicorn"}
SCREENS = {"IPython", "matplotlib", "nicegui", "plotly", "rich", "textual"}
DATA = {"datasets", "numpy", "pandas", "pyarrow", "scipy", "sympy"}
MODELS = {"accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers", "vllm"}
REST = {"gepa", "playwright", "psutil", "wandb", "zmq"}
"""Each takes tens of milliseconds to seconds to import."""

COMMANDS = ("rl", "trireme", "sft", "trainer", "orchestrator", "inference")

LOADS: dict[str, set[str]] = {
    " ".join(f"trireme.cli.{name}" for name in COMMANDS) + " trireme.inference.server": set(),
    "trireme.cli.rl trireme.launch.supervise": {"httpx", "rich"},  # asks for health, shows the run
    "trireme.orchestrator.loop": {*SERVERS, "numpy", "psutil", "tokenizers", "zmq"} - {"httpx", "requests"},
    "trireme.trainer.loop": MODELS - {"vllm"} | {"numpy", "psutil", "sympy", "zmq"},
}
"""Of the libraries above, those that each of these may load."""


def loaded_by(code: str, folder: Path) -> set[str]:
    watched = SERVERS | SCREENS | DATA | MODELS | REST
    tell = "import atexit, sys\n"
    tell += f"atexit.register(lambda: print('LOADED', *({watched!r} & sys.modules.keys())))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", tell], cwd=folder, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
        text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize(
    "modules",
    [
        # importing torch and transformers from scratch takes longer than all other rows together
        pytest.param(modules, id=modules.split()[-1], marks=[pytest.mark.slow] if "torch" in libraries else [])
        for modules, libraries in LOADS.items()
    ],
)
def test_a_process_loads_what_it_needs_and_no_more(modules, tmp_path):
    found = loaded_by("\n".join(f"import {module}" for module in modules.split()), tmp_path)
    assert found <= LOADS[modules]


@pytest.mark.parametrize(
    "call",
    [
        *(f'from trireme.cli.{name} import {name}; {name}(["--help"])' for name in ("rl", "trireme")),
        f'from trireme.cli.rl import rl; rl(["@", "{REPOSITORY}/configs/reverse-text/rl.toml", "--dry-run"])',
        "import trireme.journal.provenance as of; of.collect_provenance(of.Devices(), {}, [])",
        'from trireme.config.inference import parser_names; assert parser_names("reasoning_parser")',
    ],
    ids=["rl --help", "trireme --help", "rl --dry-run", "provenance", "parsers of vLLM"],
)
def test_what_needs_no_model_loads_none_of_them(call, tmp_path):
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    planning = {"numpy", "psutil"} if "--dry-run" in call else set()  # whether the run fits this machine
    assert loaded_by(call, tmp_path) <= planning


def test_garbage_collection_resumes_after_quick_imports():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import_module("no_such_module")
    assert gc.isenabled()

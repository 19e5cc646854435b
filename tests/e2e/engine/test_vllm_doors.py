"""What the real vLLM rejects as we start it: requests without a token, on every route of its own application (no engine
is behind it), arguments with which it cannot start, and too little free memory on a GPU."""

import json
import os

import pytest

from support.runs.real_run import run_command
from trireme.base.token import TOKEN

SECRET = "a-token-for-tests-0123456789"

ASK_VLLM = """
import json, os
from trireme.config.run import RunConfig
from trireme.inference.server import environment, server_arguments

config = RunConfig.model_validate({"device": "cpu", "inference": {"server": {"port": 1}}})
os.environ.update(environment(config))
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(server_arguments(config))
app = build_app(args, ("generate",))
client = TestClient(app, raise_server_exceptions=False)
found = {}
for route in app.routes:
    if isinstance(route, WebSocketRoute):
        continue
    path = route.path.replace("{", "").replace("}", "") or "/"
    for method in getattr(route, "methods", None) or ["GET"]:
        found[f"{method} {path}"] = client.request(method, path).status_code
found["GET /nowhere"] = client.get("/nowhere").status_code
friend = {"Authorization": "Bearer " + os.environ["TRIREME_TOKEN"]}
found = {"without": found, "with": client.get("/openapi.json", headers=friend).status_code, "refused": []}

from trireme.base.errors import ConfigError
from trireme.inference.server import serve

for name, value in (("kv-cache-dtype", "foo"), ("enable-log-outputs", True), ("max-num-batched-tokens", 1)):
    inference = {"model": {"name": "models/reverse-text-tiny"}, "server": {"port": 1}, "args": {name: value}}
    try:
        serve(RunConfig.model_validate({"device": "cpu", "inference": inference}))
    except ConfigError as error:
        found["refused"].append(str(error))

from types import SimpleNamespace
import torch
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory
from trireme.algo.model.chips import CUDA_BYTES, GIB
from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.tools.plan.advice import size_kv_cache
from trireme.tools.plan.engine_memory import CONTEXT_BYTES
from trireme.trainer.out_of_memory import leave_to_engine

total, limits, gpu = 24 * GIB, [], Devices(gpus=("0",), cores=2)
torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=total)
torch.cuda.set_per_process_memory_fraction = lambda fraction, _: limits.append(fraction)
config = resolve(load_run_config(["--model.name", "models/reverse-text-tiny"], program="rl")[0], gpu)
leave_to_engine(config.inference.gpu_share, torch.device("cuda"))
trainer = int(limits[0] * total + CUDA_BYTES)
args = make_arg_parser(FlexibleArgumentParser()).parse_args(server_arguments(size_kv_cache(config, gpu)))
now = MemorySnapshot(device="cpu", auto_measure=False, total_memory=total)
now.free_memory = int(total - trainer - CONTEXT_BYTES)  # the trainer has all that it may take, the engine has CUDA
engine = CONTEXT_BYTES + request_memory(now, args)  # raises where vLLM would not start
found["shared"] = {"total": total, "trainer": trainer, "engine": engine, "kv_cache": args.kv_cache_memory_bytes}
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "ask_vllm.py").write_text(ASK_VLLM)
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24576, 0'\n")
    (folder / "nvidia-smi").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    output = run_command("python", folder / "ask_vllm.py", env={TOKEN: SECRET, "PATH": path})
    return json.loads(output.rpartition("FOUND")[2].splitlines()[0])


def test_an_engine_starts_beside_a_trainer_that_holds_all_its_memory(found):
    shared = found["shared"]
    assert shared["trainer"] > shared["total"] / 2
    assert 0 < shared["kv_cache"] < shared["engine"]
    assert shared["trainer"] + shared["engine"] <= shared["total"] + 2**24  # vLLM takes the share in four digits


def test_every_vllm_route_but_health_requires_the_token(found):
    answers = found["without"]
    known = {"POST /pause", "POST /update_weights", "POST /inference/v1/generate", "POST /collective_rpc"}
    assert known | {"GET /metrics", "POST /v1/chat/completions", "GET /ping"} <= answers.keys()
    assert {route for route, status in answers.items() if status != 401} == {"GET /health"}
    assert found["with"] == 200
    reasons = ("'foo'", "--enable-log-requests", "max_num_batched_tokens (1)")
    for error, reason in zip(found["refused"], reasons, strict=True):
        assert error.startswith("vLLM refuses its arguments: ")
        assert reason in error

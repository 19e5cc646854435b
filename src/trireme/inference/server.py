"""vLLM's own server, started with what the run's configuration asks for."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trireme.base.log import get_logger
from trireme.base.processes import quick_imports
from trireme.config.run import RunConfig

log = get_logger("inference")

NORMS, PROVIDER = ("rms_norm", "fused_add_rms_norm"), "trireme_cpu"  # see `norms`
KNOWN = "0.32."  # versions of vLLM
OWN_WAY = ("api-key", "enable-log-requests", "enable-log-outputs", "enable-request-id-headers", "otlp-traces-endpoint")
FORKED = "trireme.inference.cpu.forked_engine.ForkedExecutor"


def serve(config: RunConfig) -> None:
    """Runs until it is told to stop. Imports vLLM only here, after its environment is set."""
    os.environ.update(environment(config))
    with quick_imports():
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = server_arguments(config)
    log.info("vllm serve %s", " ".join(arguments))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    if args.distributed_executor_backend != FORKED:
        uvloop.run(run_server(args))
        return
    with quick_imports():
        from trireme.inference.cpu.forked_engine import serve_forked
    serve_forked(args)


def environment(config: RunConfig) -> dict[str, str]:
    """vLLM reads these when it is imported."""
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights and pausing
        "VLLM_PLUGINS": "trireme",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING" if config.log_level in ("warning", "error") else "INFO",
    }
    if config.serves_adapters:
        settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the route that gives the adapter its name
    if config.device == "cuda" and config.synchronous:
        settings["VLLM_BATCH_INVARIANT"] = "1"  # a request's bits must not depend on which others it is batched with
    if config.device == "cpu":
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.inference.cpu.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.inference.cpu.threads or os.cpu_count()),
            "TORCHDYNAMO_DISABLE": "1",  # parts of sampling would be compiled, in C++, while the first request waits
        }
    return settings


def server_arguments(config: RunConfig) -> list[str]:
    """The command line of `vllm serve` for this run; `[inference.args]` comes last and wins."""
    inference, model = config.inference, config.inference.model
    arguments: dict[str, Any] = {
        "model": model.name or config.model.name,
        "host": inference.server.host,
        "port": inference.server.port,
        "dtype": model.dtype,
        "max-model-len": model.max_model_len,
        "max-num-seqs": inference.max_num_seqs,
        "scheduling-policy": "priority",  # who comes first is served first, but for the probe of new weights
        "seed": config.seed,
        "tensor-parallel-size": inference.parallel.tp,
        "weight-transfer-config": '{"backend": "trireme"}',
        "worker-extension-cls": "trireme.inference.weight_engine.WorkerExtension",
        "logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from, temperature included
        "enable-scale-out": True,  # /inference/v1/generate
        "disable-uvicorn-access-log": True,
        "trust-remote-code": model.trust_remote_code,
        "max-logprobs": config.max_logprobs,  # through them it says what a cut sampler could choose from
        "enable-auto-tool-choice": model.enable_auto_tool_choice or model.tool_call_parser is not None,
        "tool-call-parser": model.tool_call_parser,
        "reasoning-parser": model.reasoning_parser,
        "enforce-eager": model.enforce_eager,
        "data-parallel-size": inference.parallel.dp,
    }
    arguments |= _cpu_arguments(config) if config.device == "cpu" else _gpu_arguments(config)
    if config.serves_adapters:
        arguments |= _adapter_arguments(config)
    if config.replays_routes:
        arguments |= _replay_arguments(config)
    arguments |= {name.replace("_", "-"): value for name, value in inference.args.items()}
    if config.device == "cpu" and _is_for_one_worker(arguments):
        arguments.setdefault("distributed-executor-backend", FORKED)
    flags = [part for name, value in arguments.items() for part in _flag(name, value)]
    return [*flags, *_short_way(arguments), *_door_keeper()]  # whoever comes last is asked first


def _is_for_one_worker(arguments: dict[str, Any]) -> bool:
    return all(arguments.get(f"{kind}-parallel-size") in (None, 1) for kind in ("tensor", "pipeline", "data"))


def _short_way(arguments: dict[str, Any]) -> list[str]:
    """Unless something is asked for that lies on vLLM's own way to its engine, or this is not the vLLM that we know."""
    is_watched = any(arguments.get(name) for name in OWN_WAY) or os.environ.get("VLLM_API_KEY")
    return [] if is_watched or not _is_known() else ["--middleware", "trireme.inference.fast_generate.FastGenerate"]


def _is_known() -> bool:
    """Its insides are what `generate` was checked against."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name).startswith(KNOWN)
    return False


def _door_keeper() -> list[str]:
    """In front of every route, whatever else `[inference.args]` puts there."""
    return ["--middleware", "trireme.transport.bearer.RequireToken"]


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {"enforce-eager": True, "data-parallel-size": None, "block-size": _block_size(config)}
    arguments["ir-op-priority"] = json.dumps({name: [PROVIDER] for name in NORMS})
    if config.synchronous:
        # A seeded request whose prefill is split kills this engine; synchronous runs are the ones that use seeds.
        # Without prefix caching a request's arithmetic does not depend on what ran before it.
        arguments |= {"enable-chunked-prefill": False, "enable-prefix-caching": False}
        arguments["max-num-batched-tokens"] = max(8192, config.inference.model.max_model_len or config.seq_len)
    return arguments


def _block_size(config: RunConfig) -> int:
    """vLLM takes 128 tokens, longer than many a prompt; only whole blocks are found again by the others of a group.
    What wants at least 32 is Intel's matrix unit, and a cache in eight bits."""
    processor = Path("/proc/cpuinfo")
    has_amx = processor.exists() and "amx_tile" in processor.read_text()
    in_eight_bits = not {"kv_cache_dtype", "kv-cache-dtype"}.isdisjoint(config.inference.args)
    return 32 if has_amx or in_eight_bits else 16


def _gpu_arguments(config: RunConfig) -> dict[str, Any]:
    return {"gpu-memory-utilization": config.inference.gpu_memory_utilization}


def _adapter_arguments(config: RunConfig) -> dict[str, Any]:
    """Only for the layers that have one: an engine whose head is ready for adapters dies of prompt logprobs."""
    lora = config.trainer.model.lora
    assert lora is not None
    return {
        "enable-lora": True,
        "max-lora-rank": lora.engine_rank,
        "max-loras": 1,
        "max-cpu-loras": 1,
        "lora-target-modules": tuple(dict.fromkeys(name.rpartition(".")[2] for name in lora.target_modules)),
    }


def _replay_arguments(config: RunConfig) -> dict[str, Any]:
    """The engine is to say which experts it used; for that it needs its prefix cache, see `shares_prefixes`."""
    if config.device != "cpu":
        return {"enable-return-routed-experts": True, "enable-prefix-caching": True}
    ours = "trireme.inference.cpu.expert_routes"
    return {
        "scheduler-cls": f"{ours}.RoutingScheduler",
        "worker-cls": f"{ours}.RoutingWorker",
        "enable-prefix-caching": True,
    }


def _flag(name: str, value: Any) -> list[str]:
    """`--name value`, or several; True and False as vLLM's `--name` and `--no-name`; None is left out."""
    if value is None:
        return []
    if value is True:
        return [f"--{name}"]
    if value is False:
        # Plain switches have no negative form: leaving them out is their False.
        return [f"--no-{name}"] if name in ("enable-chunked-prefill", "enable-prefix-caching") else []
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]

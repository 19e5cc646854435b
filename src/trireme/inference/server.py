"""Start vLLM's own server with the arguments that the run's configuration implies."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from contextlib import suppress
from math import prod
from typing import Any, NoReturn

from trireme.algo.model.architecture import architecture_of, is_known
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.processes import quick_imports
from trireme.config.files import command_without_secrets
from trireme.config.model.folder import config_file, has_low_bit_weights, looks_local, read_config
from trireme.config.model.state_layers import (
    caches_prefixes_on_cpu,
    latent_width,
    leaves_out_vision,
    rotates_in_three_dimensions,
)
from trireme.config.model.vision import MOST_PICTURES
from trireme.config.run import RunConfig

log = get_logger("inference")

OWN_ROUTE_ONLY = (
    "api-key",
    "enable-log-requests",
    "enable-log-outputs",
    "enable-request-id-headers",
    "otlp-traces-endpoint",
)
"""Options that need vLLM's own generate route, without `fast_generate`."""

NOWHERE = "nowhere.invalid"  # the only host from which the engine would fetch a picture
BLOCK = 32  # tokens of a block of the cache on a CPU
FORKED = "trireme.inference.cpu.forked_engine.ForkedExecutor"


def serve(config: RunConfig) -> None:
    """Serve until a signal stops the server. Imports vLLM only here, after its environment is set.

    Raises: ConfigError if vLLM refuses its arguments.
    """
    os.environ.update(environment(config))
    with quick_imports():
        import uvloop
        from huggingface_hub import hf_hub_download
        from pydantic import ValidationError
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    name = str(config.inference.model.name)
    if not looks_local(name) and config_file(name) is None:
        with suppress(OSError, ValueError):  # vLLM reports it
            hf_hub_download(name, "config.json")

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)  # instead of two screens of usage

    parser = make_arg_parser(Parser())
    arguments = without_negated_switches(server_arguments(config), parser._option_string_actions)
    log.info("vllm serve %s", " ".join(command_without_secrets(arguments)))

    # Arguments are parsed here and not by vLLM's command, so that a wrong one is a `ConfigError`.
    try:
        args = parser.parse_args(arguments)
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise _refusal(str(error)) from None
    try:
        if args.distributed_executor_backend != FORKED:
            uvloop.run(run_server(args))
            return
        with quick_imports():
            from trireme.inference.cpu.forked_engine import serve_forked
        serve_forked(args)
    except ValidationError as error:  # raised by vLLM's own configuration, before the engine starts
        raise _refusal("; ".join(each["msg"] for each in error.errors())) from None


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"vLLM refuses its arguments: {reason} - expected arguments that it can start with. Correct "
        "`[inference.args]` or the key that it comes from; the whole command is the line `vllm serve …` above."
    )


def environment(config: RunConfig) -> dict[str, str]:
    """Return the environment variables that vLLM reads when it is imported."""
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

    # Threads are not bound to cores, which trainer and engine share; `OMP_NUM_THREADS` limits them instead.
    if config.device == "cpu":
        threads = config.inference.cpu.threads or os.cpu_count() or 1
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.inference.cpu.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, threads // _num_workers(config))),
            "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits while parts of sampling are compiled
        }
    return settings


def _num_workers(config: RunConfig) -> int:
    """Return how many processes of an engine on a CPU compute at once, which share its threads."""
    given = {name.replace("_", "-"): value for name, value in config.inference.args.items()}
    return prod(int(given.get(f"{kind}-parallel-size") or 1) for kind in ("tensor", "pipeline", "data"))


def server_arguments(config: RunConfig) -> list[str]:
    """Return the command line of `vllm serve` for this run; `[inference.args]` comes last and wins."""
    inference, model = config.inference, config.inference.model
    arguments: dict[str, Any] = {
        "model": model.name or config.model.name,
        "host": inference.server.host,
        "port": inference.server.port,
        "dtype": model.dtype,
        "max-model-len": model.max_model_len,
        "max-num-seqs": inference.max_num_seqs,
        "scheduling-policy": "priority",  # first come, first served, except for the probe of new weights
        "seed": config.seed,
        "tensor-parallel-size": inference.parallel.tp,
        "weight-transfer-config": '{"backend": "trireme"}',
        "worker-extension-cls": "trireme.inference.weight_engine.WorkerExtension",
        "logprobs-mode": "processed_logprobs",  # logprobs under the distribution that was sampled from
        "enable-scale-out": True,  # /inference/v1/generate
        "enable-prompt-tokens-details": True,  # how much of a prompt was in the prefix cache
        "disable-uvicorn-access-log": True,
        "trust-remote-code": model.trust_remote_code,
        "max-logprobs": config.max_logprobs,  # they tell what a cut sampler could choose from
        "enable-auto-tool-choice": model.enable_auto_tool_choice or model.tool_call_parser is not None,
        "tool-call-parser": model.tool_call_parser,
        "reasoning-parser": model.reasoning_parser,
        "enforce-eager": model.enforce_eager,
        "data-parallel-size": inference.parallel.dp,
    }

    # Low-bit weights are loaded in the precision of the engine, or they could not take the trainer's.
    described = read_config(config.inference.model.name)
    if has_low_bit_weights(described):
        plain: dict[str, Any] = {"quantization_config": None}
        plain |= {part: dict(plain) for part in ("text_config",) if "quantization_config" in described.get(part, {})}
        arguments |= {"load-format": "trireme", "hf-overrides": json.dumps(plain)}  # see `plugin.py`

    if config.trainer.model.vlm is not None:
        # vLLM forgets pictures at each weight update in the engine, but not in its server, which would then leave out
        # what the engine no longer has. Without that cache each request carries its pictures.
        arguments |= {
            "limit-mm-per-prompt": json.dumps({"image": MOST_PICTURES, "video": 0}),
            "mm-processor-cache-gb": 0,
        }
        arguments["allowed-media-domains"] = NOWHERE
    elif leaves_out_vision(described):
        arguments["language-model-only"] = True

    if config.device == "cpu":
        arguments |= _cpu_arguments(config)
    else:
        arguments["gpu-memory-utilization"] = inference.gpu_memory_utilization

    if config.serves_adapters:
        lora = config.trainer.model.lora
        assert lora is not None
        # on trained layers only: an engine with an adapter on its head dies of prompt logprobs
        targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name in lora.target_modules))
        arguments |= {"enable-lora": True, "max-lora-rank": lora.engine_rank, "lora-target-modules": targets}
        arguments |= {"max-loras": 1, "max-cpu-loras": 1}

    if config.replays_routes:  # the engine needs its prefix cache to return its routes
        arguments["enable-prefix-caching"] = True
        if config.device == "cpu":
            ours = "trireme.inference.cpu.expert_routes"
            arguments |= {"scheduler-cls": f"{ours}.RoutingScheduler", "worker-cls": f"{ours}.RoutingWorker"}
        else:
            arguments["enable-return-routed-experts"] = True

    # The user's arguments come last and win; what follows depends on the result.
    arguments |= {name.replace("_", "-"): value for name, value in inference.args.items()}
    has_one_worker = all(arguments.get(f"{kind}-parallel-size") in (None, 1) for kind in ("tensor", "pipeline", "data"))
    if config.device == "cpu" and has_one_worker:
        arguments.setdefault("distributed-executor-backend", FORKED)

    flags = [part for name, value in arguments.items() for part in _flag(name, value)]

    # `/collective_rpc` must reach all cores. The fast path is left out if an option needs vLLM's own route.
    if arguments.get("data-parallel-size") not in (None, 1):
        flags += ["--middleware", "trireme.inference.every_core.CallEveryCore"]
    if not any(arguments.get(name) for name in OWN_ROUTE_ONLY) and not os.environ.get("VLLM_API_KEY"):
        flags += ["--middleware", "trireme.inference.fast_generate.FastGenerate"]
    return [*flags, "--middleware", "trireme.transport.bearer.RequireToken"]  # the last middleware is the outermost


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    # vLLM's default blocks have 128 tokens. Only whole blocks of a prompt are shared by its group, so 32, the smallest
    # that vLLM admits here, reads 64 prompts of 40 tokens in 0.33 instead of 1.54 s (docs/decisions/engines.md).
    arguments: dict[str, Any] = {"enforce-eager": True, "data-parallel-size": None, "block-size": BLOCK}
    if not config.inference.arg("block-size"):
        arguments["num-gpu-blocks-override"] = _sufficient_blocks(config)

    described = read_config(config.inference.model.name)
    if rotates_in_three_dimensions(described):
        arguments["compilation-config"] = '{"custom_ops": ["-rotary_embedding"]}'
    if latent_width(described):  # the default computes attention in bfloat16 with AMX, and refuses small heads
        arguments["attention-backend"] = "CPU_MLA"
    if not caches_prefixes_on_cpu(described):
        log.info("The prefix cache is off: vLLM's CPU engine dies when it stores the state of a Mamba-2 layer.")
        arguments["enable-prefix-caching"] = False
    if config.synchronous:
        # A seeded request whose prefill is split kills this engine; synchronous runs are the ones that use seeds.
        # Without prefix caching a request's arithmetic does not depend on what ran before it.
        arguments |= {"enable-chunked-prefill": False, "enable-prefix-caching": False}
        arguments["max-num-batched-tokens"] = max(8192, config.inference.model.max_model_len or config.seq_len)
    return arguments


def _sufficient_blocks(config: RunConfig) -> int | None:
    """Return how many blocks of the cache hold all sequences of a run at full length; None if these may not fit into
    `kv_cache_gib`, or if layers share blocks in ways of their own. Filling a GiB that is never used takes vLLM half
    a second of its start."""
    described = read_config(config.inference.model.name)
    try:
        model = architecture_of(described) if is_known(described) else None
    except KeyError:  # a size that vLLM takes from its class
        model = None
    if model is None or not all(layer.attends and layer.window is None for layer in model.layers):
        return None

    longest = config.inference.model.max_model_len or config.seq_len
    sequences = max(config.inference.max_num_seqs, config.orchestrator.max_concurrent)
    blocks = sequences * -(-longest // BLOCK) + 1  # vLLM keeps one back
    most_bytes = blocks * BLOCK * len(model.layers) * 2 * model.key * 4  # keys and values, in float32 at most
    return blocks if most_bytes <= config.inference.cpu.kv_cache_gib << 30 else None


def _flag(name: str, value: Any) -> list[str]:
    """Return `--name value`, or several values; True and False as `--name` and `--no-name`; nothing for None."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]


def without_negated_switches(arguments: list[str], known: Container[str]) -> list[str]:
    """Leave out `--no-NAME` if vLLM knows `--NAME` alone: leaving such a switch out is its negative form."""
    return [
        each
        for each in arguments
        if not (each.startswith("--no-") and each not in known and f"--{each.removeprefix('--no-')}" in known)
    ]

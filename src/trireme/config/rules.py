"""Rules of a run and of supervised training: what contradicts itself, or cannot start on this machine.

Rules of one table are in that table's file; those here span tables. Each yields one message per problem, and all
messages are shown together. `check` holds for any load; `check_launch` adds what must be true of this machine for the
run to start: its models and files are there, its ports are free. `section` is the process that its own command starts,
whose rules alone are checked; None for `rl`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from trireme.base.devices import BFLOAT16_CAPABILITY, LEAST_CAPABILITY, LEAST_CUDA, LEAST_DRIVER, Devices
from trireme.base.errors import ConfigError
from trireme.base.functions import function_problem
from trireme.base.network import is_here, is_loopback
from trireme.base.processes import loopback_problem, port_is_free
from trireme.base.safe_text import CONTROL
from trireme.base.token import HOW, token, token_problem
from trireme.config.files import PROCESSES, ProcessName, toml_value
from trireme.config.inference import LOW_BIT, inference_problems
from trireme.config.losses import loss_problems
from trireme.config.model.folder import (
    check_model,
    has_low_bit_weights,
    learns_positions,
    longest_context,
    looks_local,
    low_bit_problem,
    model_launch_problems,
    num_experts_of,
    read_config,
    tokenizer_problems,
)
from trireme.config.model.state_layers import leaves_out_vision, mixers_of, serving_problems
from trireme.config.model.tokenizer import has_vocabulary, read_tokenizer, stop_ids, turn_end_warning
from trireme.config.model.vision import OF_PICTURES, picture_run_problems
from trireme.config.model.weights import weights_problems
from trireme.config.orchestrator import (
    environment_template_kwargs,
    nearest_divisors,
    orchestrator_problems,
    samplings,
)
from trireme.config.problems import raise_together
from trireme.config.run import RunConfig, place_of
from trireme.config.sft import SftConfig, sft_problems
from trireme.config.trainer import (
    ENGINE_RANKS,
    allocator_problems,
    lora_problems,
    model_problems,
    optim_launch_problems,
    optim_problems,
)


def check(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> None:
    """Raises: ConfigError if the resolved configuration contradicts itself or asks for GPUs that are not there."""
    raise_together(problems(config, devices, section=section))


def check_launch(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> None:
    """Raises: ConfigError if the run contradicts itself or could not start here and now."""
    raise_together(problems(config, devices, section=section) + launch_problems(config, devices, section=section))


def problems(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> list[str]:
    found = [*_run_problems(config), *_host_problems(config), *picture_run_problems(config)]
    trainer, orchestrates, trains = config.trainer, section in (None, "orchestrator"), section in (None, "trainer")

    # A process that starts alone checks only the tables that it reads.
    if orchestrates:
        found += orchestrator_problems(config.orchestrator, longest=config.loss_length)
        found += _rollout_problems(config)
    if trains:
        found += model_problems("trainer.model", trainer.model, trainer.num_ranks or 1)
        found += lora_problems("trainer.model.lora", trainer.model.lora)
        found += optim_problems("trainer.", trainer.optim, trainer.scheduler, trainer.model, max_steps=config.max_steps)
        found += _loss_problems(config)
        found += _micro_batch_problems("trainer.micro_batch_tokens", trainer.micro_batch_tokens, config.seq_len)

    if orchestrates or trains:
        found += _timeout_problems(config)
    if section in (None, "inference"):
        found += inference_problems(config.inference)
    if section != "trainer":
        found += _engine_argument_problems(config)
    found += _gpu_problems(config, devices, section)
    for table in ("env_vars", *(f"{name}.env_vars" for name in PROCESSES if section in (None, name))):
        found += env_var_problems(table, attrgetter(table)(config))
    return found


def launch_problems(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> list[str]:
    found = [*_loopback_problems(), *_token_problems(config)]

    if section is None:
        found += _processes_elsewhere(config)

    # Precisions, on the GPUs of the sides that start here.
    precisions: Computing = {
        "inference.model.dtype": (config.inference.model.dtype, config.inference_gpu_ids or ()),
        "trainer.model.optimization_dtype": (config.trainer.model.optimization_dtype, config.trainer_gpu_ids or ()),
    }
    computing = {key: each for key, each in precisions.items() if section in (None, key.partition(".")[0])}
    found += gpu_launch_problems(config.device, devices, computing) if computing else []
    found += _installed_engine_problems(config.device, devices) if section in (None, "inference") else []

    # Models, tokenizers and the user's functions, as far as they are on this disk.
    found += file_problems(config, section=section)
    found += _template_problems(config) if section in (None, "orchestrator") else []
    functions: dict[str, str | None] = {}
    if section in (None, "trainer"):
        functions = {_loss_table(name) + ".path": own.trainer.loss.path for name, own in config.losses.items()}
    if section in (None, "trainer"):
        found += optim_launch_problems("trainer.", config.trainer.optim, config.device)
        found += model_launch_problems("trainer.model", config.trainer.model, config.device)
        variables = os.environ | config.env_vars | config.trainer.env_vars
        found += allocator_problems(config.weight_broadcast.type, variables)
    found += run_tokenizer_problems(config, section=section)
    if section in (None, "inference"):
        found += served_model_problems(config)
    if section in (None, "orchestrator"):
        own = {f'orchestrator.env["{name}"]': view for name, view in config.orchestrator.sources.items()}
        views = {"orchestrator": config.orchestrator} | own
        paths = {view.advantage.path: f"{table}.advantage.path" for table, view in reversed(views.items())}
        functions |= {key: path for path, key in paths.items()}
    found += filter(None, (function_problem(path, key=key) for key, path in functions.items() if path))

    # Routes can be replayed only by a model that has experts.
    name = config.trainer.model.name or config.model.name
    if config.replays_routes and (described := read_config(name)) and not num_experts_of(described):
        found.append(f"`{REPLAY}` with {name} - expected a model with a mixture of experts. Remove the line.")

    # Ports that this command is about to bind.
    for key, (process, _) in PORTS.items():
        if (section is None and key != "ports.ranks") or section == process:
            found += port_problems(config, key)
    return found


def _loopback_problems() -> Iterator[str]:
    if problem := loopback_problem():
        yield problem


def run_tokenizer_problems(config: RunConfig, *, section: ProcessName | None = None) -> Iterator[str]:
    """Yield why conversations of this run cannot become tokens of its model, where both are on this disk."""
    model = config.trainer.model.model_copy(update={"name": config.trainer.model.name or config.model.name})
    tokenizer = config.trainer.tokenizer.name or model.name
    yield from tokenizer_problems("trainer.tokenizer.name", tokenizer, model, renders=section in (None, "orchestrator"))


def launch_warnings(config: RunConfig) -> Iterator[str]:
    """Yield what lets a run start, but is seldom meant."""
    if (without := config.trainer.ckpt.resume_without) and config.resume_from is None:
        yield (
            f"trainer.ckpt.resume_without = {toml_value(without)} has no effect without `resume_from`: a run's own "
            "checkpoints are resumed whole, so that it comes to the same weights."
        )

    name, served = config.trainer.tokenizer.name or config.model.name, config.inference.model.name
    if name is None or served is None or not (has_vocabulary(Path(name)) and has_vocabulary(Path(served))):
        return
    own, engines = config.trainer.model.trust_remote_code, config.inference.model.trust_remote_code
    try:
        opened = read_tokenizer(name, Path(name), trust_remote_code=own)
        eos = read_tokenizer(served, Path(served), trust_remote_code=engines).eos_token_id
    except ConfigError:  # the rules report it
        return

    # The engine's own sources of stop tokens, as vLLM reads them.
    args = {key.replace("-", "_"): value for key, value in config.inference.args.items()}
    described = read_config(served)
    generation = read_config(served, "generation_config.json")
    if args.get("generation_config", "auto") != "auto":  # "vllm", or another folder
        generation, described = read_config(str(args["generation_config"]), "generation_config.json"), {}

    for table, sampling in samplings(config.orchestrator):
        stops = stop_ids(eos, generation, described, sampling.extra_body.get("stop_token_ids", ()))
        if warning := turn_end_warning(opened, stops, table):
            yield warning
            return


def served_model_problems(config: RunConfig, described: dict[str, Any] | None = None) -> Iterator[str]:
    """Yield why engines cannot serve the model that this run trains, by its config.json (by default, as it is on this
    disk)."""
    arguments = {name.replace("-", "_"): value for name, value in config.inference.args.items()}
    sees = config.trainer.model.vlm is not None
    if sees:
        # `picture_run_problems` refuses arguments about pictures.
        arguments = {name: value for name, value in arguments.items() if name not in OF_PICTURES}
    served, dtype = config.inference.model.name, config.inference.model.dtype
    described = read_config(served) if described is None else described

    # The engine must round weights by itself at each update, in a precision that it can round from.
    if (method := arguments.get("quantization")) is not None and method not in LOW_BIT:
        yield (
            f'inference.args.quantization = "{method}" - expected one of {", ".join(LOW_BIT)}, for which the engine '
            "rounds the trainer's weights itself. Take one of these, or remove the line."
        )
    elif method is not None and dtype == "float32":
        yield (
            f'inference.args.quantization = "{method}" with inference.model.dtype = "float32" - expected half '
            'precision, in which vLLM computes with 8-bit weights. Set `inference.model.dtype = "bfloat16"`.'
        )

    # Prompts and completions must end where the model's positions end, unless the user gives vLLM other ones.
    longest, room = longest_context(described), config.inference.model.max_model_len or config.seq_len
    if longest and room > longest and not {"hf_overrides", "hf_config_path"} & arguments.keys():
        yield (
            f"seq_len = {config.seq_len} lets {served} read {room} tokens, and its positions end at {longest} (in its "
            f"config.json) - expected at most as many. Set `seq_len = {longest}`, or take a model for longer texts."
        )

    # A model with quantized weights is given to vLLM by overrides and a load format of ours.
    taken = {"hf_overrides", "load_format"} if has_low_bit_weights(described) else set()
    for name in sorted(taken & arguments.keys()):
        yield (
            f"inference.args.{name} with {served}, whose weights are quantized - expected none, as the engine must "
            "hold plain weights. Remove the line; keys of the model belong in a copy of its config.json."
        )

    # Layers for which vLLM lacks a kernel, or has a wrong one.
    yield from serving_problems(f'inference.model.name = "{served}"', described, arguments, config.device, dtype)
    replicas = arguments.get("data_parallel_size") or 1
    if config.device == "cpu" and replicas != 1 and num_experts_of(described):
        yield (
            f"inference.args.data_parallel_size = {replicas} with {served} on a CPU - expected 1, as vLLM's CPU engine "
            "cannot exchange what experts compute between replicas. Leave it out."
        )

    if config.trainer.model.from_scratch and leaves_out_vision(described) and not sees:
        yield (
            f"`trainer.model.from_scratch = true` with {served}, which also sees - expected a text model: engines know "
            "its weights by names in a checkpoint that is not read. Remove the line, or choose another model."
        )

    # Adapters that vLLM cannot hold apart from the base model.
    if config.serves_adapters and mixers_of(described):
        yield (
            f'`trainer.model.lora.sync = "adapter"` with {served} - expected "merged", as adapters of layers that '
            "carry a state were not tried in vLLM. Remove the line."
        )
    elif config.serves_adapters and config.device == "cpu" and num_experts_of(described):
        yield (
            f'`trainer.model.lora.sync = "adapter"` with {served} on a CPU - expected "merged" for a model with '
            "experts, beside which vLLM's adapters need triton. Remove the line."
        )


# Rules of a whole run.

REPLAY = "trainer.model.moe.router_replay = true"


def _run_problems(config: RunConfig) -> Iterator[str]:
    yield from _name_problems(config.name, config.output_dir)
    longest = config.inference.model.max_model_len
    if longest is not None and longest > config.seq_len:
        yield (
            f"seq_len must match or exceed max_model_len: seq_len = {config.seq_len}, inference.model.max_model_len = "
            f"{longest} - longer rollouts cannot be trained on. Set one of them to the other."
        )

    # Two servers of one run must not have the same port.
    used: dict[int, str] = {}
    for key, _host, port in ports(config):
        if port and port in used:
            yield f"{used[port]} = {port} and {key} = {port} - expected a port each. Remove one of them."
        used.setdefault(port, key)

    # Transports that cannot work on this device, or for which `delta` saves nothing.
    broadcast, lora = config.weight_broadcast, config.trainer.model.lora
    if config.device == "cpu" and broadcast.type in ("nccl", "ipc"):
        yield (
            f'weight_broadcast.type = "{broadcast.type}" with device = "cpu" - expected a way to move memory of CPUs. '
            'Leave it out, or write "gloo" or "filesystem".'
        )
    if broadcast.delta and broadcast.type == "ipc":
        yield (
            '`weight_broadcast.delta = true` with `weight_broadcast.type = "ipc"` - expected false, as nothing is sent '
            "that could be less: engines read the trainer's own memory. Remove `delta`."
        )

    if lora is None or lora.sync == "merged":
        return
    # The engine must know the layers before, and has no place for adapters of fused experts, or (with probes) the head.
    others = sorted({"all-linear", "lm_head", "experts", "gate_up_proj"} & set(lora.target_modules))
    refused = (
        (lora.modules_to_save, f"modules_to_save = {[*lora.modules_to_save]}", "none: engines keep the base model's"),
        (others, f"{', '.join(others)} in target_modules", "linear layers in the blocks, as engines adapt those only"),
        (lora.rank > ENGINE_RANKS[-1], f"rank = {lora.rank}", f"at most {ENGINE_RANKS[-1]}, the most of engines"),
        (broadcast.delta, "`weight_broadcast.delta`", "one of the two: adapters change in all of their values"),
    )
    for is_refused, what, expected in refused:
        if is_refused:
            yield (
                f'`trainer.model.lora.sync = "adapter"` with {what} - expected {expected}. Write '
                '`trainer.model.lora.sync = "merged"`, or change the other key.'
            )


_PROTECTED = {
    "CUDA_VISIBLE_DEVICES": "Choose GPUs by `inference_gpu_ids` and `trainer_gpu_ids`, of those that the shell shows",
    "VLLM_CPU_KVCACHE_SPACE": "Set `inference.cpu.kv_cache_gib`",
    **dict.fromkeys(("VLLM_SERVER_DEV_MODE", "VLLM_PLUGINS"), "Remove it: weight updates need the value that is set"),
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "Remove it: each rank gets its own",
    ),
}
"""Variables that Trireme sets itself, and what to do instead of setting them."""

_READ_AT_START = re.compile(r"PYTHON[A-Z]\w*|LD_\w+")  # Python and the loader read them before any file


def env_var_problems(table: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield which variables of a process cannot be set by a file."""
    for name, value in variables.items():
        advice = _PROTECTED.get(name)
        if name.startswith("TRIREME_"):
            advice = "Write the key itself, or export it in the shell"
        if _READ_AT_START.fullmatch(name):
            advice = "Export it in the shell: it is read when a process starts, before this file is"
        if not name or "=" in name or "\0" in name + value:
            yield f"{table} has the name {toml_value(name)} - expected that of an environment variable. Correct it."
        elif advice:
            yield f"{table}.{name} - expected a variable that a file may set. {advice}."


def _name_problems(name: str | None, output_dir: Path) -> Iterator[str]:
    if name is not None and (not name.strip() or "/" in name or name in (".", "..") or CONTROL.search(name)):
        yield f"name = {toml_value(name)} - expected the plain name of a folder. Set `output_dir` for those above it."
    if CONTROL.search(str(output_dir)):
        yield f"output_dir = {toml_value(output_dir)} has control characters - expected the path of a folder."


def _rollout_problems(config: RunConfig) -> Iterator[str]:
    longest = config.inference.model.max_model_len or config.seq_len
    for table, sampling in samplings(config.orchestrator):
        if sampling.max_tokens is not None and sampling.max_tokens >= longest:
            yield (
                f"{table}.max_tokens = {sampling.max_tokens}, inference.model.max_model_len = {longest} - expected "
                "fewer: the context holds the prompt too. Lower the first, or raise `seq_len` and `max_model_len`."
            )
        if sampling.seed is not None and config.device == "cpu" and not config.synchronous:
            yield (
                f'{table}.seed = {sampling.seed} with device = "cpu" in an asynchronous run - expected none: vLLM\'s '
                "CPU engine dies of a seeded prompt taken in two parts. Remove it, or set `max_async_level = 0`."
            )

    allowed, ahead = config.orchestrator.max_off_policy_steps, config.max_async_level
    if allowed < ahead:
        yield (
            f"orchestrator.max_off_policy_steps = {allowed}, max_async_level = {ahead} - expected the first to be as "
            f"high, or all rollouts would be too old. Raise it to {ahead}, or set `max_async_level = {allowed}`."
        )


def _template_problems(config: RunConfig) -> Iterator[str]:
    """Yield variables that the chat template of a model on this disk does not have."""
    tables: dict[str, dict[str, Any]] = {}
    for table, sampling in samplings(config.orchestrator):
        # Evaluation may have taken its variables from training: report them once.
        if sampling.template_request not in tables.values():
            tables[table] = sampling.template_request
    for key, kwargs in environment_template_kwargs(config.orchestrator):
        tables[key] = {"chat_template_kwargs": kwargs}
    if not any(tables.values()):
        return
    name = config.trainer.tokenizer.name or config.model.name
    if not has_vocabulary(Path(name)):
        return

    # Imported late: most runs set no variables, and need no jinja2 here.
    import jinja2

    from trireme.config.model.chat_template import template_variables, unread_problems

    try:
        opened = read_tokenizer(name, Path(name), trust_remote_code=config.trainer.model.trust_remote_code)
        variables = template_variables(*opened.templates.values())
    except (ConfigError, jinja2.TemplateSyntaxError):  # other rules report it
        return
    for table, request in tables.items():
        yield from unread_problems(table, request, variables, name)


def _loss_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with `[trainer.loss]`, and with the losses that sources have over it."""
    losses = {name: own.trainer.loss for name, own in config.losses.items()}
    for name, loss in losses.items():
        for problem in loss_problems(loss):
            yield problem.replace("trainer.loss", _loss_table(name))

    # There is one reference model, so it is updated for all at the same time.
    updates = {name: loss.reference_update_every for name, loss in losses.items() if loss.beta}
    if len(set(updates.values())) > 1:
        shown = ", ".join(f"`{_loss_table(name)}` {every or 'never'}" for name, every in updates.items())
        yield (
            f"`reference_update_every` differs: {shown} - expected the same wherever `beta` is above 0, as there is "
            "one reference model. Write the same number in each."
        )


def _loss_table(source: str) -> str:
    return f'orchestrator.env["{source}"].loss' if source else "trainer.loss"


def _micro_batch_problems(key: str, tokens: int | None, seq_len: int) -> Iterator[str]:
    if tokens is not None and tokens < seq_len:
        yield (
            f"{key} = {tokens}, seq_len = {seq_len} - expected at least as many tokens as the longest sample has. Set "
            f"`{key}` to {seq_len} or more, or lower `seq_len`."
        )


def _timeout_problems(config: RunConfig) -> Iterator[str]:
    slowest = max(config.orchestrator.env, key=lambda environment: environment.rollout_timeout_s, default=None)
    for key, limit in (
        ("trainer.batch_timeout_s", config.trainer.batch_timeout_s),
        ("orchestrator.trainer_timeout_s", config.orchestrator.trainer_timeout_s),
    ):
        if slowest and limit <= slowest.rollout_timeout_s:
            yield (
                f"`{key} = {limit:g}` with `rollout_timeout_s = {slowest.rollout_timeout_s:g}` of environment "
                f"{slowest.resolved_name!r} - expected longer than a rollout may take: a batch of slow ones would "
                f"end the run. Set `{key}` to {4 * slowest.rollout_timeout_s:g} or so."
            )


def _engine_argument_problems(config: RunConfig) -> Iterator[str]:
    """Yield arguments of vLLM that contradict the rest of the run."""
    arguments = {name.replace("-", "_"): value for name, value in config.inference.args.items()}
    if arguments.get("default_chat_template_kwargs"):
        yield (
            "inference.args.default_chat_template_kwargs - expected none, as the orchestrator renders prompts and the "
            "engine gets tokens. Move it to `[orchestrator.sampling]` `chat_template_kwargs`."
        )

    if config.replays_routes and arguments.get("enable_prefix_caching") is False:
        yield (
            f"inference.args.enable_prefix_caching = false with `{REPLAY}` - expected true, or vLLM does not say which "
            "experts it used. Remove one of the two."
        )

    # The rest is about the kept tokens of a cut sampler, if vLLM is to report them itself.
    if not arguments.get("return_sampling_mask"):
        return
    if config.device == "cpu":
        yield (
            "inference.args.return_sampling_mask on a CPU - expected none, as vLLM supports it on GPUs only. Remove "
            "it: the kept tokens are then read from logprobs, with the same result."
        )

    for table, sampling in samplings(config.orchestrator):
        if sampling.temperature == 0 or (sampling.top_k or 0) <= 0:
            yield (
                f"inference.args.return_sampling_mask with {table} at temperature {sampling.temperature:g} and top_k "
                f"{sampling.top_k} - expected both above 0, or vLLM refuses requests. Set both, or remove it."
            )


# Rules about GPUs.


def _gpu_problems(config: RunConfig, devices: Devices, section: ProcessName | None) -> Iterator[str]:
    sides = {"inference": config.inference_gpu_ids or (), "trainer": config.trainer_gpu_ids or ()}
    starting = sides if section is None else {side: ids for side, ids in sides.items() if side == section}

    # What was typed must agree with itself, also on a machine without GPUs.
    for side, ids in starting.items():
        count = config.inference_gpus if side == "inference" else config.trainer_gpus
        if count is not None and count != len(ids):
            yield f"{side}_gpus = {count} and {side}_gpu_ids = {list(ids)} - expected one. Remove `{side}_gpus`."
        if len(set(ids)) < len(ids):
            yield f"{side}_gpu_ids = {list(ids)} names a GPU twice - expected each once. Remove the second."

    if config.device == "cpu":
        return

    # The GPUs must be there, and must not be shared in a way that the transport cannot serve.
    for side in starting:
        # On a machine without GPUs, one message is enough for both sides.
        if devices.gpus or side == "inference" or not config.inference_gpu_ids:
            yield from _missing_gpus(config, devices, side, sides[side])
    if config.hosts.are_one_machine and all(sides.values()):
        yield from _shared_gpus(config)

    # Each GPU of a side has exactly one worker or rank.
    tp, dp, engines = config.inference.parallel.tp, config.inference.parallel.dp or 1, len(sides["inference"])
    if section in (None, "inference") and engines and tp * dp != engines:
        fits = f"dp = {engines // tp}" if engines % tp == 0 else f"tp = {nearest_divisors(engines, tp)[-1]}"
        yield (
            f"inference.parallel.tp = {tp} x dp = {dp} takes {tp * dp} GPUs, and inference has {engines} - expected as "
            f"many. Set `{fits}` under `[inference.parallel]`, or give inference {tp * dp} GPUs."
        )

    ranks, nodes = config.trainer.num_ranks or 1, len(config.hosts.trainer)
    gpus = nodes * len(sides["trainer"])
    if section in (None, "trainer") and gpus and ranks != gpus:
        yield (
            f"trainer.num_ranks = {ranks}, and the trainer has {gpus} GPUs on {nodes} machines - expected one rank per "
            "GPU. Leave `trainer.num_ranks` out, or change `trainer_gpu_ids`."
        )


def _missing_gpus(config: RunConfig, devices: Devices, side: str, ids: tuple[int, ...]) -> Iterator[str]:
    if not devices.gpus:
        yield (
            f"GPUs were asked for ({side}_gpu_ids = {list(ids)}), and this machine shows none - expected NVIDIA GPUs "
            "that CUDA_VISIBLE_DEVICES does not hide. The same configuration runs on CPU with `--device cpu`."
        )
        return
    if not ids:
        yield (
            f"no GPU is left for {side}: of {devices.num_gpus} the other side has all - expected at least one. Set "
            f"`inference_gpus` and `trainer_gpus`, for example to {max(1, devices.num_gpus - 1)} and 1."
        )
    if absent := [number for number in ids if not 0 <= number < devices.num_gpus]:
        yield (
            f"{side}_gpu_ids = {list(ids)}: {absent} do not exist - {devices.num_gpus} GPUs are visible, counted from "
            f"0 (CUDA calls them {', '.join(devices.gpus)}). Name fewer, or run where there are more."
        )


def _shared_gpus(config: RunConfig) -> Iterator[str]:
    engines, trainer = config.inference_gpu_ids or (), config.trainer_gpu_ids or ()
    kind, all_of_them = config.weight_broadcast.type, sorted({*engines, *trainer})
    # ipc needs one GPU for both, nccl none in common; files do not care.
    is_one = engines == trainer and len(all_of_them) == 1
    if is_one if kind == "ipc" else kind == "filesystem" or not {*engines} & {*trainer}:
        return
    expected = "GPUs of their own, as NCCL takes none twice"
    if kind == "ipc":
        expected = "one GPU for both, as the trainer's rank 0 alone sends, and only handles of its own GPU"
    half = (len(all_of_them) + 1) // 2
    engines_own, trainer_own = all_of_them[:half], all_of_them[half:]
    advice = f'Split them: `inference_gpu_ids = {engines_own}`, `trainer_gpu_ids = {trainer_own}` and type "nccl".'
    yield (
        f'weight_broadcast.type = "{kind}" with inference_gpu_ids = {[*engines]} and trainer_gpu_ids = {[*trainer]} - '
        f"expected {expected}. {'Leave the type out, for ipc.' if is_one else advice}"
    )


Computing = Mapping[str, tuple[str, Iterable[int]]]
"""A key of a precision, its value, and the GPUs that compute in it."""


def gpu_launch_problems(device: str, devices: Devices, computing: Computing) -> Iterator[str]:
    """Yield why torch and vLLM cannot use this machine's GPUs. What the driver does not tell is left to them."""
    if device == "cpu" or not devices.gpus:
        return

    # The driver. What its library offers comes first: a package cuda-compat brings a newer one for an older driver.
    driver = f"the NVIDIA driver {devices.driver}" if devices.driver else "the NVIDIA driver"
    found, least = (tuple(map(int, version.split("."))) for version in (devices.driver or LEAST_DRIVER, LEAST_DRIVER))
    if devices.cuda < LEAST_CUDA if devices.cuda else found < least:
        offers = f"offers CUDA {devices.cuda // 1000}.{devices.cuda % 1000 // 10}" if devices.cuda else "is too old"
        yield (
            f"{driver} {offers} - expected driver {LEAST_DRIVER} or newer, with CUDA {LEAST_CUDA // 1000}, for which "
            "torch and vLLM are built. Update it (on data-centre GPUs the package cuda-compat does, too), or run on "
            "the CPU: `--device cpu`."
        )
    elif devices.cuda_error:
        yield (
            f"{driver} does not start CUDA (error {devices.cuda_error}) - expected GPUs that can be used. Error 802 "
            "wants the service nvidia-fabricmanager, 803 a reboot after an update of the driver, 804 a machine without "
            "cuda-compat. Or run on the CPU: `--device cpu`."
        )

    # The oldest GPU of each side: one for which there are no kernels, or none in the precision that it is to have.
    for key, (dtype, ids) in computing.items():
        known = devices.known_capabilities(ids)
        gpu, capability = min(known.items(), key=lambda item: item[1], default=(0, BFLOAT16_CAPABILITY))
        has = f"GPU {gpu} has compute capability {'.'.join(map(str, capability))}"
        if capability < LEAST_CAPABILITY:
            yield (
                f"{has} - expected {'.'.join(map(str, LEAST_CAPABILITY))} or more, for which torch and vLLM are built. "
                f"Leave it out of `{key.partition('.')[0]}_gpu_ids` (or CUDA_VISIBLE_DEVICES), or run on the CPU: "
                "`--device cpu`."
            )
        elif dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
            other = "float16" if key.startswith("inference") else "float32"
            yield (
                f'{key} = "bfloat16", and {has} - expected {".".join(map(str, BFLOAT16_CAPABILITY))} or more for it. '
                f'Write `{key} = "{other}"`, on all machines of the run.'
            )


def _installed_engine_problems(device: str, devices: Devices) -> Iterator[str]:
    """Yield a problem if the engine that is installed has no kernels for the GPUs whose driver has answered."""
    if device == "cpu" or devices.cuda is None:
        return
    if {name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name))} == {"vllm-cpu"}:
        yield (
            'device = "cuda", and the engine that is installed is vllm-cpu - expected vllm, which has kernels for '
            "GPUs. Install it with `uv sync --no-group cpu --group gpu`, or run on the CPU: `--device cpu`."
        )


# Rules about machines.


def _host_problems(config: RunConfig) -> Iterator[str]:
    hosts = config.hosts
    tables = {f"hosts.{process}": addresses for process, addresses in hosts.by_process.items()}

    # Each address by itself, then the servers by their whole URLs, of which no two may be equal.
    for key, addresses in tables.items():
        if not addresses:
            yield f"`{key}` is empty - expected at least one address. Remove the line, or name a machine."
        for address in addresses:
            if problem := _address_problem(address, with_port=key == "hosts.inference"):
                yield f'`{key}` names "{address}": {problem}'

    readable = [address for address in hosts.inference if not _address_problem(address, with_port=True)]
    for url, count in Counter(map(config.engine_url, readable)).items():
        if count > 1:
            yield (
                f"`hosts.inference` names {url.removeprefix('http://')} {count} times - expected an address each. Give "
                'servers on one machine ports of their own: ["10.0.0.2:8000", "10.0.0.2:8010"].'
            )

    # A loopback address means another machine on each machine.
    inside = [host for host in hosts.all if is_loopback(host)]
    others = [host for host in hosts.all if not is_loopback(host)]
    if inside and others:
        keys = [key for key, addresses in tables.items() if any(is_loopback(a.partition(":")[0]) for a in addresses)]
        yield (
            f"`[hosts]` names {', '.join(others)}, and {', '.join(inside)} in {', '.join(keys)} - expected addresses "
            f"by which all machines reach each other. Give {' and '.join(keys)} the address of its machine."
        )

    if config.weight_broadcast.type == "ipc" and len(hosts.all) > 1:
        yield (
            f'weight_broadcast.type = "ipc", and `[hosts]` names {", ".join(hosts.all)} - expected one machine: ipc '
            'works between processes of one machine. Set `weight_broadcast.type = "nccl"`.'
        )

    # Every machine of the trainer starts as many ranks as the others.
    ranks, nodes = config.trainer.num_ranks or 1, len(hosts.trainer)
    if nodes and ranks % nodes:
        yield (
            f"trainer.num_ranks = {ranks}, and `hosts.trainer` names {nodes} machines - expected equally many ranks on "
            f"each. Set `trainer.num_ranks` to {max(1, ranks // nodes) * nodes} or {(ranks // nodes + 1) * nodes}."
        )


def _address_problem(address: str, *, with_port: bool) -> str | None:
    example = 'Write "10.0.0.2"' + (' or "10.0.0.2:8000".' if with_port else " (ports are in `[ports]`).")
    if address in ("::", "") or address.startswith("0.0.0.0"):
        return f"other machines cannot reach that - expected the machine's own address or name. {example}"
    if address.count(":") > 1 and "/" not in address:
        return f"expected an IPv4 address or a name. {example}"
    try:
        _, port = place_of(address)
    except ValueError:
        return f"expected an address or a name{', and maybe a port' if with_port else ''}. {example}"
    return f"expected no port. {example}" if port is not None and not with_port else None


def _token_problems(config: RunConfig) -> Iterator[str]:
    bound = {
        "inference.server.host": config.inference.server.host,
        "orchestrator.server.host": config.orchestrator.server.host,
    }
    outside = [host for host in config.hosts.all if not is_loopback(host)]
    exposed = [f"{key} = {host}" for key, host in bound.items() if not is_loopback(host)]
    exposed = [f"[hosts] {', '.join(outside)}"] if outside else exposed
    if problem := token_problem(config.hosts.token_file):
        yield problem
    elif exposed and not (token() or config.hosts.token_file):
        yield (
            f"{' and '.join(exposed)} can be reached from other machines, and there is no token - expected a secret of "
            f"this run's machines. {HOW} Or name a file that holds it: `hosts.token_file`."
        )


def _processes_elsewhere(config: RunConfig) -> Iterator[str]:
    """Yield a problem if `rl`, which starts every process on this machine, would have to start one elsewhere."""
    hosts = config.hosts
    is_one_of_each = len(hosts.inference) == len(hosts.trainer) == 1
    if is_one_of_each and all(is_loopback(host) or is_here(host) for host in hosts.all):
        return
    commands = [f"uv run {name} @ FILE   # on {', '.join(places)}" for name, places in hosts.by_process.items()]
    yield (
        f"`[hosts]` names {len(hosts.inference)} inference servers and {len(hosts.trainer)} machines of the trainer, "
        f"at {', '.join(hosts.all)} - expected one of each, all here: `rl` starts the processes of one machine. Start "
        "each process by its command, with `--node N` where one host has several:\n    " + "\n    ".join(commands)
    )


# Rules about files and ports on this machine.


def file_problems(config: RunConfig, *, section: ProcessName | None = None) -> Iterator[str]:
    """Yield which models and files of environments are missing on this machine."""
    trained, served, tokenizer = config.trainer.model.name, config.inference.model.name, config.trainer.tokenizer.name
    if section in (None, "trainer"):
        yield from check_model("trainer.model.name", trained)
        if tokenizer != trained:
            yield from check_model("trainer.tokenizer.name", tokenizer, holds="tokenizer_config.json")
    if section == "inference" or (section is None and served != trained):
        yield from check_model("inference.model.name", served)
        if served is not None and looks_local(served):
            yield from weights_problems(Path(served))
        described = read_config(served)
        if described and "architectures" not in described:
            # vLLM then guesses, and may serve the model as an embedding model whose weights cannot be updated.
            yield (
                f'inference.model.name = "{served}": its config.json names no "architectures" - expected '
                '["Qwen3ForCausalLM"] or the like, as `save_pretrained` of a model writes it. Add the line.'
            )
        if section is None and (problem := low_bit_problem(described)):
            yield f'inference.model.name = "{served}": its weights {problem} Take such a copy of the model.'

    # Environments that are files; the orchestrator itself finds packages when it starts.
    ids = {each.id for each in config.orchestrator.all_environments} if section in (None, "orchestrator") else set()
    for file in sorted(id for id in ids if id.endswith(".py")):
        if not Path(file).is_file():
            yield (
                f'environment id = "{file}": there is no such file (looked in {Path.cwd()}) - expected a Python file '
                "with `load_environment`. Check the path."
            )


PORTS: dict[str, tuple[ProcessName, str]] = {
    "inference.server.port": ("inference", "the inference server"),
    "orchestrator.server.port": ("orchestrator", "the orchestrator's status server"),
    "orchestrator.env.agent.port": ("orchestrator", "agent programs and clients of a harness"),
    "ports.batches": ("orchestrator", "batches from the orchestrator to the trainer"),
    "ports.weights": ("trainer", "the meeting of trainer and engines"),
    "ports.ranks": ("trainer", "the meeting of the trainer's ranks"),
}
"""The process that listens at each port, and what for."""


def ports(config: RunConfig) -> list[tuple[str, str, int]]:
    """Return key, address and number of each port that is known."""
    trainers = config.hosts.trainer or ("",)
    known = (
        ("inference.server.port", config.inference.server.host, config.inference.server.port),
        ("orchestrator.server.port", config.orchestrator.server.host, config.orchestrator.server.port),
        *(
            ("orchestrator.env.agent.port", each.agent.host, each.agent.port or None)
            for each in config.orchestrator.all_environments
            if each.agent is not None
        ),
        ("ports.batches", config.hosts.orchestrator, config.ports.batches),
        ("ports.weights", trainers[0], config.ports.weights),
        ("ports.ranks", trainers[0], config.ports.ranks if len(trainers) > 1 else None),
    )
    return [(key, host, port) for key, host, port in known if port is not None]


def port_problems(config: RunConfig, key: str) -> Iterator[str]:
    """Yield a problem if a port of this machine is in use. Ports of other machines cannot be checked."""
    for name, host, port in ports(config):
        if name == key and port and is_here(host) and not port_is_free(port, host):
            free = next((number for number in range(port + 1, min(port + 50, 65536)) if port_is_free(number, host)), 0)
            flag = f"`--{key.replace('_', '-')} {free}`" if ".env." not in key else f"`port = {free}` in its file"
            yield (
                f"port {port} on {host} is in use, wanted for {PORTS[key][1]} ({key}) - expected a free one. `lsof -i "
                f":{port}` shows which process has it; or take another: {flag}."
            )


# Rules of supervised training.


def check_sft(config: SftConfig, devices: Devices) -> None:
    """Raises: ConfigError if supervised training contradicts itself or could not start here and now."""
    model, ranks = config.model, config.num_ranks or 1
    found = [
        *_name_problems(config.name, config.output_dir),
        *env_var_problems("env_vars", config.env_vars),
        *sft_problems(config),
        *_loopback_problems(),
        *check_model("model.name", model.name),
    ]

    found += _micro_batch_problems("micro_batch_tokens", config.micro_batch_tokens, config.seq_len)
    found += model_problems("model", model, ranks)
    found += model_launch_problems("model", model, config.device)

    # Rotary positions continue beyond the model's own context, but a table of positions has an end.
    described = read_config(model.name)
    longest = longest_context(described)
    if longest and config.seq_len > longest and learns_positions(described):
        found.append(
            f"seq_len = {config.seq_len}, and {model.name} has a table of {longest} positions (in its config.json) - "
            f"expected at most as many. Set `seq_len = {longest}`, or take a model for longer texts."
        )

    tokenizer = config.tokenizer.name or model.name
    found += tokenizer_problems("tokenizer.name", tokenizer, model, renders=False)
    found += lora_problems("model.lora", model.lora)

    # With `num_epochs` the number of steps is known only once the data are read.
    max_steps = config.max_steps if config.num_epochs is None else None
    found += optim_problems("", config.optim, config.scheduler, model, max_steps=max_steps)
    found += optim_launch_problems("", config.optim, config.device)

    # Every rank takes one of the visible GPUs, from the first on.
    computing = {"model.optimization_dtype": (model.optimization_dtype, range(ranks))}
    found += gpu_launch_problems(config.device, devices, computing)
    if config.device == "cuda" and ranks > devices.num_gpus:
        found.append(
            f"num_ranks = {ranks}, and {devices.num_gpus} GPUs are visible - expected one GPU per rank. Lower "
            "`num_ranks`, or run on CPU with `--device cpu`."
        )

    # Keys of `[trainer]` that mean nothing without engines.
    replays, sends_adapters = model.moe.router_replay, model.lora is not None and model.lora.sync == "adapter"
    for key, is_given in (("model.moe.router_replay", replays), ("model.lora.sync", sends_adapters)):
        if is_given:
            found.append(f"`{key}` without engines - expected no such key in supervised training. Remove it.")

    raise_together(found)

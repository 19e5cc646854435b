"""Check a run or supervised training: what contradicts itself, or cannot start on this machine.

A rule yields one message per problem, and all messages are shown together. Rules of a small table are in its file, the
others next to this one. `check` holds for any load; `check_launch` adds what must be true of this machine for the
run to start: its models and files are there, its ports are free. `section` is the process that its own command starts,
whose rules alone are checked; None for `rl`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.functions import function_problem
from trireme.config.files import PROCESSES, ProcessName, toml_value
from trireme.config.inference import inference_problems
from trireme.config.model.folder import (
    check_model,
    learns_positions,
    longest_context,
    model_launch_problems,
    num_experts_of,
    read_config,
    tokenizer_problems,
)
from trireme.config.model.tokenizer import has_vocabulary, read_tokenizer, stop_ids, turn_end_warning
from trireme.config.model.vision import picture_run_problems
from trireme.config.problems import raise_together
from trireme.config.rules.engine import (
    REPLAY,
    engine_argument_problems,
    installed_engine_problems,
    served_model_problems,
)
from trireme.config.rules.gpus import Computing, gpu_launch_problems, gpu_problems
from trireme.config.rules.machines import (
    PORTS,
    file_problems,
    host_problems,
    loopback_problems,
    port_problems,
    processes_elsewhere,
    token_problems,
)
from trireme.config.rules.orchestrator import orchestrator_problems
from trireme.config.rules.run import (
    env_var_problems,
    loss_table,
    losses_problems,
    micro_batch_problems,
    name_problems,
    rollout_problems,
    run_problems,
    run_tokenizer_problems,
    template_variable_problems,
    timeout_problems,
)
from trireme.config.rules.sampling import samplings
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig, sft_problems
from trireme.config.trainer import (
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
    found = [*run_problems(config), *host_problems(config), *picture_run_problems(config)]
    trainer, orchestrates, trains = config.trainer, section in (None, "orchestrator"), section in (None, "trainer")

    # A process that starts alone checks only the tables that it reads.
    if orchestrates:
        found += orchestrator_problems(config.orchestrator, longest=config.loss_length)
        found += rollout_problems(config)
    if trains:
        found += model_problems("trainer.model", trainer.model, trainer.num_ranks or 1)
        found += lora_problems("trainer.model.lora", trainer.model.lora)
        found += optim_problems("trainer.", trainer.optim, trainer.scheduler, trainer.model, max_steps=config.max_steps)
        found += losses_problems(config)
        found += micro_batch_problems("trainer.micro_batch_tokens", trainer.micro_batch_tokens, config.seq_len)

    if orchestrates or trains:
        found += timeout_problems(config)
    if section in (None, "inference"):
        found += inference_problems(config.inference)
    if section != "trainer":
        found += engine_argument_problems(config)
    found += gpu_problems(config, devices, section)
    for table in ("env_vars", *(f"{name}.env_vars" for name in PROCESSES if section in (None, name))):
        found += env_var_problems(table, attrgetter(table)(config))
    return found


def launch_problems(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> list[str]:
    found = [*loopback_problems(), *token_problems(config)]

    if section is None:
        found += processes_elsewhere(config)

    # Precisions, on the GPUs of the sides that start here.
    precisions: Computing = {
        "inference.model.dtype": (config.inference.model.dtype, config.inference_gpu_ids or ()),
        "trainer.model.optimization_dtype": (config.trainer.model.optimization_dtype, config.trainer_gpu_ids or ()),
    }
    computing = {key: each for key, each in precisions.items() if section in (None, key.partition(".")[0])}
    found += gpu_launch_problems(config.device, devices, computing) if computing else []
    found += installed_engine_problems(config.device, devices) if section in (None, "inference") else []

    # Models, tokenizers and the user's functions, as far as they are on this disk.
    found += file_problems(config, section=section)
    found += template_variable_problems(config) if section in (None, "orchestrator") else []
    functions: dict[str, str | None] = {}
    if section in (None, "trainer"):
        functions = {loss_table(name) + ".path": own.trainer.loss.path for name, own in config.losses.items()}
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


def check_sft(config: SftConfig, devices: Devices) -> None:
    """Raises: ConfigError if supervised training contradicts itself or could not start here and now."""
    model, ranks = config.model, config.num_ranks or 1
    found = [
        *name_problems(config.name, config.output_dir),
        *env_var_problems("env_vars", config.env_vars),
        *sft_problems(config),
        *loopback_problems(),
        *check_model("model.name", model.name),
    ]

    found += micro_batch_problems("micro_batch_tokens", config.micro_batch_tokens, config.seq_len)
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

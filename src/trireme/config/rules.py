"""Rules that span tables. Each is a small function that yields one message per problem; all are shown together.

`check` holds for any load; `check_launch` adds what must be true of this machine, now, for the run to start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from trireme.base.devices import Devices
from trireme.config.files import PROCESSES, ProcessName
from trireme.config.orchestrator import Sampling
from trireme.config.problems import raise_together
from trireme.config.readiness import (
    engines_model_exists,
    engines_other_model_exists,
    environment_files_exist,
    port_rule,
    ports,
    trainer_model_exists,
)
from trireme.config.rules_broadcast import RULES as BROADCAST_RULES
from trireme.config.rules_data import LAUNCH_RULES as DATA_LAUNCH_RULES
from trireme.config.rules_data import RULES as DATA_RULES
from trireme.config.rules_evaluation import RULES as EVALUATION_RULES
from trireme.config.rules_hosts import LAUNCH_RULES as HOSTS_LAUNCH_RULES
from trireme.config.rules_hosts import RULES as HOSTS_RULES
from trireme.config.rules_lora import RULES as LORA_RULES
from trireme.config.rules_lora import lora_problems
from trireme.config.rules_loss import LAUNCH_RULES as LOSS_LAUNCH_RULES
from trireme.config.rules_loss import RULES as LOSS_RULES
from trireme.config.rules_model import LAUNCH_RULES as MODEL_LAUNCH_RULES
from trireme.config.rules_model import RULES as MODEL_RULES
from trireme.config.rules_model import model_launch_problems, model_problems
from trireme.config.rules_moe import LAUNCH_RULES as MOE_LAUNCH_RULES
from trireme.config.rules_moe import RULES as MOE_RULES
from trireme.config.rules_moe import expert_problems_of_sft
from trireme.config.rules_optim import LAUNCH_RULES as OPTIM_LAUNCH_RULES
from trireme.config.rules_optim import RULES as OPTIM_RULES
from trireme.config.rules_optim import optim_launch_problems, optim_problems
from trireme.config.rules_sampling import RULES as SAMPLING_RULES
from trireme.config.rules_sft import sft_problems
from trireme.config.rules_waiting import RULES as WAITING_RULES
from trireme.config.run import RunConfig
from trireme.config.section import Section
from trireme.config.sft import SftConfig

Rule = Callable[[RunConfig, Devices], Iterator[str]]
Rules = tuple[tuple[Rule, tuple[ProcessName | None, ...]], ...]
AnyConfig = TypeVar("AnyConfig", bound=Section)


def check(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> None:
    """Raises: ConfigError where the resolved configuration contradicts itself or asks for GPUs that are not there.

    Args:
        section: only what concerns this process, for its own command.
    """
    raise_together(problems(config, devices, section=section))


def check_launch(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> None:
    """Raises: ConfigError where the run could not start here and now, or contradicts itself."""
    raise_together(problems(config, devices, section=section) + launch_problems(config, devices, section=section))


def problems(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> list[str]:
    return _collect(_RULES, config, devices, section)


def launch_problems(config: RunConfig, devices: Devices, *, section: ProcessName | None = None) -> list[str]:
    return _collect(_LAUNCH_RULES, config, devices, section)


def _collect(rules: Rules, config: RunConfig, devices: Devices, section: ProcessName | None) -> list[str]:
    concerned = (rule for rule, commands in rules if section in commands)
    return [message for rule in concerned for message in rule(config, devices)]


def _name_is_a_folder(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from _check_run_name(config.name)


def _check_run_name(name: str | None) -> Iterator[str]:
    if name is not None and (not name.strip() or "/" in name or name in (".", "..")):
        yield (
            f'name = "{name}" - expected the plain name of a folder inside `output_dir`. '
            "Write a name without `/`, and set `output_dir` for the rest."
        )


def _environments_are_given(config: RunConfig, _: Devices) -> Iterator[str]:
    if not config.orchestrator.env:
        yield (
            "no environment is configured, so there is nothing to learn - expected at least one. "
            'Add to the file:\n    [[orchestrator.env]]\n    id = "reverse-text"'
        )


def _environments_have_their_own_names(config: RunConfig, _: Devices) -> Iterator[str]:
    evaluation = config.orchestrator.eval
    for table, environments in (
        ("orchestrator.env", config.orchestrator.env),
        ("orchestrator.eval.env", evaluation.env if evaluation else ()),
    ):
        for name, count in Counter(environment.name or environment.id for environment in environments).items():
            if count > 1:
                yield (
                    f'{count} tables `[[{table}]]` are called "{name}" - metrics need a name each. '
                    f'Add `name = "{name}-2"` to one of them.'
                )


def _batch_holds_whole_groups(config: RunConfig, _: Devices) -> Iterator[str]:
    batch, group = config.orchestrator.batch_size, config.orchestrator.rollouts_per_example
    if batch % group:
        below, above = batch // group * group, (batch // group + 1) * group
        choices = f"{below} or {above}" if below else f"{above}"
        yield (
            f"batch_size must be divisible by rollouts_per_example: {batch} % {group} = {batch % group} - expected 0. "
            f"Set `orchestrator.batch_size` to {choices}, or `orchestrator.rollouts_per_example` to one of "
            f"{', '.join(map(str, _nearest_divisors(batch, group)))}."
        )


def _nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - near))[:2])


def _context_fits_training(config: RunConfig, _: Devices) -> Iterator[str]:
    longest = config.inference.model.max_model_len
    if longest is not None and longest > config.seq_len:
        yield (
            f"seq_len must match or exceed max_model_len: seq_len = {config.seq_len}, "
            f"inference.model.max_model_len = {longest} - longer rollouts could not be trained on. "
            f"Set `seq_len = {longest}`, or `max_model_len = {config.seq_len}`."
        )


def _turns_fit_the_context(config: RunConfig, _: Devices) -> Iterator[str]:
    longest = config.inference.model.max_model_len or config.seq_len
    for table, sampling in _samplings(config):
        if sampling.max_tokens is not None and sampling.max_tokens >= longest:
            yield (
                f"{table}.max_tokens = {sampling.max_tokens}, inference.model.max_model_len = {longest} - "
                "expected fewer tokens per turn than the context, which holds the prompt too. "
                f"Lower `{table}.max_tokens`, or raise `seq_len` and `max_model_len`."
            )


def _samplings(config: RunConfig) -> Iterator[tuple[str, Sampling]]:
    yield "orchestrator.sampling", config.orchestrator.sampling
    if config.orchestrator.eval:
        yield "orchestrator.eval.sampling", config.orchestrator.eval.sampling


def _sampling_is_said_once(config: RunConfig, _: Devices) -> Iterator[str]:
    """vLLM would take one of the two and not say which."""
    for table, sampling in _samplings(config):
        for key in sorted(set(sampling.extra_body) & (set(Sampling.model_fields) - {"extra_body"})):
            yield (
                f"Duplicate sampling parameters: `{key}` is a key of `{table}` ({getattr(sampling, key)}) and stands "
                f"in its `extra_body` too ({sampling.extra_body[key]}) - expected it once. "
                f"Set `{table}.{key}` and remove it from `extra_body`."
            )


def _micro_batch_holds_a_sample(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from _check_micro_batch("trainer.micro_batch_tokens", config.trainer.micro_batch_tokens, config.seq_len)


def _check_micro_batch(key: str, tokens: int | None, seq_len: int) -> Iterator[str]:
    if tokens is not None and tokens < seq_len:
        yield (
            f"{key} = {tokens}, seq_len = {seq_len} - expected room for the longest sample. "
            f"Set `{key}` to {seq_len} or more, or lower `seq_len`."
        )


def _lag_bounds_agree(config: RunConfig, _: Devices) -> Iterator[str]:
    allowed, ahead = config.orchestrator.max_off_policy_steps, config.max_async_level
    if allowed < ahead:
        yield (
            f"orchestrator.max_off_policy_steps = {allowed}, max_async_level = {ahead} - rollouts generated {ahead} "
            f"steps ahead would all be too old to train on. Set `max_off_policy_steps` to {ahead} or more, "
            f"or `max_async_level` to {allowed}."
        )


def _ports_differ(config: RunConfig, _: Devices) -> Iterator[str]:
    used: dict[int, str] = {}
    for key, _host, port in ports(config):
        if port and port in used:
            yield (
                f"{used[port]} = {port} and {key} = {port} - expected a port each. "
                f"Remove one of them: `rl` finds free ports by itself."
            )
        used.setdefault(port, key)


def _gpus_are_named_once(config: RunConfig, _: Devices) -> Iterator[str]:
    for side, ids, count in _sides(config):
        if count is not None and count != len(ids):
            yield (
                f"{side}_gpus = {count} and {side}_gpu_ids = {list(ids)} - expected one of the two. "
                f"Remove `{side}_gpus`."
            )
        if len(set(ids)) < len(ids):
            yield f"{side}_gpu_ids = {list(ids)} names a GPU twice - expected each once. Remove the second."


def _sides(config: RunConfig) -> list[tuple[ProcessName, tuple[int, ...], int | None]]:
    return [
        ("inference", config.inference_gpu_ids or (), config.inference_gpus),
        ("trainer", config.trainer_gpu_ids or (), config.trainer_gpus),
    ]


def _inference_gpus_exist(config: RunConfig, devices: Devices) -> Iterator[str]:
    yield from _check_gpus_exist(config, devices, "inference")


def _trainer_gpus_exist(config: RunConfig, devices: Devices) -> Iterator[str]:
    if devices.gpus or not config.inference_gpu_ids:  # said once is enough
        yield from _check_gpus_exist(config, devices, "trainer")


def _check_gpus_exist(config: RunConfig, devices: Devices, side: ProcessName) -> Iterator[str]:
    if config.device == "cpu":
        return
    ids = next(ids for name, ids, _ in _sides(config) if name == side)
    if not devices.gpus:
        yield (
            f"GPUs were asked for ({side}_gpu_ids = {list(ids)}), and this machine shows none - "
            "expected NVIDIA GPUs that CUDA_VISIBLE_DEVICES does not hide. "
            "The same configuration runs on CPU with `--device cpu`; GPU ids are ignored there."
        )
        return
    if not ids:
        yield (
            f"no GPU is left for {side}: inference has {list(config.inference_gpu_ids or ())}, trainer has "
            f"{list(config.trainer_gpu_ids or ())}, {devices.num_gpus} visible - expected at least one. "
            "Set `inference_gpus` and `trainer_gpus`, for example to "
            f"{max(1, devices.num_gpus - 1)} and 1."
        )
    if absent := [number for number in ids if not 0 <= number < devices.num_gpus]:
        yield (
            f"{side}_gpu_ids = {list(ids)}: {absent} do not exist - {devices.num_gpus} GPUs are visible, "
            f"0 to {devices.num_gpus - 1} (machine's own names: {', '.join(devices.gpus)}). "
            "Name fewer, or run where there are more; `--device cpu` ignores them."
        )


def _gpus_do_not_overlap(config: RunConfig, _: Devices) -> Iterator[str]:
    engines, trainer = set(config.inference_gpu_ids or ()), set(config.trainer_gpu_ids or ())
    kind = config.weight_broadcast.type
    if (both := sorted(engines & trainer)) and kind != "ipc":
        yield (
            f"inference_gpu_ids = {sorted(engines)} and trainer_gpu_ids = {sorted(trainer)} overlap in {both} - "
            f'expected GPUs of their own each with weight_broadcast.type = "{kind}". '
            'Separate them, or share all of them with `weight_broadcast.type = "ipc"`.'
        )
    if kind == "ipc" and config.device == "cuda" and engines != trainer:
        yield (
            f'weight_broadcast.type = "ipc" with inference_gpu_ids = {sorted(engines)} and '
            f"trainer_gpu_ids = {sorted(trainer)} - ipc needs the trainer and its engine on one GPU. "
            'Give both the same ids, or set `weight_broadcast.type = "nccl"`.'
        )


def _broadcast_fits_the_device(config: RunConfig, _: Devices) -> Iterator[str]:
    kind = config.weight_broadcast.type
    if config.device == "cpu" and kind in ("nccl", "ipc"):
        yield (
            f'weight_broadcast.type = "{kind}" with device = "cpu" - {kind} moves memory of GPUs. '
            'Leave it out (`auto` takes gloo on CPU), or write "gloo" or "filesystem".'
        )


def _engines_use_their_gpus(config: RunConfig, _: Devices) -> Iterator[str]:
    if config.device == "cpu" or not config.inference_gpu_ids:
        return
    tp, dp, gpus = config.inference.parallel.tp, config.inference.parallel.dp or 1, len(config.inference_gpu_ids)
    if tp * dp != gpus:
        fits = f"dp = {gpus // tp}" if gpus % tp == 0 else f"tp = {_nearest_divisors(gpus, tp)[-1]}"
        yield (
            f"inference.parallel.tp = {tp} x dp = {dp} takes {tp * dp} GPUs, and inference has {gpus} "
            f"({list(config.inference_gpu_ids)}) - expected as many. Set `{fits}` under `[inference.parallel]`, "
            f"or give inference {tp * dp} GPUs."
        )


def _ranks_have_a_gpu_each(config: RunConfig, _: Devices) -> Iterator[str]:
    ranks, nodes = config.trainer.num_ranks or 1, len(config.hosts.trainer)
    gpus = nodes * len(config.trainer_gpu_ids or ())
    if config.device != "cpu" and gpus and ranks != gpus:
        where = f"{list(config.trainer_gpu_ids or ())}" + (f" on each of {nodes} machines" if nodes > 1 else "")
        yield (
            f"trainer.num_ranks = {ranks}, and the trainer has {gpus} GPUs ({where}) - "
            "expected one rank per GPU. Leave `trainer.num_ranks` out, or change `trainer_gpu_ids`."
        )


def _attention_runs_here(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from _check_attention("trainer.model.attn", config.trainer.model.attn, config.device)


def _check_attention(key: str, attention: str, device: str) -> Iterator[str]:
    if device == "cpu" and attention.startswith("fl"):
        yield (
            f'{key} = "{attention}" with device = "cpu" - its backward pass runs on GPUs only. '
            'Write "sdpa" (the default) or "eager".'
        )


_RUN = None  # `rl`: all processes together
_ALL: tuple[ProcessName | None, ...] = (_RUN, *PROCESSES)

# Each rule with the commands that it concerns: the whole run, or one process started alone.
_RULES: Rules = (
    (_name_is_a_folder, _ALL),
    (_environments_are_given, (_RUN, "orchestrator")),
    (_environments_have_their_own_names, (_RUN, "orchestrator")),
    (_batch_holds_whole_groups, (_RUN, "orchestrator")),
    (_context_fits_training, _ALL),
    (_turns_fit_the_context, (_RUN, "orchestrator")),
    (_sampling_is_said_once, (_RUN, "orchestrator")),
    (_micro_batch_holds_a_sample, (_RUN, "trainer")),
    (_lag_bounds_agree, (_RUN, "orchestrator")),
    (_ports_differ, _ALL),
    (_gpus_are_named_once, (_RUN, "trainer", "inference")),
    (_inference_gpus_exist, (_RUN, "inference")),
    (_trainer_gpus_exist, (_RUN, "trainer")),
    (_gpus_do_not_overlap, (_RUN,)),
    (_broadcast_fits_the_device, _ALL),
    (_engines_use_their_gpus, (_RUN, "inference")),
    (_ranks_have_a_gpu_each, (_RUN, "trainer")),
    *MODEL_RULES,
    *LOSS_RULES,
    *LORA_RULES,
    *OPTIM_RULES,
    *DATA_RULES,
    *SAMPLING_RULES,
    *MOE_RULES,
    *EVALUATION_RULES,
    *BROADCAST_RULES,
    *WAITING_RULES,
    *HOSTS_RULES,
)

_LAUNCH_RULES: Rules = (
    *HOSTS_LAUNCH_RULES,
    (_attention_runs_here, (_RUN, "trainer")),
    *LOSS_LAUNCH_RULES,
    *MOE_LAUNCH_RULES,
    *OPTIM_LAUNCH_RULES,
    *DATA_LAUNCH_RULES,
    (trainer_model_exists, (_RUN, "trainer")),
    *MODEL_LAUNCH_RULES,
    (engines_other_model_exists, (_RUN,)),
    (engines_model_exists, ("inference",)),
    (environment_files_exist, (_RUN, "orchestrator")),
    (port_rule("inference.server.port"), (_RUN, "inference")),
    (port_rule("orchestrator.server.port"), (_RUN, "orchestrator")),
    (port_rule("ports.batches"), (_RUN, "orchestrator")),
    (port_rule("ports.weights"), (_RUN, "trainer")),
)


def check_sft(config: SftConfig, devices: Devices) -> None:
    """Raises: ConfigError where supervised training could not start."""
    raise_together([*_sft_problems(config, devices)])


def _sft_problems(config: SftConfig, devices: Devices) -> Iterator[str]:
    yield from _check_run_name(config.name)
    yield from sft_problems(config, devices)
    yield from _check_micro_batch("micro_batch_tokens", config.micro_batch_tokens, config.seq_len)
    yield from _check_attention("model.attn", config.model.attn, config.device)
    yield from model_problems("model", config.model, config.num_ranks or 1)
    yield from model_launch_problems("model", config.model, config.device)
    yield from lora_problems("model.lora", config.model.lora, has_engines=False)
    yield from expert_problems_of_sft(config.model)
    yield from optim_problems("", config.optim, config.scheduler, config.model, max_steps=config.max_steps)
    yield from optim_launch_problems("", config.optim, config.device)

"""Rules that span the tables of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.safe_text import CONTROL
from trireme.config.files import ProcessName, toml_value
from trireme.config.losses import Loss, loss_problems, resolve_loss
from trireme.config.model.folder import tokenizer_problems
from trireme.config.model.tokenizer import has_vocabulary, read_tokenizer
from trireme.config.rules.machines import ports
from trireme.config.rules.sampling import environment_template_kwargs, samplings
from trireme.config.run import RunConfig
from trireme.config.trainer import ENGINE_RANKS


def run_problems(config: RunConfig) -> Iterator[str]:
    yield from name_problems(config.name, config.output_dir)
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


def name_problems(name: str | None, output_dir: Path) -> Iterator[str]:
    if name is not None and (not name.strip() or "/" in name or name in (".", "..") or CONTROL.search(name)):
        yield f"name = {toml_value(name)} - expected the plain name of a folder. Set `output_dir` for those above it."
    if CONTROL.search(str(output_dir)):
        yield f"output_dir = {toml_value(output_dir)} has control characters - expected the path of a folder."


def rollout_problems(config: RunConfig) -> Iterator[str]:
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


def template_variable_problems(config: RunConfig) -> Iterator[str]:
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


def losses_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with `[trainer.loss]`, and with the losses that sources have over it."""
    losses = {name: own.trainer.loss for name, own in config.losses.items()}
    for name, loss in losses.items():
        for problem in loss_problems(loss):
            yield problem.replace("trainer.loss", loss_table(name))

    # Cross-entropy alone trains what a teacher samples, and a loss that nothing uses is a mistake.
    taught = [name for name, own in config.orchestrator.sources.items() if own.teacher and own.teacher.samples]
    without_use = [name for name in taught if name in losses]
    plain = resolve_loss(Loss(), length=config.loss_length)
    if taught and len(taught) == len(config.orchestrator.sources) and config.recipes[""] != plain:
        without_use.append("")
    for name in without_use:
        yield (
            f"`{loss_table(name)}` ({losses[name].type}) with `teacher.samples` - expected none: the policy has no "
            "logprobs of what a teacher sampled, so no ratio, and cross-entropy trains it. Remove the table."
        )

    # There is one reference model, so it is updated for all at the same time.
    updates = {name: loss.reference_update_every for name, loss in losses.items() if loss.beta}
    if len(set(updates.values())) > 1:
        shown = ", ".join(f"`{loss_table(name)}` {every or 'never'}" for name, every in updates.items())
        yield (
            f"`reference_update_every` differs: {shown} - expected the same wherever `beta` is above 0, as there is "
            "one reference model. Write the same number in each."
        )


def loss_table(source: str) -> str:
    return f'orchestrator.env["{source}"].loss' if source else "trainer.loss"


def micro_batch_problems(key: str, tokens: int | None, seq_len: int) -> Iterator[str]:
    if tokens is not None and tokens < seq_len:
        yield (
            f"{key} = {tokens}, seq_len = {seq_len} - expected at least as many tokens as the longest sample has. Set "
            f"`{key}` to {seq_len} or more, or lower `seq_len`."
        )


def timeout_problems(config: RunConfig) -> Iterator[str]:
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


def run_tokenizer_problems(config: RunConfig, *, section: ProcessName | None = None) -> Iterator[str]:
    """Yield why conversations of this run cannot become tokens of its model, where both are on this disk."""
    model = config.trainer.model.model_copy(update={"name": config.trainer.model.name or config.model.name})
    tokenizer = config.trainer.tokenizer.name or model.name
    yield from tokenizer_problems("trainer.tokenizer.name", tokenizer, model, renders=section in (None, "orchestrator"))

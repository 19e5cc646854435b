"""The flat files of `prime-rl` and of hosted training, which differ in how they name the model and count GPUs."""

from __future__ import annotations

from typing import Any

from trireme.config.nested import value_at
from trireme.config.orchestrator import Environment
from trireme.config.rows.rules import NO_GPU, has_gpus, on_gpus, only, switch
from trireme.config.run import RunConfig
from trireme.config.translation import Refused, Row, Rule, Settings
from trireme.tools.formats.row_rules import Table, split_gpus
from trireme.tools.formats.translation import Format

ADAPTER_LR, WHOLE_LR = 1e-5, 1e-6
"""Where the guide to these formats begins, with adapters and without."""
TURNS = 4  # answers of `max_tokens` that fit into a sample if the file does not say how long it may be


def is_missing(value: Any) -> bool:
    return value is None or value == "none"


def first_of(environments: Any) -> Table:
    """Return the first environment of a file; an empty table for one that is none, which its own key refuses."""
    first = environments[0] if isinstance(environments, list) and environments else environments
    return first if isinstance(first, dict) else {}


def name_of(name: Any, environments: Any) -> Settings:
    """Return the name of a run: that of its first environment if it has none of its own."""
    first = first_of(environments)
    if is_missing(name) and isinstance(first.get("id"), str):
        name = Environment.model_construct(**{"id": first["id"], "name": first.get("name")}).resolved_name
    return {} if is_missing(name) else {"name": str(name)}


def limit_samples(seq_len: Any, table: Table) -> Settings:
    # A sample holds all turns of a rollout, so it must be longer than one answer.
    usual, max_tokens = RunConfig.model_fields["seq_len"].default, value_at(table, ("sampling", "max_tokens"))
    return {"seq_len": max(usual, TURNS * (max_tokens or 0)) if is_missing(seq_len) else seq_len}


def choose_rate(lr: Any, table: Table) -> Settings:
    return {"trainer.optim.lr": (ADAPTER_LR if table.get("use_lora") else WHOLE_LR) if is_missing(lr) else lr}


def only_with(switch: str, ours: str) -> Rule:
    """Return the rule of a key that means something only if another one is true."""

    def rule(value: Any, table: Table) -> Settings | str:
        if is_missing(value):
            return f"see {switch}"
        if not table.get(switch):
            raise Refused(f"expected `{switch} = true` with it. Add that, or remove the key.")
        return {ours: value}

    return rule


def split(num_gpus: Any, table: Table) -> Settings | str:
    # Without a number the run divides the GPUs of the machine itself.
    if is_missing(num_gpus) or not has_gpus():
        return NO_GPU if num_gpus else "all of the machine's"
    return split_gpus(num_gpus, table.get("tensor_parallel_size") or 1)


LAYERS = (
    "engines are split by tensors, not by layers, so that each GPU can be sent its weights. Write 1, and raise "
    "`tensor_parallel_size` instead."
)
COMMON = (
    Row("name", lambda name, table: name_of(name, table["env"])),
    Row("seq_len", limit_samples),
    Row("learning_rate", choose_rate),
    Row("batch_size", "orchestrator.batch_size"),
    Row("rollouts_per_example", "orchestrator.rollouts_per_example"),
    Row("use_lora", switch("trainer.model.lora", {})),
    Row("lora_rank", only_with("use_lora", "trainer.model.lora.rank")),
    Row("lora_alpha", only_with("use_lora", "trainer.model.lora.alpha")),
    Row("use_difficulty_filtering", "orchestrator.buffer.use_difficulty_filtering"),
    Row("difficulty_threshold", only_with("use_difficulty_filtering", "orchestrator.buffer.difficulty_threshold")),
    Row("sampling", "orchestrator.sampling"),
    Row("env", "orchestrator.env"),
    Row("checkpointing.save_every_n_steps", "trainer.ckpt.interval"),
    Row("checkpointing.keep_n_checkpoints", "trainer.ckpt.keep_last"),
    Row("env_file", None, "given to the run by `prime-rl` and `trireme submit`"),
)
"""Keys that both formats have, besides those that are ours by the same name."""
OF_GPUS = (
    Row("num_gpus", split),
    Row("tensor_parallel_size", on_gpus("inference.parallel.tp")),
    Row("pipeline_parallel_size", only(1, instead=LAYERS)),
)
LONG_SAMPLES: Settings = {"trainer.model.optimization_dtype": "bfloat16", "trainer.model.ac.freq": 1}
"""Settings that make long samples fit on GPUs. These formats have no keys for them."""


def format_of(system: str, model: str, *rows: Row) -> Format:
    return Format(
        system,
        (*COMMON, Row(model, "model.name"), *rows),
        defaults={"name": None, "seq_len": None, "learning_rate": None},
        required=(model, "env"),
        switches=("use_lora", "use_difficulty_filtering"),
        presets_on_gpus=LONG_SAMPLES,
    )


FLAT = format_of("prime-rl", "model_name", *OF_GPUS)
HOSTED = format_of("hosted training", "model")
